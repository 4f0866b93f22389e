"""Faults that users of ZeRO-3 and offload systems met, each as a test of its right outcome.

Every test names its case and the thread it comes from. REF is plain torch in one process; ENG2 is two real ranks
over gloo. "Equal to REF" is 1e-6 in every weight after the run; between settings of ours it is to the bit. Cases 33
(lives) and 9 (idle experts) are in `test_lifecycle.py` and `test_ranks.py`. Repeats are scaled down to seconds.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered
from tests.support import (
    LM,
    MLP,
    Attention,
    Job,
    Result,
    assert_close,
    assert_same_bits,
    launch,
    run_plain,
    run_tiered,
    snapshot,
    whole,
)
from tiered.engine import Parts
from tiered.plan.placement import Arena
from tiered.testing import SimulatedCopier, SimulatedIoEngine
from tiered.tiers.copier import Fence
from tiered.tiers.io.probe import open_engine
from tiered.zero.units import local_tensor

TIERS = ("device", "host", "nvme")
EPS = 1e-4


def everything_on(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings that put parameters, gradients and states into one tier."""
    settings: dict[str, Any] = dict.fromkeys(("parameters", "gradients", "optimizer_states"), tier)
    if tier == "nvme":
        settings |= {"nvme": [folder], "host_memory": "4MiB"}
    return settings | more


def small_arena(**more: Any) -> Parts:
    """So little staging that a few thousand elements are cut into pieces, moved and evicted."""
    return Parts(arena=Arena(4096, 12), poison=True, **more)


def mine(batch: Tensor) -> Tensor:
    """This rank's part of a whole batch; all of it without ranks."""
    if not dist.is_initialized():
        return batch
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


def random_input(step: int, size: int = 6) -> Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(step))


def random_tokens(step: int, size: int = 4) -> Tensor:
    return torch.randint(0, 37, (size, 7), generator=torch.Generator().manual_seed(step))


Loop = Callable[[Any, torch.optim.Optimizer], None]


def reference(factory: Callable[[], nn.Module], loop: Loop, **hyper: Any) -> Result:
    """Runs `loop` with plain torch."""
    torch.manual_seed(0)
    model = factory()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{"lr": 1e-2, "eps": EPS, **hyper})
    loop(model, optimizer)
    result = Result()
    snapshot(model, optimizer, result)
    return result


