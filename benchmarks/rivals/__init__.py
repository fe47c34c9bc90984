"""The rivals, which are the APIs of ncclpy and other libraries: one module each, all with the same interface.

A rival's module has ``NAME``, the name in its rows, and ``open(setting) -> list[Road]``, which prepares it in
this process and may raise `Missing`. `open` is collective on GPUs: every rank calls it at the same time.
"""

import importlib

#: Modules of this package, in the order of the tables.
MODULES = (
    "c_loop",
    "ncclpy_bindings",
    "ncclpy_communicator",
    "ncclpy_plan",
    "ncclpy_manager",
    "ncclpy_process_group",
    "ncclpy_deadline",
    "ncclpy_nonblocking",
    "nccl4py_bindings",
    "nccl4py_communicator",
    "cupy_nccl",
    "ctypes_pynccl",
    "torch_distributed",
)


class Missing(Exception):
    """A rival cannot be measured here; the message has the reason, which becomes its row."""


def load(name: str):
    """Return the module of the rival `name`."""
    return importlib.import_module(f"benchmarks.rivals.{name}")
