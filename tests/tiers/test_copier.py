"""Copiers: the CPU's, the simulated one (whose every rule is tested here), and the accelerator's where there is one."""

from __future__ import annotations

import pytest
import torch

from tiered.testing import SimulatedCopier
from tiered.tiers.copier import Copier, Fence, HostCopier, StreamCopier, open_copier

COPIERS = [HostCopier(), *(SimulatedCopier(seed=seed, polls_max=polls) for seed in range(3) for polls in (0, 5))]


def finish(fence: Fence | None) -> None:
    if fence is not None:
        fence.wait()
        assert fence.done()


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize(("source", "target"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_both_ways_and_between_dtypes(copier: Copier, source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(37).to(source)
    staged, out = torch.empty(37, dtype=target), torch.empty(37, dtype=source)
    finish(copier.copy_in(staged, values))
    assert torch.equal(staged, values.to(target))
    finish(copier.copy_out(out, staged))
    assert torch.equal(out, staged.to(source))


@pytest.mark.parametrize("copier", COPIERS)
def test_nothing_to_copy(copier: Copier) -> None:
    finish(copier.copy_in(torch.empty(0), torch.empty(0)))
    finish(copier.copy_out(torch.empty(0), torch.empty(0)))


def test_the_cpu_copies_at_once() -> None:
    copier = open_copier(torch.device("cpu"))
    staged = torch.zeros(3)
    assert copier.copy_in(staged, torch.ones(3)) is None
    assert staged.sum() == 3


def test_bytes_going_in_arrive_only_with_the_fence_and_are_those_of_the_start() -> None:
    copier = SimulatedCopier(seed=1, polls_max=9)
    staged, source = torch.zeros(64), torch.ones(64)
    fence = copier.copy_in(staged, source)
    assert fence is not None
    source.zero_()  # the current stream goes on; the copy was ordered before this
    polls = 0
    while not fence.done():
        polls += 1
        assert not torch.equal(staged, torch.ones(64))
    assert polls > 0
    assert torch.equal(staged, torch.ones(64))


@pytest.mark.parametrize("way", ["in", "out"])
def test_staged_bytes_that_change_under_a_copy_are_reported(way: str) -> None:
    copier = SimulatedCopier(seed=1)
    staged, other = torch.zeros(64), torch.ones(64)
    fence = copier.copy_in(staged, other) if way == "in" else copier.copy_out(other, staged)
    assert fence is not None
    staged.fill_(5)  # recycled too early
    with pytest.raises(AssertionError, match="staged bytes changed"):
        fence.wait()


def test_check_ends_what_nobody_waited_for() -> None:
    copier = SimulatedCopier(seed=1)
    staged = torch.zeros(64)
    fence = copier.copy_out(torch.empty(64), staged)
    staged.fill_(5)
    with pytest.raises(AssertionError):
        copier.check()
    assert fence is not None and fence.done()


def test_the_last_fence_of_a_direction_stands_for_all_before_it() -> None:
    copier = SimulatedCopier(seed=3, polls_max=50)
    staged = [torch.zeros(8) for _ in range(5)]
    fences = [copier.copy_in(target, torch.full((8,), float(i))) for i, target in enumerate(staged)]
    finish(fences[-1])
    assert [int(target[0]) for target in staged] == [0, 1, 2, 3, 4]
    assert copier.pending_max == 5


def test_the_same_seed_takes_the_same_time() -> None:
    def polls(seed: int) -> list[int]:
        copier, counts = SimulatedCopier(seed=seed, polls_max=20), []
        for _ in range(5):
            fence, count = copier.copy_out(torch.empty(4), torch.zeros(4)), 0
            while fence is not None and not fence.done():
                count += 1
            counts.append(count)
        return counts

    assert polls(1) == polls(1) != polls(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_the_accelerators_copies_are_ordered_with_the_current_stream() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    copier = open_copier(device)
    assert isinstance(copier, StreamCopier)
    staged = torch.empty(1 << 20).pin_memory()
    for round_number in range(20):
        staged.fill_(float(round_number))
        target = torch.empty(1 << 20, device=device)
        fence = copier.copy_out(target, staged)
        doubled = target * 2  # on the current stream
        finish(fence)
        finish(copier.copy_in(staged, doubled))
        assert torch.equal(staged, torch.full((1 << 20,), 2.0 * round_number))
