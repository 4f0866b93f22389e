"""Fakes that ship with the package; they run through the same contract tests as what they stand for.

The fault model of `SimulatedIoEngine`, which wraps a real engine and is driven by a seed:

- Time is counted in `reap` calls, not in seconds. The same seed and the same sequence of calls give the same
  completions in the same order on every machine. The descriptor stays readable while anything is in flight.
- Latency: the bytes of a request move some reaps after it was submitted, all at once, and are reported some
  reaps later still. Whoever looks at a buffer too early, or reuses it too early, sees wrong bytes.
- Reordering: what is due at the same time is moved and reported in random order.
- Short transfers: a request moves in several steps, each with latencies of its own; EAGAIN comes in between.
- Scripted faults, by the number of the request (1 is the first one submitted to this engine):
  `fail_nth` moves nothing and fails with that errno; `early_end_nth` moves half (in steps of 4096) and meets
  the end of the file; `corrupt_nth` changes one byte on its way (a written buffer itself stays as it is);
  `lose_nth` reports a write that never happened (a lost read leaves the buffer as it was).

Not simulated: torn writes, writes to the wrong place, errors that go away when tried again.

The model of `SimulatedCopier`, which stands for an accelerator's copy streams while everything is CPU memory:

- Time is counted in polls of a fence, by seed; a wait ends it. There are two streams, one per direction, and a
  fence that is done means that all earlier copies of its direction are done too, as on a device.
- In: what the source held when the copy was enqueued (the copy is ordered after the current stream) arrives when
  the fence is done. Until then the staged bytes are garbage, so whoever reads them early computes nonsense.
- Out: the target has its bytes at once. That is what "later work on the current stream sees them" means to a
  caller that never looks from the host, and on a CPU nobody can be made to wait in between. In exchange the
  staged bytes are watched: a device may read them at any time until the fence is done, so they must not change.
- Bytes that were recycled, overwritten or written to NVMe in between show as an AssertionError from the fence, and
  so through the swap manager at the next call, or from `check()`.

Not simulated: the caching allocator's reuse of device memory (`record_stream`), and host code that reads a target
which only the device's stream may read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import select
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tiered._native import IoPiece, IoResult
from tiered.tiers.copier import Fence
from tiered.tiers.io.engine import EARLY_END, BaseEngine, IoEngine, IoOp, IoRequest

_STEP_BYTES = 4096  # short transfers end at multiples of it, as O_DIRECT needs


@dataclass(slots=True)
class _Held:
    """A piece on its way."""

    piece: IoPiece
    moves_at: int  # the reap at which its bytes move
    reported_at: int
    result: int | None = None  # once it has moved


class SimulatedIoEngine(BaseEngine):
    """An IoEngine over `inner`, which it owns; see the fault model above."""

    def __init__(
        self,
        inner: IoEngine,
        *,
        seed: int,
        latency_reaps_max: int = 3,
        short_probability: float = 0.3,
        retry_probability: float = 0.1,
        fail_nth: Mapping[int, int] | None = None,
        early_end_nth: Collection[int] = (),
        corrupt_nth: Collection[int] = (),
        lose_nth: Collection[int] = (),
    ) -> None:
        super().__init__(f"simulated {inner.name}", inner.capacity)
        self._inner = inner
        self._random = random.Random(seed)
        self._latency_reaps_max = latency_reaps_max
        self._short_probability = short_probability
        self._retry_probability = retry_probability
        self._fail_nth = fail_nth or {}
        self._early_end_nth = early_end_nth
        self._corrupt_nth = corrupt_nth
        self._lose_nth = lose_nth
        self._held: list[_Held] = []
        self._reaps = 0

    def _start(self, pieces: Sequence[IoPiece]) -> int:
        for piece in pieces:
            moves_at = self._reaps + self._latency()
            self._held.append(_Held(piece, moves_at, reported_at=moves_at + self._latency()))
        self._wakeup.set()
        return len(pieces)

    def _collect(self) -> list[IoResult]:
        self._reaps += 1
        self._random.shuffle(self._held)
        results = []
        for held in self._held:
            if held.result is None and held.moves_at <= self._reaps:
                held.result = self._move(held.piece)
            if held.result is not None and held.reported_at <= self._reaps:
                results.append(IoResult(held.piece.slot, held.result))
        reported = {result.slot for result in results}
        self._held = [held for held in self._held if held.piece.slot not in reported]
        if self._held:
            self._wakeup.set()
        return results

    def _release(self) -> None:
        self._inner.close()

    def _latency(self) -> int:
        return self._random.randint(0, self._latency_reaps_max)

    def _move(self, piece: IoPiece) -> int:
        """One step of a request: bytes moved or -errno, after the script and the dice."""
        transfer = self._transfers[piece.slot]
        number, first = transfer.number, transfer.start == 0
        if number in self._fail_nth:
            return -self._fail_nth[number]
        if self._random.random() < self._retry_probability:
            return -errno.EAGAIN
        if number in self._lose_nth:
            return piece.nbytes
        nbytes = piece.nbytes
        if number in self._early_end_nth:
            nbytes = nbytes // 2 // _STEP_BYTES * _STEP_BYTES if first else 0
        elif nbytes > _STEP_BYTES and self._random.random() < self._short_probability:
            nbytes = self._random.randrange(_STEP_BYTES, nbytes, _STEP_BYTES)
        if nbytes == 0:
            return 0
        request = replace(transfer.request, offset=piece.offset, address=piece.address, nbytes=nbytes)
        if number in self._corrupt_nth and first:
            return self._move_corrupted(request)
        return self._through_inner(request)

    def _move_corrupted(self, request: IoRequest) -> int:
        position = self._random.randrange(request.nbytes)
        if request.op is IoOp.READ:
            result = self._through_inner(request)
            _bytes_at(request)[position] ^= 0xFF
            return result
        copy = mmap.mmap(-1, request.nbytes)
        copy[:] = bytes(_bytes_at(request))
        copy[position] ^= 0xFF
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(copy))
        return self._through_inner(replace(request, address=address))

    def _through_inner(self, request: IoRequest) -> int:
        """Really moves the bytes, and waits for them: the order of the inner engine must not show."""
        self._inner.submit([request])
        poll = select.poll()
        poll.register(self._inner, select.POLLIN)
        while not (completions := self._inner.reap()):
            poll.poll()
        (completion,) = completions
        if completion.errno == EARLY_END:
            return 0
        return -completion.errno or request.nbytes


def _bytes_at(request: IoRequest) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * request.nbytes).from_address(request.address)


class SimulatedCopier:
    """A Copier for the CPU whose copies take time; see the model above. Any thread may use it.

    Attributes:
        pending_max: most copies that were under way at once; a test that wants late copies checks it.
    """

    def __init__(self, *, seed: int, polls_max: int = 4) -> None:
        self._random = random.Random(seed)
        self._polls_max = polls_max
        self._lock = threading.RLock()
        self._outward: deque[_SimulatedCopy] = deque()
        self._inward: deque[_SimulatedCopy] = deque()
        self.pending_max = 0

    def copy_out(self, target: torch.Tensor, staged: torch.Tensor) -> Fence | None:
        target.copy_(staged)
        return self._enqueue(self._outward, staged, arriving=None)

    def copy_in(self, staged: torch.Tensor, source: torch.Tensor) -> Fence | None:
        arriving = torch.empty_like(staged).copy_(source.detach())
        raw = staged.view(torch.uint8)
        raw.copy_(
            torch.frombuffer(bytearray(self._random.randbytes(max(1, raw.numel()))), dtype=torch.uint8)[: len(raw)]
        )
        return self._enqueue(self._inward, staged, arriving=arriving)

    def check(self) -> None:
        """Ends all copies; raises for one whose staged bytes were touched too early."""
        with self._lock:
            for stream in (self._outward, self._inward):
                if stream:
                    stream[-1].wait()

    def _enqueue(
        self, stream: deque[_SimulatedCopy], staged: torch.Tensor, *, arriving: torch.Tensor | None
    ) -> _SimulatedCopy:
        with self._lock:
            copy = _SimulatedCopy(self._lock, stream, staged, arriving, polls=self._random.randint(0, self._polls_max))
            stream.append(copy)
            self.pending_max = max(self.pending_max, len(self._outward) + len(self._inward))
            return copy


class _SimulatedCopy:
    """One copy under way, and its fence."""

    def __init__(
        self,
        lock: threading.RLock,
        stream: deque[_SimulatedCopy],
        staged: torch.Tensor,
        arriving: torch.Tensor | None,
        *,
        polls: int,
    ) -> None:
        self._lock = lock
        self._stream = stream
        self._staged = staged.view(torch.uint8)
        self._seen = self._staged.clone()
        self._arriving = arriving
        self._polls = polls
        self._ended = False

    def done(self) -> bool:
        with self._lock:
            self._polls -= 1
            if self._polls < 0:
                self.wait()
            return self._ended

    def wait(self) -> None:
        with self._lock:
            while not self._ended:
                self._stream.popleft()._end()

    def _end(self) -> None:
        self._ended = True
        if not torch.equal(self._staged, self._seen):
            way = "out of" if self._arriving is None else "into"
            raise AssertionError(f"staged bytes changed while a copy {way} them was under way")
        if self._arriving is not None:
            self._staged.copy_(self._arriving.view(torch.uint8))
