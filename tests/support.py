"""Shared by the tests of whole runs: the models of CASES, a runner, comparisons, and a launcher of real ranks.

A `Job` says what is trained; `run_plain` trains it with torch alone (REF), `run_tiered` with tiered under the given
settings. Both return a `Result`: losses, norms, whole weights and whole states, comparable to the bit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiered
from tiered.report import Report

LAUNCH_SECONDS_MAX = 60
"""CASES: a hang is no end within 60 s."""

# ---- the models: each maps a batch to its mean loss, and says what a batch is ----


class MLP(nn.Module):
    """Linears 16 -> 33 -> 17 -> 8 with bias and GELU: nothing divides by 2."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = (16, 33, 17, 8)
        self.layers = nn.ModuleList(nn.Linear(n, m, dtype=dtype) for n, m in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.layers[0].weight.dtype)
        for i, layer in enumerate(self.layers):
            y = layer(y if i == 0 else functional.gelu(y))
        return (y.float() - x[:, :8]).square().mean()

    @staticmethod
    def batch(generator: torch.Generator, size: int) -> Tensor:
        return torch.randn(size, 16, generator=generator)


class Attention(nn.Module):
    """Causal; without bias, because a key's bias has a gradient of pure noise (CASES, noise trap)."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class Experts(nn.Module):
    """Top-1 router over whole experts. One without tokens takes no part in the graph; `idle_zeros` gives it zeros."""

    def __init__(self, width: int, experts: int, dtype: torch.dtype, *, idle_zeros: bool) -> None:
        super().__init__()
        self.idle_zeros = idle_zeros
        self.router = nn.Linear(width, experts, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width, dtype=dtype), nn.GELU(), nn.Linear(2 * width, width, dtype=dtype))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero(as_tuple=True)
            if len(mine[0]) or self.idle_zeros:
                y = y.index_put(mine, expert(x[mine]) * weights[mine].unsqueeze(-1))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int, dtype: torch.dtype, *, idle_zeros: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, dtype=dtype)
        self.attention = Attention(width, heads, dtype)
        self.norm2 = nn.LayerNorm(width, dtype=dtype)
        self.feed: nn.Module
        if experts:
            self.feed = Experts(width, experts, dtype, idle_zeros=idle_zeros)
        else:
            self.feed = nn.Sequential(
                nn.Linear(width, 2 * width + 1, dtype=dtype),
                nn.GELU(),
                nn.Linear(2 * width + 1, width, dtype=dtype),
            )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed(self.norm2(x))
        return result


class LM(nn.Module):
    """Transformer, vocabulary 37; `experts` makes it MOE, `tied` shares the head, `reentrant` checkpoints blocks."""

    def __init__(
        self,
        *,
        width: int = 12,
        layers: int = 2,
        heads: int = 3,
        tied: bool = False,
        experts: int = 0,
        idle_zeros: bool = False,
        reentrant: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(37, width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(width, heads, experts, dtype, idle_zeros=idle_zeros) for _ in range(layers))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, 37, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: Tensor = self.head(self.norm(x))
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(generator: torch.Generator, size: int) -> Tensor:
        return torch.randint(0, 37, (size, 7), generator=generator)


# ---- runs ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        factory: builds the model; picklable, so a class or a partial of one.
        steps, backwards: optimizer steps, and backwards for each.
        clip: norm to clip to; `clip_by` says how: "torch" (torch.nn.utils) or "optimizer".
        freeze: parameters whose name contains this are frozen.
        batch_size: of all ranks together.
        seed: of the initial weights.
        loss, batch: how a model that does not do so itself maps a batch to its loss, and makes one.
    """

    factory: Callable[[], nn.Module]
    steps: int = 20
    backwards: int = 1
    clip: float | None = None
    clip_by: str = "torch"
    freeze: str | None = None
    batch_size: int = 6
    lr: float = 1e-2
    weight_decay: float = 1e-2
    eps: float = 1e-4
    seed: int = 0
    loss: Callable[[Any, Tensor], Tensor] | None = None
    batch: Callable[[torch.Generator, int], Tensor] | None = None


