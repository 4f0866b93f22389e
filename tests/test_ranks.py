"""Several real ranks over gloo train as one process does on the joined batch, wherever the state lives.

Every test launches processes of its own, under a hard limit of time; `launch` fails when a rank does not end cleanly.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import tiered
from tests.support import (
    LM,
    MLP,
    Job,
    Result,
    assert_close,
    assert_nothing_left,
    assert_same_bits,
    free_port,
    launch,
    run_plain,
    run_tiered,
    shard_job,
    snapshot,
    steps_of,
)
from tiered import _native

ENGINES = ("io_uring", "libaio", "aiofiles") if _native.available() else ("aiofiles",)
ALL_ON_NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer_states": "nvme"}
SMALL: dict[str, Any] = {"host_memory": "2MiB", **ALL_ON_NVME}
DEVICE = {"parameters": "device", "gradients": "device", "optimizer_states": "device"}
MIXED = {"parameters": "host", "optimizer_states": "nvme", "gradients": "device", "host_memory": "4MiB"}

# 24 slots are fewer than this model's shards, also when it is divided between two ranks.
BIG = functools.partial(LM, layers=2, width=120)


class Odd(nn.Module):
    """An MLP with parameters smaller than any world: a pair, a single element, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.pair = nn.Parameter(torch.ones(2))
        self.single = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scaled = torch.cat((x[:, :2] * self.pair, x[:, 2:] * self.single), dim=1)
        result: Tensor = self.inner(scaled) * self.scalar
        return result

    batch = staticmethod(MLP.batch)


def run_each(jobs: Sequence[Job], variants: Sequence[dict[str, Any]]) -> list[Result]:
    """On a rank: each job under each of the settings, one after another in one group."""
    results = []
    for job in jobs:
        for settings in variants:
            results.append(run_tiered(job, **settings))
            dist.barrier()
    return results


def assert_ranks_agree(by_rank: Sequence[Result]) -> Result:
    """All ranks see the same whole tensors; returns rank 0's with the losses of all averaged, as REF has them."""
    for other in by_rank[1:]:
        assert_same_bits(replace_losses(other, by_rank[0].losses), by_rank[0])
    mean = [sum(losses) / len(losses) for losses in zip(*(r.losses for r in by_rank), strict=True)]
    return replace_losses(by_rank[0], mean)


def replace_losses(result: Result, losses: list[float]) -> Result:
    return Result(losses, result.norms, result.weights, result.states, result.report)


def compare(ranks: int, jobs: Sequence[Job], variants: Sequence[dict[str, Any]], folder: Path) -> list[list[Result]]:
    """Launches; of each job all variants are equal to the bit to the first, which is the run in host memory."""
    results = launch(ranks, run_each, jobs, variants, folder=folder)
    merged = [assert_ranks_agree(by_rank) for by_rank in zip(*results, strict=True)]
    by_job = [merged[start : start + len(variants)] for start in range(0, len(merged), len(variants))]
    for first, *others in by_job:
        for other in others:
            assert_same_bits(other, first)
    return by_job


# ---- between the tiers, and against plain torch ----


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp32 computing in bf16"])
def test_tiers_at_two_ranks(tmp_path: Path, form: str) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    precision = {"compute_dtype": "bfloat16"} if "computing" in form else {}
    job = Job(factory=functools.partial(BIG, dtype=dtype), steps=20, clip=0.5)
    variants = [
        {},
        DEVICE,
        *(
            {"nvme": [nvme], "prefetch_units": n, "io_engine": name, **SMALL}
            for n, name in zip((0, 1, 4), ENGINES, strict=False)
        ),
        {"nvme": [nvme], "prefetch_units": 1, **SMALL, "host_memory": "64MiB"},
        {"nvme": [nvme], **MIXED},
    ]
    (results,) = compare(2, [job], [{**variant, **precision} for variant in variants], tmp_path)
    for result in results[2 : 2 + len(ENGINES)]:
        assert result.report is not None
        assert result.report.nvme_read_bytes > result.report.placement_bytes["nvme"]
    assert_nothing_left([nvme])
    if form == "fp32":
        # one process adds in another order, and this is what twenty steps make of it; five steps are tested below
        assert_close(results[0], run_plain(job), limit=1e-5, norm_limit=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"factory": Odd},
        {"factory": functools.partial(LM, tied=True)},
        {"factory": functools.partial(LM, experts=3)},
        {"factory": functools.partial(LM, reentrant=True), "freeze": "attention"},
        {"factory": functools.partial(LM, reentrant=False), "freeze": "attention"},
    ],
    ids=["odd", "tied", "experts", "reentrant", "checkpointed"],
)
def test_small_models(tmp_path: Path, ranks: int, changes: dict[str, Any]) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    job = Job(**changes, steps=5)
    ((result, *_),) = compare(ranks, [job], [{}, {"nvme": [nvme], **SMALL}, DEVICE], tmp_path)
    assert_close(result, run_plain(reference_of(job)))
    assert_nothing_left([nvme])


