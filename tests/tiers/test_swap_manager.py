"""The swap manager: bytes are right, slots come back, errors reach whom they concern, nobody waits for ever."""

from __future__ import annotations

import errno
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.swap_rig import SLOT_BYTES, Rig, WatchedShard, content, rig, within
from tiered.errors import CapacityError, ClosedError, ConfigError, StorageError
from tiered.shard import LEGAL_EDGES, Shard, ShardState
from tiered.testing import SimulatedCopier, SimulatedIoEngine
from tiered.tiers.copier import Copier, Fence, HostCopier
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import open_engine
from tiered.tiers.swap_manager import Access, Outcome, Ticket

FAILURES = {
    (ShardState.READING, ShardState.FAILED),
    (ShardState.FAILED, ShardState.READING),
    (ShardState.WRITING, ShardState.FAILED),
    (ShardState.HOST_DIRTY, ShardState.STORED),  # a dirty shard rests only when writing has stopped
}


def simulated(**script: object) -> SimulatedIoEngine:
    return SimulatedIoEngine(open_engine("aiofiles", 3), **{"seed": 1, "retry_probability": 0.0, **script})  # type: ignore[arg-type]


def write(r: Rig, shard: Shard, value: torch.Tensor) -> None:
    with r.manager.held((shard,), Access.OVERWRITE):
        shard.view(torch.uint8).copy_(value)


def read(r: Rig, shard: Shard) -> torch.Tensor:
    with r.manager.held((shard,), Access.READ):
        return shard.view(torch.uint8).clone()


def push_out(r: Rig, *but: Shard) -> None:
    """Has every other shard evicted."""
    r.manager.drain()
    others = [s for s in r.shards if s not in but][-r.pool.slot_count :]
    assert len(others) == r.pool.slot_count
    with r.manager.held(others, Access.READ):
        pass
    r.manager.drain()


# ---- the table ----


def test_the_table_of_edges_is_the_set_that_move_to_allows() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) -> ([A-Z_]+) ", sys.modules[Shard.__module__].__doc__ or "", re.MULTILINE)
    assert {(ShardState[a], ShardState[b]) for a, b in rows} == LEGAL_EDGES
    assert len(rows) == len(LEGAL_EDGES)


def test_every_other_edge_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        shard = r.shards[0]
        for before in ShardState:
            for after in ShardState:
                shard.state = before
                if (before, after) not in LEGAL_EDGES:
                    with pytest.raises(AssertionError, match=before.name):
                        shard.move_to(after)


# ---- random use ----


