"""Engines and files for the I/O tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiers.io.harness import File
from tiered.errors import ConfigError
from tiered.testing import SimulatedIoEngine
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import ENGINES, open_engine


@pytest.fixture(params=[*ENGINES, "simulated"])
def make_engine(request: pytest.FixtureRequest) -> Callable[[int], contextlib.closing[IoEngine]]:
    """make_engine(queue_depth), a context manager: every engine that can work here, and the simulated one."""

    def make(queue_depth: int) -> contextlib.closing[IoEngine]:
        if request.param == "simulated":
            inner = open_engine("aiofiles", queue_depth)
            return contextlib.closing(SimulatedIoEngine(inner, seed=queue_depth))
        return contextlib.closing(open_engine(request.param, queue_depth))

    try:
        make(1).thing.close()
    except ConfigError as error:
        pytest.skip(str(error))
    return make


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[Callable[..., File]]:
    files: list[File] = []

    def make(content: bytes = b"", *, direct: bool = False) -> File:
        try:
            files.append(File(tmp_path / f"file{len(files)}", content, direct=direct))
        except OSError as error:
            pytest.skip(f"no O_DIRECT in {tmp_path}: {error}")
        return files[-1]

    yield make
    for file in files:
        os.close(file.fd)
