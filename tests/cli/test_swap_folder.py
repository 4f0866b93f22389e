"""The swap folder: gone after every end, and those of killed runs are found."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tiered.cli.swap_folder import PREFIX, swap_folder
from tiered.errors import ConfigError


def test_it_is_removed_at_the_end(tmp_path: Path) -> None:
    with swap_folder(tmp_path) as folder:
        (folder / "state").write_bytes(b"x")
        assert folder.parent == tmp_path
    with pytest.raises(RuntimeError), swap_folder(tmp_path) as folder:
        (folder / "state").write_bytes(b"x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_dead_ones_are_removed_and_live_ones_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead, live, other = (tmp_path / name for name in (f"{PREFIX}dead", f"{PREFIX}live", "other"))
    for folder in (dead, live, other):
        folder.mkdir()
        (folder / "state").write_bytes(b"x")
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with swap_folder(tmp_path):
        assert not dead.exists()
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == [other, live]
    assert str(dead) in capsys.readouterr().err


def test_two_runs_at_once(tmp_path: Path) -> None:
    with swap_folder(tmp_path) as one:
        (one / "state").touch()
        with swap_folder(tmp_path) as two:
            assert one != two
        assert (one / "state").exists()


def test_a_missing_parent_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--folder"), swap_folder(tmp_path / "missing"):
        pass
