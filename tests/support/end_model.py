"""A model of the common end of a group (ncclpy.peers.confirmation, ncclpy.engine.work), run with random timing.

A run is one collective of two to five ranks in a ring. A rank may launch late or never, be stopped, or be killed; the
store is slow, and its news is late. Devices continue while processes are stopped. An abort completes the kernel of the
next rank with wrong data, and so on around the ring. Decisions use the real code: `Patience` bounds the wait for a
rank, and the fence's constant is the stop after which a rank asks.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

from ncclpy.peers.confirmation import _POLL_INTERVAL, TELL_TIMEOUT, Patience

#: Seconds, as in `engine.fence` and `process_group.lifecycle`.
STILL, GRACE = 0.5, 1.0
#: Seconds of running within which a living rank hears of the end.
HEARS = 4.5


class Rank:
    """One rank: the events of its process, and its state."""

    def __init__(self, run: Run, number: int) -> None:
        choose = run.choose
        self.run, self.number = run, number
        self.launches = math.inf if choose.random() < 0.25 else choose.choice([0.0, choose.uniform(0, 3)])
        self.deadline = choose.choice([0.5, 1.0, choose.uniform(0.2, 4), 30.0])
        self.poll = choose.choice([0.001, 0.05, choose.uniform(0.001, 0.2)])
        self.killed = choose.uniform(0, 4) if choose.random() < 0.2 else math.inf
        self.stops = self._stops(choose)
        self.hears = choose.choice([0.002, choose.uniform(0, 1), choose.uniform(0, HEARS)])
        self.store = choose.choice(
            [0.001, choose.uniform(0, 0.3), choose.uniform(0, 2)]
        )  # seconds of an operation of the store
        self.launched = self.fenced = False
        self.kernel: bool | None = None  # None until completed; then whether the data are right
        self.outcome: str | None = None
        self.asked = 0.0  # the last time that it asked the store
        self.asking = False

    @staticmethod
    def _stops(choose: random.Random) -> list[tuple[float, float]]:
        stops, moment = [], 0.0
        for _ in range(choose.choice([0, 0, 1, 1, 2, 4])):
            begin = moment + choose.uniform(0, 3)
            moment = begin + choose.choice([choose.uniform(0, 0.49), choose.uniform(0, 2), choose.uniform(1, 8)])
            stops.append((begin, moment))
        if choose.random() < 0.2:  # a series of stops that are too short to be noticed, as `cpulimit` makes
            moment = max(moment, choose.uniform(0, 3))
            for _ in range(choose.randint(2, 30)):
                begin = moment + choose.uniform(0.005, 0.1)
                moment = begin + choose.uniform(0.2, 0.49)
                stops.append((begin, moment))
        return stops

    def awake(self, moment: float) -> float:
        """Return the first moment from `moment` on at which the process runs."""
        for begin, end in self.stops:
            if begin <= moment < end:
                moment = end
        return moment if moment < self.killed else math.inf

    def running(self, moment: float, seconds: float) -> float:
        """Return the moment at which the process has run for `seconds` since `moment`."""
        for begin, end in self.stops:
            if end <= moment:
                continue
            begin = max(begin, moment)
            if moment + seconds < begin:
                break
            seconds -= begin - moment
            moment = end
        return self.awake(moment + seconds)

    def stop(self, moment: float) -> int:
        """Return the number of the stop that the process is in, or was in last."""
        return sum(begin <= moment for begin, _ in self.stops)

    def condition(self, moment: float) -> str:
        if moment >= self.killed:
            return "ended"
        return "stopped" if any(begin <= moment < end for begin, end in self.stops) else "unresponsive"


class Run:
    """One run; `wrong` has the ranks that have taken wrong data for a success."""

    def __init__(self, seed: int, *, two_steps: bool = True, asks: bool = True) -> None:
        self.choose = random.Random(seed)
        self.two_steps, self.asks = two_steps, asks
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.told = math.inf  # the moment at which the end is in the store
        self.confirmed: dict[int, float] = {}
        self.ranks = [Rank(self, number) for number in range(self.choose.randint(2, 5))]
        self.given: set[int] = set()  # ranks that have aborted, or completed with wrong data
        self.wrong: list[int] = []
        for rank in self.ranks:
            self.at(rank.awake(rank.launches), rank, self.launch)
            for _, end in rank.stops:
                self.at(rank.awake(end), rank, self.poll)
            for other in self.ranks:
                if other is not rank and rank.killed < math.inf:
                    self.at(other.awake(rank.killed + GRACE), other, self.hear_of_death)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def at(self, moment: float, rank: Rank, event: Callable[[Rank], None]) -> None:
        if moment < 60:
            heapq.heappush(self._events, (moment, next(self._numbers), lambda: event(rank)))

    def launch(self, rank: Rank) -> None:
        if rank.fenced:  # the group has ended: the call is refused
            return
        rank.launched = True
        self.at(rank.running(self.now, rank.deadline), rank, self.fail)
        if all(each.launched and self.now < each.killed for each in self.ranks) and not self.given:
            for each in self.ranks:
                self.at(self.now + self.choose.uniform(0, 0.01), each, self.complete)
        self.pass_on(self.ranks[rank.number - 1])

    def complete(self, rank: Rank) -> None:
        """Complete a kernel, unless a process killed before has left the kernels of the others stuck."""
        if rank.kernel is None and self.now < rank.killed and not self.given:
            if all(each.kernel is not None or self.now < each.killed for each in self.ranks):
                self.end_kernel(rank, True)

    def end_kernel(self, rank: Rank, right: bool) -> None:
        rank.kernel = right
        turns = math.ceil(self.now / rank.poll) * rank.poll
        self.at(rank.awake(max(turns, self.now)), rank, self.poll)
        if not right:
            self.given.add(rank.number)
            self.pass_on(rank)

    def pass_on(self, rank: Rank) -> None:
        """Complete the next rank's kernel with wrong data if this rank has left the ring."""
        after = self.ranks[(rank.number + 1) % len(self.ranks)]
        if rank.number in self.given and after.launched and after.kernel is None and self.now < after.killed:
            self.end_kernel(after, False)

    def poll(self, rank: Rank) -> None:
        """Query the device like the monitor; ask the store first if the process was stopped since it last asked."""
        if not rank.launched or rank.outcome is not None or rank.asking:
            return
        stops = [end - begin for begin, end in rank.stops if rank.asked < end <= self.now]
        if self.asks and max(stops, default=0.0) > STILL:
            rank.asking = True
            self.at(rank.running(self.now, rank.store), rank, self.answer)
        elif rank.kernel is not None and not rank.fenced:
            self.succeed(rank)

    def answer(self, rank: Rank) -> None:
        rank.asking, rank.asked = False, self.now
        if self.told <= self.now:
            self.end(rank)
        else:
            self.poll(rank)

    def succeed(self, rank: Rank) -> None:
        rank.outcome = "success"
        if not rank.kernel:
            self.wrong.append(rank.number)

    def fail(self, rank: Rank) -> None:
        """Tell the others; the wait for their confirmations begins once the end is in the store."""
        if rank.outcome is not None or rank.fenced:
            return
        told = self.now + min(rank.store, TELL_TIMEOUT)
        if told < self.told:
            self.told = told
            for other in self.ranks:
                if other is not rank:
                    self.at(other.running(told, other.hears), other, self.hear)
        self.end(rank, told)

    def hear(self, rank: Rank) -> None:
        if self.told <= self.now:
            self.end(rank)

    def hear_of_death(self, rank: Rank) -> None:
        if rank.launched and rank.outcome is None:
            self.fail(rank)
        elif not rank.launched and self.now < 50:
            self.at(rank.awake(self.now + GRACE), rank, self.hear_of_death)

    def end(self, rank: Rank, told: float = 0.0) -> None:
        """Take no completion for a success any more, confirm, and abort once the others have confirmed."""
        if rank.fenced:
            return
        rank.fenced = True
        if rank.launched and rank.outcome is None:
            rank.outcome = "failed"
        begun = max(self.now, told)
        self.confirmed[rank.number] = rank.running(begun, rank.store)
        patience = Patience(begun)
        self.at(rank.awake(begun), rank, lambda rank: self.wait(rank, patience, set(range(len(self.ranks)))))

    def wait(self, rank: Rank, patience: Patience, missing: set[int]) -> None:
        if self.two_steps:
            missing = {
                each
                for each in missing - {rank.number}
                if self.confirmed.get(each, math.inf) > self.now
                and patience.is_waited_for(
                    each, self.ranks[each].condition(self.now), self.now, self.ranks[each].stop(self.now)
                )
            }
        else:
            missing = set()
        if missing:
            self.at(rank.awake(self.now + _POLL_INTERVAL), rank, lambda rank: self.wait(rank, patience, missing))
        elif rank.launched and rank.kernel is None:
            self.given.add(rank.number)
            self.pass_on(rank)
