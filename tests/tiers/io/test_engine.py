"""BaseEngine's bookkeeping, against a back-end whose every answer is scripted."""

from __future__ import annotations

import errno
import select
from collections.abc import Sequence

from tiered._native import IoPiece, IoResult
from tiered.tiers.io.engine import EARLY_END, BaseEngine, IoCompletion, IoOp, IoRequest, Wakeup

KIB = 1024


class ScriptedEngine(BaseEngine):
    """Answers pieces with `results` in order; takes as many at a time as `takes` says, or else all."""

    def __init__(self, *results: int, takes: Sequence[int] = ()) -> None:
        super().__init__("scripted", 8)
        self.pieces: list[IoPiece] = []
        self._results = list(results)
        self._takes = list(takes)
        self._waiting: list[IoPiece] = []

    def _start(self, pieces: Sequence[IoPiece]) -> int:
        count = min(self._takes.pop(0), len(pieces)) if self._takes else len(pieces)
        self._waiting += pieces[: max(count, 0)]
        if self._waiting:
            self._wakeup.set()
        return count

    def _collect(self) -> list[IoResult]:
        waiting, self._waiting = self._waiting, []
        self.pieces += waiting
        return [IoResult(piece.slot, self._results.pop(0)) for piece in waiting]

    def _release(self) -> None:
        pass


def request(op: IoOp, nbytes: int, *, offset: int = 0, tag: int = 0) -> IoRequest:
    return IoRequest(op, 3, "file", offset, 1 << 20, nbytes, tag)


def run(engine: ScriptedEngine, *requests: IoRequest) -> list[IoCompletion]:
    assert engine.submit(requests) == len(requests)
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    done: list[IoCompletion] = []
    while engine.in_flight:
        assert poll.poll(0), "an owner that polls would sleep for ever"
        done += engine.reap()
    return done


def spans(engine: ScriptedEngine) -> list[tuple[int, int]]:
    assert all(piece.address - piece.offset == 1 << 20 for piece in engine.pieces)
    return [(piece.offset, piece.nbytes) for piece in engine.pieces]


def test_a_short_read_goes_on_from_an_aligned_place() -> None:
    engine = ScriptedEngine(5000, 12_000 - 4096)
    assert [c.errno for c in run(engine, request(IoOp.READ, 12_000))] == [0]
    assert spans(engine) == [(0, 12_000), (4096, 12_000 - 4096)]
    statistics = engine.statistics()
    assert (statistics.read_bytes, statistics.read_count, statistics.short_transfers) == (12_000, 1, 1)


def test_a_read_that_brings_nothing_new_is_an_early_end() -> None:
    engine = ScriptedEngine(5000, 5000 - 4096)
    assert [c.errno for c in run(engine, request(IoOp.READ, 12_000))] == [EARLY_END]
    assert engine.statistics().read_bytes == 5000
    assert engine.statistics().read_count == 0


def test_a_short_write_goes_on_where_it_stopped() -> None:
    engine = ScriptedEngine(5000, 1, -errno.ENOSPC)
    assert [c.errno for c in run(engine, request(IoOp.WRITE, 12_000))] == [errno.ENOSPC]
    assert spans(engine) == [(0, 12_000), (5000, 7000), (5001, 6999)]


def test_interrupted_pieces_are_tried_again() -> None:
    engine = ScriptedEngine(-errno.EINTR, 8 * KIB, -errno.EAGAIN, 8 * KIB)
    assert [c.errno for c in run(engine, request(IoOp.WRITE, 16 * KIB))] == [0]
    assert engine.statistics().retries == 2


def test_retries_without_progress_end() -> None:
    engine = ScriptedEngine(*[-errno.EAGAIN] * 10_001)
    assert [c.errno for c in run(engine, request(IoOp.READ, 4096))] == [errno.EAGAIN]


def test_requests_beyond_the_kernels_limit_are_cut() -> None:
    gib = 1 << 30
    engine = ScriptedEngine(gib, gib, 4096)
    assert [c.errno for c in run(engine, request(IoOp.READ, 2 * gib + 4096))] == [0]
    assert spans(engine) == [(0, gib), (gib, gib), (2 * gib, 4096)]
    assert engine.statistics().short_transfers == 0


def test_what_the_back_end_does_not_take_waits() -> None:
    engine = ScriptedEngine(1, 1, 1, takes=[1, -errno.EAGAIN, -errno.EAGAIN, 2])
    requests = [request(IoOp.READ, 1, tag=tag) for tag in range(3)]
    assert [(c.request.tag, c.errno) for c in run(engine, *requests)] == [(0, 0), (1, 0), (2, 0)]
    assert engine.statistics().retries == 2


def test_what_the_back_end_refuses_fails_alone() -> None:
    engine = ScriptedEngine(1, 1, takes=[1, -errno.EBADF, 1])
    done = run(engine, *[request(IoOp.READ, 1, tag=tag) for tag in range(3)])
    assert sorted((c.request.tag, c.errno) for c in done) == [(0, 0), (1, errno.EBADF), (2, 0)]


def test_an_error_names_the_transfer() -> None:
    error = IoCompletion(request(IoOp.WRITE, 4096, offset=8192), errno.EIO).error("layer.weight")
    assert str(error) == (
        "write of 4096 bytes at offset 8192 of file for layer.weight failed: Input/output error (errno 5)"
    )


def test_a_wakeup_may_be_set_any_number_of_times() -> None:
    wakeup = Wakeup()
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    for times in (0, 1, 3):
        for _ in range(times):
            wakeup.set()
        assert bool(poll.poll(0)) == (times > 0)
        wakeup.clear()
        assert not poll.poll(0)
    wakeup.close()
