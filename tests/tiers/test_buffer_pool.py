"""Host regions and the pool of leased slots."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import CapacityError, ClosedError, UsageError
from tiered.tiers.buffer_pool import HUGE_PAGE_BYTES, POISON, BufferPool, Lease, Purpose, allocate_host

KIB, MIB = 1 << 10, 1 << 20
RESERVE = {Purpose.DEMAND: 1, Purpose.UPDATE: 2}


def smaps_of(address: int) -> dict[str, str]:
    """The kernel's fields of the mapping that holds `address`."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            inside = start <= address < stop
        elif inside:
            fields[head[:-1]] = rest.strip()
    return fields


# ---- regions


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3])
def test_region_is_exact_and_aligned(nbytes: int) -> None:
    region = allocate_host(nbytes)
    assert region.tensor.shape == (nbytes,) and region.tensor.dtype == torch.uint8
    assert region.address == region.tensor.data_ptr()
    assert region.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 4096) == 0
    region.tensor.fill_(7)
    assert int(region.tensor.sum(dtype=torch.int64)) == 7 * nbytes
    region.close()


def test_region_is_not_touched_before_use_and_asks_for_huge_pages() -> None:
    region = allocate_host(8 * MIB)
    fields = smaps_of(region.address)
    assert fields["Rss"] == "0 kB"
    assert "hg" in fields["VmFlags"].split()


def test_views_outlive_close_and_the_memory_goes_with_the_last_one() -> None:
    region = allocate_host(4 * MIB)
    address = region.address
    view = region.tensor[MIB : MIB + 8]
    view.fill_(3)
    region.close()
    region.close()
    assert view.tolist() == [3] * 8
    assert "hg" in smaps_of(address)["VmFlags"].split()
    with pytest.raises(ClosedError):
        _ = region.tensor
    del view
    gc.collect()
    assert "hg" not in smaps_of(address).get("VmFlags", "").split()


def test_region_that_cannot_be_mapped_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="refuses to map"):
        allocate_host(1 << 60)
    with pytest.raises(ValueError, match="at least one byte"):
        allocate_host(0)


def test_pinning_without_an_accelerator_is_quiet() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not allocate_host(4096, register=True).registered


