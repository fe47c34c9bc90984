"""One promise of the project's speed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """One promise.

    Attributes
    ----------
    text : str
        The promise in words.
    experiment, engine : str
        Which results it speaks of; the engine is "" where an experiment has only one.
    row : tuple
        ``(rival, road, measure)`` of the row that has to keep it.
    how : str
        ``"value"``, ``"ratio"`` or ``"difference"``; the latter two round by round against `over`.
    limit : float
        The value may not be above it (below it, with `at_least`).
    over : tuple, optional
        The row to compare with.
    at_least : bool
        Whether more is better.
    why : str
        What is known of the reason where it is missed; shown then.
    roads : tuple of str
        Where several roads have to keep it: all of them, `row` and `over` having the first. The one that is furthest
        off counts, and is named.
    """

    text: str
    experiment: str
    engine: str
    row: tuple[str, str, str]
    how: str
    limit: float
    unit: str
    over: tuple[str, str, str] | None = None
    at_least: bool = False
    why: str = ""
    roads: tuple[str, ...] = ()

    def each(self) -> list[Target]:
        """Return a target for each of the roads."""
        if not self.roads:
            return [self]
        return [
            dataclasses.replace(
                self,
                row=(self.row[0], road, self.row[2]),
                over=None if self.over is None else (self.over[0], road, self.over[2]),
                roads=(),
            )
            for road in self.roads
        ]
