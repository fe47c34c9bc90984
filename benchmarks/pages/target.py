"""One target of the project's speed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """One target.

    Attributes
    ----------
    text : str
        The target in words.
    experiment, engine : str
        The results that it is about; the engine is "" if an experiment has only one.
    row : tuple
        ``(rival, road, measure)`` of the row that must meet it.
    how : str
        ``"value"``, ``"ratio"`` or ``"difference"``; the latter two round by round against `over`.
    limit : float
        The value may not be above it (below it, with `at_least`).
    over : tuple, optional
        The row to compare with.
    at_least : bool
        Whether more is better.
    why : str
        The known reason, shown if the target is missed.
    roads : tuple of str
        All roads that must meet it, if there are several; `row` and `over` have the first. The worst of them is
        judged, and named in the text.
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
