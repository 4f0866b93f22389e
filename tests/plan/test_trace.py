"""The trace against the obvious way to compute the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiered.plan.trace import Trace

UNITS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(UNITS, st.integers(0, 5), st.integers(0, 60))
def test_locate_finds_the_first_use_from_there_on(units: list[int], unit: int, position: int) -> None:
    found = Trace(units).locate(unit, position)
    expected = [p for p in range(position, position + len(units)) if units[p % len(units)] == unit]
    assert found == (expected[0] if expected else None)


@given(UNITS, st.integers(0, 60), st.integers(1, 8))
def test_upcoming_are_the_next_different_units_in_order(units: list[int], position: int, count: int) -> None:
    trace = Trace(units)
    found = trace.upcoming(position, count)
    assert len(found) == min(count, len(set(units)))
    assert [p for _, p in found] == sorted(p for _, p in found)
    for unit, place in found:
        assert trace.locate(unit, position) == place


def test_an_empty_trace_knows_nothing() -> None:
    assert Trace(()).locate(0, 5) is None
    assert Trace(()).upcoming(5, 3) == []
