"""Use Ray actors as the ranks of a process group; they find each other through a store that the driver serves.

Four actors average their gradients. Then one is killed; the others report it and continue as three ranks.

python examples/with_ray.py
"""

import secrets
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import ncclpy
from ncclpy.bootstrap import TCPStore

SIZE = 4
Array = NDArray[np.float64]
TARGET = np.array([1.0, -2.0, 0.5])


class Worker:
    """One rank, with a group and a model."""

    def __init__(self, rank: int, size: int, host: str, port: int, token: str) -> None:
        ncclpy.use("host")  # on GPUs: leave it out, pass device=0, the one GPU that the actor sees, and arrays of CuPy
        self.store = TCPStore(host, port, token=token, timeout=60)
        self.group = ncclpy.ProcessGroup(self.store, rank, size, device=rank, timeout=60)
        self.random = np.random.default_rng(rank)
        self.model = np.zeros(3)

    def train(self, steps: int) -> Array:
        """Train for some steps; return the model."""
        for _ in range(steps):
            inputs = self.random.normal(size=(32, 3))
            gradient = 2 * inputs.T @ (inputs @ (self.model - TARGET)) / len(inputs)
            self.group.all_reduce(gradient, op="avg").wait()
            self.model -= 0.1 * gradient
        return self.model

    def recover(self) -> tuple[int, ...]:
        """Agree with the others on the ranks that continue; return the lost ones."""
        return self.group.recover(timeout=30, min_size=2).lost

    def close(self) -> None:
        """Close the group; all ranks call it."""
        self.group.close()
        self.store.close()


def main() -> None:
    """Start the actors, and kill one of them."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    token = secrets.token_hex(16)
    # Other machines can reach this address, so a token is needed. The driver outlives the actors.
    with TCPStore(ray.util.get_node_ip_address(), 0, serve=True, token=token) as store:
        actor = ray.remote(Worker).options(num_cpus=0)  # with GPUs: num_gpus=1
        workers: list[Any] = [actor.remote(rank, SIZE, store.host, store.port, token) for rank in range(SIZE)]
        ray.get([worker.train.remote(20) for worker in workers], timeout=120)
        ray.kill(workers.pop())
        for result in [worker.train.remote(1) for worker in workers]:
            try:
                ray.get(result, timeout=60)
            except ncclpy.NcclError as error:  # Ray's error has the actor's class too; its args hold the actor's error
                print(*error.args)
        lost = ray.get([worker.recover.remote() for worker in workers], timeout=60)
        print("lost:", *map(list, lost))
        models = ray.get([worker.train.remote(40) for worker in workers], timeout=120)
        ray.get([worker.close.remote() for worker in workers], timeout=60)
    ray.shutdown()
    print(f"{len(models)} actors, weights", models[0].round(1))


if __name__ == "__main__":
    main()
