"""Texts of the errors of operations that did not run, and of a coordinator's end: the same on all ranks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ncclpy.coordinator.keys import names_of, shown
from ncclpy.errors import (
    NcclAborted,
    NcclError,
    NcclRemoteError,
    NcclTimeout,
    deliver,
    peer_error_class,
    ranks,
    seconds,
    spans,
)
from ncclpy.types import Result

__all__ = ["after_join", "did_not_run", "ended", "has_ended", "overdue", "stall"]


#: Most similar names that a warning shows, and their least similarity by `difflib`.
_MAX_SIMILAR, _MIN_SIMILARITY = 6, 0.75
#: Most operations that an error names as not run.
_NAMED = 4


def after_join(what: str, key: bytes, absent: Sequence[int]) -> NcclError:
    """Return the error of an operation that is not defined without the ranks that have joined."""
    return NcclError(
        f"{what} {shown(names_of(key))}: {ranks(spans(absent))} {_has(absent)} joined and will bring nothing more; "
        "only all-reduces run without them. None of the others has begun it",
        result=Result.INVALID_USAGE,
    )


def overdue(what: str, key: bytes, have: Sequence[int], missing: Sequence[int], timeout: float | None) -> NcclTimeout:
    """Return the error of an operation that not all ranks have brought in time."""
    limit = "" if timeout is None else f" within {seconds(timeout)}"
    error = NcclTimeout(
        f"{what} {shown(names_of(key))}: {ranks(spans(missing))} did not bring it{limit}, {ranks(spans(have))} did. "
        "None of them has begun it"
    )
    error.missing = list(missing)
    return error


def ended(name: str, rank: int, lost: Sequence[int], reason: str) -> NcclError:
    """Return the error of a coordinator that has ended: ranks are lost, it was shut down, or it has failed."""
    because = f": {reason}" if reason else ""
    if lost:
        error: NcclError = NcclRemoteError(f"coordinator {name!r}: {ranks(spans(lost))} {_is(lost)} gone{because}")
        error.ranks = tuple(lost)
        return error
    if rank < 0:
        return NcclAborted(f"coordinator {name!r} has ended{because}")
    return NcclAborted(f"coordinator {name!r} was ended by rank {rank}{because}")


def has_ended(name: str, error: BaseException) -> NcclError:
    """Return the error of a call after `error` has ended the coordinator.

    It has the class of `error` if that is `NcclRemoteError` or `NcclTimeout` and the program was not given `error`
    yet; otherwise it is an `NcclAborted`.
    """
    kind = NcclAborted if getattr(error, "_delivered", False) else peer_error_class(type(error).__name__)
    made = kind(f"coordinator {name!r} does nothing more: {error}")
    made.ranks = getattr(error, "ranks", None)
    made.__cause__ = error
    deliver(error)
    return made


def did_not_run(error: NcclError, unfinished: Sequence[str]) -> NcclError:
    """Return the error of a shutdown after which operations of this rank have not run."""
    more = f" and {len(unfinished) - _NAMED} more" if len(unfinished) > _NAMED else ""
    made = type(error)(f"{error}. Not all ranks had brought {', '.join(unfinished[:_NAMED])}{more}: these did not run")
    made.ranks = error.ranks
    made.__cause__ = error
    return made


def stall(
    what: str,
    key: bytes,
    have: Sequence[int],
    missing: Sequence[int],
    waited: float,
    near: Sequence[tuple[bytes, Sequence[int]]],
) -> str:
    """Return the warning of an operation that some ranks have long not brought, and of others with similar names.

    `near` has other waiting operations: their keys, and the ranks that have brought them.
    """
    name = shown(names_of(key))
    text = (
        f"{what} {name}: {ranks(spans(missing))} {_has(missing)} not brought it after {seconds(waited)}; "
        f"{ranks(spans(have))} {_wait(have)}"
    )
    others = {shown(names_of(other)): owners for other, owners in near}
    alike = difflib.get_close_matches(name, others, n=_MAX_SIMILAR, cutoff=_MIN_SIMILARITY)
    if not alike:
        return text
    beside = [(name, have), *((other, others[other]) for other in alike)]
    width = max(len(each) for each, _ in beside)
    lines = "".join(f"\n    {each:<{width}}  brought by {ranks(spans(owners))}" for each, owners in beside)
    return f"{text}. Names that are nearly the same:{lines}"


def _has(subject: Sequence[int]) -> str:
    return "has" if len(subject) == 1 else "have"


def _is(subject: Sequence[int]) -> str:
    return "is" if len(subject) == 1 else "are"


def _wait(subject: Sequence[int]) -> str:
    return "waits for it" if len(subject) == 1 else "wait for it"
