"""What the other ranks do, asked by a rank in trouble before anybody sees its error.

A thread of its own asks: a store may be stuck for minutes, and who waits for the answer may be left by a signal
handler, or be a handler that has come in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ncclpy.peers.standing import Began, RankState

__all__ = ["Inquiries"]

_log = logging.getLogger("ncclpy.peers")

#: Seconds for one that is in trouble to hear what the others do, whatever becomes of the store.
_ASKS = 3.0

Said = tuple[str | None, tuple[RankState, ...] | None]
#: Finds out what all ranks do, for a rank in an operation; whether each trouble is its own.
Inquire = Callable[[Began | None, bool], Said]


class _Inquiry:
    """One question to all ranks, and the answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.said: Said = None, None

    def ask(self, inquire: Inquire, subject: Began | None, alone: bool, who: str) -> None:
        try:
            self.said = inquire(subject, alone)
        except Exception:  # what has failed is to end all the same
            _log.warning("%s could not ask what the others do", who, exc_info=True)
        finally:
            self.done.set()


class Inquiries:
    """The questions of one rank: those that come while one is asked are given its answer.

    Parameters
    ----------
    inquire
        Asks all ranks.
    alone
        Whether each trouble is this rank's own; else there is one for all, which ends what they belong to.
    who
        Who asks, for the log: "rank 3 of process group 'default'".
    """

    def __init__(self, inquire: Inquire, alone: bool, who: str) -> None:
        self._inquire, self._alone, self._who = inquire, alone, who
        self._now: dict[str, _Inquiry] = {}  # no lock: a signal handler may ask in the middle of this

    def ask(self, look: Callable[[], dict[str, Any]]) -> Said:
        """Return what all ranks do, in a sentence and as data, or None for either.

        Parameters
        ----------
        look
            Returns this rank's standing.
        """
        mine = _Inquiry()
        asked = self._now.setdefault("inquiry", mine)
        if asked is mine:
            try:
                current = look()["current"]
                subject = None if current is None else Began(**current)
                question = self._inquire, subject, self._alone, self._who
                threading.Thread(target=mine.ask, args=question, name="ncclpy-ask", daemon=True).start()
            except Exception:  # no thread can be started, say
                _log.warning("%s could not ask what the others do", self._who, exc_info=True)
                mine.done.set()
            except BaseException:  # of a signal handler
                mine.done.set()
                raise
        told = asked.done.wait(_ASKS)
        if self._alone and self._now.get("inquiry") is asked:  # the next one asks anew
            self._now.pop("inquiry", None)
        if told:
            return asked.said
        return f"What the other ranks do is not known: the store has not answered within {_ASKS:.3g} s", None
