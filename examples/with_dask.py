"""Use Dask workers as the ranks of a communicator; they find each other through a store that the client serves.

python examples/with_dask.py
"""

import secrets

import numpy as np
from dask.distributed import Client, LocalCluster
from numpy.typing import NDArray

import ncclpy
from ncclpy.bootstrap import TCPStore

SIZE = 2
Array = NDArray[np.float64]


def column_means(rank: int, size: int, host: str, port: int, token: str, rows: Array) -> Array:
    """Return the means over all ranks' rows; the task of one worker."""
    ncclpy.use("host")  # on GPUs: leave it out, and pass arrays of CuPy
    with TCPStore(host, port, token=token, timeout=60) as store:
        unique_id = store.gather("unique id", rank, size, bytes(ncclpy.get_unique_id()) if rank == 0 else b"", 60)[0]
        with ncclpy.Communicator.init(size, rank, unique_id, device=rank, timeout=60) as comm:
            sums = np.append(rows.sum(axis=0), len(rows))
            comm.all_reduce(sums)
    means: Array = sums[:-1] / sums[-1]
    return means


def main() -> None:
    """Start a cluster on this machine; for an existing one, pass its address to the client."""
    token = secrets.token_hex(16)
    with (
        LocalCluster(n_workers=SIZE, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        # For workers on other machines, use this machine's name in place of 127.0.0.1.
        TCPStore("127.0.0.1", 0, serve=True, token=token) as store,
    ):
        client.wait_for_workers(SIZE, timeout=60)
        addresses = sorted(client.scheduler_info()["workers"])[:SIZE]
        parts = np.array_split(np.arange(24.0).reshape(8, 3), SIZE)
        # All tasks must run at once: each is pinned to one worker, and `pure=False` keeps Dask from merging tasks.
        tasks = [
            client.submit(
                column_means, rank, SIZE, store.host, store.port, token, parts[rank], workers=[address], pure=False
            )
            for rank, address in enumerate(addresses)
        ]
        means = client.gather(tasks)
        print(f"{len(means)} workers, means", means[0])


if __name__ == "__main__":
    main()
