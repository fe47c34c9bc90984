"""Why something has failed, said once: many ranks have the same reason, in their own words."""

from __future__ import annotations

import re

#: What an error says in front of the reason: its class, and who has ended the group.
_HEAD = re.compile(
    r"(?:[A-Z]\w+: |process group '[^']*' (?:was ended by rank \d+ of \d+|has ended): "
    r"|it was ended by rank \d+ of \d+: )+"
)
_DURATION = re.compile(r"\d+(?:\.\d+)? m?s\b")
_PYTHON = ". Python of rank"
_CALLED = "This rank called "
#: Two are the same if one begins with the other and has so many characters at least.
_ENOUGH = 40
#: So many different ones are told apart; of more, the others are left out.
_MOST = 100
_SHOWN = 300


class Reasons:
    """Reasons that a report has said, and where."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def say(self, text: str, where: str) -> str:
        """Return a reason in short, or where it was said already.

        Parameters
        ----------
        text
            The text of an error.
        where
            Who says it here, for those that have the same.
        """
        text = _without_advice(text)
        reason = _reason_of(text)
        for known, place in self._known.items():
            enough = min(len(known), len(reason)) >= _ENOUGH
            if reason == known or (enough and (reason.startswith(known) or known.startswith(reason))):
                return f"same as {place}"
        if reason and len(self._known) < _MOST:
            self._known[reason] = where
        head, python, stacks = text.partition(_PYTHON)  # which stand last, and say what a rank without a dump does
        return (head if len(head) <= _SHOWN else head[: _SHOWN - 3] + "...") + (python + stacks)[:_SHOWN]


def _reason_of(text: str) -> str:
    """Return what is the same in the words of several ranks."""
    head = _HEAD.match(text)
    return _DURATION.sub("#", text[head.end() :] if head else text)


def _without_advice(text: str) -> str:
    """Leave out the sentences that tell to do what is being done, or where an operation was called, as entries do."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    return " ".join(each for each in sentences if "ncclpy trace" not in each and not each.startswith(_CALLED))
