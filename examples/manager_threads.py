"""Reduce gradients that become ready in any order on the threads of several devices; the Manager matches them by key.

Each thread stands for one device and visits its layers in another order. Without the Manager that would
deadlock: NCCL needs the same order on every device. The Manager reduces a layer as soon as the last thread adds it.
"""

import random
import threading
from typing import Any

import numpy as np

import ncclpy

on_gpus = ncclpy.library().engine == "cuda"
DEVICES = min(4, ncclpy.device_count())
LAYERS = ("embedding", "attention", "output")
STEPS = 3


if on_gpus:
    import torch

    def gradient(device: int, step: int) -> Any:
        return torch.full((1000,), float(device + step), device=f"cuda:{device}")
else:

    def gradient(device: int, step: int) -> Any:
        return np.full(1000, float(device + step))


def backward(manager: ncclpy.Manager, device: int, failures: list[Exception]) -> None:
    shuffled = random.Random(device)
    try:
        for step in range(STEPS):
            order = list(LAYERS)
            shuffled.shuffle(order)
            works: dict[str, ncclpy.Work[Any]] = {}
            for name in order:
                works[name] = manager.all_reduce(
                    (step, name), gradient(device, step), op="avg", device=device, num_local=DEVICES
                )
            for work in works.values():
                expected = step + (DEVICES - 1) / 2
                assert float(work.result()[0]) == expected, (work.result()[0], expected)
    except Exception as error:
        failures.append(error)


failures: list[Exception] = []
with ncclpy.Manager(timeout=30) as manager:
    threads = [threading.Thread(target=backward, args=(manager, device, failures)) for device in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not failures, failures
print(f"{STEPS * len(LAYERS)} collectives of {DEVICES} devices")
