"""How much memory there is, who needs it, and what this process holds.

Asks the kernel and answers; allocates nothing. The one setting it changes is `tune_malloc`.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tiered.config import format_bytes
from tiered.errors import CapacityError

EXACT_THRESHOLD_BYTES = 2 << 20

_UNLIMITED_V1 = 1 << 62  # cgroup v1 says "no limit" with the largest page-rounded number
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class HostLimits:
    """What the machine and this process's control group allow.

    Attributes:
        total_bytes: memory of the machine.
        available_bytes: what the machine can give without swapping.
        cgroup_limit_bytes: of the group among ours and its ancestors that has the least left, or None.
        cgroup_usage_bytes: what that group uses, less droppable file cache; 0 without one.
        memlock_bytes: how much may be locked in memory, or None for no limit.
    """

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_usage_bytes: int
    memlock_bytes: int | None


@dataclass(frozen=True)
class Need:
    """One line of a capacity table."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of this process, now and at its highest."""

    rss_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class MallocTuning:
    """What `tune_malloc` reached.

    Attributes:
        huge_pages: large tensors now come on huge pages.
        threshold_bytes: blocks at least this large go back to the system when freed; 0: not glibc, unknown.
    """

    huge_pages: bool
    threshold_bytes: int


def host_limits(root: Path = Path("/")) -> HostLimits:
    """The limits now. `root` is where /proc and /sys of control groups are looked for (tests)."""
    machine = psutil.virtual_memory()
    group = min(_groups(root), key=lambda group: group.limit - group.usage, default=None)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        total_bytes=machine.total,
        available_bytes=machine.available,
        cgroup_limit_bytes=group.limit if group else None,
        cgroup_usage_bytes=group.usage if group else 0,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
    )


def usable_host_bytes(limits: HostLimits | None = None) -> int:
    """What may still be allocated: the smaller of the machine's and the control group's remainder."""
    limits = limits or host_limits()
    if limits.cgroup_limit_bytes is None:
        return limits.available_bytes
    return max(0, min(limits.available_bytes, limits.cgroup_limit_bytes - limits.cgroup_usage_bytes))


def check_capacity(needs: Sequence[Need], available: int, *, what: str, smallest: int) -> None:
    """Raises CapacityError, with a table of who needs what, if `needs` exceed `available` bytes.

    `what` names the budget or place; `smallest` is the least of it that would do.
    """
    needed = sum(need.nbytes for need in needs)
    if needed <= available:
        return
    totals = [Need("needed", needed), Need("available", available), Need("missing", needed - available)]
    rows = [*needs, *totals]
    name_width = max(len(row.name) for row in rows)
    size_width = max(len(format_bytes(row.nbytes)) for row in rows)
    byte_width = max(len(str(row.nbytes)) for row in rows)
    lines = [
        f"  {row.name:<{name_width}}  {format_bytes(row.nbytes):>{size_width}}  ({row.nbytes:>{byte_width}} bytes)"
        for row in rows
    ]
    lines.insert(len(needs), "  " + "-" * (len(lines[0]) - 2))
    raise CapacityError(
        f"{what} is too small: {format_bytes(needed)} are needed, {format_bytes(available)} are there.\n"
        + "\n".join(lines)
        + f"\nThe smallest {what} that would do: {format_bytes(smallest)} ({smallest} bytes)."
    )


