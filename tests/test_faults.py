"""One I/O request of a whole training run fails, each in turn: right numbers or a named error, and a clean end."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.tiers.swap_rig import open_descriptors, within
from tiered.engine import Parts
from tiered.plan.placement import Arena
from tiered.testing import SimulatedCopier, SimulatedIoEngine
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import open_engine

STEPS = 2


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 300), nn.GELU(), nn.Linear(300, 5))


class Run:
    """A short training run in a tiny arena over the simulated engine; every byte at home on NVMe."""

    def __init__(self, folder: Path, **script: Any) -> None:
        self.folder = folder
        self.script = script
        self.engine: SimulatedIoEngine | None = None
        self.copier = SimulatedCopier(seed=1)

    def open_engine(self, name: str, queue_depth: int) -> IoEngine:
        settings: dict[str, Any] = {"seed": 1, "retry_probability": 0.0, "short_probability": 0.0, **self.script}
        self.engine = SimulatedIoEngine(open_engine(name, queue_depth), **settings)
        return self.engine

    def train(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parts = Parts(
            open_engine=self.open_engine,
            open_copier=lambda device: self.copier,
            arena=Arena(4096, 12),
            poison=True,
        )
        config = tiered.Config(
            parameters="nvme",
            gradients="nvme",
            optimizer_states="nvme",
            nvme=[self.folder],
            host_memory="4MiB",
            io_engine="aiofiles",
        )
        model = tiered.shard(build, config, _parts=parts)
        try:
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                model(torch.randn(3, 9, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            tiered.engine(model).synchronize()
            return [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        finally:
            tiered.engine(model).close()


def resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), open_descriptors()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], int]:
    """The numbers of a run without faults, and how many requests it makes."""
    run = Run(tmp_path_factory.mktemp("right"))
    weights = run.train()
    assert run.engine is not None and run.copier.pending_max > 0
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(torch.randn(3, 9, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=0)
    statistics = run.engine.statistics()
    return weights, statistics.read_count + statistics.write_count


def outcome(folder: Path, script: Mapping[str, Any]) -> list[torch.Tensor] | tiered.StorageError:
    found: list[list[torch.Tensor] | tiered.StorageError] = []

    def body() -> None:
        try:
            found.append(Run(folder, **script).train())
        except tiered.StorageError as error:
            found.append(error)

    within(body)
    return found[0]


@pytest.mark.parametrize("fault", ["fails", "ends early"])
def test_every_single_request_may_fail(tmp_path: Path, right: tuple[list[torch.Tensor], int], fault: str) -> None:
    weights, requests = right
    before = resources()
    survived = 0
    for number in range(1, requests + 1, 1 if fault == "fails" else 4):
        script = {"fail_nth": {number: errno.EIO}} if fault == "fails" else {"early_end_nth": [number]}
        result = outcome(tmp_path, script)
        if isinstance(result, tiered.StorageError):
            assert result.op in ("read", "write")
            assert result.errno == (errno.EIO if fault == "fails" else 0)
            assert Path(result.path).parent == tmp_path
            assert result.offset is not None and result.offset % 4096 == 0 and result.nbytes
            assert result.tensor is not None and ("weight" in result.tensor or "bias" in result.tensor)
            for part in (result.op, result.path, str(result.offset), str(result.nbytes), result.tensor):
                assert part in str(result)
        else:
            survived += 1
            for ours, expected in zip(result, weights, strict=True):
                assert torch.equal(ours, expected), f"request {number} {fault}: wrong numbers, and no error"
        assert not list(tmp_path.iterdir())
    assert survived < requests // 4
    assert resources() == before


def test_latency_order_and_short_transfers_change_no_number(
    tmp_path: Path, right: tuple[list[torch.Tensor], int]
) -> None:
    for seed in range(4):
        noise = {"seed": seed, "latency_reaps_max": 8, "short_probability": 0.5, "retry_probability": 0.2}
        result = outcome(tmp_path, noise)
        assert isinstance(result, list), result
        assert all(torch.equal(a, b) for a, b in zip(result, right[0], strict=True))


def test_a_copier_without_fences_is_caught(tmp_path: Path, right: tuple[list[torch.Tensor], int]) -> None:
    """Proves that the tests above can fail: bytes that nobody waits for must show."""

    class Careless(SimulatedCopier):
        def copy_in(self, staged: torch.Tensor, source: torch.Tensor) -> None:
            super().copy_in(staged, source)

    run = Run(tmp_path)
    run.copier = Careless(seed=1)
    wrong: list[bool] = []

    def body() -> None:
        try:
            result = run.train()
            run.copier.check()
            wrong.append(not all(torch.equal(a, b) for a, b in zip(result, right[0], strict=True)))
        except (AssertionError, tiered.StorageError, tiered.ClosedError):
            wrong.append(True)

    within(body)
    assert wrong == [True]


def test_a_model_collected_on_the_mover_closes_all_the_same(tmp_path: Path) -> None:
    before = resources()
    model = tiered.shard(build, parameters="nvme", nvme=[tmp_path], host_memory="4MiB")
    manager = tiered.engine(model)._runtime.tools.manager
    gc.disable()
    try:
        del model
        manager._post(gc.collect)
        manager._mover.join(30)
    finally:
        gc.enable()
    assert not manager._mover.is_alive()
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()) or resources() != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