def reference_of(job: Job) -> Job:
    """REF for ranks: an expert that nobody used has a gradient of zeros, so it decays like the others."""
    if isinstance(job.factory, functools.partial) and "experts" in job.factory.keywords:
        return replace(job, factory=functools.partial(job.factory, idle_zeros=True))
    return job


@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_over_four_backwards(tmp_path: Path, ranks: int) -> None:
    """Case 1 and case 35: by torch's function and by the optimizer's the norm is REF's, and so are the weights."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    job = Job(factory=Odd, steps=5, backwards=4, clip=0.1)
    by_torch, by_optimizer = compare(
        ranks, [job, replace(job, clip_by="optimizer")], [{}, {"nvme": [nvme], **SMALL}], tmp_path
    )
    for result in (by_torch[0], by_optimizer[0]):
        assert_close(result, run_plain(job))


# ---- saving and loading between steps ----


def save_and_load(job: Job, settings: dict[str, Any], whole_tensors: bool) -> Result:
    """Three steps, everything out and into a fresh model with other weights, three steps more."""
    result = Result()
    with shard_job(job, **settings) as (model, optimizer):
        steps_of(model, optimizer, job, result)
        model_state, optimizer_state = out(model, whole_tensors), optimizer.state_dict()
        optimizer_state["state"] = {
            number: {key: plain(value, whole_tensors) for key, value in state.items()}
            for number, state in optimizer_state["state"].items()
        }
        model.load_state_dict(model_state)  # onto itself: changes nothing
        snapshot(model, optimizer, result)
    dist.barrier()
    with shard_job(replace(job, seed=1), **settings) as (model, optimizer):
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        steps_of(model, optimizer, job, result, first=job.steps)
        snapshot(model, optimizer, result)
    return result


def out(model: nn.Module, whole_tensors: bool) -> dict[str, Tensor]:
    return {name: plain(value, whole_tensors) for name, value in model.state_dict().items()}


def plain(tensor: Any, whole_tensors: bool) -> Tensor:
    """A copy in memory of a whole tensor, or of this rank's part as a DTensor."""
    if whole_tensors and isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    result: Tensor = tensor.detach().clone()
    return result


@pytest.mark.parametrize(
    ("ranks", "form", "whole_tensors"),
    [
        (2, "fp32", True),
        (3, "fp32", False),
        (2, "bf16", False),
        (3, "bf16", True),
        (3, "fp32 computing in bf16", True),
        (2, "fp32 computing in bf16", False),
    ],
)
def test_save_and_load_between_steps(tmp_path: Path, ranks: int, form: str, whole_tensors: bool) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    settings: dict[str, Any] = {"compute_dtype": "bfloat16"} if "computing" in form else {}
    settings.update(nvme=[nvme], **SMALL)
    job = Job(factory=functools.partial(LM, tied=True, dtype=dtype), steps=3)
    broken = assert_ranks_agree(launch(ranks, save_and_load, job, settings, whole_tensors, folder=tmp_path))
    ((unbroken,),) = compare(ranks, [replace(job, steps=6)], [settings], tmp_path)
    assert_same_bits(broken, unbroken)
    assert_nothing_left([nvme])


