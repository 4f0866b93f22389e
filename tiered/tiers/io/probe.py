"""Which I/O engine to use in a directory: found out by writing, reading back and comparing.

First the file system: does it take O_DIRECT, and with which alignment? In-memory ones (tmpfs) may accept the
flag, but there is no device that could be reached directly: they count as buffered. Then the engines, in
this order:

- direct: io_uring, libaio, aiofiles. The first two are about equally fast with O_DIRECT; io_uring comes first
  because submitting never waits there (see libaio.py), so the mover keeps moving.
- buffered: io_uring, aiofiles. Not libaio, which waits for each transfer while submitting.

An engine that was asked for by name is used or refused with the reason, never replaced.
"""

from __future__ import annotations

import difflib
import errno
import mmap
import os
import select
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy
import psutil

from tiered import _native
from tiered.errors import ConfigError, CorruptionError, StorageError, TieredError
from tiered.tiers.io.aiofiles_engine import AiofilesEngine
from tiered.tiers.io.engine import IoEngine, IoOp, IoRequest
from tiered.tiers.io.io_uring import UringEngine
from tiered.tiers.io.libaio import LibaioEngine

ENGINES: dict[str, Callable[[int], IoEngine]] = {
    "io_uring": UringEngine,
    "libaio": LibaioEngine,
    "aiofiles": AiofilesEngine,
}

_ORDER = ("io_uring", "libaio", "aiofiles")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_ALIGNMENTS = (512, 4096, 16384, 65536)
_GRAIN_BYTES = 65536  # of the blocks tried
_BLOCK_BYTES_MAX = 1 << 20
_BLOCKS_MAX = 4


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What works in `directory`; `reason` is one line for the user."""

    directory: Path
    engine: str  # for open_engine
    direct: bool  # open files with O_DIRECT
    alignment: int  # of offset, size and address where direct; else 1
    reason: str


def open_engine(name: str, queue_depth: int) -> IoEngine:
    """The engine of that name. ConfigError, with the reason and what to do, where it cannot work."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        allowed = ", ".join(f'"{known}"' for known in ENGINES)
        raise ConfigError(f'io_engine "{name}" is unknown; allowed are "auto", {allowed}{hint}')
    return ENGINES[name](queue_depth)


def probe(directory: Path, *, engine: str = "auto", queue_depth: int, block_bytes: int) -> ProbeResult:
    """Writes a small file in `directory` through the candidates, and picks; the file is gone afterwards.

    StorageError where the directory cannot be written to; ConfigError, StorageError or CorruptionError where
    the engine asked for does not work there.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=".tiered-probe-", dir=directory)
    except OSError as error:
        hint = "io needs an existing directory in which files can be made"
        raise StorageError("open", str(directory), error.errno or errno.EIO, hint=hint) from error
    os.close(fd)
    path = Path(name)
    try:
        return _pick(path, engine, queue_depth, block_bytes)
    finally:
        path.unlink()


def _pick(path: Path, engine: str, queue_depth: int, block_bytes: int) -> ProbeResult:
    filesystem = _filesystem(path.parent)
    alignment = 0 if filesystem in _IN_MEMORY else _direct_alignment(path)
    names = [engine] if engine != "auto" else list(_ORDER) if _native.available() else ["aiofiles"]
    buffered_names = [name for name in names if name != "libaio" or engine == "libaio"]
    candidates = [(name, True) for name in names if alignment] + [(name, False) for name in buffered_names]

    remarks: dict[str, None] = {} if _native.available() else {_native.unavailable_reason(): None}
    failure: TieredError | None = None
    for name, direct in candidates:
        try:
            verified = _verify(path, name, direct, queue_depth=queue_depth, block_bytes=block_bytes)
        except TieredError as error:
            failure = error
            remarks[str(error)] = None
            continue
        if direct:
            how = "with O_DIRECT"
        elif filesystem in _IN_MEMORY:
            how = f"buffered ({filesystem} keeps its bytes in memory)"
        else:
            how = f"buffered ({'O_DIRECT failed' if alignment else 'O_DIRECT is refused'})"
        reason = f"{path.parent}: {name} {how} on {filesystem}, {verified >> 10} KiB written and verified"
        reason = "; ".join([reason, *remarks])
        return ProbeResult(path.parent, name, direct, alignment if direct else 1, reason)
    assert failure is not None
    raise failure


def _verify(path: Path, name: str, direct: bool, *, queue_depth: int, block_bytes: int) -> int:
    """Moves a few blocks of random bytes out and back; how many bytes. Raises what went wrong."""
    block_bytes = max(min(block_bytes, _BLOCK_BYTES_MAX) // _GRAIN_BYTES, 1) * _GRAIN_BYTES
    total = block_bytes * min(queue_depth, _BLOCKS_MAX)
    written = _page_aligned(total)
    read = _page_aligned(total)
    written[:] = numpy.frombuffer(os.urandom(total), dtype=numpy.uint8)

    with ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        stack.callback(os.close, fd)
        engine = stack.enter_context(closing(open_engine(name, queue_depth)))
        for op, memory in ((IoOp.WRITE, written), (IoOp.READ, read)):
            requests = [
                IoRequest(op, fd, str(path), offset, memory.ctypes.data + offset, block_bytes, tag=offset)
                for offset in range(0, total, block_bytes)
            ]
            _move(engine, requests)
    if not numpy.array_equal(written, read):
        raise CorruptionError(f"{name} read other bytes than it wrote in {path.parent}")
    return total


def _move(engine: IoEngine, requests: Sequence[IoRequest]) -> None:
    accepted = engine.submit(requests)
    assert accepted == len(requests), "the engine is empty and deep enough"
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    while engine.in_flight:
        poll.poll()
        for completion in engine.reap():
            if completion.errno:
                raise completion.error()


def _direct_alignment(path: Path) -> int:
    """The smallest alignment of offset, size and address that O_DIRECT takes there; 0 where it takes none."""
    if sys.platform != "linux":
        return 0
    memory = memoryview(mmap.mmap(-1, _GRAIN_BYTES))
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return 0
    try:
        for alignment in _ALIGNMENTS:
            try:
                if os.pwritev(fd, [memory[:alignment]], alignment) == alignment:
                    return alignment
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise StorageError("write", str(path), error.errno or errno.EIO) from error
        return 0
    finally:
        os.close(fd)


def _page_aligned(nbytes: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    return numpy.frombuffer(mmap.mmap(-1, nbytes), dtype=numpy.uint8)


def _filesystem(directory: Path) -> str:
    """Its type: "ext4", "tmpfs", ..."""
    directory = directory.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if directory.is_relative_to(part.mountpoint)]
    innermost = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    return innermost.fstype if innermost else "an unknown file system"
