"""Limits read from fake kernels, the capacity table, and what malloc tuning does to a real process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tiered.errors import CapacityError
from tiered.tiers.memory import (
    HostLimits,
    Need,
    check_capacity,
    host_limits,
    process_memory,
    usable_host_bytes,
)

GIB, MIB = 1 << 30, 1 << 20
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


def fake_root(root: Path, *, membership: str, mounts: str) -> Path:
    """A root directory with this process's control groups and mounts."""
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(membership)
    (process / "mountinfo").write_text(mounts)
    return root


def group_v2(group: Path, *, limit: str, usage: int, high: str = "max", stat: str = "anon 1\n") -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in {"max": limit, "high": high, "current": str(usage), "stat": stat}.items():
        (group / f"memory.{name}").write_text(f"{text}\n" if name != "stat" else text)


def group_v1(group: Path, *, limit: int, usage: int, stat: str = "") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (group / "memory.stat").write_text(stat)


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def limit_and_usage(root: Path) -> tuple[int | None, int]:
    limits = host_limits(root)
    return limits.cgroup_limit_bytes, limits.cgroup_usage_bytes


def test_v2_the_ancestor_with_the_least_left_counts(tmp_path: Path) -> None:
    root = fake_root(tmp_path, membership="0::/slice/job/step\n", mounts=V2_MOUNT)
    top = root / "sys/fs/cgroup"
    top.mkdir(parents=True)  # the top group has no memory files
    group_v2(top / "slice", limit=str(10 * GIB), usage=9 * GIB)
    group_v2(top / "slice/job", limit="max", usage=3 * GIB)
    group_v2(top / "slice/job/step", limit=str(4 * GIB), usage=1 * GIB)
    assert limit_and_usage(root) == (10 * GIB, 9 * GIB)


def test_v2_file_cache_is_not_in_the_way_and_the_soft_limit_is(tmp_path: Path) -> None:
    root = fake_root(tmp_path, membership="0::/\n", mounts=V2_MOUNT)
    stat = f"anon {MIB}\ninactive_file {600 * MIB}\nactive_file {100 * MIB}\n"
    group_v2(root / "sys/fs/cgroup", limit=str(2 * GIB), high=str(1 * GIB), usage=1 * GIB, stat=stat)
    assert limit_and_usage(root) == (1 * GIB, 1 * GIB - 700 * MIB)


def test_v1_nested_with_an_unlimited_child(tmp_path: Path) -> None:
    membership = "9:name=systemd:/\n4:memory:/outer/inner\n1:cpu:/\n0::/\n"
    root = fake_root(tmp_path, membership=membership, mounts=V1_MOUNTS)
    top = root / "sys/fs/cgroup/memory"
    group_v1(top, limit=NO_LIMIT_V1, usage=8 * GIB)
    stat = f"inactive_file 1\ntotal_inactive_file {200 * MIB}\n"
    group_v1(top / "outer", limit=3 * GIB, usage=2 * GIB, stat=stat)
    group_v1(top / "outer/inner", limit=NO_LIMIT_V1, usage=1 * GIB)
    assert limit_and_usage(root) == (3 * GIB, 2 * GIB - 200 * MIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/sub", "/../../elsewhere"])
def test_a_container_sees_its_group_at_the_mount_point(tmp_path: Path, path: str) -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = fake_root(tmp_path, membership=f"4:memory:{path}\n", mounts=mounts)
    group_v1(root / "sys/fs/cgroup/memory", limit=1 * GIB, usage=MIB)
    assert limit_and_usage(root) == (1 * GIB, MIB)


def test_no_control_groups_no_limit(tmp_path: Path) -> None:
    assert limit_and_usage(tmp_path) == (None, 0)
    root = fake_root(tmp_path, membership="4:memory:/a\n0::/\n", mounts="1 1 0:1 / / rw - ext4 /dev/x rw\n")
    assert limit_and_usage(root) == (None, 0)


def test_the_real_machine_answers() -> None:
    limits = host_limits()
    assert 0 < limits.available_bytes <= limits.total_bytes
    assert limits.memlock_bytes is None or limits.memlock_bytes >= 0
    assert 0 < usable_host_bytes() <= limits.total_bytes


@pytest.mark.parametrize(
    ("available", "limit", "usage", "usable"),
    [(100, None, 0, 100), (100, 60, 20, 40), (100, 600, 20, 100), (100, 60, 70, 0)],
)
def test_usable_is_the_smaller_remainder(available: int, limit: int | None, usage: int, usable: int) -> None:
    assert usable_host_bytes(HostLimits(1000, available, limit, usage, None)) == usable


def test_capacity_table_says_who_needs_what() -> None:
    needs = [Need("staging, 8 x 32 MiB", 256 * MIB), Need("gradients", 44 * MIB)]
    check_capacity(needs, 300 * MIB, what="host_memory", smallest=0)
    with pytest.raises(CapacityError) as caught:
        check_capacity(needs, 100 * MIB, what="host_memory", smallest=130 * MIB)
    expected = """\
        host_memory is too small: 300 MiB are needed, 100 MiB are there.
          staging, 8 x 32 MiB  256 MiB  (268435456 bytes)
          gradients             44 MiB  ( 46137344 bytes)
          -----------------------------------------------
          needed               300 MiB  (314572800 bytes)
          available            100 MiB  (104857600 bytes)
          missing              200 MiB  (209715200 bytes)
        The smallest host_memory that would do: 130 MiB (136314880 bytes)."""
    assert str(caught.value) == textwrap.dedent(expected)


def test_process_memory_follows_what_lives() -> None:
    before = process_memory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    during = process_memory()
    del block
    assert during.rss_bytes - before.rss_bytes > 48 * MIB
    assert during.peak_bytes >= during.rss_bytes - MIB


def test_process_memory_reads_the_kernels_fields(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx: y\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t1\n")
    memory = process_memory(tmp_path)
    assert (memory.rss_bytes, memory.peak_bytes) == (MIB, 2 * MIB)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_tuned_malloc_gives_every_large_tensor_back_at_once() -> None:
    code = """
        import json
        from tiered.tiers import memory
        tuning = memory.tune_malloc()
        import torch
        base = memory.process_memory().rss_bytes
        kept, tensors = [], []
        for _ in range(10):
            tensors.append(torch.ones(20 << 20, dtype=torch.uint8))
            kept.append(torch.ones(100))  # by default these hold the freed heap below them
        full = memory.process_memory().rss_bytes - base
        del tensors
        freed = memory.process_memory().rss_bytes - base
        print(json.dumps([tuning.threshold_bytes, full >> 20, freed >> 20]))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=True, text=True)
    threshold, full, freed = json.loads(run.stdout)
    assert threshold == 2 * MIB
    assert 195 <= full <= 215
    assert freed <= 10
