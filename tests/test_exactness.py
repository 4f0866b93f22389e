"""Moving bytes never changes a number: the same run, wherever its state lives, gives the same bits.

Every run here is compared with one in host memory (bits), and with plain torch by the rules of CASES ("equal to REF").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.support import (
    LM,
    MLP,
    Job,
    Result,
    assert_close,
    assert_same_bits,
    run_masters,
    run_plain,
    run_tiered,
)
from tiered.config import Config
from tiered.engine import Parts
from tiered.errors import ConfigError
from tiered.testing import SimulatedCopier, SimulatedIoEngine
from tiered.tiers.io.probe import open_engine

SMALL, LARGE = "2MiB", "64MiB"
"""Arenas: 24 slots, fewer than the 40 or more shards of the model below; and everything cached."""

ALL_ON_NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer_states": "nvme"}
ALL_ON_DEVICE = {"parameters": "device", "gradients": "device", "optimizer_states": "device"}
ENGINES = ("libaio", "io_uring", "aiofiles")

# Width 99 divides by nothing used here; a block's shards are cut in the middle of its parameters.
MODEL = functools.partial(LM, layers=2, width=99)
FORMS: dict[str, tuple[Job, dict[str, Any]]] = {
    "fp32": (Job(factory=MODEL), {}),
    "bf16": (Job(factory=functools.partial(MODEL, dtype=torch.bfloat16)), {}),
    "fp32 computing in bf16": (Job(factory=MODEL), {"compute_dtype": "bfloat16"}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.5, "clip_by": "torch"},
    "clip by the optimizer": {"clip": 0.5, "clip_by": "optimizer"},
    "three backwards": {"backwards": 3},
    "three backwards and clip": {"backwards": 3, "clip": 0.1},
    "frozen": {"freeze": "feed"},
}


@functools.cache
def in_host_memory(form: str, **changes: Any) -> Result:
    job, precision = FORMS[form]
    return run_tiered(replace(job, **changes), **precision)


def need_engine(name: str) -> None:
    try:
        open_engine(name, 1).close()
    except ConfigError as error:
        pytest.skip(str(error))


def on_nvme(folder: Path, job: Job, *, evicts: bool = True, **changes: Any) -> Result:
    """A run with everything on NVMe; an arena that `evicts` really had to read."""
    result = run_tiered(job, **{"nvme": [folder], "host_memory": SMALL, **ALL_ON_NVME, **changes})
    assert result.report is not None
    assert result.report.placement_bytes["host"] == result.report.placement_bytes["device"] == 0
    assert result.report.nvme_write_bytes > 0
    if evicts:
        assert result.report.nvme_read_bytes > result.report.placement_bytes["nvme"]
    return result


# ---- against plain torch ----


def test_fp32_equals_torch() -> None:
    job, _ = FORMS["fp32"]
    assert_close(in_host_memory("fp32"), run_plain(job))
    assert len(set(in_host_memory("fp32").losses)) == job.steps


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_variants_equal_torch(variant: str) -> None:
    """Norms of 80,000 elements, twenty times: torch's fp32 sum is itself off by some 1e-6."""
    job, _ = FORMS["fp32"]
    expected = run_plain(replace(job, **VARIANTS[variant]))
    assert_close(in_host_memory("fp32", **VARIANTS[variant]), expected, norm_limit=1e-5)


@pytest.mark.parametrize("form", ["bf16", "fp32 computing in bf16"])
@pytest.mark.parametrize("variant", ["clip", "three backwards", "frozen"])
def test_bf16_equals_torch_with_masters(form: str, variant: str) -> None:
    """One step closely; later a weight that is rounded the other way changes all that follows."""
    job, _ = FORMS[form]
    changes = {**VARIANTS[variant], "steps": 1}
    expected, got = run_masters(replace(job, **changes)), in_host_memory(form, **changes)
    assert got.losses == expected.losses
    for name, master in expected.weights.items():
        mine = got.states[name].get("master", got.weights[name])
        assert (mine.float() - master).abs().max() <= 1e-6, name
    changes["steps"] = 10
    expected, got = run_masters(replace(job, **changes)), in_host_memory(form, **changes)
    assert got.losses == pytest.approx(expected.losses, rel=2e-3)


