"""Faults on command: make the host engine fail where a program is to be tested."""

from __future__ import annotations

import os
import types

from ncclpy.core import library as _library

_outer: list[str] = []  # the plans of the enclosing blocks


class Faults:
    """Let what a plan says go wrong on the host engine, inside a ``with`` block.

    The plan holds for every thread of the process, from the block's beginning to its end; the plan that held before,
    of an enclosing block or of the environment variable ``NCCLPY_FAULTS``, then holds again, its occurrences counted
    anew. ``docs/host-engine.md`` describes the language.

    Parameters
    ----------
    plan : str
        Rules apart by ``;``, each of words ``key=value``, as in ``"rank=1 call=AllReduce nth=2 do=hang"``.

    Raises
    ------
    ValueError
        At the block's beginning, if the plan is not understood: the message names the word and what is allowed.
    RuntimeError
        If the loaded library is not the host engine: NCCL itself takes no orders to fail.
    """

    def __init__(self, plan: str):
        if not isinstance(plan, str):
            raise TypeError(f"plan must be a str, not {type(plan).__name__}")
        self.plan = plan
        self._fired: list[str] | None = None

    def __enter__(self) -> Faults:
        _set(self.plan)
        _outer.append(self.plan)
        self._fired = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._fired = _read()
        _outer.pop()
        _set(_outer[-1] if _outer else os.environ.get("NCCLPY_FAULTS", ""))

    @property
    def fired(self) -> list[str]:
        """Return what has happened so far, one line each, in order; it stays readable after the block."""
        if self._fired is not None:
            return self._fired
        return _read() if self.plan in _outer else []


def _engine():
    import ctypes

    loaded = _library.library()
    if loaded.engine != "host":
        raise RuntimeError(
            f"faults can be planned on the host engine only, and {loaded.path} is loaded; choose the host engine with "
            'NCCLPY_LIBRARY=host or ncclpy.use("host")'
        )
    engine = ctypes.CDLL(loaded.path)
    engine.ncclpyHostSetFaults.argtypes = [ctypes.c_char_p]
    engine.ncclpyHostFaultsFired.restype = ctypes.c_char_p
    engine.ncclGetLastError.restype = ctypes.c_char_p
    return engine


def _set(plan: str) -> None:
    engine = _engine()
    if engine.ncclpyHostSetFaults(plan.encode()) != 0:
        raise ValueError(engine.ncclGetLastError(None).decode())


def _read() -> list[str]:
    fired: bytes = _engine().ncclpyHostFaultsFired()
    return fired.decode().splitlines()