# ---- ranks that do not use the same parameters ----


class Routed(nn.Module):
    """MOE whose tokens choose their expert by number: token t goes to expert t % 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 12)
        self.layer = nn.ModuleDict({str(n): nn.Linear(12, 12) for n in range(3)})
        self.head = nn.Linear(12, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = x
        for number in range(3):
            mine = (tokens % 3 == number).nonzero(as_tuple=True)
            if len(mine[0]):
                y = y.index_put(mine, self.layer[str(number)](x[mine]))
        return functional.cross_entropy(self.head(functional.gelu(y)).flatten(0, 1), (tokens + 1).flatten() % 9)

    @staticmethod
    def batch(generator: torch.Generator, size: int) -> Tensor:
        """The first half goes to expert 0, the second to expert 1."""
        tokens = 3 * torch.randint(0, 3, (size, 5), generator=generator)
        tokens[size // 2 :] += 1
        return tokens


class RoutedEverywhere(Routed):
    """REF for ranks: an idle expert has a gradient of zeros, so that it decays as one that was used."""

    def forward(self, tokens: Tensor) -> Tensor:
        idle = sum(parameter.sum() * 0 for parameter in self.layer.parameters())
        result: Tensor = super().forward(tokens) + idle
        return result


def test_idle_experts(tmp_path: Path) -> None:
    """Case 9: rank 0 uses expert 0, rank 1 expert 1, nobody expert 2."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    job = Job(factory=Routed, steps=5)
    ((result, _),) = compare(2, [job], [{}, {"nvme": [nvme], **SMALL}], tmp_path)
    assert_close(result, run_plain(replace(job, factory=RoutedEverywhere)))


# ---- the group ----


def never_end() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_a_hang_is_noticed(tmp_path: Path) -> None:
    """Of the launcher itself: two ranks of which one never comes are a failure, and are gone afterwards."""
    with pytest.raises(AssertionError, match="did not end"):
        launch(2, never_end, folder=tmp_path, seconds=4)
    assert not multiprocessing.active_children()


SCRIPT = """
import os, sys, torch
from tests.support import MLP, Job, run_tiered
result = run_tiered(Job(factory=MLP, steps=3), nvme=[sys.argv[1]], host_memory="2MiB", parameters="nvme")
if os.environ["RANK"] == "0":
    torch.save(result, sys.argv[2])
"""


def test_group_from_the_environment(tmp_path: Path) -> None:
    """As under torchrun: nothing but the variables; tiered makes the group and takes it down."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(nvme), str(tmp_path / "result.pt")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(tiered.__file__).parents[1],
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    result = torch.load(tmp_path / "result.pt", weights_only=False)
    assert_close(result, run_plain(Job(factory=MLP, steps=3)))
    assert_nothing_left([nvme])


class Gated(nn.Module):
    """Two scalars, each used only where the batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.first = nn.Parameter(torch.ones(()))
        self.second = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, use_first: bool) -> Tensor:
        result: Tensor = self.layer(x) * (self.first if use_first else self.second)
        return result


def gated_scalars() -> list[float]:
    torch.manual_seed(0)
    model = tiered.shard(Gated)
    x = torch.arange(6.0).view(2, 3)[dist.get_rank()].unsqueeze(0)
    for _ in range(2):  # gradients of two backwards add up
        model(x, dist.get_rank() == 0).sum().backward()
    gradients = [model.first.grad.item(), model.second.grad.item()]
    tiered.engine(model).close()
    return gradients


def test_a_scalar_that_one_rank_did_not_use(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gated()
    for _ in range(2):
        for rank in range(2):
            x = torch.arange(6.0).view(2, 3)[rank].unsqueeze(0)
            (model(x, rank == 0).sum() / 2).backward()
    expected = [model.first.grad.item(), model.second.grad.item()]
    for gradients in launch(2, gated_scalars, folder=tmp_path):
        assert gradients == pytest.approx(expected, rel=1e-6)
