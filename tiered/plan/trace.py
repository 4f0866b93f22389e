"""The order in which units are gathered, and what it says about the future. Pure data, no disk, no device.

[Note: the trace is a hint] A trace is recorded in one pass and used in the next; a pass may differ at any
time. A wrong guess costs a read too many or too late, never a result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence


class Trace:
    """An immutable cyclic sequence of unit numbers: one pass of gathers.

    Positions count on for ever: position p means entry p modulo the length, so a difference of positions says
    how many gathers lie between two uses, also across passes.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = tuple(units)
        places: dict[int, list[int]] = defaultdict(list)
        for place, unit in enumerate(self.units):
            places[unit].append(place)
        self._places = dict(places)

    def __len__(self) -> int:
        return len(self.units)

    def locate(self, unit: int, position: int) -> int | None:
        """The first position from `position` on at which `unit` is used, or None when it never is."""
        places = self._places.get(unit)
        if not places:
            return None
        lap, place = divmod(position, len(self.units))
        index = bisect_right(places, place - 1)
        if index < len(places):
            return lap * len(self.units) + places[index]
        return (lap + 1) * len(self.units) + places[0]

    def upcoming(self, position: int, count: int) -> list[tuple[int, int]]:
        """The next `count` different units from `position` on, as (unit, position) in order of use."""
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        for ahead in range(position, position + len(self.units)):
            unit = self.units[ahead % len(self.units)]
            if unit not in seen:
                seen.add(unit)
                found.append((unit, ahead))
                if len(found) >= count:
                    break
        return found
