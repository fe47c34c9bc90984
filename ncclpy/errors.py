"""The exception classes.

What NCCL reports is an `NcclError` or a subclass. A mistake of the caller in Python is a plain `TypeError` or
`ValueError`, raised before NCCL is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "LibraryNotFound",
    "NcclAborted",
    "NcclError",
    "NcclRemoteError",
    "NcclTimeout",
    "NcclUnsupported",
]


#: What an error says about other ranks if these cannot be asked.
ADVICE = "A rank is missing or stuck: see which of the other ranks did not make the same call"


def not_copied(thing: object, instead: str) -> TypeError:
    """Return the error for pickling or copying an object of this process; `instead` says what to do."""
    name = type(thing).__name__
    return TypeError(
        f"ncclpy.{'group' if name == 'Group' else name} cannot be pickled or copied: it stands for something that "
        f"exists once, in this process; {instead}"
    )


def seconds(duration: float) -> str:
    """Return a duration as text for readers."""
    if duration <= 0:
        return "0 s"
    if duration < 1e-3:
        return "less than 1 ms"
    if duration < 0.9995:
        return f"{duration * 1e3:.3g} ms"
    return f"{duration:.3g} s" if duration < 999.5 else f"{duration:.0f} s"


def spans(numbers: Iterable[int]) -> list[range]:
    """Return numbers, sorted and without duplicates, as ranges of consecutive ones."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def listed(parts: Sequence[range], limit: int | None = None, between: str = ", ") -> str:
    """Return ranges as text for readers, at most `limit` of them: "0-3, 7 and 12 more"."""
    words = [f"{each.start}-{each.stop - 1}" if _size(each) > 1 else str(each.start) for each in parts[:limit]]
    shown = between.join(words)
    more = 0 if limit is None else sum(map(_size, parts[limit:]))
    return f"{shown} and {more} more" if more else shown


def ranks(parts: Sequence[range], limit: int | None = None) -> str:
    """Return ranks as text for readers: "rank 3" or "ranks 0-3, 7 and 12 more"."""
    return ("rank " if sum(map(_size, parts)) == 1 else "ranks ") + listed(parts, limit)


def _size(part: range) -> int:
    return part.stop - part.start  # len() is limited to 63 bits


def attach(first: BaseException, others: Iterable[BaseException]) -> BaseException:
    """Return the first of several errors, with a note on each of the others.

    Parameters
    ----------
    first
        The error that will be raised.
    others
        Further errors; equal texts are noted once.
    """
    for words in dict.fromkeys(f"also {type(other).__name__}: {other}" for other in others if other is not first):
        note(first, words)
    return first


def note(error: BaseException, words: str) -> None:
    """Add a note to an error, as `BaseException.add_note` does from Python 3.11 on."""
    if sys.version_info >= (3, 11):
        error.add_note(words)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), words]


class NcclError(RuntimeError):
    """Report a call that NCCL refused or that failed.

    Parameters
    ----------
    message
        What went wrong, for readers.
    result
        The `ncclResult_t` as an int, also a code that only a newer NCCL has. ``None`` if NCCL returned no error, for
        example after a deadline or an abort.
    function
        The C function that failed, or what has passed its deadline, such as "initialisation". ``None`` if not known.
    detail
        The text of `ncclGetLastError`, empty if there is none.
    version
        The version of the loaded NCCL, such as ``(2, 32, 3)``, if the error depends on it; else ``None``.

    Attributes
    ----------
    ranks : tuple of RankState, or None
        What each rank did when the error was made; None if the ranks were not asked. Ranks can be asked in a process
        group, in a Manager that has a store, in a Communicator made by `Communicator.from_env`, and in one that was
        split or shrunk from such a Communicator.
    """

    ranks: tuple[Any, ...] | None = None

    def __init__(
        self,
        message: str = "",
        *,
        result: int | None = None,
        function: str | None = None,
        detail: str = "",
        version: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.result = result
        self.function = function
        self.detail = detail
        self.version = version

    def __reduce__(self):
        # The default would pass args alone, and so lose the keyword-only fields.
        return type(self), (str(self),), self.__dict__


class NcclTimeout(NcclError, TimeoutError):
    """Report that a deadline has passed.

    Past the ``timeout=`` of a wait for a `Work` or a store, only the wait has ended. Past the deadline of a
    communicator or of a group of ranks, its communicators were aborted.

    Attributes
    ----------
    missing : list of str or of int, or None
        The keys that were not set, or the ranks that did not take part, if they are known; else None.
    """

    missing: list[str] | list[int] | None = None


class NcclAborted(NcclError):
    """Report a call or work that was refused or ended because its communicator, or its group of ranks, was aborted."""


class NcclRemoteError(NcclError):
    """Report that another rank or the network failed (`ncclRemoteError`)."""


def peer_error_class(kind: str) -> type[NcclError]:
    """Return the exception class by which the other ranks report a rank's failure.

    `kind` is the name of the exception class that the failed rank itself has raised.
    """
    return {"NcclTimeout": NcclTimeout, "NcclRemoteError": NcclRemoteError}.get(kind, NcclAborted)


#: Functions that are called, without arguments, each time that the program is given an error.
on_delivery: list[Callable[[], object]] = []


def deliver(error: BaseException) -> None:
    """Note that the program is given this error of an operation, and call the functions of `on_delivery`."""
    error._delivered = True  # type: ignore[attr-defined]
    for call in on_delivery:
        call()


def undelivered(errors: Sequence[BaseException]) -> BaseException | None:
    """Return the first of the errors of several operations, unless the program was given one of them (`deliver`).

    Return None if there are no errors, or if the program was given one.

    `close()` of a group or a Manager raises an undelivered error: otherwise the program would take the contents of its
    arrays for results. (Which threads were given an error is noted in its attribute `_informed`, if it has one, see
    `core.runtime.stream_readers`.)
    """
    return None if not errors or any(getattr(each, "_delivered", False) for each in errors) else errors[0]


class NcclUnsupported(NcclError):
    """Report something that the loaded library cannot do; the message names the version that can, if there is one."""


class LibraryNotFound(NcclError):
    """Report that no usable NCCL or CUDA driver was found; the message says why, or lists every place searched."""
