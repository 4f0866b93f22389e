"""The I/O engine protocol, and what every engine has in common.

An engine moves bytes between host memory and files. `submit` takes what fits, `reap` hands out what has
finished, and a file descriptor that can be polled says when reaping is worth it. Neither ever waits. Every
request that was accepted completes exactly once: whole, or failed with an errno.

`BaseEngine` holds all of the bookkeeping, so that a back-end is three small methods over *pieces* (a piece is
one system call's worth of one request):

- A short transfer is continued. A short read may end anywhere (at the end of the file), so its continuation
  starts at a multiple of 4096 bytes into the request, as well aligned for O_DIRECT as the request was; a few
  bytes are read twice.
- A transfer that brings nothing new ends the request with EARLY_END: the file ends there.
- EAGAIN and EINTR are retried, a bounded number of times without progress.
- A piece that the kernel does not take for want of resources waits in a backlog; the descriptor stays
  readable meanwhile, so that the owner comes back.

An engine is used by one thread only and knows no O_DIRECT: alignment is the caller's duty, and a misaligned
request gets whatever the kernel says, normally EINVAL.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from tiered._native import IoPiece, IoResult
from tiered.errors import ConfigError, StorageError, UsageError

EARLY_END = errno.ENODATA
QUEUE_DEPTH_MAX = 4096  # well under the kernel's limits for both libaio and io_uring

_RETRIED = frozenset({errno.EAGAIN, errno.EINTR})
_RETRIES_MAX = 10_000  # of one request without progress
_PIECE_BYTES_MAX = 1 << 30  # the kernel moves at most 2 GiB - 4 KiB per call
_RESTART_BYTES = 4096


class IoOp(IntEnum):
    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class IoRequest:
    """Move `nbytes` between the file at `offset` and host memory at `address`; the memory stays valid."""

    op: IoOp
    fd: int
    path: str  # for messages only
    offset: int
    address: int
    nbytes: int  # > 0
    tag: int  # the caller's


class IoCompletion(NamedTuple):
    request: IoRequest
    errno: int  # 0: all of it moved; EARLY_END: the file ends inside it

    def error(self, tensor: str | None = None) -> StorageError:
        """The exception that a failed completion means."""
        request = self.request
        return StorageError(
            request.op.name.lower(),
            request.path,
            0 if self.errno == EARLY_END else self.errno,
            offset=request.offset,
            nbytes=request.nbytes,
            tensor=tensor,
        )


@dataclass(frozen=True, slots=True)
class IoStatistics:
    """Since the start. Bytes count what moved, even of requests that failed later; counts, whole requests."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_count: int = 0
    write_count: int = 0
    short_transfers: int = 0
    retries: int = 0


