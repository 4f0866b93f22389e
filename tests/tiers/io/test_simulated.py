"""The fault model of SimulatedIoEngine: what it promises, it does, and again under the same seed."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import numpy
import pytest

from tests.tiers.io.harness import File, memory, run
from tiered.testing import SimulatedIoEngine
from tiered.tiers.io.aiofiles_engine import AiofilesEngine
from tiered.tiers.io.engine import EARLY_END

MakeFile = Callable[..., File]
BLOCK = 1 << 16
CONTENT = random.Random(0).randbytes(8 * BLOCK)


def simulated(seed: int = 0, **faults: object) -> SimulatedIoEngine:
    return SimulatedIoEngine(AiofilesEngine(8), seed=seed, **faults)  # type: ignore[arg-type]


def read_all(engine: SimulatedIoEngine, file: File) -> tuple[numpy.ndarray, list[tuple[int, int]]]:
    """Eight blocks, tagged 1 to 8; their bytes, and (tag, errno) in the order of completion."""
    target = memory(len(CONTENT))
    requests = [file.read(i * BLOCK, target[i * BLOCK : (i + 1) * BLOCK], tag=i + 1) for i in range(8)]
    done = run(engine, requests)
    engine.close()
    return target.reshape(8, BLOCK), [(c.request.tag, c.errno) for c in done]


def test_a_seed_is_a_reproduction(make_file: MakeFile) -> None:
    file = make_file(CONTENT)
    orders = []
    for seed in range(10):
        engine, again = simulated(seed), simulated(seed)
        content, order = read_all(engine, file)
        assert content.tobytes() == CONTENT
        assert read_all(again, file)[1] == order
        assert again.statistics() == engine.statistics()
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 10, "seeds differ"


def test_bytes_come_late_and_in_steps(make_file: MakeFile) -> None:
    engine = simulated(latency_reaps_max=5, short_probability=1.0)
    _, _ = read_all(engine, make_file(CONTENT))
    assert engine.statistics().short_transfers >= 8
    target = memory(BLOCK)
    with_latency = simulated(seed=3, latency_reaps_max=5)
    with_latency.submit([make_file(b"x" * BLOCK).read(0, target)])
    seen = []
    while with_latency.in_flight:
        seen.append(int(target[-1]))
        with_latency.reap()
    assert seen[0] == 0
    assert target[-1] == ord("x")
    with_latency.close()


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_the_nth_request_fails_and_no_other(make_file: MakeFile, n: int, number: int) -> None:
    content, order = read_all(simulated(fail_nth={n: number}), make_file(CONTENT))
    assert dict(order) == {tag: number if tag == n else 0 for tag in range(1, 9)}
    assert not content[n - 1].any()


def test_an_early_end_moves_half(make_file: MakeFile) -> None:
    content, order = read_all(simulated(early_end_nth={4}), make_file(CONTENT))
    assert dict(order)[4] == EARLY_END
    assert content[3, : BLOCK // 2].tobytes() == CONTENT[3 * BLOCK :][: BLOCK // 2]
    assert not content[3, BLOCK // 2 :].any()


def test_corruption_changes_one_byte(make_file: MakeFile) -> None:
    file = make_file(CONTENT)
    original = numpy.frombuffer(CONTENT, dtype=numpy.uint8).reshape(8, BLOCK)
    content, order = read_all(simulated(corrupt_nth={2}), file)
    assert dict(order) == dict.fromkeys(range(1, 9), 0)
    assert [int((content[i] != original[i]).sum()) for i in range(8)] == [0, 1, 0, 0, 0, 0, 0, 0]

    source = memory(CONTENT)
    engine = simulated(corrupt_nth={1})
    run(engine, [file.write(0, source)])
    engine.close()
    assert source.tobytes() == CONTENT
    on_disk = numpy.frombuffer(file.path.read_bytes(), dtype=numpy.uint8)
    assert int((on_disk != source).sum()) == 1


def test_a_lost_write_reports_success(make_file: MakeFile) -> None:
    file = make_file(bytes(2 * BLOCK))
    source = memory(CONTENT)
    engine = simulated(lose_nth={2})
    done = run(engine, [file.write(i * BLOCK, source[i * BLOCK : (i + 1) * BLOCK]) for i in range(2)])
    engine.close()
    assert [c.errno for c in done] == [0, 0]
    assert file.path.read_bytes() == CONTENT[:BLOCK] + bytes(BLOCK)
