"""The prefetch queue: both limits hold, and a wrong guess asks for too much or too little, nothing worse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.swap_rig import SLOT_BYTES, content, rig, within
from tiered.plan.prefetch_queue import Mode, PrefetchQueue
from tiered.shard import NEVER_USED, Shard, ShardKey, ShardKind, Tier
from tiered.tiers.swap_manager import Access, Outcome


class Recorder:
    """Stands for the swap manager: keeps what was asked for since the last `advance`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Shard, int]] = []
        self.position = 0

    def advance(self, position: int) -> None:
        self.asked, self.position = [], position

    def prefetch(self, shards: Sequence[Shard], *, next_use: int) -> None:
        self.asked += [(shard, next_use) for shard in shards]


def shards_of(sizes: list[list[int]], home: Tier = Tier.NVME) -> list[list[Shard]]:
    return [
        [Shard(ShardKey(unit, 0, ShardKind.PARAM, piece), f"u{unit}", n, home=home) for piece, n in enumerate(pieces)]
        for unit, pieces in enumerate(sizes)
    ]


def queue_over(recorder: Recorder, shards: list[list[Shard]], **limits: int) -> PrefetchQueue:
    queue = PrefetchQueue(cast(Any, recorder), **limits)
    queue.set_shards(shards)
    return queue


def run(queue: PrefetchQueue, order: Sequence[int], mode: Mode = Mode.TRAIN) -> None:
    queue.begin_pass(mode)
    for unit in order:
        queue.on_gather(unit)


@given(
    sizes=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=6),
    units_max=st.integers(0, 4),
    bytes_max=st.integers(1, 120),
    dice=st.randoms(use_true_random=False),
)
def test_never_more_units_or_bytes_than_allowed(
    sizes: list[list[int]], units_max: int, bytes_max: int, dice: random.Random
) -> None:
    recorder = Recorder()
    queue = queue_over(recorder, shards_of(sizes), prefetch_units=units_max, prefetch_bytes=bytes_max)
    for _ in range(6):
        queue.begin_pass(dice.choice(list(Mode)))
        for _ in range(dice.randint(0, 12)):
            unit = dice.randrange(len(sizes))
            recorder.asked = []
            queue.on_gather(unit)
            assert len({shard.key.unit for shard, _ in recorder.asked}) <= units_max
            assert sum(shard.nbytes for shard, _ in recorder.asked) <= bytes_max
            assert all(next_use > recorder.position for _, next_use in recorder.asked)


def test_asks_for_what_comes_next_in_order() -> None:
    recorder = Recorder()
    queue = queue_over(recorder, shards_of([[10], [10], [10]]), prefetch_units=2, prefetch_bytes=1000)
    run(queue, [0, 1, 2, 1, 0])
    assert not recorder.asked  # the first pass only records
    queue.begin_pass(Mode.TRAIN)
    assert queue.on_gather(0) == 5 + 4 - 5  # position 4: the last gather of the pass
    assert [shard.key.unit for shard, _ in recorder.asked] == [1, 2]
    queue.on_gather(1)
    queue.on_gather(2)
    assert [(shard.key.unit, at) for shard, at in recorder.asked] == [(1, 3), (0, 4)]
    queue.on_gather(1)
    queue.on_gather(0)
    assert [(shard.key.unit, at) for shard, at in recorder.asked] == [(0, 5), (1, 6)]  # the next pass


def test_depth_zero_asks_for_nothing() -> None:
    recorder = Recorder()
    queue = queue_over(recorder, shards_of([[10], [10]]), prefetch_units=0, prefetch_bytes=1000)
    for _ in range(3):
        run(queue, [0, 1])
        assert not recorder.asked


def test_a_unit_too_large_is_asked_for_in_part() -> None:
    recorder = Recorder()
    queue = queue_over(recorder, shards_of([[10], [60, 60, 60], [10]]), prefetch_units=2, prefetch_bytes=130)
    run(queue, [0, 1, 2])
    queue.begin_pass(Mode.TRAIN)
    queue.on_gather(0)
    assert [shard.key[:4] for shard, _ in recorder.asked] == [(1, 0, 0, 0), (1, 0, 0, 1)]


def test_what_rests_in_memory_uses_no_budget() -> None:
    recorder = Recorder()
    shards = shards_of([[10], [100]], home=Tier.HOST)
    shards += [[Shard(ShardKey(2, 0, ShardKind.PARAM, 0), "u2", 10, home=Tier.NVME)]]
    queue = queue_over(recorder, shards, prefetch_units=2, prefetch_bytes=10)
    run(queue, [0, 1, 2])
    queue.begin_pass(Mode.TRAIN)
    queue.on_gather(0)
    assert [shard.key.unit for shard, _ in recorder.asked] == [2]


def test_modes_have_traces_of_their_own() -> None:
    queue = queue_over(Recorder(), shards_of([[1]] * 4), prefetch_units=1, prefetch_bytes=10)
    run(queue, [0, 1, 2, 3, 2, 1, 0])
    run(queue, [0, 1, 2, 3], Mode.NO_GRAD)
    run(queue, [0, 3], Mode.NO_GRAD)  # an abandoned forward
    queue.begin_pass(Mode.TRAIN)
    assert queue.trace(Mode.TRAIN).units == (0, 1, 2, 3, 2, 1, 0)
    assert queue.trace(Mode.NO_GRAD).units == (0, 3)
    assert queue.on_gather(0) != NEVER_USED


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=8))
def test_next_use_is_never_in_the_past(passes: list[list[int]]) -> None:
    queue = queue_over(Recorder(), shards_of([[1]] * 4), prefetch_units=2, prefetch_bytes=10)
    for order in passes:
        queue.begin_pass(Mode.TRAIN)
        for unit in order:
            at = queue.on_gather(unit)
            assert at == NEVER_USED or at == queue.next_use(unit)


def test_wrong_guesses_over_a_real_arena_cost_no_byte(tmp_path: Path) -> None:
    """Every pass in another order, hints for all of them, an arena for half: right bytes and no error."""
    with rig(tmp_path, sizes=[SLOT_BYTES] * 8, slot_count=4) as r:
        for number, shard in enumerate(r.shards):
            with r.manager.held((shard,), Access.OVERWRITE):
                shard.view(torch.uint8).copy_(content(number, SLOT_BYTES))
        queue = PrefetchQueue(r.manager, prefetch_units=3, prefetch_bytes=3 * SLOT_BYTES)
        queue.set_shards([[shard] for shard in r.shards])

        def body() -> None:
            dice = random.Random(0)
            for _ in range(12):
                queue.begin_pass(dice.choice(list(Mode)))
                for unit in dice.sample(range(8), dice.randint(1, 8)):
                    next_use = queue.on_gather(unit)
                    shard = r.shards[unit]
                    r.manager.acquire((shard,), Access.READ).wait()
                    assert torch.equal(shard.view(torch.uint8), content(unit, SLOT_BYTES))
                    r.manager.release((shard,), Outcome.UNCHANGED, next_use=next_use)
            r.manager.drain()

        within(body)
        prefetched = r.events.prefetch
        assert prefetched["hit"] + prefetched["late"] > 0 and prefetched["miss"] > 0
