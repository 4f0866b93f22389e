"""The swap manager: the only writer of shard states, and the only caller of the I/O engine.

[Note: one writer] A thread of its own, the mover, owns every state, lease and request. Other threads post
commands (`acquire`, `release`, `prefetch`, `discard`) and wait on tickets; they touch a shard's bytes only between
a finished acquire and the release. The mover sleeps in poll(2), without the GIL, until a command or a
completion arrives; progress never depends on when the training thread calls in.

[Note: copies] A device copy that still uses a shard's bytes is a fence in `_uploads` (it reads them) or `_downloads`
(it writes them). A slot with a fence is neither evicted nor given back; nobody reads a shard before its downloads
have arrived, nobody changes it before its uploads have left. A write to NVMe may run beside uploads.

Order of service: demand before writes before prefetch, each first in, first out. Memory: a demand takes a free
slot, else evicts the clean shard whose next use is farthest, else waits for a write to end. Prefetch takes a
free slot beyond the demand reserve, or one whose next use is farther than its own.

Knows bytes, not models: what to fetch when is decided above.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple

import torch

from tiered.errors import CapacityError, ClosedError, StorageError, TieredError
from tiered.events import EventLog
from tiered.shard import NEVER_USED, Shard, ShardState, Tier
from tiered.tiers.buffer_pool import BufferPool, Lease, Purpose
from tiered.tiers.copier import Fence
from tiered.tiers.io.engine import IoCompletion, IoEngine, IoOp, IoRequest
from tiered.tiers.nvme_store import NvmeStore


class Access(IntEnum):
    """What the holder of a shard will do with its bytes."""

    READ = 0
    UPDATE = 1
    OVERWRITE = 2  # every byte that matters will be written: nothing is read first


class Outcome(IntEnum):
    """What the holder did with a shard's bytes, told at release."""

    UNCHANGED = 0
    MODIFIED = 1


class Ticket:
    """Shards on their way to host memory. `wait` may be called again and raises the same error each time."""

    __slots__ = ("_error", "_event", "_granted", "_missing", "access", "shards")

    def __init__(self, shards: Sequence[Shard], access: Access) -> None:
        self.shards = tuple(shards)
        self.access = access
        self._missing = len(self.shards)
        self._granted: list[Shard] = []  # pinned for this ticket; the mover's
        self._error: BaseException | None = None
        self._event = threading.Event()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._event.is_set()

    def wait(self) -> None:
        """Blocks until every shard is in memory. Raises StorageError, ClosedError."""
        self._event.wait()
        if self._error is not None:
            raise self._error

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._event.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._event.set()


class _Demand(NamedTuple):
    ticket: Ticket
    shard: Shard


class _Transfer:
    """The requests of one shard's read or write that the engine has not finished."""

    __slots__ = ("error", "op", "outstanding", "pending", "shard", "waiting")

    def __init__(self, op: IoOp, shard: Shard, pending: deque[IoRequest]) -> None:
        self.op = op
        self.shard = shard
        self.pending = pending
        self.outstanding = len(pending)
        self.error: StorageError | None = None
        self.waiting: list[_Demand] = []


class SwapStatistics(NamedTuple):
    """A snapshot of the mover, for reports and leak checks."""

    pinned_count: int
    cached_count: int
    transfers: int
    leased_slots: int