class IoEngine(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """How many requests may be in flight."""

    @property
    def in_flight(self) -> int:
        """How many were accepted and not yet reaped."""

    def fileno(self) -> int:
        """Readable while completions may be waiting; poll it, then reap."""

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """How many, from the front, were accepted; 0 when full. Never waits."""

    def reap(self) -> list[IoCompletion]:
        """What has finished since the last call. Never waits."""

    def statistics(self) -> IoStatistics: ...

    def close(self) -> None:
        """Waits for what is in flight, whose completions are dropped. Idempotent."""


class Wakeup:
    """A descriptor that one side makes readable and the other polls and clears: an eventfd or else a pipe."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        with suppress(BlockingIOError):  # full, hence readable
            os.write(self._write, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        with suppress(BlockingIOError):  # it is clear
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        os.close(self._read)
        if self._write != self._read:
            os.close(self._write)


class Transfer:
    """One accepted request: how far it is."""

    __slots__ = ("done", "number", "request", "retries", "start")

    def __init__(self, request: IoRequest, number: int) -> None:
        self.request = request
        self.number = number  # 1 for the engine's first request
        self.done = 0  # bytes of the request that have moved
        self.start = 0  # where in the request the current piece starts, <= done
        self.retries = 0  # since the last progress


class BaseEngine(ABC):
    """An IoEngine but for the three methods at the end."""

    def __init__(self, name: str, queue_depth: int) -> None:
        if not 1 <= queue_depth <= QUEUE_DEPTH_MAX:
            raise ConfigError(f"io_queue_depth is {queue_depth}; it must be from 1 to {QUEUE_DEPTH_MAX}")
        self.name = name
        self.capacity = queue_depth
        self._wakeup = Wakeup()
        self._closed = False
        self._free = list(range(queue_depth))
        self._transfers: dict[int, Transfer] = {}  # by slot
        self._backlog: list[IoPiece] = []  # the back-end has not taken these yet
        self._finished: list[tuple[int, int]] = []  # (slot, errno), not reaped yet
        self._accepted = 0
        self._bytes = [0, 0]  # by IoOp, as the next
        self._counts = [0, 0]
        self._short_transfers = 0
        self._retries = 0

    @property
    def in_flight(self) -> int:
        return len(self._transfers)

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def submit(self, requests: Sequence[IoRequest]) -> int:
        if self._closed:
            raise UsageError(f"the {self.name} engine is closed")
        accepted = requests[: len(self._free)]
        for request in accepted:
            assert request.nbytes > 0, request
            slot = self._free.pop()
            self._accepted += 1
            self._transfers[slot] = Transfer(request, self._accepted)
            self._continue(slot)
        self._push()
        if self._backlog or self._finished:
            self._wakeup.set()
        return len(accepted)

    def reap(self) -> list[IoCompletion]:
        if self._closed:
            raise UsageError(f"the {self.name} engine is closed")
        self._wakeup.clear()  # first: what completes from here on sets it again
        for slot, result in self._collect():
            self._advance(slot, result)
        self._push()
        if self._backlog:
            self._wakeup.set()
        finished, self._finished = self._finished, []
        return [self._complete(slot, errno) for slot, errno in finished]

    def statistics(self) -> IoStatistics:
        return IoStatistics(
            read_bytes=self._bytes[IoOp.READ],
            write_bytes=self._bytes[IoOp.WRITE],
            read_count=self._counts[IoOp.READ],
            write_count=self._counts[IoOp.WRITE],
            short_transfers=self._short_transfers,
            retries=self._retries,
        )

    def close(self) -> None:
        if self._closed:
            return
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while self._transfers:
            poll.poll()
            self.reap()
        self._closed = True
        self._release()
        self._wakeup.close()

    def _continue(self, slot: int) -> None:
        """Puts the next piece of a request into the backlog."""
        transfer = self._transfers[slot]
        request = transfer.request
        write = request.op is IoOp.WRITE
        transfer.start = transfer.done - (0 if write else transfer.done % _RESTART_BYTES)
        piece = IoPiece(
            slot=slot,
            write=write,
            fd=request.fd,
            offset=request.offset + transfer.start,
            address=request.address + transfer.start,
            nbytes=min(request.nbytes - transfer.start, _PIECE_BYTES_MAX),
        )
        self._backlog.append(piece)

    def _advance(self, slot: int, result: int) -> None:
        """Takes one piece's result: bytes moved, or -errno."""
        transfer = self._transfers[slot]
        request = transfer.request
        progress = transfer.start + result - transfer.done
        if result < 0 and self._may_retry(slot, -result):
            self._continue(slot)
        elif result < 0:
            self._finished.append((slot, -result))
        elif progress <= 0:
            self._finished.append((slot, EARLY_END))
        else:
            transfer.done += progress
            transfer.retries = 0
            self._bytes[request.op] += progress
            if transfer.done == request.nbytes:
                self._counts[request.op] += 1
                self._finished.append((slot, 0))
            else:
                self._short_transfers += result < _PIECE_BYTES_MAX
                self._continue(slot)

    def _push(self) -> None:
        """Hands the backlog to the back-end, as far as that takes it."""
        while self._backlog:
            started = self._start(self._backlog)
            if started > 0:
                del self._backlog[:started]
            elif self._may_retry(self._backlog[0].slot, -started):
                break
            else:
                self._finished.append((self._backlog.pop(0).slot, -started))

    def _may_retry(self, slot: int, errno: int) -> bool:
        transfer = self._transfers[slot]
        if errno not in _RETRIED or transfer.retries == _RETRIES_MAX:
            return False
        transfer.retries += 1
        self._retries += 1
        return True

    def _complete(self, slot: int, errno: int) -> IoCompletion:
        self._free.append(slot)
        return IoCompletion(self._transfers.pop(slot).request, errno)

    @abstractmethod
    def _start(self, pieces: Sequence[IoPiece]) -> int:
        """Starts pieces: how many, from the front, at least one; or -errno about the first. Never waits."""

    @abstractmethod
    def _collect(self) -> list[IoResult]:
        """Results of finished pieces. The wake-up has been set after each. Never waits."""

    @abstractmethod
    def _release(self) -> None:
        """Frees the back-end's resources; nothing is in flight."""