class FailingRuntime:
    """A CUDA runtime that cannot pin."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return 2


def test_failing_to_pin_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_error(result: int) -> None:
        raise RuntimeError(f"CUDA error {result}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", FailingRuntime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        region = allocate_host(4096, register=True)
    assert not region.registered
    region.tensor.fill_(1)
    region.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_pinned_region_copies_to_the_device() -> None:
    region = allocate_host(4 * MIB, register=True)
    assert region.registered and region.tensor.is_pinned()
    region.tensor.fill_(5)
    assert region.tensor.to("cuda", non_blocking=True).cpu().eq(5).all()
    region.close()


# ---- leases


def test_slots_are_page_aligned_disjoint_and_exact() -> None:
    pool = BufferPool(8 * KIB, 5, reserve={})
    leases = [pool.try_lease(Purpose.DEMAND, f"t{i}") for i in range(5)]
    addresses = sorted(lease.address for lease in leases if lease)
    assert addresses == [pool.address + 8 * KIB * i for i in range(5)]
    assert pool.address % 4096 == 0
    assert pool.try_lease(Purpose.DEMAND, "one more") is None
    for lease in leases:
        assert lease is not None and lease.nbytes == 8 * KIB
        lease.release()
    pool.close()
    pool.close()


def test_prefetch_cannot_take_the_reserves_and_each_reserve_serves_its_own() -> None:
    pool = BufferPool(4096, 5, reserve=RESERVE)
    prefetch = [pool.try_lease(Purpose.PREFETCH, "p") for _ in range(5)]
    assert [lease is not None for lease in prefetch] == [True, True, False, False, False]
    demand = [pool.try_lease(Purpose.DEMAND, "d") for _ in range(2)]
    assert [lease is not None for lease in demand] == [True, False]
    update = [pool.try_lease(Purpose.UPDATE, "u") for _ in range(3)]
    assert [lease is not None for lease in update] == [True, True, False]
    assert pool.statistics().by_purpose == {Purpose.DEMAND: 1, Purpose.UPDATE: 2, Purpose.PREFETCH: 2}


def test_view_checks_its_range_and_its_right() -> None:
    pool = BufferPool(4096, 2, reserve={})
    lease = pool.try_lease(Purpose.DEMAND, "layer.weight")
    assert lease is not None
    view = lease.view(torch.float32, 100, 64)
    assert view.data_ptr() == lease.address + 64 and view.shape == (100,)
    assert lease.view(torch.bfloat16, 0).shape == (0,)
    assert lease.view(torch.uint8, 4096).numel() == 4096
    for numel, offset in ((1025, 0), (1024, 4), (1, 2), (1, -4), (-1, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            lease.view(torch.float32, numel, offset)
    lease.release()
    with pytest.raises(UsageError, match=r"layer\.weight"):
        lease.view(torch.uint8, 1)
    with pytest.raises(UsageError, match=r"layer\.weight was released twice"):
        lease.release()
    assert pool.statistics().leased == 0


def test_poison_shows_late_readers_and_spares_neighbours() -> None:
    pool = BufferPool(4096, 2, reserve={}, poison=True)
    first, second = pool.try_lease(Purpose.DEMAND, "a"), pool.try_lease(Purpose.DEMAND, "b")
    assert first and second
    late, neighbour = first.view(torch.uint8, 4096), second.view(torch.uint8, 4096).fill_(1)
    late.fill_(2)
    first.release()
    assert late.eq(POISON).all() and neighbour.eq(1).all()


def test_close_names_what_leaked_once_and_late_releases_are_harmless() -> None:
    pool = BufferPool(4096, 3, reserve={}, poison=True)
    kept = pool.try_lease(Purpose.UPDATE, "layers.3.weight")
    assert kept is not None
    view = kept.view(torch.uint8, 16).fill_(9)
    with pytest.raises(UsageError, match=r"1 of 3 .*layers\.3\.weight \(UPDATE\)"):
        pool.close()
    pool.close()
    assert view.eq(9).all()
    kept.release()
    with pytest.raises(ClosedError):
        pool.try_lease(Purpose.DEMAND, "x")


def test_lease_is_a_context() -> None:
    pool = BufferPool(4096, 1, reserve={})
    lease = pool.try_lease(Purpose.DEMAND, "a")
    assert lease is not None
    with lease as entered:
        assert entered is lease and "slot 0" in repr(lease)
    assert "released" in repr(lease)
    pool.close()


@pytest.mark.parametrize(
    ("slot_bytes", "slot_count", "reserve"),
    [(0, 1, {}), (100, 1, {}), (4096, 0, {}), (4096, 2, RESERVE), (4096, 2, {Purpose.DEMAND: -1})],
)
def test_impossible_pools_are_refused(slot_bytes: int, slot_count: int, reserve: dict[Purpose, int]) -> None:
    with pytest.raises(ValueError, match=r"slot"):
        BufferPool(slot_bytes, slot_count, reserve=reserve)


def test_untouched_slots_cost_nothing() -> None:
    pool = BufferPool(64 * KIB, 16, reserve={})
    for _ in range(10):
        lease = pool.try_lease(Purpose.DEMAND, "a")
        assert lease is not None
        lease.view(torch.uint8, 64 * KIB).fill_(1)
        lease.release()
    assert smaps_of(pool.address)["Rss"] == "64 kB"


def test_forked_child_gets_zeros_and_the_parent_keeps_its_bytes() -> None:
    pool = BufferPool(4096, 1, reserve={})
    lease = pool.try_lease(Purpose.DEMAND, "a")
    assert lease is not None
    data = lease.view(torch.uint8, 4096).fill_(1).numpy()
    child = os.fork()
    if child == 0:
        os._exit(int(data[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert data.min() == 1


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(Purpose), st.integers(0, 9)), max_size=60))
def test_any_sequence_keeps_the_accounts(steps: list[tuple[bool, Purpose, int]]) -> None:
    pool = BufferPool(4096, 6, reserve=RESERVE)
    held: list[Lease] = []
    peak = 0
    for take, purpose, pick in steps:
        counts = {each: sum(lease.purpose is each for lease in held) for each in Purpose}
        if take:
            owed = sum(max(0, RESERVE[each] - counts[each]) for each in RESERVE if each is not purpose)
            lease = pool.try_lease(purpose, "t")
            assert (lease is not None) == (len(held) + owed < 6)
            if lease:
                held.append(lease)
        elif held:
            held.pop(pick % len(held)).release()
        peak = max(peak, len(held))
        statistics = pool.statistics()
        assert (statistics.leased, statistics.peak) == (len(held), peak)
        assert sum(statistics.by_purpose.values()) == len(held)
        assert len({lease.address for lease in held}) == len(held)
    for lease in held:
        lease.release()
    pool.close()
