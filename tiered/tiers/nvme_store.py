"""Space on NVMe: one preallocated file per rank and directory, handed out as extents.

Owns offsets, padding and free space; moves no bytes and knows no tensor. Used from one thread.

[Note: whose file is it] A file's life is marked by a flock that its run holds:
    1. create a new, empty file under a random name;      2. lock it;
    3. write and sync the header page (machine, pid, rank);  4. reserve space; ...; 5. unlink, then unlock.
A later run removes a file only if its header is whole and from this machine *and* its lock can be had. The
header appears only under the lock, so such a file's run is dead, whatever other runs create or sweep at the
same moment; the kernel drops the lock of a killed process. Files without a header hold no bytes and are left
alone, and so are those of other machines, where a lock may not be seen from here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tiered.config import format_bytes
from tiered.errors import CapacityError, ClosedError, StorageError, UsageError

HEADER_BYTES = 4096
GROWTH_BYTES = 64 << 20

_MAGIC = b"tiered store\n"
_LAYOUT_VERSION = 1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Extent(NamedTuple):
    """A run of bytes in one file of the store: offset and size are multiples of the alignment."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoreStatistics:
    """Bytes handed out, bytes reserved on disk (headers included), extents handed out, and the files."""

    allocated_bytes: int
    reserved_bytes: int
    extents: int
    paths: tuple[str, ...]


