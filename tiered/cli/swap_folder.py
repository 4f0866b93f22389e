"""A folder for one run's swap files, removed at its end; folders of runs that were killed are removed too.

A run holds a lock on its folder for as long as it lives. Who gets the lock of a folder knows its run is dead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.errors import ConfigError

PREFIX = "tiered-swap-"


@contextmanager
def swap_folder(parent: Path) -> Iterator[Path]:
    """A new folder below `parent`."""
    if not parent.is_dir():
        raise ConfigError(f"folder {parent} (flag --folder) is no directory: create it, or name another")
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_dead(folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_dead(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # gone, or not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(folder.iterdir()):  # an empty one may be about to be locked by its run
            shutil.rmtree(folder, ignore_errors=True)
            print(f"tiered: removed {folder}, left by a run that was killed", file=sys.stderr)
    except OSError:
        return  # its run is alive
    finally:
        os.close(lock)