class SwapManager:
    """Moves shards between NVMe and the slots of the host arena; see the module's docstring.

    Args:
        pool: the staging slots, used by the mover alone; or None when nothing lives on NVMe.
        store: where NVMe shards live, or None when nothing does.
        engine: I/O engine, or None when nothing lives on NVMe.
        io_block_bytes: a larger transfer is cut into requests of this size.
        events: counters and log.
    """

    def __init__(
        self,
        pool: BufferPool | None,
        store: NvmeStore | None,
        engine: IoEngine | None,
        *,
        io_block_bytes: int,
        events: EventLog,
    ) -> None:
        self._pool = pool
        self._store = store
        self._engine = engine
        self._block_bytes = io_block_bytes
        self._events = events
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._gate = threading.Lock()  # a command is either run by the mover or refused, never lost
        self._closing = False
        self._broken: BaseException | None = None
        self._under_copy: dict[Shard, tuple[Fence, Outcome]] = {}  # of shards that never move: their callers'
        # Everything below belongs to the mover.
        self._demands: deque[_Demand] = deque()
        self._prefetches: deque[Shard] = deque()
        self._reads: deque[_Transfer] = deque()
        self._writes: deque[_Transfer] = deque()
        self._background_reads: deque[_Transfer] = deque()
        self._transfers: dict[Shard, _Transfer] = {}
        self._by_tag: dict[int, _Transfer] = {}
        self._next_tag = 0
        self._position = 0
        self._leased: set[Shard] = set()
        self._cached: dict[Shard, None] = {}  # in the order in which they came to rest
        self._pinned: set[Shard] = set()
        self._prefetched: set[Shard] = set()
        self._unread: set[Shard] = set()  # given to a writer without reading: NVMe has other bytes
        self._uploads: dict[Shard, list[Fence]] = {}
        self._downloads: dict[Shard, list[Fence]] = {}
        self._quiet: list[threading.Event] = []
        self._mover = threading.Thread(target=self._run, name="tiered-mover", daemon=True)
        self._mover.start()

    # ---- any thread ----

    def acquire(self, shards: Sequence[Shard], access: Access) -> Ticket:
        """Asks for the shards' bytes in host memory, pinned until released. Does not wait for the drive.

        What never moves is ready at once, after a copy of it that this access must not meet.
        """
        ticket = Ticket(shards, access)
        resting = [shard for shard in ticket.shards if shard.home is not Tier.NVME]
        for shard in resting:
            self._end_copy(shard, access)
            _fill_blank(shard, access)  # not on the mover: zeros on a device are ordered with the caller's stream
        if len(resting) == len(ticket.shards):
            ticket._missing = 0
            ticket._event.set()
            return ticket
        self._post(lambda: self._demand(ticket))
        return ticket

    def release(
        self,
        shards: Sequence[Shard],
        outcome: Outcome,
        *,
        fence: Fence | None = None,
        next_use: int = NEVER_USED,
    ) -> None:
        """Gives acquired shards back. `fence`: a copy still reads (UNCHANGED) or writes (MODIFIED) the bytes.

        A modified shard is written back to NVMe from here on; a later acquire sees the new bytes.
        """
        moving = tuple(shard for shard in shards if shard.home is Tier.NVME)
        if fence is not None:
            self._under_copy.update((shard, (fence, outcome)) for shard in shards if shard.home is not Tier.NVME)
        if moving:
            self._post(lambda: self._release_all(moving, outcome, fence, next_use))

    @contextmanager
    def held(self, shards: Sequence[Shard], access: Access) -> Iterator[None]:
        """Acquire, wait, release; modified unless `access` is READ."""
        ticket = self.acquire(shards, access)
        try:
            ticket.wait()
        except KeyboardInterrupt:
            self._abandon(ticket)
            raise
        try:
            yield
        finally:  # a body that raised may have changed some bytes: memory is what counts
            self.release(shards, Outcome.UNCHANGED if access is Access.READ else Outcome.MODIFIED)

    def stream(
        self,
        groups: Iterable[Sequence[Shard]],
        access: Access,
        *,
        window: int,
        cause: str,
    ) -> Iterator[Sequence[Shard]]:
        """Yields each group when its bytes are in memory, asking for up to `window` groups ahead.

        The consumer releases what it was given; what was asked for and never yielded is released here.
        """
        ahead: deque[Ticket] = deque()
        source = iter(groups)
        try:
            while True:
                while len(ahead) < window and (group := next(source, None)) is not None:
                    ahead.append(self.acquire(group, access))
                if not ahead:
                    return
                if not ahead[0].done():
                    with self._events.stall(cause):
                        ahead[0].wait()
                ahead[0].wait()
                yield ahead.popleft().shards
        finally:
            for ticket in ahead:
                self._abandon(ticket)

    def prefetch(self, shards: Sequence[Shard], *, next_use: int) -> None:
        """A hint that the shards are needed at trace position `next_use`. Never blocks, never fails."""
        moving = [shard for shard in shards if shard.home is Tier.NVME]
        if moving:
            self._post(lambda: self._want(moving, next_use))

    def advance(self, position: int) -> None:
        """The trace has reached `position`: hints that have not started are dropped, and what was expected
        earlier and is still here is the first to be evicted."""
        self._post(lambda: self._advance(position))

    def discard(self, shards: Sequence[Shard]) -> None:
        """Says that nobody needs the bytes of these unpinned shards: until written again they read as zeros."""
        for shard in shards:
            shard.blank = shard.blank or shard.home is not Tier.NVME
        moving = [shard for shard in shards if shard.home is Tier.NVME]
        if moving:
            self._post(lambda: self._discard_all(moving))

    def drain(self) -> None:
        """Blocks until nothing is in flight and every modified shard is on its home tier."""
        self._end_copies()
        quiet = threading.Event()
        self._post(lambda: self._quiet.append(quiet))
        quiet.wait()
        if self._broken is not None:
            raise self._broken

    def raise_pending_error(self) -> None:
        """Raises the error of a write that failed in the background, if there was one."""
        if self._broken is not None:
            raise self._broken

    def statistics(self) -> SwapStatistics:
        """Counts of the moment; exact only when nothing is in flight."""
        return SwapStatistics(len(self._pinned), len(self._cached), len(self._transfers), len(self._leased))

    def close(self) -> None:
        """Waits for what is in flight, drops the rest, ends the mover and the engine. Idempotent; never raises."""
        with self._gate:
            if not self._closing:
                self._closing = True
                self._commands.append(self._refuse_waiting)
                os.eventfd_write(self._wake, 1)
        self._mover.join()
        with suppress(Exception):  # a device that failed does not use the bytes any more
            self._end_copies()
        with self._gate:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    def _post(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self._closing:
                raise self._broken or ClosedError("the engine is closed")
            self._commands.append(command)
            os.eventfd_write(self._wake, 1)

    def _end_copy(self, shard: Shard, access: Access) -> None:
        """Waits for the last copy of a shard that never moves; only readers may meet a reader."""
        if shard not in self._under_copy:
            return
        fence, outcome = self._under_copy[shard]
        if access is not Access.READ or outcome is Outcome.MODIFIED or shard.blank:
            fence.wait()
            del self._under_copy[shard]

    def _end_copies(self) -> None:
        while self._under_copy:
            _, (fence, _) = self._under_copy.popitem()
            fence.wait()

    def _abandon(self, ticket: Ticket) -> None:
        """Releases a ticket that nobody will use, whether it has arrived or not."""
        with suppress(TieredError):
            ticket.wait()
            self.release(ticket.shards, Outcome.UNCHANGED)

    # ---- the mover ----

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._engine is not None:
            poller.register(self._engine.fileno(), select.POLLIN)
        try:
            while not (self._closing and self._is_idle()):
                poller.poll(1 if self._uploads or self._downloads else None)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._commands:
                    self._commands.popleft()()
                self._reap()
                self._poll_fences()
                self._serve()
        except BaseException as error:
            self._break(error)
        finally:
            with self._gate:
                self._closing = True
            try:
                if self._engine is not None:
                    self._engine.close()
            finally:
                self._release_everything()

    def _is_idle(self) -> bool:
        return not (self._commands or self._transfers or self._uploads or self._downloads)

    def _serve(self) -> None:
        """Starts whatever can start now, in order of urgency."""
        while self._demands and self._admit(self._demands[0]):
            self._demands.popleft()
        while self._prefetches and not self._demands and self._start_prefetch(self._prefetches[0]):
            self._prefetches.popleft()
        for queue in (self._reads, self._writes, self._background_reads):
            while queue and self._submit(queue[0]):
                queue.popleft()
        if self._quiet and self._is_idle() and not self._demands:
            for event in self._quiet:
                event.set()
            self._quiet.clear()

    def _demand(self, ticket: Ticket) -> None:
        moving = [shard for shard in ticket.shards if shard.home is Tier.NVME]
        slot_count = self._pool.slot_count if self._pool is not None else 0
        if self._broken is not None:
            self._fail(ticket, self._broken)
        elif len(set(moving)) > slot_count:
            text = f"{len(set(moving))} shards are wanted at once, from {moving[0].label} on, but the arena has "
            self._fail(ticket, CapacityError(f"{text}{slot_count} slots: raise host_memory"))
        else:
            for shard in ticket.shards:
                if shard.home is Tier.NVME:
                    self._demands.append(_Demand(ticket, shard))
                else:
                    ticket._arrived()

    def _admit(self, demand: _Demand) -> bool:
        """Grants a demand, or lets it wait for a transfer; False when it has to wait for memory or for a copy."""
        ticket, shard = demand
        if ticket.done():  # failed by another of its shards
            return True
        state = shard.state
        writes = ticket.access is not Access.READ or shard.blank  # a blank shard is filled with zeros
        if shard in self._downloads or (shard in self._uploads and writes):
            return False
        if state in (ShardState.STORED, ShardState.FAILED):
            lease = self._take_slot(shard, Purpose.DEMAND, NEVER_USED)
            if lease is None:
                return False
            self._hold(shard, lease)
            if state is ShardState.STORED and (shard.blank or ticket.access is Access.OVERWRITE):
                shard.move_to(ShardState.HOST_CLEAN)
                if ticket.access is Access.OVERWRITE:
                    self._unread.add(shard)
                self._grant(demand)
            else:
                if ticket.access is Access.READ:
                    self._events.count_prefetch("miss")
                self._start_read(shard, self._reads).waiting.append(demand)
        elif state is ShardState.READING:
            transfer = self._transfers[shard]
            transfer.waiting.append(demand)
            if transfer in self._background_reads:
                self._background_reads.remove(transfer)
                self._reads.append(transfer)
            self._count_use(shard, "late")
        elif state is ShardState.WRITING and writes:
            self._transfers[shard].waiting.append(demand)
        else:
            self._count_use(shard, "hit")
            self._grant(demand)
        return True

    def _count_use(self, shard: Shard, outcome: str) -> None:
        if shard in self._prefetched:
            self._prefetched.discard(shard)
            self._events.count_prefetch(outcome)

    def _grant(self, demand: _Demand) -> None:
        ticket, shard = demand
        if shard.blank and ticket.access is not Access.READ:
            self._unread.add(shard)
        _fill_blank(shard, ticket.access)
        self._cached.pop(shard, None)
        self._pinned.add(shard)
        shard.pins += 1
        ticket._granted.append(shard)
        ticket._arrived()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """Ends a ticket that has not ended; its owner will release nothing, so what it was granted is released."""
        if ticket.done():
            return
        ticket._fail(error)
        for shard in ticket._granted:
            self._release(shard, Outcome.UNCHANGED, None, shard.next_use)

    def _hold(self, shard: Shard, lease: Lease) -> None:
        self._leased.add(shard)
        shard.lease = lease
        shard.buffer = lease.view(torch.uint8, shard.extent.nbytes if shard.extent else shard.nbytes)

    def _take_slot(self, shard: Shard, purpose: Purpose, next_use: int) -> Lease | None:
        if self._pool is None:
            raise AssertionError(f"{shard!r} is to move, but there is no arena")
        lease = self._pool.try_lease(purpose, shard.label)
        while lease is None and self._cached:
            victim = max(reversed(self._cached), key=self._farness)  # use is cyclic: the youngest is needed last
            if purpose is Purpose.PREFETCH and self._farness(victim) <= next_use:
                return None
            self._evict(victim)
            lease = self._pool.try_lease(purpose, shard.label)
        return lease

    def _evict(self, shard: Shard) -> None:
        self._cached.pop(shard, None)
        self._count_use(shard, "unused")
        shard.move_to(ShardState.STORED)
        self._give_back(shard)
        self._events.record("evict", shard.key)

    def _give_back(self, shard: Shard) -> None:
        lease, shard.lease, shard.buffer = shard.lease, None, None
        self._leased.discard(shard)
        if lease is not None:
            lease.release()

    def _farness(self, shard: Shard) -> int:
        return shard.next_use if shard.next_use >= self._position else NEVER_USED

    def _advance(self, position: int) -> None:
        self._position = position
        self._prefetches.clear()

    def _want(self, shards: list[Shard], next_use: int) -> None:
        for shard in shards:
            shard.next_use = next_use
            if shard.state is ShardState.STORED and not shard.blank:
                self._prefetches.append(shard)

    def _start_prefetch(self, shard: Shard) -> bool:
        if shard.state is not ShardState.STORED:
            return True
        lease = self._take_slot(shard, Purpose.PREFETCH, shard.next_use)
        if lease is None:
            return False
        self._hold(shard, lease)
        self._prefetched.add(shard)
        self._start_read(shard, self._background_reads)
        return True

    def _start_read(self, shard: Shard, queue: deque[_Transfer]) -> _Transfer:
        shard.move_to(ShardState.READING)
        self._events.record("read", shard.key)
        return self._start(IoOp.READ, shard, queue)

    def _start_write(self, shard: Shard) -> None:
        try:
            if self._store is not None and shard.extent is not None:
                self._store.check(shard.extent.file, tensor=shard.label)
        except StorageError as error:  # cut short by someone: this write would hide it behind a hole of zeros
            self._break(error)
            return
        shard.move_to(ShardState.WRITING)
        self._events.record("write", shard.key)
        self._start(IoOp.WRITE, shard, self._writes)

    def _start(self, op: IoOp, shard: Shard, queue: deque[_Transfer]) -> _Transfer:
        store, extent, lease = self._store, shard.extent, shard.lease
        if store is None or extent is None or lease is None:
            raise AssertionError(f"{shard!r} has no place on NVMe or no slot")
        pending: deque[IoRequest] = deque()
        for start in range(0, extent.nbytes, self._block_bytes):
            nbytes = min(self._block_bytes, extent.nbytes - start)
            self._next_tag += 1
            pending.append(
                IoRequest(
                    op=op,
                    fd=store.fd(extent.file),
                    path=store.path(extent.file),
                    offset=extent.offset + start,
                    address=lease.address + start,
                    nbytes=nbytes,
                    tag=self._next_tag,
                )
            )
        transfer = _Transfer(op, shard, pending)
        self._transfers[shard] = transfer
        queue.append(transfer)
        return transfer

    def _submit(self, transfer: _Transfer) -> bool:
        """Hands requests to the engine; False when it is full."""
        if self._engine is None:
            raise AssertionError("an NVMe transfer without an I/O engine")
        accepted = self._engine.submit(tuple(transfer.pending))
        for _ in range(accepted):
            self._by_tag[transfer.pending.popleft().tag] = transfer
        return not transfer.pending

    def _reap(self) -> None:
        if self._engine is None:
            return
        for completion in self._engine.reap():
            transfer = self._by_tag.pop(completion.request.tag)
            transfer.outstanding -= 1
            if completion.errno and transfer.error is None:
                transfer.error = self._describe(completion, transfer.shard)
            if transfer.outstanding == 0:
                del self._transfers[transfer.shard]
                if transfer.op is IoOp.READ:
                    self._finish_read(transfer)
                else:
                    self._finish_write(transfer)

    def _describe(self, completion: IoCompletion, shard: Shard) -> StorageError:
        if completion.request.op is IoOp.READ and self._store is not None and shard.extent is not None:
            try:
                self._store.check(shard.extent.file, tensor=shard.label)
            except StorageError as error:  # the file is not the size it was: say so
                return error
        return completion.error(shard.label)

    def _finish_read(self, transfer: _Transfer) -> None:
        shard = transfer.shard
        if transfer.error is not None:
            shard.move_to(ShardState.FAILED)
            self._prefetched.discard(shard)
            self._give_back(shard)
            for demand in transfer.waiting:
                self._fail(demand.ticket, transfer.error)
            return
        shard.move_to(ShardState.HOST_CLEAN)
        self._events.count_read(shard.key.kind, shard.extent.nbytes if shard.extent else 0)
        self._events.record("read_done", shard.key)
        self._arrive(shard, transfer.waiting)

    def _finish_write(self, transfer: _Transfer) -> None:
        shard = transfer.shard
        if transfer.error is not None:
            shard.move_to(ShardState.FAILED)
            self._break(transfer.error)
            for demand in transfer.waiting:
                self._fail(demand.ticket, transfer.error)
            return
        shard.move_to(ShardState.HOST_CLEAN)
        self._events.count_write(shard.key.kind, shard.extent.nbytes if shard.extent else 0)
        self._events.record("write_done", shard.key)
        self._arrive(shard, transfer.waiting)

    def _arrive(self, shard: Shard, waiting: list[_Demand]) -> None:
        """A transfer has ended well: who waited for it comes first, by the rules of every demand."""
        self._demands.extendleft(reversed(waiting))
        self._rest(shard)

    def _release_all(self, shards: Sequence[Shard], outcome: Outcome, fence: Fence | None, next_use: int) -> None:
        for shard in shards:
            self._release(shard, outcome, fence, next_use)

    def _release(self, shard: Shard, outcome: Outcome, fence: Fence | None, next_use: int) -> None:
        shard.pins -= 1
        shard.next_use = next_use
        if shard.pins == 0:
            self._pinned.discard(shard)
        arriving = False
        if fence is not None and not fence.done():
            arriving = outcome is Outcome.MODIFIED
            copies = self._downloads if arriving else self._uploads
            copies.setdefault(shard, []).append(fence)
        if not arriving and (outcome is Outcome.MODIFIED or shard in self._unread):
            self._soil(shard)
        self._unread.discard(shard)
        self._rest(shard)

    def _soil(self, shard: Shard) -> None:
        """The bytes differ from those on NVMe now."""
        if shard.state is ShardState.UPLOADING:  # its holder changed them beside a reader: rare, and its own risk
            for fence in self._uploads.pop(shard):
                fence.wait()
            shard.move_to(ShardState.HOST_CLEAN)
        if shard.state is ShardState.HOST_CLEAN:
            shard.move_to(ShardState.HOST_DIRTY)
        elif shard.state is ShardState.WRITING:
            raise AssertionError(f"{shard!r} was modified while it was written (invariant 3)")

    def _rest(self, shard: Shard) -> None:
        """What a shard in memory does next: serve its copies, be written, or be kept as cache."""
        if shard.state is ShardState.HOST_CLEAN:
            if shard in self._downloads:
                shard.move_to(ShardState.DOWNLOADING)
            elif shard in self._uploads:
                shard.move_to(ShardState.UPLOADING)
            elif shard.pins == 0:
                self._cached[shard] = None
        elif (
            shard.state is ShardState.HOST_DIRTY
            and shard.pins == 0
            and shard not in self._downloads
            and self._broken is None  # else nothing is written any more; the slot is given back at close
        ):
            self._start_write(shard)

    def _poll_fences(self) -> None:
        for copies in (self._uploads, self._downloads):
            for shard, fences in tuple(copies.items()):
                running = [fence for fence in fences if not fence.done()]
                if running:
                    copies[shard] = running
                    continue
                del copies[shard]
                if shard.state is ShardState.UPLOADING:
                    shard.move_to(ShardState.HOST_CLEAN)
                elif shard.state is ShardState.DOWNLOADING and copies is self._downloads:
                    shard.move_to(ShardState.HOST_DIRTY)
                self._rest(shard)

    def _discard_all(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._discard(shard)

    def _discard(self, shard: Shard) -> None:
        shard.blank = True
        resting = shard.state in (ShardState.HOST_CLEAN, ShardState.HOST_DIRTY)
        if not resting or shard.pins or shard in self._uploads or shard in self._downloads:
            return  # in flight: it comes to rest as clean cache and is evicted when its slot is needed
        self._cached.pop(shard, None)
        self._prefetched.discard(shard)
        self._unread.discard(shard)
        shard.move_to(ShardState.STORED)
        self._give_back(shard)

    def _break(self, error: BaseException) -> None:
        """Memory and disk may disagree from here on: every later call gets this error."""
        self._broken = self._broken or error
        self._refuse_waiting()
        if not isinstance(error, StorageError):  # a bug in the mover: nobody will serve these
            self._refuse_transfers()

    def _refuse_waiting(self) -> None:
        """Ends the tickets that wait for memory, and forgets the hints."""
        demands, self._demands = self._demands, deque()
        self._prefetches.clear()
        for demand in demands:
            self._fail(demand.ticket, self._reason())

    def _refuse_transfers(self) -> None:
        for transfer in tuple(self._transfers.values()):
            for demand in transfer.waiting:
                self._fail(demand.ticket, self._reason())
        for event in self._quiet:
            event.set()
        self._quiet.clear()

    def _reason(self) -> BaseException:
        return self._broken or ClosedError("the engine was closed while this was waiting")

    def _release_everything(self) -> None:
        """The mover's last act: nobody waits for ever, and no slot goes back under a copy."""
        self._broken = self._reason()
        while self._commands:  # posted while the mover was ending
            with suppress(Exception):  # nobody is left to hear of it
                self._commands.popleft()()
        self._refuse_waiting()
        self._refuse_transfers()
        for fences in (*self._uploads.values(), *self._downloads.values()):
            for fence in fences:
                with suppress(Exception):  # a device that failed does not use the bytes any more
                    fence.wait()
        for shard in tuple(self._leased):
            self._give_back(shard)
        for holders in (self._cached, self._pinned, self._transfers, self._uploads, self._downloads):
            holders.clear()

    def check(self) -> None:
        """Re-checks the invariants of `tiered.shard`; only when nothing is in flight. For tests."""
        held = (ShardState.HOST_CLEAN, ShardState.HOST_DIRTY)
        for shard in [*self._cached, *self._pinned]:
            if shard.state not in held or shard.lease is None:
                raise AssertionError(f"{shard!r} is held without a lease (invariant 2)")
        if self._cached.keys() & self._pinned:
            raise AssertionError("a pinned shard is evictable (invariant 5)")
        held_by_someone = self._cached.keys() | self._pinned
        if self._leased != held_by_someone:
            raise AssertionError(f"{self._leased - held_by_someone} hold slots for nobody (invariant 2)")


def _fill_blank(shard: Shard, access: Access) -> None:
    """Gives a shard without content its zeros, unless they would be overwritten at once."""
    if shard.blank and access is not Access.OVERWRITE and shard.buffer is not None:
        shard.buffer.zero_()
    shard.blank = shard.blank and access is Access.READ