# ---- between the tiers ----


@pytest.mark.parametrize("form", FORMS)
def test_device_equals_host(form: str) -> None:
    job, precision = FORMS[form]
    result = run_tiered(job, **precision, **ALL_ON_DEVICE)
    assert result.report is not None
    assert result.report.placement_bytes["host"] == 0 < result.report.placement_bytes["device"]
    assert_same_bits(result, in_host_memory(form))


@pytest.mark.parametrize("arena", [SMALL, LARGE])
@pytest.mark.parametrize("prefetch_units", [0, 1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_nvme_equals_host_fp32(tmp_path: Path, engine: str, prefetch_units: int, arena: str) -> None:
    need_engine(engine)
    job, _ = FORMS["fp32"]
    result = on_nvme(
        tmp_path, job, evicts=arena == SMALL, io_engine=engine, prefetch_units=prefetch_units, host_memory=arena
    )
    assert result.report is not None
    assert result.report.io_engine == engine
    assert_same_bits(result, in_host_memory("fp32"))


@pytest.mark.parametrize(
    ("engine", "prefetch_units", "arena"),
    [
        ("libaio", 0, SMALL),
        ("libaio", 4, SMALL),
        ("io_uring", 1, SMALL),
        ("io_uring", 0, LARGE),
        ("aiofiles", 4, SMALL),
        ("aiofiles", 1, LARGE),
    ],
)
@pytest.mark.parametrize("form", ["bf16", "fp32 computing in bf16"])
def test_nvme_equals_host_bf16(tmp_path: Path, form: str, engine: str, prefetch_units: int, arena: str) -> None:
    need_engine(engine)
    job, precision = FORMS[form]
    result = on_nvme(
        tmp_path,
        job,
        evicts=arena == SMALL,
        io_engine=engine,
        prefetch_units=prefetch_units,
        host_memory=arena,
        **precision,
    )
    assert_same_bits(result, in_host_memory(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_nvme_equal_host(tmp_path: Path, form: str, variant: str) -> None:
    changes = {**VARIANTS[variant], "steps": 5}
    job, precision = FORMS[form]
    result = on_nvme(tmp_path, replace(job, **changes), **precision)
    assert_same_bits(result, in_host_memory(form, **changes))


@pytest.mark.parametrize(
    "tiers",
    [
        {"parameters": "host", "optimizer_states": "nvme", "gradients": "device"},
        {"parameters": "nvme", "optimizer_states": "host", "gradients": "nvme", "host_memory": "8MiB"},
        {"parameters": "device", "optimizer_states": "nvme", "gradients": "host"},
        {"parameters": "nvme", "optimizer_states": "device", "gradients": "host"},
        {"host_memory": "3MiB"},  # all "auto": the plan divides between host and NVMe
    ],
    ids=lambda tiers: " ".join(tiers.values()),
)
@pytest.mark.parametrize("form", ["fp32", "fp32 computing in bf16"])
def test_mixed_tiers_equal_host(tmp_path: Path, form: str, tiers: dict[str, str]) -> None:
    changes = {"backwards": 2, "clip": 0.5, "steps": 5}
    job, precision = FORMS[form]
    result = run_tiered(replace(job, **changes), **{"nvme": [tmp_path], "host_memory": "4MiB", **tiers}, **precision)
    assert result.report is not None
    assert sum(nbytes > 0 for nbytes in result.report.placement_bytes.values()) >= 2
    assert_same_bits(result, in_host_memory(form, **changes))


def test_two_directories_equal_one(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    job, _ = FORMS["fp32"]
    result = run_tiered(job, nvme=folders, host_memory=SMALL, **ALL_ON_NVME)
    assert_same_bits(result, in_host_memory("fp32"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("convert", [False, True], ids=["factory", "module"])
def test_tied_head_on_nvme(tmp_path: Path, form: str, convert: bool) -> None:
    job, precision = FORMS[form]
    job = replace(job, factory=functools.partial(job.factory, tied=True), steps=5)
    assert_same_bits(on_nvme(tmp_path, job, convert=convert, **precision), run_tiered(job, **precision))


# ---- sizes that a direct transfer does not like ----


class Wide(nn.Module):
    """Two square linears, each larger than a slot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = functional.gelu(layer(y))
        return (y - x).square().mean()

    def batch(self, generator: torch.Generator, size: int) -> Tensor:
        return torch.randn(size, self.layers[0].in_features, generator=generator)


@pytest.mark.parametrize("width", [448, 449, 480, 576])
def test_widths_that_are_no_multiple_of_512_bytes(tmp_path: Path, width: int) -> None:
    job = Job(factory=functools.partial(Wide, width), steps=4, clip=0.1)
    host = run_tiered(job)
    # torch's fp32 norm of this many elements is itself off by some 1e-5
    assert_close(host, run_plain(job), norm_limit=3e-5)
    assert_same_bits(on_nvme(tmp_path, job), host)


# ---- disorder ----


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", FORMS)
def test_slow_reordered_short_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, seed: int) -> None:
    """Transfers arrive late, in another order and in pieces; slots are poisoned when they are given back."""

    parts = Parts(
        open_engine=lambda name, depth: SimulatedIoEngine(open_engine("aiofiles", depth), seed=seed),
        open_copier=lambda device: SimulatedCopier(seed=seed),
        poison=True,
    )
    changes = {"steps": 5, "backwards": 2, "clip": 0.5}
    job, precision = FORMS[form]
    result = on_nvme(
        tmp_path, replace(job, **changes), io_block_bytes="16KiB", io_queue_depth=4, _parts=parts, **precision
    )
    assert_same_bits(result, in_host_memory(form, **changes))


# ---- any model, any setting ----


def tier_settings() -> st.SearchStrategy[dict[str, str]]:
    tiers = st.sampled_from(["device", "host", "nvme", "auto"])
    return st.fixed_dictionaries(dict.fromkeys(ALL_ON_NVME, tiers))


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    factory=st.one_of(
        st.builds(
            functools.partial,
            st.just(LM),
            layers=st.integers(1, 3),
            heads=st.integers(1, 3),
            width=st.integers(1, 6).map(lambda n: 6 * n),
            tied=st.booleans(),
            experts=st.sampled_from([0, 3]),
            reentrant=st.sampled_from([None, True, False]),
        ),
        st.just(MLP),
    ),
    half=st.sampled_from([None, "built", "computed"]),
    backwards=st.integers(1, 3),
    clip=st.sampled_from([None, 0.1]),
    clip_by=st.sampled_from(["torch", "optimizer"]),
    freeze=st.sampled_from([None, "norm", "weight", "blocks.0"]),
    tiers=tier_settings(),
    prefetch_units=st.integers(0, 5),
    host_memory=st.sampled_from(["2MiB", "3MiB", "32MiB"]),
    io_block_bytes=st.sampled_from(["4KiB", "64KiB"]),
)
def test_any_run_equals_host(
    tmp_path_factory: pytest.TempPathFactory,
    factory: Callable[..., nn.Module],
    half: str | None,
    backwards: int,
    clip: float | None,
    clip_by: str,
    freeze: str | None,
    tiers: dict[str, str],
    **knobs: Any,
) -> None:
    if half == "built":
        factory = functools.partial(factory, dtype=torch.bfloat16)
    precision = {"compute_dtype": "bfloat16"} if half == "computed" else {}
    job = Job(factory=factory, steps=3, backwards=backwards, clip=clip, clip_by=clip_by, freeze=freeze)
    folder = tmp_path_factory.mktemp("nvme")
    result = run_tiered(job, **Config(nvme=[folder], **tiers, **knobs, **precision).model_dump())
    assert_same_bits(result, run_tiered(job, **precision))
