"""How long the parts of a launch take, and what is left of it, by what the same lines took at earlier builds.

Owns no clock and no file: it is told what happens when, and given what was noted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["PHASES", "Pace"]

# A launch is these, one after the other; each begins with imports and the model, then takes its cases in turn.
PHASES = ("record", "reload")
_Item = tuple[str, int | None]


class Pace:
    """One launch: what each rank is doing, and what each part took the slowest rank.

    Args:
        cases: indices of the launch's cases, in their order.
        known: what was noted of each case: seconds by phase, and by `<phase> start` of what comes before the cases.
        recorded: those of the cases that an earlier build recorded; with all of them there is no first phase.
    """

    def __init__(
        self,
        cases: Sequence[int],
        known: Mapping[int, Mapping[str, float]],
        recorded: Collection[int] = (),
    ) -> None:
        self._cases = tuple(cases)
        of_phase = dict.fromkeys(PHASES, self._cases)
        of_phase["record"] = tuple(case for case in self._cases if case not in recorded)
        self._items: list[_Item] = [
            (phase, case) for phase in PHASES if of_phase[phase] for case in (None, *of_phase[phase])
        ]
        self._known = known
        self._at: dict[int, tuple[_Item, float]] = {}
        self._took: dict[_Item, float] = {}

    def enter(self, rank: int, phase: str, case: int | None, now_s: float) -> None:
        """Note that a rank is at a case of a phase, or before its cases."""
        item = (phase, case)
        before = self._at.get(rank)
        if before is None or before[0] != item:
            self._leave(rank, now_s)
            self._at[rank] = (item, now_s)

    def end(self, now_s: float) -> None:
        """Note that a phase ended in all ranks."""
        for rank in list(self._at):
            self._leave(rank, now_s)

    def _leave(self, rank: int, now_s: float) -> None:
        if (before := self._at.pop(rank, None)) is not None:
            item, since_s = before
            self._took[item] = max(self._took.get(item, 0.0), now_s - since_s)

    def whole_s(self) -> float | None:
        """Return how long the launch took last time; None where that is not known of each part."""
        expected = [self._expected(item) for item in self._items]
        return sum(seconds for seconds in expected if seconds is not None) if None not in expected else None

    def left_s(self, rank: int, now_s: float) -> float | None:
        """Return how long a rank will take from now on; None where that is not known of each part that is left."""
        if rank not in self._at:
            return None
        item, since_s = self._at[rank]
        expected = [self._expected(later) for later in self._items[self._items.index(item) :]]
        if None in expected:
            return None
        first, *later = [seconds for seconds in expected if seconds is not None]
        return max(0.0, first - (now_s - since_s)) + sum(later)

    def _expected(self, item: _Item) -> float | None:
        phase, case = item
        if case is not None:
            return self._known.get(case, {}).get(phase)
        starts = [self._known.get(index, {}).get(f"{phase} start") for index in self._cases]
        return max((seconds for seconds in starts if seconds is not None), default=None)

    def of_case(self, case: int) -> dict[str, float]:
        """Return what is to be noted of a case; nothing where a part of it did not run."""
        found = {phase: self._took.get((phase, case)) for phase in PHASES}
        found |= {f"{phase} start": self._took.get((phase, None)) for phase in PHASES}
        seconds = {name: round(value, 3) for name, value in found.items() if value is not None}
        return seconds if len(seconds) == len(found) else {}
