"""The contract of IoEngine: one suite over every engine that works here, and over the simulated one."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.io.harness import File, memory, run
from tiered.errors import ConfigError, UsageError
from tiered.tiers.io.engine import EARLY_END, IoEngine, IoOp
from tiered.tiers.io.probe import open_engine

MakeEngine = Callable[[int], closing[IoEngine]]
MakeFile = Callable[..., File]
BLOCK = 4096


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("queue_depth", [1, 2, 7, 64])
def test_blocks_go_out_and_come_back(
    make_engine: MakeEngine, make_file: MakeFile, queue_depth: int, direct: bool
) -> None:
    file = make_file(direct=direct)
    content = random.Random(0).randbytes(70 * BLOCK)
    source, target = memory(content), memory(len(content))
    offsets = range(0, len(content), BLOCK)
    with make_engine(queue_depth) as engine:
        for request, array in ((file.write, source), (file.read, target)):
            done = run(engine, [request(o, array[o : o + BLOCK], tag=o) for o in offsets])
            assert sorted(c.request.tag for c in done) == list(offsets), "each completes exactly once"
            assert {c.errno for c in done} == {0}
        statistics = engine.statistics()
    assert target.tobytes() == content == file.path.read_bytes()
    assert statistics.read_bytes == statistics.write_bytes == len(content)
    assert statistics.read_count == statistics.write_count == len(offsets)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_moves_exactly_its_bytes(make_engine: MakeEngine, make_file: MakeFile, data: st.DataObject) -> None:
    """Odd offsets, sizes and addresses in a buffered file; some reads run over its end."""
    cuts = sorted(data.draw(st.sets(st.integers(1, 30_000), min_size=1, max_size=20), label="cuts"))
    extents = list(zip([0, *cuts], cuts, strict=False))
    reads = data.draw(st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 20_000)), max_size=20))
    queue_depth = data.draw(st.integers(1, 64), label="queue_depth")
    content = random.Random(cuts[-1]).randbytes(cuts[-1])

    file = make_file()
    source = memory(content)
    targets = [memory(nbytes) for _, nbytes in reads]
    with make_engine(queue_depth) as engine:
        done = run(engine, [file.write(start, source[start:end]) for start, end in extents])
        assert [c.errno for c in done] == [0] * len(extents)
        requests = [file.read(offset, targets[i], tag=i) for i, (offset, _) in enumerate(reads)]
        errnos = {c.request.tag: c.errno for c in run(engine, requests)}

    assert file.path.read_bytes() == content
    for i, (offset, nbytes) in enumerate(reads):
        expected = content[offset : offset + nbytes]
        assert targets[i].tobytes() == expected.ljust(nbytes, b"\0")
        assert errnos[i] == (0 if len(expected) == nbytes else EARLY_END)


def test_a_full_engine_takes_nothing(make_engine: MakeEngine, make_file: MakeFile) -> None:
    file = make_file(bytes(8 * BLOCK))
    requests = [file.read(i * BLOCK, memory(BLOCK)) for i in range(8)]
    with make_engine(3) as engine:
        assert engine.capacity == 3
        assert engine.submit([]) == 0
        assert engine.submit(requests) == 3
        assert engine.in_flight == 3
        assert engine.submit(requests[3:]) == 0
        assert len(run(engine, requests[3:])) == 8
        assert engine.in_flight == 0


def test_an_idle_descriptor_is_not_readable(make_engine: MakeEngine, make_file: MakeFile) -> None:
    file = make_file(bytes(BLOCK))
    with make_engine(4) as engine:
        poll = select.poll()
        poll.register(engine, select.POLLIN)
        assert not poll.poll(0)
        run(engine, [file.read(0, memory(BLOCK)) for _ in range(9)])
        assert engine.reap() == []
        assert not poll.poll(0), "an owner that waits for it would spin"


def test_reading_over_the_end_is_an_early_end(make_engine: MakeEngine, make_file: MakeFile) -> None:
    """Also with O_DIRECT, where the short read ends at an offset that cannot be continued from."""
    for direct in (False, True):
        file = make_file(b"x" * 5000, direct=direct)
        target = memory(3 * BLOCK)
        with make_engine(2) as engine:
            (over, beyond) = run(engine, [file.read(0, target, tag=0), file.read(2 * BLOCK, memory(BLOCK), tag=1)])
        assert {over.errno, beyond.errno} == {EARLY_END}
        assert target.tobytes() == (b"x" * 5000).ljust(3 * BLOCK, b"\0")
        assert over.error().errno == 0
        assert "ends too early" in str(over.error("layer.weight"))


def test_misaligned_direct_requests_end_in_einval(make_engine: MakeEngine, make_file: MakeFile) -> None:
    file = make_file(bytes(4 * BLOCK), direct=True)
    try:
        os.preadv(file.fd, [memory(BLOCK)], 1)
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        pytest.skip("this file system takes misaligned O_DIRECT")
    with make_engine(4) as engine:
        done = run(
            engine,
            [
                file.read(1, memory(BLOCK), tag=1),
                file.read(0, memory(BLOCK)[:100], tag=2),
                file.write(10, memory(BLOCK), tag=3),
                file.write(0, memory(BLOCK), tag=4),
            ],
        )
    errnos = {c.request.tag: c.errno for c in done}
    assert errnos == {1: errno.EINVAL, 2: errno.EINVAL, 3: errno.EINVAL, 4: 0}


def test_bad_descriptors_and_addresses_fail_alone(make_engine: MakeEngine, make_file: MakeFile) -> None:
    """A request that the kernel refuses at submission must not take its neighbours with it."""
    file = make_file(bytes(BLOCK))
    good = file.read(0, memory(BLOCK), tag=0)
    bad = [
        type(good)(op, fd, "", 0, address, BLOCK, tag)
        for tag, (op, fd, address) in enumerate(
            [
                (IoOp.READ, 10_000, good.address),
                (IoOp.WRITE, 10_000, good.address),
                (IoOp.WRITE, file.fd, 4096),
            ],
            start=1,
        )
    ]
    with make_engine(8) as engine:
        done = run(engine, [bad[0], good, bad[1], good, bad[2], good])
    assert sorted((c.request.tag, c.errno) for c in done) == [
        (0, 0),
        (0, 0),
        (0, 0),
        (1, errno.EBADF),
        (2, errno.EBADF),
        (3, errno.EFAULT),
    ]


def test_close_waits_for_what_is_in_flight(make_engine: MakeEngine, make_file: MakeFile) -> None:
    file = make_file()
    content = random.Random(1).randbytes(32 * BLOCK)
    source = memory(content)
    with make_engine(32) as engine:
        engine.submit([file.write(o, source[o : o + BLOCK]) for o in range(0, len(content), BLOCK)])
        engine.close()
        assert file.path.read_bytes() == content
        assert engine.in_flight == 0
        engine.close()
        with pytest.raises(UsageError, match="closed"):
            engine.submit([file.read(0, source)])
        with pytest.raises(UsageError, match="closed"):
            engine.reap()


def test_engines_leave_no_descriptor_behind(make_engine: MakeEngine) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with make_engine(4):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_size_limit_is_efbig(make_engine: MakeEngine, make_file: MakeFile) -> None:
    file = make_file()
    block = 1 << 16
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with make_engine(4) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * block + BLOCK, hard))  # block 5 is written in part first
        try:
            done = run(engine, [file.write(i * block, memory(block), tag=i) for i in range(8)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errnos = {c.request.tag: c.errno for c in done}
    assert errnos == {i: 0 if i < 5 else errno.EFBIG for i in range(8)}


_FILL_A_DISK = """
import errno, os, sys
from pathlib import Path
from tests.tiers.io.harness import File, memory, run
from tiered.errors import ConfigError
from tiered.tiers.io.probe import ENGINES, open_engine
for name in ENGINES:
    try:
        engine = open_engine(name, 1)
    except ConfigError:
        continue
    path = Path(sys.argv[1], name)
    file, block = File(path), 1 << 16
    done = run(engine, [file.write(i * block, memory(block)) for i in range(8)])
    assert sorted(c.errno for c in done) == [0] * 4 + [errno.ENOSPC] * 4, (name, done)
    engine.close()
    os.close(file.fd)
    path.unlink()
"""


def test_a_full_disk_is_enospc(tmp_path: Path) -> None:
    """Every engine that works here, on a file system of 256 KiB mounted in a namespace of its own."""
    mount = f"mount -t tmpfs -o size=256k none '{tmp_path}' && exec"
    inside = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", f'{mount} "$0" "$@"']
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    subprocess.run([*inside, sys.executable, "-c", _FILL_A_DISK, tmp_path], check=True)


@pytest.mark.parametrize("queue_depth", [0, -1, 1 << 20])
def test_impossible_queue_depths_are_config_errors(queue_depth: int) -> None:
    with pytest.raises(ConfigError, match=f"io_queue_depth is {queue_depth}"):
        open_engine("aiofiles", queue_depth)