def sharded(factory: Callable[[], nn.Module], loop: Loop, settings: dict[str, Any], **hyper: Any) -> Result:
    """Runs `loop` with tiered, on as many ranks as there are."""
    torch.manual_seed(0)
    model = tiered.shard(factory, **settings)
    with tiered.engine(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = tiered.AdamW(trained, **{"lr": 1e-2, "eps": EPS, **hyper})
        loop(model, optimizer)
        result = Result()
        snapshot(model, optimizer, result)
    return result


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# ---- numbers right ----


def _case_1(folder: Path, job: Job) -> list[Result]:
    return [run_tiered(job, **everything_on(tier, folder)) for tier in TIERS]


@pytest.mark.parametrize("clip_by", ["torch", "optimizer"])
def test_case_1_all_micro_batches_count(tmp_path: Path, clip_by: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/7967"""
    job = Job(factory=MLP, steps=1, backwards=4, clip=0.1, clip_by=clip_by, batch_size=8)
    expected = run_plain(job)
    for results in launch(2, _case_1, tmp_path, job, folder=tmp_path):
        for result in results:
            assert_close(result, expected)
            assert_same_bits(result, results[0])


class SleepyCopier(SimulatedCopier):
    """Sleeps up to 2 ms in a copy, at random."""

    def copy_out(self, target: Tensor, staged: Tensor) -> Fence | None:
        time.sleep(random.random() / 500)
        return super().copy_out(target, staged)

    def copy_in(self, staged: Tensor, source: Tensor) -> Fence | None:
        time.sleep(random.random() / 500)
        return super().copy_in(staged, source)


def _case_3(folder: Path, job: Job) -> list[Result]:
    results = []
    for seed, prefetch_units in ((0, 0), (1, 3), (2, 3), (3, 1)):
        parts = small_arena(
            open_engine=lambda name, depth, seed=seed: SimulatedIoEngine(open_engine(name, depth), seed=seed),
            open_copier=lambda device, seed=seed: SleepyCopier(seed=seed),
        )
        settings = everything_on("nvme", folder, prefetch_units=prefetch_units)
        results.append(run_tiered(job, _parts=parts, **settings))
    return results


def test_case_3_overlap_never_races(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5545"""
    job = Job(factory=MLP, steps=12, batch_size=4)
    expected = run_plain(job)
    for results in launch(2, _case_3, tmp_path, job, folder=tmp_path):
        for result in results:
            assert_same_bits(result, results[0])
            assert_close(result, expected)


def _case_4(folder: Path, job: Job) -> list[Result]:
    results = [run_tiered(job, **everything_on(tier, folder)) for tier in TIERS]
    for slot_bytes, slot_count, prefetch_bytes, io_block_bytes in (
        (4096, 12, 1, 4096),
        (4096, 12, 64, 4096),
        (4096, 40, 7000, 8192),
        (8192, 12, 1000, 4096),
        (1 << 20, 12, 1 << 20, 1 << 20),
    ):
        parts = Parts(arena=Arena(slot_bytes, slot_count), poison=True)
        more = {"prefetch_bytes": prefetch_bytes, "io_block_bytes": io_block_bytes, "host_memory": "16MiB"}
        results.append(run_tiered(job, _parts=parts, **everything_on("nvme", folder, **more)))
    return results


def test_case_4_sizes_of_buffers_do_not_decide(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6351"""
    job = Job(factory=LM, steps=3, batch_size=4)
    expected = run_plain(job)
    for results in launch(2, _case_4, tmp_path, job, folder=tmp_path):
        for result in results:
            assert_same_bits(result, results[0])
            assert_close(result, expected)


# ---- order of execution ----


class SpeakingLM(LM):
    """Generates through its forward, as users' models do."""

    def forward(self, tokens: Tensor, generate: bool = False) -> Tensor:
        return self.logits(tokens) if generate else super().forward(tokens)


def _generate(model: Any, tokens: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens, generate=True)[:, -1:].argmax(-1)], dim=1)
    return tokens


def _cycle(model: Any, optimizer: torch.optim.Optimizer, heard: list[Tensor], rates: list[float]) -> None:
    for cycle in range(2):
        if rates is not None and tiered_engine(model):
            tiered.engine(model).reset_report()
        for number in range(3):
            model(mine(random_tokens(10 * cycle + number))).backward()
            step(optimizer)
        if tiered_engine(model):
            report = tiered.engine(model).report()
            rates.append(report.prefetch_hits / max(1, report.prefetch_hits + report.prefetch_misses))
        with torch.no_grad():
            model(mine(random_tokens(77)))
        heard.append(_generate(model, random_tokens(5, 1)[:, :3], 5))
        with torch.no_grad():
            heard.append(model.blocks[1](torch.ones(1, 3, 12)))


def tiered_engine(model: nn.Module) -> bool:
    try:
        tiered.engine(model)
    except tiered.UsageError:
        return False
    return True


def _case_11(folder: Path) -> tuple[Result, list[Tensor], list[float], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    heard: list[Tensor] = []
    rates: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = everything_on("nvme", folder, _parts=Parts(arena=Arena(4096, 40)))
        result = sharded(SpeakingLM, lambda model, optimizer: _cycle(model, optimizer, heard, rates), settings)
    return result, heard, rates, lines + [str(w.message) for w in caught if "tiered" in str(w.message)]


def test_case_11_train_evaluate_generate_train(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5662"""
    heard: list[Tensor] = []
    expected = reference(SpeakingLM, lambda model, optimizer: _cycle(model, optimizer, heard, []))
    for result, ours, rates, lines in launch(2, _case_11, tmp_path, folder=tmp_path):
        assert_close(result, expected)
        for said, meant in zip(ours, heard, strict=True):
            torch.testing.assert_close(said, meant, atol=1e-5, rtol=0)
        assert rates[1] >= rates[0]
        assert len(lines) <= 1, lines


class Skipping(nn.Module):
    """Leaves its last layer out when told.

    At several ranks FSDP2 gives a parameter that no rank used a gradient of zeros; `zeros` makes REF do the same.
    """

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        self.zeros = zeros
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for layer in self.layers[:2] if skip else self.layers:
            x = torch.tanh(layer(x))
        if self.zeros:
            x = x + sum(parameter.sum() * 0 for parameter in self.layers[2].parameters())
        return x


def frozen_tower() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16)).requires_grad_(False)


def _two_models(a: Any, b: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        x = mine(random_input(number))
        y = a(x, skip=number % 3 == 1)
        (y - b(x) if b is not None else y).square().mean().backward()
        step(optimizer)


def _case_12(folder: Path) -> Result:
    torch.manual_seed(0)
    a = tiered.shard(Skipping, **everything_on("nvme", folder, _parts=small_arena()))
    b = tiered.shard(frozen_tower, **everything_on("nvme", folder, _parts=small_arena()))
    result = Result()
    with tiered.engine(a):
        optimizer = tiered.AdamW(a.parameters(), lr=1e-2, eps=EPS)
        with tiered.engine(b):
            _two_models(a, b, optimizer, 0, 5)
        _two_models(a, None, optimizer, 5, 8)
        snapshot(a, optimizer, result)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_case_12_two_models_in_one_process(tmp_path: Path, ranks: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3735"""
    torch.manual_seed(0)
    a, b = Skipping(zeros=ranks > 1), frozen_tower()
    optimizer = torch.optim.AdamW(a.parameters(), lr=1e-2, eps=EPS)
    _two_models(a, b, optimizer, 0, 5)
    _two_models(a, None, optimizer, 5, 8)
    expected = Result()
    snapshot(a, optimizer, expected)
    swap = tmp_path / "swap"
    swap.mkdir()
    for result in [_case_12(swap)] if ranks == 1 else launch(2, _case_12, swap, folder=tmp_path):
        assert_close(result, expected)


class Looping(nn.Module):
    """The same block three times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(16, 17)
        self.blocks = nn.ModuleList([nn.Linear(17, 17), nn.Linear(17, 17)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(3):
            x = torch.tanh(self.blocks[0](x))
        return self.blocks[1](x).square().mean()  # type: ignore[no-any-return]


def _two_forwards(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        (model(mine(random_input(number))) + model(mine(random_input(100 + number)))).backward()
        step(optimizer)


def _case_13(folder: Path) -> list[Result]:
    settings = everything_on("nvme", folder, _parts=small_arena())
    return [sharded(factory, _two_forwards, settings) for factory in (MLP, Looping)]


def test_case_13_two_forwards_and_one_backward_and_a_block_in_a_loop(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5321"""
    expected = [reference(factory, _two_forwards) for factory in (MLP, Looping)]
    for results in launch(2, _case_13, tmp_path, folder=tmp_path):
        for result, other in zip(results, expected, strict=True):
            assert_close(result, other)


class AdaptedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 3, torch.float32)
        self.adapter = nn.Sequential(nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.attention(y) + self.adapter(y)
        return result


class AdaptedLM(nn.Module):
    """Frozen norms and base, small trained adapters, checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList(AdaptedBlock(12) for _ in range(2))
        self.head = nn.Linear(12, 37, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]).requires_grad_()  # a reentrant checkpoint needs an input with a gradient
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def reentrant_lm() -> nn.Module:
    return AdaptedLM(True)


def plain_checkpoint_lm() -> nn.Module:
    return AdaptedLM(False)


def _adapt(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for number in range(4):
        model(mine(random_tokens(number))).backward()
        step(optimizer)


def _case_15(folder: Path) -> list[Result]:
    settings = everything_on("nvme", folder, _parts=small_arena())
    return [sharded(factory, _adapt, settings) for factory in (reentrant_lm, plain_checkpoint_lm)]


def test_case_15_checkpointing_with_frozen_weights(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/47254"""
    expected = reference(plain_checkpoint_lm, _adapt)
    for results in launch(2, _case_15, tmp_path, folder=tmp_path):
        for result in results:
            assert_close(result, expected)


# ---- files, disk, start-up ----


class OneLayer(nn.Module):
    """One linear layer and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - x[:, :8]).square().mean()  # type: ignore[no-any-return]

    @staticmethod
    def batch(generator: torch.Generator, size: int) -> Tensor:
        return MLP.batch(generator, size)


def _case_18(folder: Path, jobs: list[Job]) -> list[Result]:
    return [run_tiered(job, optimizer_states="nvme", nvme=[folder], host_memory="4MiB") for job in jobs]


@pytest.mark.parametrize("ranks", [1, 2])
def test_case_18_the_smallest_run_with_the_optimizer_on_nvme(tmp_path: Path, ranks: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4565"""
    jobs = [Job(factory=OneLayer, steps=3, clip=clip) for clip in (None, 0.1)]
    swap = tmp_path / "swap"
    swap.mkdir()
    answers = [_case_18(swap, jobs)] if ranks == 1 else launch(2, _case_18, swap, jobs, folder=tmp_path)
    for results in answers:
        for job, result in zip(jobs, results, strict=True):
            assert_close(result, run_plain(job))
    assert not list(swap.iterdir())


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        check=False,
    )


def allocated_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def test_case_19_files_of_a_killed_run_go_and_those_of_a_live_one_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/4416"""
    settings = everything_on("nvme", tmp_path)
    for _ in range(2):
        run_tiered(Job(factory=MLP, steps=1), **settings)
        assert not list(tmp_path.iterdir())
    killed = python(
        """
        import os, signal, sys
        import tiered
        from tests.support import MLP
        from tests.test_cases import everything_on, random_input
        model = tiered.shard(MLP, **everything_on("nvme", sys.argv[1]))
        optimizer = tiered.AdamW(model.parameters())
        model(random_input(0)).backward()
        optimizer.step()
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda p: os.kill(os.getpid(), signal.SIGKILL))
        model(random_input(1)).backward()
        """,
        tmp_path,
    )
    assert killed.returncode == -9, killed.stderr
    dead = list(tmp_path.iterdir())
    assert len(dead) == 1
    live = tiered.shard(MLP, **settings)
    alive = list(tmp_path.iterdir())
    with tiered.engine(live):
        assert len(alive) == 1 and alive != dead
        assert any(dead[0].name in record.getMessage() for record in caplog.records)
        one_run = allocated_bytes(tmp_path)
        caplog.clear()
        with tiered.engine(tiered.shard(MLP, **settings)):
            assert len(list(tmp_path.iterdir())) == 2
            assert allocated_bytes(tmp_path) <= 2 * one_run
        assert list(tmp_path.iterdir()) == alive
        live(random_input(0)).backward()
    assert not list(tmp_path.iterdir())


def test_case_20_a_file_that_cannot_grow_is_refused_at_the_start(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1627"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
    try:
        with pytest.raises(tiered.CapacityError) as caught:
            tiered.shard(lambda: nn.Linear(1024, 3000, bias=False), **everything_on("nvme", tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(caught.value)
    assert re.search(r"[0-9.]+ [KMG]iB.*needed.*free", str(caught.value)), caught.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept_bytes", [0, 5000, 30_000])
def test_case_20_a_file_that_is_cut_short_between_steps(tmp_path: Path, kept_bytes: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1627"""
    model = tiered.shard(lambda: nn.Linear(16, 1000), **everything_on("nvme", tmp_path, _parts=small_arena()))
    with tiered.engine(model):
        optimizer = tiered.AdamW(model.parameters())
        model(random_input(0)).square().mean().backward()
        step(optimizer)
        tiered.engine(model).synchronize()
        (file,) = tmp_path.iterdir()
        expected = file.stat().st_size
        os.truncate(file, kept_bytes)
        with pytest.raises(tiered.StorageError) as caught:
            for number in range(3):
                model(random_input(number)).square().mean().backward()
                step(optimizer)
        for part in (str(file), str(kept_bytes), str(expected), "weight"):
            assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


class Wide(nn.Module):
    """An embedding of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16_384, 1024)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).square().mean()  # type: ignore[no-any-return]


def test_case_21_one_tensor_larger_than_the_staging_memory(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3506"""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        tokens = torch.randint(0, 16_384, (100,), generator=torch.Generator().manual_seed(1))
        model(tokens).backward()
        step(optimizer)
        if tiered_engine(model):
            assert tiered.engine(model).report().host_arena_bytes <= 4 << 20

    settings = everything_on("nvme", tmp_path, host_memory="8MiB")
    ours = sharded(Wide, loop, settings).weights["embedding.weight"]
    expected = reference(Wide, loop).weights["embedding.weight"]
    assert (ours - expected).abs().max() <= 1e-6
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_case_23_without_direct_io_it_says_so_and_works(caplog: pytest.LogCaptureFixture) -> None:
    """https://github.com/LMCache/LMCache/issues/4386"""
    folder = Path("/dev/shm") / f"tiered-test-{os.getpid()}"
    folder.mkdir()
    try:
        job = Job(factory=MLP, steps=3)
        with caplog.at_level(logging.INFO, logger="tiered"):
            result = run_tiered(job, **everything_on("nvme", folder))
        assert_close(result, run_plain(job))
        assert sum("buffered" in record.getMessage() for record in caplog.records) == 1
        assert result.report is not None and "buffered" in result.report.io_reason
        assert not list(folder.iterdir())
    finally:
        folder.rmdir()


@pytest.mark.parametrize("place", ["missing", "a file", "read-only"])
def test_case_23_a_directory_that_is_no_good_is_refused_before_training(tmp_path: Path, place: str) -> None:
    """https://github.com/LMCache/LMCache/issues/4386"""
    folder = tmp_path / "swap"
    if place == "a file":
        folder.write_text("")
    elif place == "read-only" and os.geteuid() == 0:
        folder = Path("/proc/self")  # root may write where others may not
    elif place == "read-only":
        folder.mkdir(mode=0o500)
    with pytest.raises(tiered.StorageError) as caught:
        tiered.shard(MLP, **everything_on("nvme", folder))
    assert caught.value.errno
    assert str(folder) in str(caught.value) and str(caught.value.errno) in str(caught.value)


def test_case_24_without_the_compiled_part_it_works_and_says_so(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6920"""
    swap = tmp_path / "swap"
    swap.mkdir()
    ended = python(
        """
        import json, logging, sys
        sys.modules["tiered._tiered_native"] = None
        logging.basicConfig(level=logging.INFO)
        import tiered
        from tests.support import Job, assert_close, run_plain, run_tiered
        from tests.test_cases import OneLayer
        for clip in (None, 0.1):
            job = Job(factory=OneLayer, steps=3, clip=clip)
            result = run_tiered(job, optimizer_states="nvme", nvme=[sys.argv[1]], host_memory="4MiB")
            assert_close(result, run_plain(job))
        print(json.dumps([result.report.io_engine, result.report.io_reason]))
        """,
        swap,
    )
    assert ended.returncode == 0, ended.stderr
    engine, reason = json.loads(ended.stdout.splitlines()[-1])
    assert engine == "aiofiles" and "aiofiles" in reason
    assert "without its compiled part" in ended.stderr


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"host_memry": "4MiB"}, ("host_memry", "keyword argument", "host_memory", "bytes")),
        ({"optimizer": {"host_memory": "4MiB"}}, ("host_memory", "section [optimizer]", "top level")),
        ({"io_queue_depth": "many"}, ("io_queue_depth", "keyword argument", "whole number from 1")),
        ({"io_block_bytes": 0}, ("io_block_bytes", "keyword argument", "more than zero")),
    ],
)
def test_case_26_a_wrong_setting_is_explained_at_construction(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/2721 and https://github.com/deepspeedai/DeepSpeed/issues/8260"""
    with pytest.raises(tiered.ConfigError) as caught:
        tiered.shard(MLP, **values)
    for part in parts:
        assert part in str(caught.value)


# ---- life cycle ----


def initialised() -> nn.Module:
    """A model whose author initialises it after construction."""
    model = LM(tied=True)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.constant_(module.bias, 0.125)  # type: ignore[arg-type]

    model.apply(init)
    return model


@pytest.mark.parametrize("tier", TIERS)
def test_case_31_initialisation_after_construction_acts_on_the_real_values(tmp_path: Path, tier: str) -> None:
    """https://github.com/huggingface/transformers/pull/43847"""
    torch.manual_seed(0)
    expected = initialised()
    torch.manual_seed(0)
    model = tiered.shard(initialised, **everything_on(tier, tmp_path))
    with tiered.engine(model):
        for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs.detach()), name
        for name, parameter in model.named_parameters():  # and after sharding
            if name.endswith("bias"):
                nn.init.constant_(parameter, 0.5)
                assert torch.equal(whole(parameter), torch.full(parameter.shape, 0.5))


# ---- optimizer and user surface ----


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    layers = list(model.layers)  # type: ignore[arg-type]
    rates = ((1e-2, 0.1), (1e-3, 0.0), (0.0, 0.0))
    return [
        {"params": list(layer.parameters()), "lr": lr, "weight_decay": decay}
        for layer, (lr, decay) in zip(layers, rates, strict=True)
    ]


def _scheduled(model: Any, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    seen = []
    for number in range(5):
        model(mine(random_input(number))).backward()
        step(optimizer)
        scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


def _case_34(folder: Path) -> tuple[Result, list[list[float]]]:
    torch.manual_seed(0)
    result = Result()
    model = tiered.shard(MLP, **everything_on("nvme", folder))
    with tiered.engine(model):
        groups = _groups(model)
        optimizer = tiered.AdamW(groups, eps=EPS)
        rates = _scheduled(model, optimizer)
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            assert all(a is b for a, b in zip(group["params"], given["params"], strict=True))
        snapshot(model, optimizer, result)
    return result, rates


def test_case_34_groups_keep_their_rates_under_a_scheduler(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6873 and https://github.com/pytorch/ao/issues/959"""
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(_groups(model), eps=EPS)
    expected = Result()
    expected_rates = _scheduled(model, optimizer)
    snapshot(model, optimizer, expected)
    for result, rates in launch(2, _case_34, tmp_path, folder=tmp_path):
        assert rates == expected_rates
        assert_close(result, expected)


def _clipped(model: Any, optimizer: Any, *, by: str, norms: list[float]) -> None:
    for number in range(3):
        model(mine(random_input(number))).backward()
        for way in by.split("+"):
            if way == "torch" or not isinstance(optimizer, tiered.AdamW):
                norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))))
            else:
                norms.append(float(optimizer.clip_grad_norm_(0.1)))
        step(optimizer)


