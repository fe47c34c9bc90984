"""The tree of the control plane: ranks of a machine under one of them, and these leaders under each other."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Tree"]

#: Most children of a rank on its machine, and most child machines of a machine.
_FAN = 8


class Tree:
    """Find the parents and children of all ranks; rank 0 is the root.

    The lowest ranks of the machines are its leaders and form one tree; the ranks of each machine form another one
    under their leader. The depth of each tree is the logarithm of its size.

    Parameters
    ----------
    machines
        The name of each rank's machine, by rank.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        places: dict[str, list[int]] = {}
        for rank, machine in enumerate(machines):
            places.setdefault(machine, []).append(rank)
        leaders = [ranks[0] for ranks in places.values()]
        self.parents: list[int | None] = [None] * len(machines)
        for ranks in (leaders, *places.values()):
            for position, rank in enumerate(ranks):
                if position:
                    self.parents[rank] = ranks[(position - 1) // _FAN]
        self.children: list[list[int]] = [[] for _ in machines]
        for rank, parent in enumerate(self.parents):
            if parent is not None:
                self.children[parent].append(rank)

    def below(self, rank: int) -> tuple[int, ...]:
        """Return a rank and all ranks below it."""
        found = [rank]
        for each in found:
            found += self.children[each]
        return tuple(sorted(found))

    def depth(self) -> int:
        """Return how many steps the farthest rank is from the root."""
        deepest = 0
        for rank in range(len(self.parents)):
            steps, at = 0, self.parents[rank]
            while at is not None:
                steps, at = steps + 1, self.parents[at]
            deepest = max(deepest, steps)
        return deepest