class Walk:
    """A random user who breaks no rule of the interface, and knows what every byte must be."""

    def __init__(self, r: Rig, copier: Copier, seed: int) -> None:
        self.r = r
        self.copier = copier
        self.random = random.Random(seed)
        self.expected = {shard: torch.zeros(shard.nbytes, dtype=torch.uint8) for shard in r.shards}
        self.readers: list[Shard] = []
        self.writer: Shard | None = None
        self.ahead: list[Ticket] = []
        self.clock = 0

    def run(self, steps: int) -> None:
        moves = [self.read, self.read, self.modify, self.modify, self.ask_ahead, self.take_ahead, self.hint]
        for _ in range(steps):
            self.clock += 1
            self.random.choice([*moves, self.let_go, self.let_go, self.discard, self.advance, self.drain])()
        self.finish()

    def free_slots(self) -> int:
        wanted = {s for t in self.ahead for s in t.shards} | set(self.readers)
        return self.r.pool.slot_count - len(wanted)

    def read(self) -> None:
        shard = self.random.choice(self.r.shards)
        if self.free_slots() < 1:
            return
        self.r.manager.acquire((shard,), Access.READ).wait()
        self.see(shard)
        self.readers.append(shard)

    def see(self, shard: Shard) -> None:
        assert torch.equal(shard.view(torch.uint8), self.expected[shard]), shard

    def let_go(self) -> None:
        if self.readers:
            self.release(self.readers.pop(self.random.randrange(len(self.readers))))

    def release(self, shard: Shard) -> None:
        fence: Fence | None = None
        if self.random.random() < 0.5:
            target = torch.empty(shard.nbytes, dtype=torch.uint8)
            fence = self.copier.copy_out(target, shard.view(torch.uint8))
            assert torch.equal(target, self.expected[shard])
        next_use = self.clock + self.random.randint(1, 20)
        self.r.manager.release((shard,), Outcome.UNCHANGED, fence=fence, next_use=next_use)

    def modify(self) -> None:
        ahead = {s for t in self.ahead for s in t.shards}
        free = [s for s in self.r.shards if s not in self.readers and s not in ahead]
        if self.free_slots() < 1 or not free:
            return
        shard = self.random.choice(free)
        access = self.random.choice([Access.UPDATE, Access.OVERWRITE])
        self.r.manager.acquire((shard,), access).wait()
        if access is Access.UPDATE:
            self.see(shard)
        value, fence = content(self.random.getrandbits(30), shard.nbytes), None
        if self.random.random() < 0.5:
            fence = self.copier.copy_in(shard.view(torch.uint8), value)
        else:
            shard.view(torch.uint8).copy_(value)
        self.expected[shard] = value
        self.r.manager.release((shard,), Outcome.MODIFIED, fence=fence)

    def ask_ahead(self) -> None:
        """Two shards on one ticket, waited for later."""
        if self.free_slots() >= 2:
            self.ahead.append(self.r.manager.acquire(self.random.sample(self.r.shards, 2), Access.READ))

    def take_ahead(self) -> None:
        if self.ahead:
            ticket = self.ahead.pop(0)
            ticket.wait()
            for shard in ticket.shards:
                self.see(shard)
                self.release(shard)

    def hint(self) -> None:
        self.r.manager.prefetch(self.random.sample(self.r.shards, 3), next_use=self.clock + self.random.randint(1, 9))

    def advance(self) -> None:
        self.r.manager.advance(self.clock)

    def discard(self) -> None:
        ahead = {s for t in self.ahead for s in t.shards}
        free = [s for s in self.r.shards if s not in self.readers and s not in ahead]
        if free:
            shard = self.random.choice(free)
            self.r.manager.discard((shard,))
            self.expected[shard] = torch.zeros(shard.nbytes, dtype=torch.uint8)

    def drain(self) -> None:
        if not self.ahead:
            self.r.manager.drain()
            self.r.manager.check()
            for shard in self.r.shards:
                if not shard.blank:
                    assert torch.equal(self.r.on_disk(shard), self.expected[shard]), shard

    def finish(self) -> None:
        while self.ahead:
            self.take_ahead()
        while self.readers:
            self.let_go()
        self.drain()
        for shard in self.r.shards:
            assert torch.equal(read(self.r, shard), self.expected[shard]), shard
        self.r.manager.drain()
        statistics = self.r.manager.statistics()
        assert (statistics.pinned_count, statistics.transfers) == (0, 0)
        assert statistics.leased_slots == statistics.cached_count == self.r.pool.statistics().leased


def walk(open_it: Callable[[], IoEngine], copier: Copier, seed: int, steps: int) -> None:
    random_sizes = [random.Random(seed).randint(1, SLOT_BYTES) for _ in range(8)]
    with (
        tempfile.TemporaryDirectory() as folder,
        rig(Path(folder), open_it(), sizes=random_sizes, slot_count=3 + seed % 3) as r,
    ):
        within(lambda: Walk(r, copier, seed).run(steps))


