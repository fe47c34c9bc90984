"""Train a linear model on four virtual devices, one thread each: data-parallel training by hand.

Every rank has a quarter of the data, computes the gradient of its part, and averages it with the others. After each
step all ranks have the same weights: those that one process with the whole data set would have.
"""

import threading

import numpy as np
from numpy.typing import NDArray

import ncclpy

ncclpy.use("host")  # numpy arrays lie in CPU memory: this program runs on the host engine everywhere
RANKS, SAMPLES, STEPS, RATE = 4, 256, 200, 0.1
Array = NDArray[np.float64]

generator = np.random.default_rng(0)
inputs = generator.normal(size=(SAMPLES, 3))
targets = inputs @ np.array([1.0, -2.0, 0.5]) + 0.01 * generator.normal(size=SAMPLES)


def gradient(weights: Array, x: Array, y: Array) -> Array:
    return 2 / len(x) * x.T @ (x @ weights - y)


def train(rank: int, unique_id: ncclpy.UniqueId, results: dict[int, Array]) -> None:
    part = slice(rank * SAMPLES // RANKS, (rank + 1) * SAMPLES // RANKS)
    weights = np.zeros(3)
    with ncclpy.Communicator.init(RANKS, rank, unique_id, device=rank, timeout=30) as comm:
        for _ in range(STEPS):
            mine = gradient(weights, inputs[part], targets[part])
            comm.all_reduce(mine, op="avg")  # in place; an array in CPU memory is ready when the call returns
            weights -= RATE * mine
    results[rank] = weights


results: dict[int, Array] = {}
unique_id = ncclpy.get_unique_id()
threads = [threading.Thread(target=train, args=(rank, unique_id, results)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

alone = np.zeros(3)
for _ in range(STEPS):
    alone -= RATE * gradient(alone, inputs, targets)
assert len(results) == RANKS, "a rank has failed"
assert all(np.array_equal(results[0], each) for each in results.values()), "ranks have come apart"
assert np.allclose(results[0], alone), "not what one process computes"
print("weights", np.round(results[0], 2))