class NvmeStore:
    """This rank's files, and who has which part of them.

    Args:
        directories: existing directories, best one per drive; extents go where the least is allocated.
        rank: named in the files, nothing more.
        direct: per directory, whether it takes O_DIRECT.
        alignment: of every extent's offset and size; a power of two.
        growth_bytes: the step in which files grow; a file never reserves more than its need plus this.

    Attributes:
        removed: paths of the files of dead runs that were found and removed at the start.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        rank: int,
        direct: Mapping[Path, bool],
        alignment: int = 4096,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        if not directories:
            raise ValueError("a store needs at least one directory")
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {alignment}")
        self._alignment = alignment
        self._growth_bytes = _round_up(max(growth_bytes, 1), alignment)
        self._extents: dict[tuple[int, int], int] = {}
        self._files: list[_File] = []
        # Also at garbage collection and at exit: a forgotten close() leaves no file behind.
        self._discard = weakref.finalize(self, _discard_files, self._files, os.getpid())
        self.removed: list[str] = []
        try:
            for directory in directories:
                self._files.append(_create(directory, rank))
            for directory in directories:
                self.removed += remove_dead_files(directory)
            for file, directory in zip(self._files, directories, strict=True):
                _write_header(file, rank, nbytes=_round_up(HEADER_BYTES, alignment))
                if direct[directory]:
                    file.fd = _open_direct(file.path)
        except BaseException:
            self._discard()
            raise

    def allocate(self, nbytes: int) -> Extent:
        """`nbytes`, rounded up to the alignment, really reserved; CapacityError if no disk has the room."""
        if nbytes < 1:
            raise ValueError(f"an extent needs at least one byte, not {nbytes}")
        need = _round_up(nbytes, self._alignment)
        refusals: list[str] = []
        for index in sorted(range(len(self._open_files())), key=lambda index: self._files[index].allocated_bytes):
            file = self._files[index]
            missing = file.space.missing(need)
            if missing and not self._grow(file, missing, refusals):
                continue
            extent = Extent(index, file.space.take(need), need)
            file.allocated_bytes += need
            self._extents[extent.file, extent.offset] = need
            return extent
        raise CapacityError(
            f"{format_bytes(need)} more are needed on NVMe, beyond the "
            f"{format_bytes(self.statistics().reserved_bytes)} reserved so far: " + "; ".join(refusals)
        )

    def free(self, extent: Extent) -> None:
        """Takes an extent back for later ones; the file keeps the space. Nothing may still move in it."""
        file = self._open_files()[extent.file]
        if self._extents.get((extent.file, extent.offset)) != extent.nbytes:
            raise UsageError(f"{extent} is not handed out: freed twice, or from another store")
        del self._extents[extent.file, extent.offset]
        file.allocated_bytes -= extent.nbytes
        file.space.give(extent.offset, extent.nbytes)

    def fd(self, file: int) -> int:
        """For reading and writing file number `file`; direct where its directory takes that."""
        return self._open_files()[file].fd

    def path(self, file: int) -> str:
        """Where file number `file` is, for messages."""
        return str(self._files[file].path)

    def check(self, file: int | None = None, *, tensor: str | None = None) -> None:
        """Raises StorageError, naming `tensor`, if the file, or any of them, is shorter than what is reserved in it."""
        for entry in self._open_files() if file is None else [self._open_files()[file]]:
            found = os.fstat(entry.lock_fd).st_size
            if found < entry.space.end:
                raise StorageError(
                    "check",
                    str(entry.path),
                    0,
                    offset=found,
                    nbytes=entry.space.end - found,
                    tensor=tensor,
                    hint=f"The file has {found} bytes, expected are {entry.space.end}; someone cut it short.",
                )

    def statistics(self) -> StoreStatistics:
        """Space handed out and reserved."""
        return StoreStatistics(
            allocated_bytes=sum(file.allocated_bytes for file in self._files),
            reserved_bytes=sum(file.space.end for file in self._files),
            extents=len(self._extents),
            paths=tuple(str(file.path) for file in self._files),
        )

    def close(self) -> None:
        """Removes the files. Nothing may still move in them. Idempotent."""
        self._discard()

    def _open_files(self) -> list[_File]:
        if not self._discard.alive:
            raise ClosedError("the store was closed; its files are gone")
        return self._files

    def _grow(self, file: _File, missing: int, refusals: list[str]) -> bool:
        """Reserves `missing` bytes at the end, better a whole step; False, and why, if there is no room."""
        for nbytes in sorted({missing, max(missing, self._growth_bytes)}, reverse=True):
            try:
                os.posix_fallocate(file.lock_fd, file.space.end, nbytes)
            except OSError as error:
                os.ftruncate(file.lock_fd, file.space.end)  # a failed reservation keeps what it got
                if error.errno not in _NO_SPACE:
                    number, offset = error.errno or errno.EIO, file.space.end
                    path = str(file.path)
                    raise StorageError("allocate", path, number, offset=offset, nbytes=nbytes) from error
                reason = os.strerror(error.errno or 0)
            else:
                file.space.grow(nbytes)
                return True
        refusals.append(f"{file.path} cannot grow by {format_bytes(missing)}: {reason}, {_free_text(file.path)}")
        return False


class FreeSpace:
    """The unused ranges of one file, sorted and coalesced; arithmetic only.

    Attributes:
        end: bytes reserved in the file, from its first byte on.
    """

    def __init__(self, end: int = 0) -> None:
        self.end = end
        self._holes: list[tuple[int, int]] = []  # (start, stop)

    def missing(self, nbytes: int) -> int:
        """How much the file must grow before `nbytes` fit; 0 when they do now."""
        if any(stop - start >= nbytes for start, stop in self._holes):
            return 0
        tail = self._holes[-1] if self._holes else (self.end, self.end)
        return nbytes - (tail[1] - tail[0] if tail[1] == self.end else 0)

    def grow(self, nbytes: int) -> None:
        """The file has `nbytes` more at its end."""
        self.end += nbytes
        self.give(self.end - nbytes, nbytes)

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` from the smallest hole that has them; there must be one."""
        start, stop = min(
            (hole for hole in self._holes if hole[1] - hole[0] >= nbytes),
            key=lambda hole: (hole[1] - hole[0], hole[0]),
        )
        index = bisect_left(self._holes, (start, stop))
        self._holes[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
        return start

    def give(self, offset: int, nbytes: int) -> None:
        """Adds a hole, and joins it with its neighbours."""
        start, stop = offset, offset + nbytes
        first = last = bisect_left(self._holes, (start, stop))
        if first and self._holes[first - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == stop:
            stop = self._holes[last][1]
            last += 1
        self._holes[first:last] = [(start, stop)]


@dataclass
class _File:
    path: Path
    lock_fd: int  # buffered: carries the flock, writes the header, reserves space
    fd: int  # for the data; the same as lock_fd where direct I/O is off
    space: FreeSpace = field(default_factory=FreeSpace)
    allocated_bytes: int = 0


def remove_dead_files(directory: Path) -> list[str]:
    """Removes the store files whose run on this machine is dead; returns their paths."""
    removed = []
    for path in sorted(directory.glob("tiered-rank*.store")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # gone by now, another user's, or no plain file
            continue
        try:
            if not _is_from_here(fd):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(str(path))
        except OSError:  # alive, or another sweeper was faster
            continue
        finally:
            os.close(fd)
    return removed


def free_disk_bytes(directories: Sequence[Path]) -> int:
    """Bytes that an ordinary user may still write there; directories of one file system count once."""
    systems = {directory.stat().st_dev: os.statvfs(directory) for directory in directories}
    return sum(system.f_bavail * system.f_frsize for system in systems.values())


def _create(directory: Path, rank: int) -> _File:
    """A new, empty, locked file; fails with the errno of a directory that is no good."""
    path = directory.absolute() / f"tiered-rank{rank}-{secrets.token_hex(6)}.store"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        hint = "NVMe space needs an existing directory that can be written."
        raise StorageError("open", str(directory), error.errno or errno.EIO, hint=hint) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        path.unlink()
        os.close(fd)
        raise StorageError("lock", str(path), error.errno or errno.EIO) from error
    return _File(path, lock_fd=fd, fd=fd)


def _write_header(file: _File, rank: int, *, nbytes: int) -> None:
    """Writes the header page, and reserves the first `nbytes` of the file for it."""
    about = {"version": _LAYOUT_VERSION, "rank": rank, "pid": os.getpid(), **_this_machine()}
    page = (_MAGIC + json.dumps(about).encode()).ljust(HEADER_BYTES, b"\0")
    try:
        os.posix_fallocate(file.lock_fd, 0, nbytes)  # so that the write cannot be a short one
        os.pwrite(file.lock_fd, page, 0)
        os.fdatasync(file.lock_fd)
        file.space.end = nbytes
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise CapacityError(
                f"{nbytes} bytes are needed for the header of {file.path}: {error.strerror}, {_free_text(file.path)}"
            ) from error
        number = error.errno or errno.EIO
        raise StorageError("write", str(file.path), number, offset=0, nbytes=nbytes) from error


def _is_from_here(fd: int) -> bool:
    """Whether the file has a header that was written on this machine, by any of its containers."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    page = os.pread(fd, HEADER_BYTES, 0)
    if not page.startswith(_MAGIC):
        return False
    try:
        about = json.loads(page[len(_MAGIC) :].rstrip(b"\0"))
    except ValueError:
        return False
    return isinstance(about, dict) and any(about.get(name) == value for name, value in _this_machine().items())


def _this_machine() -> dict[str, str]:
    """Two names of this machine: one lives through a restart, one is the same in every container."""
    names = {"host": socket.gethostname()}
    with suppress(OSError):
        names["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return names


def _discard_files(files: list[_File], owner: int) -> None:
    for file in files:
        if os.getpid() == owner:  # a forked child has these descriptors, but not the files
            with suppress(OSError):
                file.path.unlink()
        for fd in {file.fd, file.lock_fd}:
            os.close(fd)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        hint = "If the file system refuses O_DIRECT, use buffered I/O there."
        raise StorageError("open", str(path), error.errno or errno.EIO, hint=hint) from error


def _free_text(path: Path) -> str:
    return f"{format_bytes(free_disk_bytes([path.parent]))} are free there"


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
