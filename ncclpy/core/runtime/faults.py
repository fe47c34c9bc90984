"""Fault injection: make the host engine fail, to test how a program reacts."""

from __future__ import annotations

import os
import types
import warnings

from ncclpy.core.runtime import library as _library

_open_blocks: list[Faults] = []  # the blocks that are open, the innermost last


class Faults:
    """Make the host engine fail as a plan says, inside a ``with`` block.

    The plan holds for every thread of the process, from the beginning of the block to its end. After that the previous
    plan, of an enclosing block or of the environment variable ``NCCLPY_FAULTS``, holds again, with its counts reset.
    ``docs/host-engine.md`` describes the language. A rule, other than a ``random`` one, that has not fired when its
    block ends causes a `RuntimeWarning`: it tests nothing, perhaps because the program makes another call than the
    rule names.

    Parameters
    ----------
    plan : str
        Rules separated by ``;``, each of words ``key=value``, as in ``"rank=1 call=AllReduce nth=2 do=hang"``.

    Raises
    ------
    ValueError
        At the beginning of the block, if the plan is not valid: the message names the word and what is allowed.
    RuntimeError
        At the beginning of the block, if the loaded library is not the host engine: NCCL itself has no fault
        injection.
    TypeError
        If `plan` is no str.
    """

    def __init__(self, plan: str):
        if not isinstance(plan, str):
            raise TypeError(f"plan must be a str, not {type(plan).__name__}")
        self.plan = plan
        self._fired: list[str] | None = None
        # The rules that have never fired in this block; None before the first reading. The engine is asked before each
        # inner block and at the end, since the beginning of an inner block resets its record of rules that have fired.
        self._unfired: list[str] | None = None

    def __enter__(self) -> Faults:
        unfired = _unfired()
        _set(self.plan)
        if _open_blocks:
            _open_blocks[-1]._note_unfired(unfired)
        _open_blocks.append(self)
        self._fired = self._unfired = None
        return self

    def _note_unfired(self, unfired: list[str]) -> None:
        known = unfired if self._unfired is None else self._unfired
        self._unfired = [rule for rule in known if rule in unfired]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._fired = _fired()
        self._note_unfired(_unfired())
        _open_blocks.pop()
        _set(_open_blocks[-1].plan if _open_blocks else os.environ.get("NCCLPY_FAULTS", ""))
        for rule in self._unfired or []:
            warnings.warn(
                f'the fault "{rule}" has not happened: no call in this block matched the rule '
                f"({len(self._fired)} other faults have happened)",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def fired(self) -> list[str]:
        """Return the faults that have happened so far, one line each, in order; also after the block has ended.

        Each change of the plan resets the engine's list: after an inner block the list has only the faults since the
        end of the inner block, and during an inner block it has the faults of the inner block's plan.
        """
        if self._fired is not None:
            return self._fired
        return _fired() if self in _open_blocks else []


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
    engine.ncclpyHostFaultsUnfired.restype = ctypes.c_char_p
    engine.ncclGetLastError.restype = ctypes.c_char_p
    return engine


def _set(plan: str) -> None:
    engine = _engine()
    if engine.ncclpyHostSetFaults(plan.encode()) != 0:
        raise ValueError(engine.ncclGetLastError(None).decode())


def _fired() -> list[str]:
    fired: bytes = _engine().ncclpyHostFaultsFired()
    return fired.decode().splitlines()


def _unfired() -> list[str]:
    rules: bytes = _engine().ncclpyHostFaultsUnfired()
    return rules.decode().splitlines()