def process_memory(root: Path = Path("/")) -> ProcessMemory:
    """Resident memory of this process, from the kernel's own counters."""
    lines = (root / "proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    rss, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return ProcessMemory(rss_bytes=rss, peak_bytes=peak)


def tune_malloc(threshold_bytes: int = EXACT_THRESHOLD_BYTES) -> MallocTuning:
    """Makes large tensors on the CPU cheap to allocate and exact in memory. Call it before the first tensor.

    [Note: malloc and page faults] FSDP2 frees and makes every unsharded tensor anew. By default glibc maps
    and unmaps those above 32 MiB, one fault for every 4 KiB, and keeps those below in a heap that fragments.
    Two settings answer this:
    - torch advises huge pages for tensors of 2 MiB and more if THP_MEM_ALLOC_ENABLE is set in the environment
      at its first allocation in this process: 512 times fewer faults.
    - a *fixed* M_MMAP_THRESHOLD (and M_TRIM_THRESHOLD) of 2 MiB maps every such tensor by itself, so resident
      memory is what lives, to the page.
    Measured on a mix of units of 20 to 120 MiB and small tensors, 224 to 342 MiB alive at most (glibc 2.36,
    torch 2.13; peak resident memory over live bytes, and time over the default's):

        default                            1.3 to 2.3 x    1
        threshold 2 MiB                    1.0 x           1.0 to 1.15
        threshold 1 GiB                    up to 5 x       0.5 to 0.8
        huge pages                         1.1 to 1.6 x    0.35 to 0.8
        huge pages + threshold 2 MiB       1.0 x           0.4 to 0.65
        huge pages + threshold 256 MiB     1.3 to 2.5 x    0.3 to 0.4

    So a higher threshold buys the last third of the time with memory that no budget counts. It must be under
    2 GiB (older versions of glibc take no more than 32 MiB), and serves the main thread only: the heaps of
    other threads end at 64 MiB.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    taken = _mallopt(_M_MMAP_THRESHOLD, threshold_bytes) and _mallopt(_M_TRIM_THRESHOLD, threshold_bytes)
    return MallocTuning(huge_pages=_tensors_have_huge_pages(), threshold_bytes=threshold_bytes if taken else 0)


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(ctypes.c_int(option), ctypes.c_int(value)))
    except AttributeError:  # another C library
        return False


def _tensors_have_huge_pages() -> bool:
    nbytes = 16 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(nbytes, dtype=torch.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults < nbytes // resource.getpagesize() // 2  # its two ragged ends are on small pages


class _Group(NamedTuple):
    limit: int
    usage: int


class _Hierarchy(NamedTuple):
    """Where a kind of control group is mounted, and the names of its files."""

    mount: Path
    top: str  # the group that is visible at the mount point
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]  # fields of memory.stat


def _groups(root: Path) -> list[_Group]:
    """Every limited memory group that this process is in: its own and their ancestors, v1 and v2."""
    try:
        membership = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return []
    groups = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = _hierarchy(mounts, root, controllers.split(","))
        if hierarchy is None:
            continue
        # In a container the path may lead outside of what is mounted; then the mount point is our group.
        inside = Path(path).is_relative_to(hierarchy.top)
        group = hierarchy.mount / Path(path).relative_to(hierarchy.top) if inside else hierarchy.mount
        while group.is_relative_to(hierarchy.mount):
            groups += _read_group(group, hierarchy)
            group = group.parent
    return groups


def _hierarchy(mounts: str, root: Path, controllers: Sequence[str]) -> _Hierarchy | None:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        top, mount = before.split(" ")[3:5]
        place = root / mount.lstrip("/")
        if kind == "cgroup" and "memory" in controllers and "memory" in options.split(","):
            cache = ("total_inactive_file", "total_active_file")
            return _Hierarchy(place, top, ("memory.limit_in_bytes",), "memory.usage_in_bytes", cache)
        if kind == "cgroup2" and controllers == [""]:
            cache = ("inactive_file", "active_file")
            return _Hierarchy(place, top, ("memory.max", "memory.high"), "memory.current", cache)
    return None


def _read_group(group: Path, hierarchy: _Hierarchy) -> list[_Group]:
    """The group's tightest limit and its use, as a list of one; empty where it has no limit."""
    try:
        texts = [(group / name).read_text().strip() for name in hierarchy.limits]
        usage = int((group / hierarchy.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the top group of v2 has no such files
        return []
    limits = [int(text) for text in texts if text != "max" and int(text) < _UNLIMITED_V1]
    cache = sum(int(stat.get(name, 0)) for name in hierarchy.cache)
    return [_Group(min(limits), max(0, usage - cache))] if limits else []