WAYS = ("torch", "ours", "torch+ours", "ours+torch")


def _case_35(folder: Path) -> list[Result]:
    results = []
    for by in WAYS:
        for tier in ("host", "nvme"):
            norms: list[float] = []
            loop = lambda model, optimizer, by=by, norms=norms: _clipped(model, optimizer, by=by, norms=norms)  # noqa: E731
            results.append(sharded(MLP, loop, everything_on(tier, folder)))
            results[-1].norms = norms
    return results


def test_case_35_both_ways_to_clip_and_both_together(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/148532"""
    expected = {}
    for by in WAYS:
        norms: list[float] = []
        loop = lambda model, optimizer, by=by, norms=norms: _clipped(model, optimizer, by=by, norms=norms)  # noqa: E731
        expected[by] = reference(MLP, loop)
        expected[by].norms = norms
    for results in launch(2, _case_35, tmp_path, folder=tmp_path):
        for number, by in enumerate(WAYS):
            host, nvme = results[2 * number : 2 * number + 2]
            assert_same_bits(host, nvme)
            assert_close(host, expected[by])


def _edit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for number in range(4):
        model(mine(random_input(number))).backward()
        step(optimizer)
        if number == 1:
            weight = model.layers[1].weight
            with torch.no_grad():
                weight.mul_(0.5)
                weight[:, 3:5].fill_(0.25)


def _case_36(folder: Path) -> tuple[Result, str]:
    said: list[str] = []

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        view = local_tensor(model.layers[1].weight).cell.gather_input()  # type: ignore[attr-defined]
        try:
            view[0] = 7.0
        except tiered.UsageError as error:
            said.append(str(error))
        _edit(model, optimizer)

    result = sharded(MLP, loop, everything_on("nvme", folder, _parts=small_arena()))
    return result, said[0]


def test_case_36_a_read_only_view_refuses_and_an_edit_lasts(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/7811"""
    expected = reference(MLP, _edit)
    for result, said in launch(2, _case_36, tmp_path, folder=tmp_path):
        assert "layers.1.weight" in said and "read-only" in said
        assert_close(result, expected)


def test_case_38_an_optimizer_made_before_sharding_is_refused() -> None:
    """https://github.com/huggingface/accelerate/issues/3770"""
    plain = MLP()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model: Any = tiered.shard(plain)
    with tiered.engine(model):
        model(random_input(0)).backward()
        with pytest.raises(tiered.UsageError, match=r"after tiered\.shard"):
            optimizer.step()


@pytest.mark.parametrize("tier", TIERS)
def test_case_38_a_plain_torch_optimizer_over_tiered_parameters_trains(tmp_path: Path, tier: str) -> None:
    """https://github.com/huggingface/accelerate/issues/3770"""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number in range(3):
            model(random_input(number)).backward()
            step(optimizer)

    torch.manual_seed(0)
    model = tiered.shard(MLP, **everything_on(tier, tmp_path))
    result = Result()
    with tiered.engine(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
        loop(model, optimizer)
        snapshot(model, optimizer, result)
    assert_close(result, reference(MLP, loop))
