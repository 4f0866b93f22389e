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
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import select
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered._native import IoPiece, IoResult
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
