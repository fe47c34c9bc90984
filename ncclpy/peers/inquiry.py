"""What the other ranks do, asked by a rank in trouble before the program sees its error.

A separate thread asks, since the store may be stuck for minutes. A signal handler may interrupt the thread that waits
for the answer, and may call `Inquiries.ask` before that answer arrives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ncclpy.peers.rank_state import OperationInfo, RankState

__all__ = ["Inquiries"]

_log = logging.getLogger("ncclpy.peers")

#: Seconds that a rank in trouble waits for the answer, whatever happens to the store.
_ANSWER_TIMEOUT = 3.0

Answer = tuple[str | None, tuple[RankState, ...] | None]
#: Finds out what all ranks do; called with the operation that this rank is in, and `fails_alone` of `Inquiries`.
Inquire = Callable[[OperationInfo | None, bool], Answer]


class _Inquiry:
    """One question to all ranks, and the answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: Answer = None, None

    def ask(self, inquire: Inquire, subject: OperationInfo | None, fails_alone: bool, asker: str) -> None:
        try:
            self.answer = inquire(subject, fails_alone)
        except Exception:  # without an answer the failure must still be raised
            _log.warning("%s could not ask what the others do", asker, exc_info=True)
        finally:
            self.done.set()


class Inquiries:
    """The questions of one rank; a question that begins during another one shares its answer.

    Parameters
    ----------
    inquire
        Asks all ranks.
    fails_alone
        Whether ranks fail independently of each other, so that each failure asks anew; otherwise the first failure
        ends the group for all ranks, and this rank asks only once.
    asker
        The rank that asks, for the log: "rank 3 of process group 'default'".
    stopped_here
        Returns a text to append to a message: which processes of this machine are stopped. It needs no store.
    """

    def __init__(self, inquire: Inquire, fails_alone: bool, asker: str, stopped_here: Callable[[], str]) -> None:
        self._inquire, self._fails_alone, self._asker, self._stopped_here = inquire, fails_alone, asker, stopped_here
        # The running inquiry under the key "inquiry". A dict, whose methods are atomic, and no lock: a signal handler
        # may interrupt `ask` and call it.
        self._running: dict[str, _Inquiry] = {}

    def ask(self, look: Callable[[], dict[str, Any]]) -> Answer:
        """Return what all ranks do, in a sentence and as data, or None for either.

        If no answer arrives within `_ANSWER_TIMEOUT` seconds, the sentence says so and names the stopped processes of
        this machine; the data are None.

        Parameters
        ----------
        look
            Returns this rank's status.
        """
        new = _Inquiry()
        inquiry = self._running.setdefault("inquiry", new)
        if inquiry is new:
            try:
                current = look()["current"]
                subject = None if current is None else OperationInfo(**current)
                question = self._inquire, subject, self._fails_alone, self._asker
                threading.Thread(target=new.ask, args=question, name="ncclpy-ask", daemon=True).start()
            except Exception:  # for example, no thread can be started
                _log.warning("%s could not ask what the others do", self._asker, exc_info=True)
                new.done.set()
            except BaseException:  # raised by a signal handler
                new.done.set()
                raise
        answered = inquiry.done.wait(_ANSWER_TIMEOUT)
        if self._fails_alone and self._running.get("inquiry") is inquiry:  # the next question is a new one
            self._running.pop("inquiry", None)
        if answered:
            return inquiry.answer
        stopped = self._stopped_here()
        return (
            "What the other ranks do is not known: the store has not answered within "
            f"{_ANSWER_TIMEOUT:.3g} s{stopped}",
            None,
        )
