"""The store: extents, space, whose file it is, and what a bad directory or a full disk says."""

from __future__ import annotations

import errno
import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.errors import CapacityError, ClosedError, StorageError, UsageError
from tiered.tiers.nvme_store import HEADER_BYTES, Extent, FreeSpace, NvmeStore, free_disk_bytes

KIB, MIB = 1 << 10, 1 << 20


def open_store(*directories: Path, rank: int = 0, growth_bytes: int = MIB, alignment: int = 4096) -> NvmeStore:
    direct = dict.fromkeys(directories, False)
    return NvmeStore(directories, rank=rank, direct=direct, growth_bytes=growth_bytes, alignment=alignment)


def in_python(code: str, *arguments: object, shell: str = "") -> subprocess.Popen[str]:
    """Starts `code` in a new Python; `shell` runs before, in the same process."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# ---- extents


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40_000), st.integers(0, 99)), max_size=60),
    st.sampled_from([512, 4096, 8192]),
    st.integers(1, 2),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_any_sequence_keeps_extents_apart_and_space_bounded(
    tmp_path: Path, steps: list[tuple[int, int, int]], alignment: int, directory_count: int
) -> None:
    growth = 64 * KIB
    directories = [tmp_path / str(i) for i in range(directory_count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    store = open_store(*directories, growth_bytes=growth, alignment=alignment)
    held: list[Extent] = []
    highest = [max(HEADER_BYTES, alignment)] * directory_count
    for kind, nbytes, pick in steps:
        if kind < 2 or not held:
            extent = store.allocate(nbytes)
            assert nbytes <= extent.nbytes < nbytes + alignment
            assert extent.offset % alignment == extent.nbytes % alignment == 0
            assert extent.offset >= max(HEADER_BYTES, alignment)
            for other in held:
                apart = other.file != extent.file or (
                    extent.offset + extent.nbytes <= other.offset or other.offset + other.nbytes <= extent.offset
                )
                assert apart, (extent, other)
            held.append(extent)
            highest[extent.file] = max(highest[extent.file], extent.offset + extent.nbytes)
        else:
            store.free(held.pop(pick % len(held)))
        store.check()
        statistics = store.statistics()
        assert statistics.extents == len(held)
        assert statistics.allocated_bytes == sum(extent.nbytes for extent in held)
        assert statistics.reserved_bytes <= sum(highest) + growth * directory_count
        on_disk = [os.fstat(store.fd(file)) for file in range(directory_count)]
        assert sum(entry.st_size for entry in on_disk) == statistics.reserved_bytes
        assert all(entry.st_blocks * 512 >= entry.st_size for entry in on_disk), "not really reserved"
    store.close()
    assert not [path for directory in directories for path in directory.iterdir()]


def test_freed_space_is_reused_and_neighbours_join(tmp_path: Path) -> None:
    with closing_store(tmp_path, growth_bytes=4096) as store:
        extents = [store.allocate(8192) for _ in range(4)]
        reserved = store.statistics().reserved_bytes
        for index in (0, 2, 1):
            store.free(extents[index])
        assert store.allocate(3 * 8192) == Extent(0, extents[0].offset, 3 * 8192)
        assert store.statistics().reserved_bytes == reserved


def test_the_smallest_hole_is_taken() -> None:
    space = FreeSpace()
    space.grow(100)
    assert [space.take(n) for n in (30, 10, 20, 10, 30)] == [0, 30, 40, 60, 70]
    space.give(0, 30)
    space.give(40, 20)
    assert space.missing(20) == 0 and space.take(20) == 40
    assert space.missing(31) == 31
    space.give(70, 30)
    assert space.missing(40) == 10, "the free tail counts"
    assert space.missing(30) == 0


def test_bytes_go_where_the_least_is_allocated(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    with closing_store(first, second) as store:
        files = [store.allocate(nbytes).file for nbytes in (64 * KIB, 16 * KIB, 16 * KIB, 64 * KIB, 4 * KIB)]
        assert files == [0, 1, 1, 1, 0]
        assert Path(store.path(0)).parent == first and Path(store.path(1)).parent == second


def test_freeing_twice_or_what_was_never_given_raises(tmp_path: Path) -> None:
    with closing_store(tmp_path) as store:
        extent = store.allocate(100)
        store.free(extent)
        for wrong in (extent, Extent(0, 0, 4096)):
            with pytest.raises(UsageError, match="not handed out"):
                store.free(wrong)
        other = store.allocate(100)
        with pytest.raises(UsageError, match="not handed out"):
            store.free(other._replace(nbytes=8192))
        with pytest.raises(ValueError, match="at least one byte"):
            store.allocate(0)


def test_bytes_written_come_back_direct_and_buffered(tmp_path: Path) -> None:
    page = mmap.mmap(-1, 8192)
    for direct in (False, True):
        try:
            store = NvmeStore([tmp_path], rank=0, direct={tmp_path: direct})
        except StorageError as error:
            assert direct and error.errno == errno.EINVAL and "buffered" in str(error)
            continue
        extent = store.allocate(8192)
        page[:] = random.Random(direct).randbytes(8192)
        expected = bytes(page)
        assert os.pwritev(store.fd(extent.file), [page], extent.offset) == 8192
        page[:] = bytes(8192)
        assert os.preadv(store.fd(extent.file), [page], extent.offset) == 8192
        assert bytes(page) == expected
        store.close()


# ---- whose file it is


def test_header_says_whose_file_it_is(tmp_path: Path) -> None:
    with closing_store(tmp_path, rank=3) as store:
        page = Path(store.path(0)).read_bytes()[:HEADER_BYTES]
        magic, text = page.split(b"\n", 1)
        about = json.loads(text.rstrip(b"\0"))
        assert magic == b"tiered store"
        assert about["pid"] == os.getpid() and about["rank"] == 3 and about["version"] == 1
        assert about["host"] == os.uname().nodename
        assert "rank3" in Path(store.path(0)).name


RUN = """
    import sys
    from pathlib import Path
    from tiered.tiers.nvme_store import NvmeStore
    directory = Path(sys.argv[1])
    store = NvmeStore([directory], rank=0, direct={directory: False})
    store.allocate(3 << 20)
    print(store.path(0), flush=True)
    sys.stdin.read()
