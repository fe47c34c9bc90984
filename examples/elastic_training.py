"""Train on four processes, of which one is killed and a new one joins: 4 -> 3 -> 4 ranks, and no step is lost.

There are no checkpoints. The survivors agree on the ranks that continue (`recover`). Then rank 0 sends its step and
weights to all, and they continue from there: a step that only some ranks had finished is repeated, with the same
result. Every few steps the group admits processes that wait to join (`admit`).

python examples/elastic_training.py
"""

import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

import ncclpy
from ncclpy.bootstrap import TCPStore

ncclpy.use("host")  # numpy arrays lie in CPU memory: this program runs on the host engine everywhere
RANKS, SAMPLES, STEPS, RATE = 4, 256, 300, 0.1
Array = NDArray[np.float64]

generator = np.random.default_rng(0)
inputs = generator.normal(size=(SAMPLES, 3))
targets = inputs @ np.array([1.0, -2.0, 0.5]) + 0.01 * generator.normal(size=SAMPLES)


def gradient(weights: Array, x: Array, y: Array) -> Array:
    return 2 / SAMPLES * x.T @ (x @ weights - y)


def train(group: ncclpy.ProcessGroup) -> Array:
    """Train from the step of rank 0 on, and return the weights."""
    step, weights, changed = 0, np.zeros(3), True
    while True:
        try:
            if changed:
                told = np.array([step, *weights])
                group.broadcast(told, root=0).wait()
                step, weights, changed = int(told[0]), told[1:], False
            if group.rank == 0:
                group.store.set("progress", b"%d %d" % (step, group.size))
            if step == STEPS and group.size == RANKS:
                return weights
            if step % 5 == 0 and group.admit():
                changed = True  # a new rank has neither step nor weights
                continue
            if step == STEPS:  # the new process may not have joined yet
                time.sleep(0.02)
                continue
            part = slice(group.rank * SAMPLES // group.size, (group.rank + 1) * SAMPLES // group.size)
            mine = gradient(weights, inputs[part], targets[part])
            time.sleep(0.02)  # as a model of some size would take
            group.all_reduce(mine).wait()
            step, weights = step + 1, weights - RATE * mine
        except ncclpy.NcclError as error:
            found = group.recover(timeout=30)
            print(
                f"after step {step} rank {found.survivors[group.rank]} is rank {group.rank} of {group.size}: {error}"
            )
            changed = True


def worker(port: int, device: int, joins: bool) -> None:
    store = TCPStore("127.0.0.1", port)
    if joins:
        group = ncclpy.ProcessGroup.join(store, device=device, timeout=60)
    else:
        group = ncclpy.ProcessGroup(store, device, RANKS, device=device, timeout=60)
    with group:
        store.set(f"weights/{device}", train(group).tobytes())


def main() -> None:
    """Serve the store, which outlives every rank; start, kill and replace the ranks."""
    with TCPStore("127.0.0.1", 0, serve=True) as store:

        def start(device: int, *joins: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, __file__, str(store.port), str(device), *joins])

        def wait_until(step: int, size: int) -> None:
            while True:
                at, ranks = map(int, store.get("progress", 60).split())
                if at >= step and ranks == size:
                    return
                time.sleep(0.02)

        processes = [start(rank) for rank in range(RANKS)]
        wait_until(40, 4)
        processes[2].kill()
        wait_until(80, 3)
        processes.append(start(2, "joins"))
        wait_until(120, 4)
        codes = [process.wait() for process in processes]
        results = [np.frombuffer(store.get(f"weights/{device}", 60)) for device in range(RANKS)]
    assert codes == [0, 0, -9, 0, 0], codes

    alone = np.zeros(3)
    for _ in range(STEPS):
        alone -= RATE * gradient(alone, inputs, targets)
    assert all(np.array_equal(results[0], each) for each in results), "ranks have come apart"
    assert np.allclose(results[0], alone), "not what one process computes"
    print("weights", np.round(results[0], 2))


if len(sys.argv) > 2:
    worker(int(sys.argv[1]), int(sys.argv[2]), "joins" in sys.argv)
elif __name__ == "__main__":
    main()
