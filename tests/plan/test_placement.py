"""Placement: settings are obeyed, budgets are kept, and what does not fit is refused with numbers that then work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.config import Config
from tiered.errors import CapacityError
from tiered.plan.placement import ORDER, SETTING, SLOT_BYTES_MIN, SLOTS_MIN, Arena, UnitBytes, place, plan_arena
from tiered.shard import ShardKind, Tier

UNITS = st.lists(
    st.dictionaries(st.sampled_from(list(ShardKind)), st.integers(1, 1000), min_size=1), min_size=1, max_size=6
).map(lambda all_kinds: [UnitBytes(f"u{i}", kinds) for i, kinds in enumerate(all_kinds)])
PLACES = st.sampled_from(["auto", "device", "host", "nvme"])


@given(UNITS, PLACES, PLACES, PLACES, st.integers(0, 20_000))
def test_settings_are_obeyed_and_the_budget_is_kept(
    units: list[UnitBytes], parameters: str, gradients: str, states: str, budget: int
) -> None:
    config = Config(parameters=parameters, gradients=gradients, optimizer_states=states, nvme=["/nowhere"])
    arena = Arena(64, 4)
    try:
        plan = place(units, config, arena, host_budget_bytes=budget)
    except CapacityError:
        forced = [k for k in ShardKind if getattr(config, SETTING[k]) == "host"]
        assert arena.nbytes + sum(unit.kinds.get(k, 0) for unit in units for k in forced) > budget
        return
    assert set(plan.tiers) == {(i, kind) for i, unit in enumerate(units) for kind in unit.kinds}
    assert arena.nbytes + plan.bytes_in(units, Tier.HOST) <= budget
    for (_, kind), tier in plan.tiers.items():
        setting = getattr(config, SETTING[kind])
        assert setting == "auto" or tier is Tier[setting.upper()]
    assert place(units, config, arena, host_budget_bytes=budget) == plan  # a pure function


def test_without_nvme_everything_is_in_host_memory_or_refused() -> None:
    units = [UnitBytes("u", {ShardKind.PARAM: 100, ShardKind.GRAD: 100})]
    assert set(place(units, Config(), Arena(64, 0), host_budget_bytes=200).tiers.values()) == {Tier.HOST}
    with pytest.raises(CapacityError):
        place(units, Config(), Arena(64, 0), host_budget_bytes=199)


def test_host_memory_goes_to_gradients_then_weights_then_states() -> None:
    units = [UnitBytes("u", dict.fromkeys(ShardKind, 100))]
    config = Config(nvme=["/nowhere"])
    for count in range(len(ORDER) + 1):
        plan = place(units, config, Arena(64, 0), host_budget_bytes=100 * count)
        assert {kind for (_, kind), tier in plan.tiers.items() if tier is Tier.HOST} == set(ORDER[:count])


@given(st.integers(SLOTS_MIN * SLOT_BYTES_MIN, 1 << 36))
def test_the_arena_fits_and_has_many_slots(budget: int) -> None:
    arena = plan_arena(budget, uses_nvme=True)
    assert arena.nbytes <= budget
    assert arena.slot_count >= SLOTS_MIN
    assert arena.slot_bytes % 4096 == 0


def test_the_smallest_budget_that_is_named_works(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_arena(1000, uses_nvme=True)
    smallest = SLOTS_MIN * SLOT_BYTES_MIN
    assert re.search(r"1(\.5)? ?MiB|" + str(smallest), str(caught.value))
    plan_arena(smallest, uses_nvme=True)


def test_no_nvme_no_arena() -> None:
    assert plan_arena(10, uses_nvme=False).nbytes == 0
