"""What is said of operations that come to nothing, and of a coordinator's end: the same on all ranks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ncclpy.coordinator.names import names_of, shown
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, seconds, spans
from ncclpy.types import Result

__all__ = ["after_join", "did_not_run", "ended", "has_ended", "overdue", "stall"]


#: So many names are shown beside one, of this likeness at least, as `difflib` has it.
_ALIKE, _LIKENESS = 6, 0.75
#: So many operations that did not run are named.
_TOLD = 4


def after_join(what: str, key: bytes, absent: Sequence[int]) -> NcclError:
    """Return the error of an operation that means nothing without the ranks that have joined."""
    return NcclError(
        f"{what} {shown(names_of(key))}: {ranks(spans(absent))} {_has(absent)} joined and will bring nothing more; "
        "only all-reduces go on without them. None of the others has begun it",
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
    """Return the error of a coordinator that has ended before its time, or as it was asked to."""
    because = f": {reason}" if reason else ""
    if lost:
        error: NcclError = NcclRemoteError(f"coordinator {name!r}: {ranks(spans(lost))} {_is(lost)} gone{because}")
        error.ranks = tuple(lost)
        return error
    if rank < 0:
        return NcclAborted(f"coordinator {name!r} has ended{because}")
    return NcclAborted(f"coordinator {name!r} was ended by rank {rank}{because}")


def has_ended(name: str, error: BaseException) -> NcclAborted:
    """Return the error of a call of a coordinator that an error has ended."""
    made = NcclAborted(f"coordinator {name!r} does nothing more: {error}")
    made.ranks = getattr(error, "ranks", None)
    made.__cause__ = error
    error._delivered = True  # type: ignore[attr-defined]
    return made


def did_not_run(error: NcclError, unfinished: Sequence[str]) -> NcclError:
    """Return the error of a shutdown that has left operations of this rank without a result."""
    more = f" and {len(unfinished) - _TOLD} more" if len(unfinished) > _TOLD else ""
    made = type(error)(f"{error}. Not all ranks had brought {', '.join(unfinished[:_TOLD])}{more}: these did not run")
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
    """Return the sentence of an operation that not all ranks have brought for long, beside what is called alike.

    `near` are others that wait, by their keys, and who has brought them.
    """
    name = shown(names_of(key))
    text = (
        f"{what} {name}: {ranks(spans(missing))} {_has(missing)} not brought it after {seconds(waited)}; "
        f"{ranks(spans(have))} {_wait(have)}"
    )
    others = {shown(names_of(other)): who for other, who in near}
    alike = difflib.get_close_matches(name, others, n=_ALIKE, cutoff=_LIKENESS)
    if not alike:
        return text
    beside = [(name, have), *((other, others[other]) for other in alike)]
    width = max(len(each) for each, _ in beside)
    lines = "".join(f"\n    {each:<{width}}  brought by {ranks(spans(who))}" for each, who in beside)
    return f"{text}. Names that are nearly the same:{lines}"


def _has(who: Sequence[int]) -> str:
    return "has" if len(who) == 1 else "have"


def _is(who: Sequence[int]) -> str:
    return "is" if len(who) == 1 else "are"


def _wait(who: Sequence[int]) -> str:
    return "waits for it" if len(who) == 1 else "wait for it"