@dataclass(slots=True)
class Result:
    """What a run came to; tensors are whole, ordinary and of the user's dtype."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    report: Report | None = None


def build_job(job: Job) -> nn.Module:
    """The job's model, plain."""
    torch.manual_seed(job.seed)
    return job.factory()


def freeze(model: nn.Module, job: Job) -> nn.Module:
    for name, parameter in model.named_parameters():
        if job.freeze is not None and job.freeze in name:
            parameter.requires_grad_(False)
    return model


def batch_of(model: Any, job: Job, step: int, micro: int) -> Any:
    """The whole batch of a micro-step; there are four different steps, so that losses fall."""
    generator = torch.Generator().manual_seed(1000 * (step % 4) + micro)
    return (job.batch or model.batch)(generator, job.batch_size)


def loss_of(model: Any, job: Job, batch: Tensor) -> Tensor:
    """The mean loss of one backward's share."""
    loss: Tensor = model(batch) if job.loss is None else job.loss(model, batch)
    return loss / job.backwards


def steps_of(model: Any, optimizer: torch.optim.Optimizer, job: Job, result: Result, *, first: int = 0) -> None:
    """Trains `job.steps` steps; batches depend on the number of the step only, and each rank takes its slice."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, first + job.steps):
        for micro in range(job.backwards):
            batch = batch_of(model, job, step, micro)
            loss = loss_of(model, job, batch.tensor_split(ranks)[rank])
            loss.backward()
            result.losses.append(float(loss.detach()))
        if job.clip is not None:
            if job.clip_by == "torch" or not isinstance(optimizer, tiered.Adam):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            else:
                norm = optimizer.clip_grad_norm_(job.clip)
            result.norms.append(float(whole(norm)))
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor as an ordinary one; a collective at several ranks."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.empty(full.shape, dtype=full.dtype).copy_(full.detach())


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, result: Result) -> None:
    """Writes whole weights and states into `result`."""
    for name, parameter in model.named_parameters():
        result.weights[name] = whole(parameter)
        result.states[name] = {key: whole(value) for key, value in optimizer.state.get(parameter, {}).items()}


def run_plain(job: Job) -> Result:
    """REF: the same in one process, plain torch."""
    result = Result()
    model = freeze(build_job(job), job)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=job.lr, eps=job.eps, weight_decay=job.weight_decay
    )
    steps_of(model, optimizer, job, result)
    snapshot(model, optimizer, result)
    return result


def run_masters(job: Job) -> Result:
    """REF for bf16: torch's AdamW on fp32 masters, whose bf16 rounding (half away from zero) the model computes with.

    The weights of the result are the masters; `job.factory` may build in fp32 or in bf16.
    """
    result = Result()
    model = freeze(build_job(job), job)
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [masters[name] for name in trained], lr=job.lr, eps=job.eps, weight_decay=job.weight_decay
    )

    @torch.no_grad()
    def round_masters() -> None:
        for name, parameter in model.named_parameters():
            bits = masters[name].view(torch.int32) + 0x8000
            parameter.copy_((bits & -0x10000).view(torch.float32))

    round_masters()
    for step in range(job.steps):
        for micro in range(job.backwards):
            loss = loss_of(model, job, batch_of(model, job, step, micro))
            loss.backward()
            result.losses.append(float(loss.detach()))
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    grad, parameter.grad = parameter.grad.float(), None
                    total = masters[name].grad
                    masters[name].grad = grad if total is None else total + grad
        if job.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_([masters[name] for name in trained], job.clip)
            result.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        round_masters()
    result.weights = masters
    return result


def run_tiered(job: Job, *, convert: bool = False, **settings: Any) -> Result:
    """The same with tiered; `convert` shards a finished module instead of a factory."""
    result = Result()
    with shard_job(job, convert=convert, **settings) as (model, optimizer):
        steps_of(model, optimizer, job, result)
        tiered.engine(model).synchronize()
        result.report = tiered.engine(model).report()
        snapshot(model, optimizer, result)
    return result


class shard_job:  # noqa: N801  (used as a function)
    """A context with the job's sharded model and optimizer; closes, and checks that nothing is left behind."""

    def __init__(self, job: Job, *, convert: bool = False, **settings: Any) -> None:
        torch.manual_seed(job.seed)
        build = lambda: freeze(job.factory(), job)  # noqa: E731
        self._directories = [Path(d) for d in settings.get("nvme", ())]
        self.model = tiered.shard(build() if convert else build, **settings)
        self.optimizer = tiered.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=job.lr,
            eps=job.eps,
            weight_decay=job.weight_decay,
        )

    def __enter__(self) -> tuple[Any, tiered.AdamW]:
        return self.model, self.optimizer

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        ranks = dist.get_world_size()
        tiered.engine(self.model).close()
        if error is None and ranks == 1:
            assert_nothing_left(self._directories)


