"""Exit status of a process in which operations have failed, if the program was not given their errors.

Such a program takes the contents of its arrays for results, and must not end with the exit status of a success. A
group, Manager or coordinator notes the errors of its operations here when the operations fail, and removes the errors
when the program closes or aborts that object. When Python ends, a line on stderr names each object with undelivered
errors, and the process ends with status 70 instead of 0. Any other status stays.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence

from ncclpy.core.runtime import wait
from ncclpy.engine.recorder import text_of
from ncclpy.errors import on_delivery, undelivered

__all__ = ["EXIT_CODE", "forget_failures", "note_failures"]

#: The exit status of a process that ends because operations have failed.
EXIT_CODE = 70
#: `EXIT_CODE` once `_end_of_process` has found undelivered errors; 0 before that, and without such errors.
exit_code = 0
#: How many failures are kept: a program that ignores them may run for long.
_MAX_KEPT = 32

#: What has failed, and the list of its errors; by the id of that list. Each change is one step under the GIL, since a
#: signal handler may close a group during it.
_noted: dict[int, tuple[str, Sequence[BaseException]]] = {}


def note_failures(name: str, errors: Sequence[BaseException]) -> None:
    """Note the errors of operations that have failed together; ignore them if `_MAX_KEPT` failures are kept.

    Parameters
    ----------
    name
        What has failed: "rank 0 of process group 'default'".
    errors
        A list with one error or more; it may become longer. None of them is reported if the program is given one, see
        `undelivered`.
    """
    if len(_noted) < _MAX_KEPT:
        _noted[id(errors)] = (name, errors)
        _forget_delivered()  # another thread may have been given them already


def forget_failures(errors: Sequence[BaseException]) -> None:
    """Forget errors that were noted: the program is told in another way, or wants no results."""
    _noted.pop(id(errors), None)


def _forget_delivered() -> None:
    """Forget delivered errors: their tracebacks keep the frames, and with them the arrays, of the program."""
    for number, (_, errors) in list(_noted.items()):
        if undelivered(errors) is None:
            _noted.pop(number, None)


on_delivery.append(_forget_delivered)


@atexit.register
def _end_of_process() -> None:
    """Write the undelivered errors, behind the program's own output, and change the exit status."""
    failed: dict[str, BaseException] = {}
    for name, errors in _noted.values():
        # SystemExit: Python's end has raised it in the operation's own thread; no program would read that result.
        if (error := undelivered(errors)) is not None and not isinstance(error, SystemExit):
            failed.setdefault(name, error)
    if not failed:
        return
    global exit_code
    exit_code = EXIT_CODE
    wait.exit_with(exit_code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced or None
            stream.flush()
    with contextlib.suppress(OSError), open(2, "w", errors="backslashreplace", closefd=False) as stderr:
        for name, error in failed.items():
            stderr.write(
                f"ncclpy: {name}: operations have failed, and the program has ended without their error, which "
                f"close() raises and abort() drops. Exit status {EXIT_CODE}, if it was 0. {type(error).__name__}: "
                f"{text_of(error)}\n"
            )


def _forked() -> None:
    """Forget the parent's errors in a forked child: the parent reports them."""
    _noted.clear()


os.register_at_fork(after_in_child=_forked)