@pytest.mark.parametrize("name", ["aiofiles", "libaio", "io_uring"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_random_use_of_a_real_engine(name: str, seed: int) -> None:
    try:
        engine = open_engine(name, 1 + seed % 4)
    except ConfigError as error:
        pytest.skip(str(error))
    walk(lambda: engine, HostCopier(), seed, steps=100)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_random_use_with_latency_reordering_short_transfers_and_late_copies(seed: int) -> None:
    copier = SimulatedCopier(seed=seed)
    walk(lambda: simulated(seed=seed, retry_probability=0.1), copier, seed, steps=100)
    copier.check()


def test_random_use_takes_every_edge_but_those_of_failures() -> None:
    WatchedShard.edges.clear()
    for seed in range(8):
        walk(lambda seed=seed: simulated(seed=seed), SimulatedCopier(seed=seed), seed, steps=150)  # type: ignore[misc]
    assert LEGAL_EDGES - WatchedShard.edges == FAILURES


def test_several_threads_at_once(tmp_path: Path) -> None:
    """Each owns shards of its own; the arena is all they share."""
    with rig(tmp_path, simulated(), slot_count=6) as r:

        def user(shards: list[Shard], seed: int) -> None:
            dice = random.Random(seed)
            expected = {shard: torch.zeros(shard.nbytes, dtype=torch.uint8) for shard in shards}
            for number in range(30):
                shard = dice.choice(shards)
                assert torch.equal(read(r, shard), expected[shard])
                expected[shard] = content(1000 * seed + number, shard.nbytes)
                write(r, shard, expected[shard])

        def body() -> None:
            errors: list[BaseException] = []

            def guarded(number: int) -> None:
                try:
                    user(r.shards[2 * number : 2 * number + 2], number)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, errors

        within(body)


# ---- order of copies ----


def test_a_slot_is_not_recycled_before_its_upload_has_left(tmp_path: Path) -> None:
    with rig(tmp_path, slot_count=1) as r:
        first, second = r.shards[:2]
        write(r, first, content(1, SLOT_BYTES))
        r.manager.drain()
        gate = r.gate()
        r.manager.acquire((first,), Access.READ).wait()
        staged = first.view(torch.uint8)
        r.manager.release((first,), Outcome.UNCHANGED, fence=gate)
        ticket = r.manager.acquire((second,), Access.READ)
        r.settle()
        assert not ticket.done()
        assert first.state is ShardState.UPLOADING
        assert torch.equal(staged, content(1, SLOT_BYTES))
        gate.open()
        within(ticket.wait)
        r.manager.release((second,), Outcome.UNCHANGED)


@pytest.mark.parametrize("access", [Access.READ, Access.UPDATE])
def test_nobody_reads_before_a_download_has_arrived(tmp_path: Path, access: Access) -> None:
    with rig(tmp_path) as r:
        shard, gate = r.shards[0], r.gate()
        r.manager.acquire((shard,), Access.OVERWRITE).wait()
        staged = shard.view(torch.uint8)
        r.manager.release((shard,), Outcome.MODIFIED, fence=gate)
        ticket = r.manager.acquire((shard,), access)
        r.settle()
        assert shard.state is ShardState.DOWNLOADING and not ticket.done()
        staged.copy_(content(1, SLOT_BYTES))
        gate.open()
        within(ticket.wait)
        assert torch.equal(shard.view(torch.uint8), content(1, SLOT_BYTES))
        r.manager.release((shard,), Outcome.UNCHANGED)
        within(r.manager.drain)
        assert torch.equal(r.on_disk(shard), content(1, SLOT_BYTES))


def test_a_writer_waits_for_an_upload_and_a_reader_does_not(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        shard, gate = r.shards[0], r.gate()
        write(r, shard, content(1, SLOT_BYTES))
        r.manager.acquire((shard,), Access.READ).wait()
        r.manager.release((shard,), Outcome.UNCHANGED, fence=gate)
        within(r.manager.acquire((shard,), Access.READ).wait)
        r.manager.release((shard,), Outcome.UNCHANGED)
        writer = r.manager.acquire((shard,), Access.UPDATE)
        r.settle()
        assert not writer.done()
        gate.open()
        within(writer.wait)
        r.manager.release((shard,), Outcome.MODIFIED)


def test_many_uploads_of_one_shard_never_block_the_mover(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        shard, gates = r.shards[0], [r.gate(), r.gate(), r.gate()]
        write(r, shard, content(1, SLOT_BYTES))
        for gate in gates:
            r.manager.acquire((shard,), Access.READ).wait()
            r.manager.release((shard,), Outcome.UNCHANGED, fence=gate)
            r.settle()
        assert torch.equal(read(r, r.shards[1]), torch.zeros(SLOT_BYTES, dtype=torch.uint8))
        for gate in gates:
            assert shard.state in (ShardState.UPLOADING, ShardState.WRITING)
            gate.open()
        within(r.manager.drain)
        assert shard.state is ShardState.HOST_CLEAN


def test_a_change_beside_an_upload_is_not_lost(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        shard, gate = r.shards[0], r.gate()
        write(r, shard, content(1, SLOT_BYTES))
        r.manager.drain()
        r.manager.acquire((shard,), Access.UPDATE).wait()
        r.manager.acquire((shard,), Access.READ).wait()
        r.manager.release((shard,), Outcome.UNCHANGED, fence=gate)
        r.settle()
        shard.view(torch.uint8).copy_(content(2, SLOT_BYTES))
        gate.open()
        r.manager.release((shard,), Outcome.MODIFIED)
        within(r.manager.drain)
        assert torch.equal(r.on_disk(shard), content(2, SLOT_BYTES))


# ---- bytes that nobody wrote, or needs ----


def test_what_was_never_written_reads_as_zeros(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert not read(r, r.shards[0]).any()
        assert r.events.read_bytes.total() == 0


def test_discarded_bytes_read_as_zeros_even_when_they_were_still_being_written(tmp_path: Path) -> None:
    with rig(tmp_path, simulated(latency_reaps_max=20)) as r:
        write(r, r.shards[0], content(1, SLOT_BYTES))
        r.manager.discard((r.shards[0],))
        assert not read(r, r.shards[0]).any()


def test_what_is_written_after_a_discard_lives(tmp_path: Path) -> None:
    with rig(tmp_path, simulated(latency_reaps_max=20)) as r:
        shard = r.shards[0]
        write(r, shard, content(1, SLOT_BYTES))
        r.manager.discard((shard,))
        with r.manager.held((shard,), Access.UPDATE):
            assert not shard.view(torch.uint8).any()
            shard.view(torch.uint8)[:100] = 7
        push_out(r, shard)
        assert shard.state is ShardState.STORED
        assert read(r, shard).sum() == 700


@pytest.mark.parametrize("access", [Access.UPDATE, Access.OVERWRITE])
def test_a_writer_who_changed_nothing_leaves_memory_and_disk_alike(tmp_path: Path, access: Access) -> None:
    with rig(tmp_path) as r:
        shard = r.shards[0]
        write(r, shard, content(1, SLOT_BYTES))
        r.manager.discard((shard,))
        r.manager.acquire((shard,), access).wait()
        seen = shard.view(torch.uint8).clone()
        r.manager.release((shard,), Outcome.UNCHANGED)
        push_out(r, shard)
        assert torch.equal(read(r, shard), seen)


# ---- errors ----


def filled(r: Rig) -> list[Shard]:
    """Writes every shard; returns those that are out of memory again."""
    for number, shard in enumerate(r.shards):
        write(r, shard, content(number, SLOT_BYTES))
        r.manager.drain()
    away = [shard for shard in r.shards if shard.state is ShardState.STORED]
    assert len(away) == len(r.shards) - r.pool.slot_count
    return away


def fail_ahead(r: Rig, faults: dict[int, int], ahead: int) -> None:
    """The request that comes as number `ahead` from now on will fail."""
    statistics = r.engine.statistics()
    faults[statistics.read_count + statistics.write_count + ahead] = errno.EIO


def assert_names_it(error: StorageError, r: Rig, shard: Shard, op: str, number: int) -> None:
    assert shard.extent is not None
    assert (error.op, error.errno, error.tensor) == (op, number, shard.label)
    assert error.path == r.store.path(shard.extent.file)
    assert error.offset in (shard.extent.offset, shard.extent.offset + 4096)
    assert error.nbytes == 4096
    for part in (error.path, str(error.offset), "4096", str(number), shard.label):
        assert part in str(error)


def test_a_failed_read_reaches_its_ticket_alone_and_may_be_tried_again(tmp_path: Path) -> None:
    faults = {0: 0}
    with rig(tmp_path, simulated(fail_nth=faults)) as r:
        away = filled(r)
        fail_ahead(r, faults, 1)
        bad, good = away[:2]
        tickets = [r.manager.acquire((bad,), Access.READ), r.manager.acquire((good,), Access.READ)]
        with pytest.raises(StorageError) as caught:
            within(tickets[0].wait)
        assert_names_it(caught.value, r, bad, "read", errno.EIO)
        assert bad.state is ShardState.FAILED
        within(tickets[1].wait)
        assert torch.equal(good.view(torch.uint8), content(good.key.unit, SLOT_BYTES))
        r.manager.release((good,), Outcome.UNCHANGED)
        assert torch.equal(read(r, bad), content(bad.key.unit, SLOT_BYTES))
        r.manager.raise_pending_error()


def test_a_ticket_that_fails_half_way_pins_nothing(tmp_path: Path) -> None:
    faults = {0: 0}
    with rig(tmp_path, simulated(fail_nth=faults), slot_count=3) as r:
        away = filled(r)
        fail_ahead(r, faults, 5)
        with pytest.raises(StorageError, match=away[2].label):
            within(r.manager.acquire(away[:3], Access.UPDATE).wait)
        within(r.manager.drain)
        assert r.manager.statistics().pinned_count == 0
        for _ in range(3):  # all slots are there
            with r.manager.held(r.shards[3:6], Access.READ):
                pass


def test_a_failed_prefetch_is_nobodys_error(tmp_path: Path) -> None:
    faults = {0: 0}
    with rig(tmp_path, simulated(fail_nth=faults)) as r:
        shard = filled(r)[0]
        fail_ahead(r, faults, 1)
        r.manager.prefetch((shard,), next_use=1)
        within(r.manager.drain)
        assert shard.state is ShardState.FAILED
        assert torch.equal(read(r, shard), content(shard.key.unit, SLOT_BYTES))


def test_a_failed_write_is_final(tmp_path: Path) -> None:
    with rig(tmp_path, simulated(fail_nth={3: errno.ENOSPC})) as r:
        write(r, r.shards[0], content(0, SLOT_BYTES))
        r.manager.drain()
        r.manager.acquire((r.shards[2],), Access.UPDATE).wait()
        write(r, r.shards[1], content(1, SLOT_BYTES))
        with pytest.raises(StorageError) as caught:
            within(r.manager.drain)
        assert_names_it(caught.value, r, r.shards[1], "write", errno.ENOSPC)
        for call in (
            r.manager.acquire((r.shards[0],), Access.READ).wait,
            r.manager.raise_pending_error,
            r.manager.drain,
        ):
            with pytest.raises(StorageError, match="tensor1"):
                within(call)
        r.manager.release((r.shards[2],), Outcome.MODIFIED)
        r.settle()
        assert r.shards[2].state is ShardState.HOST_DIRTY
        r.manager.discard((r.shards[2],))
        r.settle()
        assert r.shards[2].state is ShardState.STORED


def test_a_file_that_was_cut_short_is_named_with_both_sizes(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        filled(r)
        push_out(r, r.shards[0])
        path = r.store.path(0)
        expected = Path(path).stat().st_size
        os.truncate(path, 5000)
        with pytest.raises(StorageError) as caught:
            within(lambda: read(r, r.shards[0]) and None)  # type: ignore[func-returns-value]
        assert caught.value.tensor == "tensor0"
        for part in (path, "5000", str(expected), "tensor0"):
            assert part in str(caught.value)


def test_more_shards_than_slots_are_refused_not_waited_for(tmp_path: Path) -> None:
    with rig(tmp_path, slot_count=2) as r:
        with pytest.raises(CapacityError, match=r"3 shards.*2 slots"):
            within(r.manager.acquire(r.shards[:3], Access.READ).wait)
        within(r.manager.acquire(r.shards[:2], Access.READ).wait)


# ---- the end ----


def test_close_while_idle_twice_and_afterwards(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        filled(r)
        within(r.manager.close)
        within(r.manager.close)
        for call in (lambda: r.manager.acquire(r.shards[:1], Access.READ), r.manager.drain):
            with pytest.raises(ClosedError):
                call()


def test_close_from_several_threads(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        threads = [threading.Thread(target=r.manager.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_close_with_reads_and_writes_in_flight(tmp_path: Path) -> None:
    with rig(tmp_path, simulated(latency_reaps_max=50)) as r:
        away = filled(r)
        write(r, r.shards[7], content(9, SLOT_BYTES))
        ticket = r.manager.acquire(away[:2], Access.READ)
        r.manager.prefetch(away[2:3], next_use=3)
        within(r.manager.close)
        assert ticket.done()
        assert torch.equal(r.on_disk(r.shards[7]), content(9, SLOT_BYTES))


def test_close_while_somebody_waits_for_memory(tmp_path: Path) -> None:
    with rig(tmp_path, slot_count=1) as r:
        r.manager.acquire((r.shards[0],), Access.READ).wait()
        ticket = r.manager.acquire((r.shards[1],), Access.READ)
        r.settle()
        assert not ticket.done()
        within(r.manager.close)
        with pytest.raises(ClosedError):
            within(ticket.wait)
        with pytest.raises(ClosedError):
            r.manager.release((r.shards[0],), Outcome.UNCHANGED)


def test_close_waits_for_copies(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        shard, gate = r.shards[0], r.gate()
        r.manager.acquire((shard,), Access.OVERWRITE).wait()
        r.manager.release((shard,), Outcome.MODIFIED, fence=gate)
        closing = threading.Thread(target=r.manager.close)
        closing.start()
        closing.join(0.05)
        assert shard.lease is not None
        gate.open()
        closing.join(30)
        assert not closing.is_alive()


def test_close_after_a_failed_write(tmp_path: Path) -> None:
    with rig(tmp_path, simulated(fail_nth={1: errno.EIO, 2: errno.EIO})) as r:
        tickets = [r.manager.acquire((shard,), Access.OVERWRITE) for shard in r.shards[:3]]
        for ticket in tickets:
            ticket.wait()
            r.manager.release(ticket.shards, Outcome.MODIFIED)
        within(r.manager.close)


def test_a_bug_in_the_mover_ends_every_wait_and_close_still_works(tmp_path: Path) -> None:
    class BugError(Exception):
        pass

    def bug() -> None:
        raise BugError

    with rig(tmp_path, simulated(latency_reaps_max=50)) as r:
        filled(r)
        gate = r.gate()
        r.manager.acquire((r.shards[5],), Access.UPDATE).wait()
        r.manager.release((r.shards[5],), Outcome.MODIFIED, fence=gate)  # the first demand waits, the rest behind
        tickets = [r.manager.acquire((shard,), Access.READ) for shard in (r.shards[5], *r.shards[:5])]
        r.manager._post(bug)
        for ticket in tickets:
            with pytest.raises((BugError, ClosedError)):
                within(ticket.wait)
        gate.open()
        with pytest.raises((BugError, ClosedError)):
            within(r.manager.drain)
        within(r.manager.close)
