"""The probe finds out what works, says so in one line, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered.errors import ConfigError, CorruptionError, StorageError
from tiered.testing import SimulatedIoEngine
from tiered.tiers.io import probe as probe_module
from tiered.tiers.io.aiofiles_engine import AiofilesEngine
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import ENGINES, open_engine, probe


def try_probe(directory: Path, engine: str = "auto") -> probe_module.ProbeResult:
    return probe(directory, engine=engine, queue_depth=8, block_bytes=1 << 16)


def use(monkeypatch: pytest.MonkeyPatch, name: str, **faults: object) -> None:
    """Puts an engine with faults in the place of `name`."""

    def faulty(queue_depth: int) -> IoEngine:
        return SimulatedIoEngine(AiofilesEngine(queue_depth), seed=1, **faults)  # type: ignore[arg-type]

    monkeypatch.setitem(ENGINES, name, faulty)


def test_auto_picks_something_that_works(tmp_path: Path) -> None:
    result = try_probe(tmp_path)
    assert result.engine in ENGINES
    assert result.alignment == (1 if not result.direct else max(512, result.alignment))
    assert str(tmp_path) in result.reason
    assert result.engine in result.reason
    assert "\n" not in result.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_asked_for_is_used_or_refused(tmp_path: Path, name: str) -> None:
    try:
        open_engine(name, 8).close()
    except ConfigError:
        with pytest.raises(ConfigError, match=f'"{name}" cannot work here: .+'):
            try_probe(tmp_path, name)
    else:
        assert try_probe(tmp_path, name).engine == name
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'"libaoi" is unknown; .*"aiofiles".* did you mean "libaio"\?'):
        try_probe(tmp_path, "libaoi")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", ["auto", "aiofiles"])
def test_an_in_memory_file_system_is_buffered_and_says_so(shared_memory: Path, name: str) -> None:
    result = try_probe(shared_memory, name)
    assert not result.direct
    assert result.alignment == 1
    assert "buffered (tmpfs keeps its bytes in memory)" in result.reason


def test_a_file_system_without_o_direct_is_buffered_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return really_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    monkeypatch.setattr(probe_module, "_filesystem", lambda directory: "overlay")
    result = try_probe(tmp_path)
    assert not result.direct
    assert result.engine != "libaio"
    assert "buffered (O_DIRECT is refused) on overlay" in result.reason


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing") as caught:
        try_probe(tmp_path / "missing")
    assert (caught.value.op, caught.value.errno) == ("open", errno.ENOENT)
    assert caught.value.path == str(tmp_path / "missing")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError) as caught:
        try_probe(file)
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", str(file), errno.ENOTDIR)


def test_a_read_only_directory(shared_memory: Path) -> None:
    folder = shared_memory / "read-only"
    folder.mkdir(mode=0o555)
    user = os.geteuid()
    shared_memory.chmod(0o755)
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(StorageError) as caught:
            try_probe(folder)
    finally:
        os.seteuid(user)
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", str(folder), errno.EACCES)


def test_an_engine_that_corrupts_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "io_uring", corrupt_nth={2})
    assert "io_uring read other bytes than it wrote" in try_probe(tmp_path).reason
    assert try_probe(tmp_path).engine != "io_uring"
    with pytest.raises(CorruptionError, match="io_uring read other bytes"):
        try_probe(tmp_path, "io_uring")


def test_a_failing_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENGINES:
        use(monkeypatch, name, fail_nth={3: errno.EIO})
    for name in ("auto", "aiofiles"):
        with pytest.raises(StorageError) as caught:
            try_probe(tmp_path, name)
        assert (caught.value.op, caught.value.errno) == ("write", errno.EIO)
    assert list(tmp_path.iterdir()) == []
