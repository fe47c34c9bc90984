"""The reasons of failures, each said once: many ranks have the same reason, worded differently."""

from __future__ import annotations

import re

#: What precedes the reason in an error: its class, and the rank that has ended the group.
_HEAD = re.compile(
    r"(?:[A-Z]\w+: |process group '[^']*' (?:was ended by rank \d+ of \d+|has ended): "
    r"|it was ended by rank \d+ of \d+: )+"
)
_DURATION = re.compile(r"\d+(?:\.\d+)? m?s\b")
_PYTHON = ". Python of rank"
_CALLED = "This rank called "
#: Two reasons are the same if one begins with the other, and both have at least so many characters.
_ENOUGH = 40
#: How many different reasons are remembered; any further ones are not compared.
_MOST = 100
_SHOWN = 300


class Reasons:
    """The reasons that a report has said, and where."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def say(self, text: str, where: str) -> str:
        """Return a reason in short, or where it was said before.

        Parameters
        ----------
        text
            The text of an error.
        where
            A name of this place, for later errors with the same reason.
        """
        text = _without_advice(text)
        reason = _reason_of(text)
        for known, place in self._known.items():
            enough = min(len(known), len(reason)) >= _ENOUGH
            if reason == known or (enough and (reason.startswith(known) or known.startswith(reason))):
                return f"same as {place}"
        if reason and len(self._known) < _MOST:
            self._known[reason] = where
        head, python, stacks = text.partition(_PYTHON)  # at the end: what ranks without a dump do
        return (head if len(head) <= _SHOWN else head[: _SHOWN - 3] + "...") + (python + stacks)[:_SHOWN]


def _reason_of(text: str) -> str:
    """Return the part of an error's text that several ranks share."""
    head = _HEAD.match(text)
    return _DURATION.sub("#", text[head.end() :] if head else text)


def _without_advice(text: str) -> str:
    """Drop the sentences that advise to use ``ncclpy trace``, or say where an operation was called, as entries do."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    return " ".join(each for each in sentences if "ncclpy trace" not in each and not each.startswith(_CALLED))
