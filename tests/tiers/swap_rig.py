"""A swap manager over a tiny arena and a real file, and a watchdog that turns a hang into a failure."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

from tiered.events import EventLog
from tiered.shard import Shard, ShardKey, ShardKind, ShardState, Tier
from tiered.tiers.buffer_pool import BufferPool, Purpose
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import open_engine
from tiered.tiers.nvme_store import NvmeStore
from tiered.tiers.swap_manager import SwapManager

SLOT_BYTES = 8192
BLOCK_BYTES = 4096
HANG_SECONDS = 60


def within(work: Callable[[], None], seconds: float = HANG_SECONDS) -> None:
    """Runs `work` on a thread of its own; a hang is a failure that shows every stack, never a stuck test run."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        raise AssertionError(f"no end within {seconds} s")
    if errors:
        raise errors[0]


class WatchedShard(Shard):
    """Remembers the edges of the state machine that it took."""

    edges: ClassVar[set[tuple[ShardState, ShardState]]] = set()

    def move_to(self, state: ShardState) -> None:
        before = self.state
        super().move_to(state)
        self.edges.add((before, state))


class Gate:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def open(self) -> None:
        self._passed.set()

    def done(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        assert self._passed.wait(30)


class Rig:
    """Store, pool, engine and manager, and shards whose content the test knows."""

    def __init__(self, folder: Path, engine: IoEngine, *, sizes: list[int], slot_count: int) -> None:
        self.folder = folder
        self.store = NvmeStore([folder], rank=0, direct={folder: False}, growth_bytes=1 << 16)
        self.pool = BufferPool(SLOT_BYTES, slot_count, reserve={Purpose.DEMAND: 1}, poison=True)
        self.events = EventLog(log_max=10_000)
        self.engine = engine
        self.gates: list[Gate] = []
        self.manager = SwapManager(self.pool, self.store, engine, io_block_bytes=BLOCK_BYTES, events=self.events)
        self.shards = [
            WatchedShard(
                ShardKey(number, 0, ShardKind.PARAM, 0),
                f"tensor{number}",
                nbytes,
                home=Tier.NVME,
                extent=self.store.allocate(nbytes),
            )
            for number, nbytes in enumerate(sizes)
        ]

    def on_disk(self, shard: Shard) -> torch.Tensor:
        """What the file holds of a shard, past every cache of ours."""
        assert shard.extent is not None
        raw = os.pread(self.store.fd(shard.extent.file), shard.nbytes, shard.extent.offset)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def settle(self) -> None:
        """Returns when the mover has done what it can with everything posted so far."""
        for _ in range(2):
            passed = threading.Event()
            self.manager._post(passed.set)
            assert passed.wait(HANG_SECONDS)

    def gate(self) -> Gate:
        """A fence that the end of the rig opens, so that a failed test does not hang."""
        self.gates.append(Gate())
        return self.gates[-1]

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        within(self.manager.close)
        assert self.pool.statistics().leased == 0
        self.pool.close()
        self.store.close()


@contextmanager
def rig(
    folder: Path, engine: IoEngine | None = None, *, sizes: list[int] | None = None, slot_count: int = 4
) -> Iterator[Rig]:
    """A rig that must end clean: no slot, thread, descriptor or file is left."""
    threads, descriptors = threading.active_count(), open_descriptors()
    if engine is None:
        engine = open_engine("aiofiles", 4)
    else:
        threads, descriptors = -1, -1  # made before we could count
    made = Rig(folder, engine, sizes=sizes or [SLOT_BYTES] * 8, slot_count=slot_count)
    try:
        yield made
    finally:
        made.close()
    assert not list(folder.iterdir())
    if threads >= 0:
        assert threading.active_count() == threads
        assert open_descriptors() == descriptors


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def content(number: int, nbytes: int) -> torch.Tensor:
    """Bytes that are different for every number, and never the poison's."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
