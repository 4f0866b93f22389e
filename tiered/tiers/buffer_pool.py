"""Host memory for moving bytes: page-aligned regions, and a pool of equal slots that are leased.

A region is mapped once and touched only by use. A pool never grows and never blocks: when no slot may be
given, `try_lease` answers None and the caller tries later. Used from one thread; holds no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch

from tiered.config import format_bytes
from tiered.errors import CapacityError, ClosedError, UsageError

HUGE_PAGE_BYTES = 2 << 20
SLOT_ALIGNMENT = 4096  # what direct I/O asks of addresses, sizes and offsets
POISON = 0xA5

_MADV_WIPEONFORK = 18  # Linux 4.14; not among the names of `mmap`


class HostRegion:
    """Exactly `nbytes` of private anonymous memory; made by `allocate_host`.

    The memory goes back to the system when the region is closed *and* the last tensor over it is gone, so a
    view that outlives `close()` stays valid.

    Attributes:
        nbytes: size asked for; no byte beyond it is ever resident, except in the last page.
        address: of the first byte; a multiple of 2 MiB for regions of at least that size, else of a page.
        registered: whether the accelerator can copy to and from it directly.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"a host region needs at least one byte, not {nbytes}")
        # [Note: huge pages] MAP_PRIVATE is the point: Python's default, MAP_SHARED, is shmem and gets none.
        # A 2 MiB page needs a 2 MiB boundary, so map more and start at the first one; what is never touched
        # costs address space only. Only whole huge pages are advised: the tail must not grow past nbytes.
        huge_bytes = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        mapped_bytes = nbytes + HUGE_PAGE_BYTES if huge_bytes else nbytes
        try:
            mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"the system refuses to map {format_bytes(nbytes)} of host memory: {error.strerror}"
            ) from error
        start = -_address(mapping) % HUGE_PAGE_BYTES if huge_bytes else 0
        if huge_bytes:
            with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
                mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
        # The tensor's storage holds `mapping`, and nobody calls mapping.close(): torch keeps no buffer
        # export, so that would unmap the memory under live views.
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=nbytes)
        self._mapping: mmap.mmap | None = mapping
        self.nbytes = nbytes
        self.address = self._tensor.data_ptr()
        self.registered = False

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, 1-D uint8."""
        if self._tensor is None:
            raise ClosedError("this host region was closed")
        return self._tensor

    def register(self) -> None:
        """Pins the region for the accelerator, if there is one; failing is a warning, copies stay right."""
        if self.registered or not torch.cuda.is_available():
            return
        try:
            torch.cuda.check_error(_cuda_runtime().cudaHostRegister(self.address, self.nbytes, 0))
        except RuntimeError as error:
            warnings.warn(
                f"{format_bytes(self.nbytes)} of host memory could not be pinned ({error}); copies to the "
                "device will be slower and will not overlap. A larger limit for locked memory may help.",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self.registered = True

    def wipe_on_fork(self) -> None:
        """A forked child sees zeros here instead of sharing the pages.

        Sharing would cost the parent: each of its next writes would copy a page, and break a huge page up.
        """
        if self._mapping is not None:
            with contextlib.suppress(OSError):
                self._mapping.madvise(_MADV_WIPEONFORK)

    def close(self) -> None:
        """Gives the region up; see the class about views that still live. Idempotent."""
        if self.registered:
            torch.cuda.check_error(_cuda_runtime().cudaHostUnregister(self.address))
            self.registered = False
        self._tensor = None
        self._mapping = None


def allocate_host(nbytes: int, *, register: bool = False) -> HostRegion:
    """A region of exactly `nbytes`, page-aligned, on huge pages where it can be, not yet touched.

    `register` pins it for the accelerator if there is one. Raises CapacityError if the system refuses.
    """
    region = HostRegion(nbytes)
    if register:
        region.register()
    return region


class Purpose(IntEnum):
    """What a slot is wanted for; each may have slots that the others cannot take."""

    DEMAND = 0  # a computation waits for it now
    UPDATE = 1  # the optimizer's pipeline
    PREFETCH = 2  # a guess about what comes


@dataclass(frozen=True)
class PoolStatistics:
    """Counts of slots: all, now leased, most leased at once, and now leased by purpose."""

    slot_bytes: int
    slots: int
    leased: int
    peak: int
    by_purpose: Mapping[Purpose, int]


class Lease:
    """The exclusive right to one slot, until `release()`, which comes exactly once."""

    __slots__ = ("_pool", "_released", "_slot", "address", "nbytes", "purpose", "tag")

    def __init__(self, pool: BufferPool, slot: int, *, purpose: Purpose, tag: str) -> None:
        self._pool = pool
        self._slot = slot
        self._released = False
        self.address = pool.address + slot * pool.slot_bytes
        self.nbytes = pool.slot_bytes
        self.purpose = purpose
        self.tag = tag

    def view(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """`numel` elements of the slot from `offset_bytes` on; must not be used after the release."""
        if self._released:
            raise UsageError(f"the lease of {self.tag} was released; its bytes belong to another")
        end = offset_bytes + numel * dtype.itemsize
        if offset_bytes < 0 or numel < 0 or end > self.nbytes or offset_bytes % dtype.itemsize:
            raise ValueError(f"{numel} elements of {dtype} at byte {offset_bytes} do not fit into {self.nbytes} bytes")
        start = self._slot * self.nbytes
        return self._pool.region.tensor[start + offset_bytes : start + end].view(dtype)

    def release(self) -> None:
        """Gives the slot back. Whoever still reads or writes it, a device copy too, must be done first."""
        if self._released:
            raise UsageError(f"the lease of {self.tag} was released twice")
        self._released = True
        self._pool._take_back(self._slot)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"slot {self._slot}"
        return f"<Lease {self.tag}: {state}, {self.purpose.name}>"


class BufferPool:
    """One region, cut into equal slots that are leased for a purpose.

    Args:
        slot_bytes: size of a slot, a multiple of 4096. Let `slot_bytes * slot_count` be a multiple of 2 MiB:
            the rest is on small pages, which some drives read at half the speed.
        slot_count: number of slots.
        reserve: slots that only this purpose can take, as long as it has not taken as many.
        register: pin the arena for the accelerator.
        poison: fill each slot with 0xA5 when it is released, so that late readers show.
    """

    def __init__(
        self,
        slot_bytes: int,
        slot_count: int,
        *,
        reserve: Mapping[Purpose, int],
        register: bool = False,
        poison: bool = False,
    ) -> None:
        if slot_bytes < 1 or slot_bytes % SLOT_ALIGNMENT:
            raise ValueError(f"slot_bytes must be a multiple of {SLOT_ALIGNMENT}, not {slot_bytes}")
        if slot_count < 1:
            raise ValueError(f"a pool needs at least one slot, not {slot_count}")
        self._reserve = {purpose: reserve.get(purpose, 0) for purpose in Purpose}
        if min(self._reserve.values()) < 0 or sum(self._reserve.values()) > slot_count:
            raise ValueError(f"{slot_count} slots cannot hold the reserves {dict(reserve)}")
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.region = allocate_host(slot_bytes * slot_count, register=register)
        self.region.wipe_on_fork()
        self.address = self.region.address
        self._poison = poison
        self._free = list(range(slot_count))[::-1]  # a stack: slots never needed are never touched
        self._leases: dict[int, Lease] = {}
        self._by_purpose: Counter[Purpose] = Counter()
        self._peak = 0
        self._closed = False

    def try_lease(self, purpose: Purpose, tag: str) -> Lease | None:
        """A slot, or None: all are leased, or the free ones are kept for other purposes.

        `tag` says for whom, in leak reports.
        """
        if self._closed:
            raise ClosedError("the buffer pool was closed")
        kept_for_others = sum(
            max(0, count - self._by_purpose[other]) for other, count in self._reserve.items() if other != purpose
        )
        if len(self._free) <= kept_for_others:
            return None
        slot = self._free.pop()
        lease = self._leases[slot] = Lease(self, slot, purpose=purpose, tag=tag)
        self._by_purpose[purpose] += 1
        self._peak = max(self._peak, len(self._leases))
        return lease

    def _take_back(self, slot: int) -> None:
        lease = self._leases.pop(slot)
        self._by_purpose[lease.purpose] -= 1
        self._free.append(slot)
        if self._poison and not self._closed:
            self.region.tensor[slot * self.slot_bytes : (slot + 1) * self.slot_bytes].fill_(POISON)

    def statistics(self) -> PoolStatistics:
        """What is leased now, and the peak."""
        return PoolStatistics(
            slot_bytes=self.slot_bytes,
            slots=self.slot_count,
            leased=len(self._leases),
            peak=self._peak,
            by_purpose={purpose: self._by_purpose[purpose] for purpose in Purpose},
        )

    def close(self) -> None:
        """Gives the memory up; then raises UsageError if leases were never released, by tag. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.region.close()
        if self._leases:
            tags = ", ".join(f"{lease.tag} ({lease.purpose.name})" for lease in self._leases.values())
            raise UsageError(f"{len(self._leases)} of {self.slot_count} buffers were never released: {tags}")


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(mapping: mmap.mmap) -> int:
    # from_buffer holds an export of the mapping until the ctypes object dies, at the end of this line.
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
