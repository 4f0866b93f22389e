"""The training loop of `tiered train`: an ordinary one, with meters around it."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn

from tiered.cli import meters
from tiered.cli.learners import Learner
from tiered.cli.presets import Job, Preset
from tiered.cli.progress import Rates, TrainingProgress
from tiered.cli.summary import IN_MEMORY, Moved, State, Summary
from tiered.models.text import TextBatches, standard_library_text
from tiered.models.transformer import Transformer
from tiered.report import Report
from tiered.tiers.memory import process_memory

WARM_UP_STEPS = 10
LAST_FRACTION = 0.1  # of the learning rate, at the end
LAST_LOSSES = 10  # averaged, to judge a run


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, as far as it changes the numbers.

    Attributes:
        dtype: type that the model is built with.
        weight_dtype: type of the weights in forward and backward; narrower than `dtype` if tiered casts them.
        compute_dtype: type of the arithmetic; wider than `weight_dtype` if the processor is slow in that.
    """

    preset: Preset
    job: Job
    dtype: torch.dtype
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype
    seed: int
    clip: float

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.model()

    def model(self) -> Transformer:
        return Transformer(
            self.job.shape,
            dtype=self.dtype,
            compute_dtype=None if self.compute_dtype == self.weight_dtype else self.compute_dtype,
            activation_checkpointing=self.job.activation_checkpointing,
        )


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear warm-up, which a very short run never leaves, then half a cosine down to `LAST_FRACTION`."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    turn = (step - WARM_UP_STEPS) / (steps - WARM_UP_STEPS)
    return LAST_FRACTION + (1 - LAST_FRACTION) * 0.5 * (1 + math.cos(math.pi * turn))


def run(settings: Settings, learner: Learner, *, baseline_rss_bytes: int) -> Summary:
    """Trains, and says what it took; the same on every rank."""
    job = settings.job
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = TextBatches(
        standard_library_text(), job.sequence, batch=job.batch, seed=settings.seed, rank=rank, ranks=ranks
    )
    device = next(learner.model.parameters()).device
    schedule = torch.optim.lr_scheduler.LambdaLR(learner.optimizer, lambda step: learning_rate_factor(step, job.steps))
    tokens_per_step = ranks * job.batch * job.sequence
    losses: list[float] = []
    learner.finish()
    learner.reset_report()
    kernel_before = meters.kernel_io()
    started = first_done = time.perf_counter()
    if rank == 0 and (report := learner.report()) is not None:
        print(f"tiered: {report.io_reason}", file=sys.stderr)
    title = settings.preset.value if learner.report() else f"{settings.preset.value} in memory"
    with TrainingProgress(title, steps=job.steps, tokens_per_step=tokens_per_step, shown=rank == 0) as progress:
        for step in range(job.steps):
            tokens, targets = (part.to(device) for part in batches.batch(step))
            loss = learner.model(tokens, targets)
            loss.backward()
            learner.update(settings.clip)
            schedule.step()
            losses.append(_mean_over_ranks(loss.detach(), ranks))
            if step == 0:
                first_done = time.perf_counter()
            report = learner.report()
            rates = None if report is None else _rates(report)
            progress.step_done(step + 1, losses[-1], rates)
    learner.finish()
    step_seconds = _per_step(job.steps, started, first_done, time.perf_counter())
    kernel = meters.kernel_io()
    report = learner.report()
    params = sum(parameter.numel() for parameter in learner.model.parameters())
    own = Summary(
        preset=settings.preset.value,
        engine=IN_MEMORY if report is None else "tiered",
        dtype=_name(settings.dtype),
        compute_dtype=_name(settings.compute_dtype),
        ranks=ranks,
        batch=job.batch,
        sequence=job.sequence,
        steps=job.steps,
        params=params,
        activation_bytes=activation_bytes(settings),
        losses=losses,
        loss_first=losses[0],
        loss_last=losses[-1],
        loss_mean_last=fmean(losses[-LAST_LOSSES:]),
        step_seconds=step_seconds,
        tokens_per_second=tokens_per_step / step_seconds,
        peak_rss_bytes=process_memory().peak_bytes,
        baseline_rss_bytes=baseline_rss_bytes,
        moved=Moved.between(kernel_before, kernel, report),
        state=State.in_memory(params, settings.weight_dtype) if report is None else State.of(report),
    )
    return own if ranks == 1 else _over_ranks(own, ranks)


def activation_bytes(settings: Settings) -> int:
    """What autograd keeps from forward to backward, computed without running the model."""
    job = settings.job

    def loss() -> tuple[nn.Module, torch.Tensor]:
        model = settings.model().to(settings.weight_dtype)
        tokens = torch.zeros(job.batch, job.sequence, dtype=torch.int64)
        return model, model(tokens, tokens)

    return meters.saved_for_backward_bytes(loss)


def _rates(report: Report) -> Rates:
    return Rates(report.nvme_read_bytes, report.nvme_write_bytes, report.to_device_bytes, report.to_host_bytes)


def _per_step(steps: int, started: float, first_done: float, done: float) -> float:
    """The first step, which sets up, is left out where there are others."""
    return (done - first_done) / (steps - 1) if steps > 1 else done - started


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mean_over_ranks(loss: torch.Tensor, ranks: int) -> float:
    if ranks > 1:
        dist.all_reduce(loss)
    return loss.item() / ranks


def _over_ranks(own: Summary, ranks: int) -> Summary:
    gathered: list[Summary | None] = [None] * ranks
    dist.all_gather_object(gathered, own)
    return Summary.over_ranks([summary for summary in gathered if summary is not None])