"""


def test_live_files_stay_and_those_of_killed_runs_go(tmp_path: Path) -> None:
    run = in_python(RUN, tmp_path)
    assert run.stdout is not None
    theirs = run.stdout.readline().strip()
    with closing_store(tmp_path) as store:
        assert store.removed == []
    assert [str(path) for path in tmp_path.iterdir()] == [theirs]
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert Path(theirs).stat().st_size > 3 * MIB, "the killed run left its file"
    with closing_store(tmp_path) as store:
        assert store.removed == [theirs]
        assert [str(path) for path in tmp_path.iterdir()] == [store.path(0)]
    assert not list(tmp_path.iterdir())


def test_many_runs_leave_no_file_and_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        with closing_store(tmp_path, growth_bytes=4096) as store:
            store.allocate(4096)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not list(tmp_path.iterdir())


def test_relative_directory_survives_a_change_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing_store(Path()) as store:
        assert Path(store.path(0)).is_absolute()
        monkeypatch.chdir("/")
    assert not list(tmp_path.iterdir())


def test_a_run_that_forgets_to_close_leaves_nothing(tmp_path: Path) -> None:
    run = in_python(RUN, tmp_path)
    out, _ = run.communicate("")
    assert run.returncode == 0 and out.strip().startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_forked_child_does_not_take_the_files_away(tmp_path: Path) -> None:
    code = """
        import os
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            store.check()
            print(Path(store.path(0)).exists())
    """
    start = textwrap.dedent(RUN).replace("sys.stdin.read()\n", "")
    out, _ = in_python(start + textwrap.dedent(code), tmp_path).communicate()
    assert out.split()[-1] == "True"
    assert not list(tmp_path.iterdir())


def test_only_our_own_kind_of_file_is_removed(tmp_path: Path) -> None:
    with closing_store(tmp_path) as store:
        header = Path(store.path(0)).read_bytes()[:HEADER_BYTES]
    about = json.loads(header.split(b"\n", 1)[1].rstrip(b"\0"))

    def page(**changes: object) -> bytes:
        return b"tiered store\n" + json.dumps(about | changes).encode() + b"\0" * 100

    elsewhere = {"host": "elsewhere", "boot": "another"}
    contents = {
        "empty": b"",  # another run may have made it this very moment
        "foreign": b"something else entirely",
        "broken": b"tiered store\n{",
        "list": b"tiered store\n[1]",
        "another-machine": page(**elsewhere),
        "container": page(host="elsewhere"),
        "rebooted": page(boot="another"),
        "newer-layout": page(version=99),
    }
    for name, content in contents.items():
        (tmp_path / f"tiered-rank0-{name}.store").write_bytes(content)
    (tmp_path / "mine.store").write_bytes(header)
    (tmp_path / "tiered-rank0-link.store").symlink_to(tmp_path / "mine.store")
    (tmp_path / "tiered-rank0-folder.store").mkdir()
    os.mkfifo(tmp_path / "tiered-rank0-pipe.store")
    with closing_store(tmp_path) as store:
        gone = [re.sub(r".*tiered-rank0-|\.store", "", path) for path in store.removed]
    assert gone == ["container", "newer-layout", "rebooted"]
    assert (tmp_path / "mine.store").exists() and len(list(tmp_path.iterdir())) == len(contents) - 3 + 4


def start_and_stop(directory: Path, seed: int) -> None:
    """Many short runs; some end without closing. Exits with 1 if a file vanished under a live run."""
    dice = random.Random(seed)
    kept = []
    for _ in range(30):
        store = open_store(directory, rank=seed, growth_bytes=4096)
        store.allocate(4096)
        if not Path(store.path(0)).exists():
            os._exit(1)
        if dice.random() < 0.7:
            store.close()
        else:
            kept.append(store)
    os._exit(0 if all(Path(store.path(0)).exists() for store in kept) else 1)


def test_runs_that_start_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=start_and_stop, args=(tmp_path, seed)) for seed in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0] * 4
    with closing_store(tmp_path) as store:
        assert len(store.removed) == len(set(store.removed))
    assert not list(tmp_path.iterdir())


# ---- what goes wrong


@contextmanager
def closing_store(*directories: Path, rank: int = 0, growth_bytes: int = MIB) -> Iterator[NvmeStore]:
    store = open_store(*directories, rank=rank, growth_bytes=growth_bytes)
    try:
        yield store
    finally:
        store.close()
        store.close()


def test_closed_store_has_no_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    for act in (lambda: store.allocate(1), lambda: store.fd(0), store.check):
        with pytest.raises(ClosedError):
            act()


@pytest.mark.parametrize(("kind", "number"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_bad_directory_is_named_and_the_good_one_stays_clean(tmp_path: Path, kind: str, number: int) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    if kind == "file":
        bad.write_text("")
    with pytest.raises(StorageError) as caught:
        open_store(good, bad)
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", str(bad), number)
    assert not list(good.iterdir())


def test_directory_name_beyond_the_limit_is_an_early_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        open_store(tmp_path / ("x/" * 2040))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_directory_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        with mounted(tmp_path, "tmpfs", "ro") as place, pytest.raises(StorageError) as caught:
            open_store(place)
        assert caught.value.errno == errno.EROFS
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(StorageError) as caught:
            open_store(tmp_path)
        assert caught.value.errno == errno.EACCES


@contextmanager
def mounted(tmp_path: Path, *how: str) -> Iterator[Path]:
    """A small file system: ("tmpfs", options), or ("ext4",) of 16 MiB over a loop device."""
    place, image = tmp_path / "mounted", tmp_path / "image"
    place.mkdir()
    if how[0] == "ext4":
        with image.open("wb") as file:
            file.truncate(16 * MIB)
        commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(place)]]
    else:
        commands = [["mount", "-t", "tmpfs", "-o", how[1], "tmpfs", str(place)]]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("how", [("ext4",), ("tmpfs", "size=16M")], ids=["ext4", "tmpfs"])
def test_full_disk_names_need_free_bytes_and_path(tmp_path: Path, how: tuple[str, ...]) -> None:
    with mounted(tmp_path, *how) as place, closing_store(place, growth_bytes=32 * MIB) as store:
        extent = store.allocate(4 * MIB)  # a whole step has no room; this has
        before = store.statistics()
        free = free_disk_bytes([place])
        with pytest.raises(CapacityError) as caught:
            store.allocate(20 * MIB)
        text = str(caught.value)
        assert "20 MiB" in text and store.path(0) in text and "are free there" in text
        assert free - free_disk_bytes([place]) < 64 * KIB, "a failed reservation gives back what it took"
        assert store.statistics() == before
        store.check()
        store.free(extent)
        assert store.allocate(4 * MIB) == extent


def test_a_full_directory_leaves_the_work_to_the_other(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    with mounted(tmp_path, "tmpfs", "size=1M") as small, closing_store(small, large) as store:
        assert [store.allocate(600 * KIB).file for _ in range(4)] == [0, 1, 1, 1]


def test_disk_too_full_for_a_header(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=64k") as place:
        (place / "filler").write_bytes(bytes(64 * KIB))
        with pytest.raises(CapacityError, match="header of"):
            open_store(place)
        assert [path.name for path in place.iterdir()] == ["filler"]


def test_file_size_limit_is_a_capacity_error(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from tiered.errors import CapacityError
        from tiered.tiers.nvme_store import NvmeStore
        directory = Path(sys.argv[1])
        store = NvmeStore([directory], rank=0, direct={directory: False})
        store.allocate(1 << 20)
        try:
            store.allocate(8 << 20)
        except CapacityError as error:
            store.check()
            print(error, store.statistics().allocated_bytes)
    """
    limit = f"ulimit -f {4 * MIB // 512}"  # in blocks of 512 bytes
    out, _ = in_python(code, tmp_path, shell=limit).communicate()
    assert "8 MiB" in out and "File too large" in out and out.strip().endswith(str(MIB))


def test_file_cut_short_is_found_with_both_sizes(tmp_path: Path) -> None:
    with closing_store(tmp_path) as store:
        store.allocate(100)
        expected = store.statistics().reserved_bytes
        os.truncate(store.path(0), 5000)
        with pytest.raises(StorageError) as caught:
            store.check(0)
        text = str(caught.value)
        assert store.path(0) in text and "5000" in text and str(expected) in text


def test_free_bytes_count_a_file_system_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    once, twice = free_disk_bytes([tmp_path]), free_disk_bytes([tmp_path, tmp_path / "a"])
    assert abs(twice - once) < once / 2


@pytest.mark.parametrize("alignment", [0, 3, 5000])
def test_impossible_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        open_store(tmp_path, alignment=alignment)
    with pytest.raises(ValueError, match="at least one directory"):
        open_store()