def assert_nothing_left(directories: list[Path]) -> None:
    left = [path for directory in directories for path in directory.iterdir()]
    assert not left, f"left behind: {left}"


# ---- comparisons ----


def assert_same_bits(a: Result, b: Result) -> None:
    """Losses, norms, weights and states are equal to the bit."""
    assert a.losses == b.losses
    assert a.norms == b.norms
    _assert_same_tensors(a.weights, b.weights)
    assert a.states.keys() == b.states.keys()
    for name in a.states:
        _assert_same_tensors(a.states[name], b.states[name], name)


def _assert_same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor], what: str = "weight") -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, (what, name)
        same = torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        assert same, f"{what} {name} differs by {(a[name] - b[name]).abs().max().item():.3g}"


def assert_close(result: Result, reference: Result, *, limit: float = 1e-6, norm_limit: float = 1e-6) -> None:
    """CASES, "equal to REF": no weight differs by more than `limit`, no norm by more than `norm_limit` of itself."""
    assert result.weights.keys() == reference.weights.keys()
    for name, expected in reference.weights.items():
        difference = (result.weights[name].double() - expected.double()).abs().max().item()
        assert difference <= limit, f"{name} differs by {difference:.3g}"
    assert len(result.norms) == len(reference.norms)
    for norm, expected_norm in zip(result.norms, reference.norms, strict=True):
        assert abs(norm - expected_norm) <= norm_limit * expected_norm, f"norm {norm}, not {expected_norm}"


# ---- real ranks ----


def launch(
    ranks: int, work: Callable[..., Any], *args: Any, folder: Path, seconds: float = LAUNCH_SECONDS_MAX, **kwargs: Any
) -> list[Any]:
    """Runs `work(*args, **kwargs)` on `ranks` processes over gloo; the results, by rank.

    The group is there before `work` begins (a file store, no port). Fails when a rank raises, ends dirty, or when not
    all have ended in time; then none is left running.
    """
    store = folder / f"store-{time.monotonic_ns()}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support", "torch._dynamo"])  # what every rank would import
    answers = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, ranks, str(store), answers, work, args, kwargs), daemon=True)
        for rank in range(ranks)
    ]
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        while len(results) + len(errors) < ranks and time.monotonic() < deadline:
            if errors:
                deadline = min(deadline, time.monotonic() + 5)
            if answers.empty():
                time.sleep(0.01)
                if all(p.exitcode is not None for p in processes) and answers.empty():
                    break
                continue
            rank, path, error = answers.get()
            if error:
                errors[rank] = error
            else:
                results[rank] = torch.load(path, weights_only=False)
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    assert not errors, "\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items()))
    assert codes == [0] * ranks, f"exit codes {codes} after {seconds} s (None: did not end)"
    return [results[rank] for rank in range(ranks)]


def _rank_main(
    rank: int, ranks: int, store: str, answers: Any, work: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        result = work(*args, **kwargs)
        path = f"{store}.{rank}.pt"
        torch.save(result, path)
        dist.barrier()
        dist.destroy_process_group()
        answers.put((rank, path, ""))
    except BaseException:
        answers.put((rank, "", traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
