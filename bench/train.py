"""How much slower is a step with the training state on NVMe, or in host memory, than plain torch in memory?

    python bench/train.py [--smoke] [--json FILE] [--case PATTERN] [--size 300m] [--steps 6] [--host-memory 1GiB]
                          [--folder FOLDER]

One bf16 transformer with fp32 masters, clipped to norm 1, trained by contestants that take turns in one run, each in
a process of its own. `plain` is what torch users write: cast the gradients, fused AdamW on fp32 masters, copy back.
Step times are medians after the first step; memory is the peak above what the imports took. The losses of the tiered
contestants must be equal to the bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _harness import Bench, note, run

from tiered.cli.learners import Learner, PlainLearner, TieredLearner
from tiered.cli.meters import reset_peak
from tiered.cli.swap_folder import swap_folder
from tiered.config import Config, format_bytes
from tiered.errors import TieredError
from tiered.models.text import TextBatches, standard_library_text
from tiered.models.transformer import SHAPES, Shape, Transformer
from tiered.tiers.memory import process_memory

SIZES = {
    "10m": Shape(layers=8, width=320, heads=5),
    "100m": Shape(layers=14, width=768, heads=12),
    "300m": Shape(layers=24, width=1024, heads=16),
    "600m": Shape(layers=30, width=1280, heads=20),
    "1b": SHAPES["1b"],
}
EXACT_BYTES = 26  # a parameter's traffic a step with everything but the gradients on NVMe (DESIGN 5)
STEPS_A_TURN = 2
CLIP, LEARNING_RATE, SEED = 1.0, 3e-4, 1234
LOSS_DIFFERENCE_MAX = 0.05  # between tiered and plain, whose bf16 weights are rounded elsewhere


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every contestant trains."""

    shape: Shape
    batch: int
    sequence: int


@dataclass
class Turn:
    """What a contestant did: seconds and loss of each step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a contestant took, over all steps but the first."""

    params: int
    peak_bytes: int
    device_peak_bytes: int
    nvme_bytes: int
    stall_seconds: float


# ---- in the process of a contestant ----


def serve(pipe: Connection, job: Job, config: Config | None) -> None:
    """Trains as many steps as the pipe asks for, until it asks for none; `config` None: plain torch."""
    try:
        if accelerator() is not None:
            make_repeatable()
        text = TextBatches(standard_library_text(), job.sequence, batch=job.batch, seed=SEED)
        baseline_bytes = process_memory().rss_bytes
        reset_peak()
        learner = make_learner(job, config)
        params = sum(parameter.numel() for parameter in learner.model.parameters())
        device = next(learner.model.parameters()).device
        pipe.send(params)
        step = 0
        while count := pipe.recv():
            pipe.send(take_turn(learner, text, device, range(step, step + count)))
            if step == 0:
                learner.reset_report()
            step += count
        pipe.send(facts(learner, params, baseline_bytes, device))
        learner.close()
    except (TieredError, RuntimeError, OSError) as error:
        pipe.send(error.args[0] if error.args and isinstance(error.args[0], str) else repr(error))


def accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def make_repeatable() -> None:
    """An accelerator's kernels may add in any order; then the losses of two equal runs differ too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what makes CUDA's matrix products repeatable
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def make_learner(job: Job, config: Config | None) -> Learner:
    def build() -> Transformer:
        torch.manual_seed(SEED)
        return Transformer(job.shape, dtype=torch.bfloat16)

    if config is not None:
        return TieredLearner(build, config, learning_rate=LEARNING_RATE)
    device = accelerator() or torch.device("cpu")
    return PlainLearner(lambda: build().to(device), weight_dtype=torch.bfloat16, learning_rate=LEARNING_RATE)


def take_turn(learner: Learner, text: TextBatches, device: torch.device, steps: range) -> Turn:
    """The last step of a turn pays for what is still on its way, so that nobody works in another's turn."""
    turn = Turn()
    for step in steps:
        tokens, targets = (part.to(device) for part in text.batch(step))
        start = time.perf_counter()
        loss = learner.model(tokens, targets)
        loss.backward()
        learner.update(CLIP)
        turn.losses.append(loss.item())
        if step == steps[-1]:
            learner.finish()
        turn.seconds.append(time.perf_counter() - start)
    return turn


def facts(learner: Learner, params: int, baseline_bytes: int, device: torch.device) -> Facts:
    report = learner.report()
    return Facts(
        params=params,
        peak_bytes=process_memory().peak_bytes - baseline_bytes,
        device_peak_bytes=0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device),
        nvme_bytes=report.nvme_read_bytes + report.nvme_write_bytes if report else 0,
        stall_seconds=sum(report.stall_seconds.values()) if report else 0.0,
    )


# ---- in the process of the script ----


class Contestant:
    """One way to train, in a process of its own."""

    def __init__(self, name: str, job: Job, config: Config | None) -> None:
        self.name = name
        self.total = Turn()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, job, config), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self.params = 0

    def get_ready(self) -> None:
        """Waits until the model is built."""
        self.params = self._receive()

    def train(self, steps: int) -> None:
        self._pipe.send(steps)
        turn: Turn = self._receive()
        self.total.seconds += turn.seconds
        self.total.losses += turn.losses

    def end(self) -> Facts:
        self._pipe.send(0)
        result: Facts = self._receive()
        self._process.join()
        return result

    def stop(self) -> None:
        """Idempotent; ends the process in any case."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def step_seconds(self) -> float:
        return median(self.total.seconds[1:])

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise TieredError(f"the process of {self.name} died (out of memory?)") from None
        if isinstance(answer, str):
            raise TieredError(f"{self.name}: {answer}")
        return answer


@contextmanager
def contestants(job: Job, configs: dict[str, Config | None]) -> Iterator[list[Contestant]]:
    with ExitStack() as stack:
        running = []
        for name, config in configs.items():
            running.append(Contestant(name, job, config))
            stack.callback(running[-1].stop)
        for contestant in running:
            contestant.get_ready()
        yield running


def everything_in(tier: str, **settings: object) -> Config:
    return Config(parameters=tier, gradients=tier, optimizer_states=tier, **settings)


def compare(bench: Bench, label: str, job: Job, rivals: dict[str, Config], *, steps: int) -> None:
    """Trains all that the wanted cases need, in turns, and reports each against plain torch."""
    wanted = {n: c for n, c in rivals.items() if bench.wants(*cases_of(label, n), f"{label}-loss-nvme/host")}
    if not wanted:
        return
    with contestants(job, {"plain": None, **wanted}) as (plain, *tiered):
        note(f"{label}: {plain.params / 1e6:.1f} M parameters, batch {job.batch} x {job.sequence}, {steps} steps")
        for turn in [1] + [min(STEPS_A_TURN, steps - at) for at in range(0, steps, STEPS_A_TURN)]:
            for contestant in (plain, *tiered):
                contestant.train(turn)
        taken = {contestant.name: contestant.end() for contestant in (plain, *tiered)}
    for contestant in tiered:
        report(bench, label, contestant, plain, taken, steps=steps)
    check_losses(bench, label, plain, tiered)


def cases_of(label: str, name: str) -> list[str]:
    whats = ["step-{}/plain", "memory-{}/plain", "device-memory-{}/plain", "traffic-{}/exact", "unstalled-{}/step"]
    return [f"{label}-{what.format(name)}" for what in whats]


def report(bench: Bench, label: str, us: Contestant, plain: Contestant, taken: dict[str, Facts], *, steps: int) -> None:
    step, memory, device_memory, traffic, unstalled = cases_of(label, us.name)
    ours, theirs = taken[us.name], taken[plain.name]
    bench_time = partial(bench.time, repeats=steps)
    bench_time(step, us.step_seconds, ceiling=plain.step_seconds, unit="s")
    bench_time(memory, ours.peak_bytes / 2**30, ceiling=theirs.peak_bytes / 2**30, unit="GiB")
    if ours.device_peak_bytes:
        bench_time(device_memory, ours.device_peak_bytes / 2**30, ceiling=theirs.device_peak_bytes / 2**30, unit="GiB")
    if ours.nvme_bytes:
        moved = ours.nvme_bytes / ours.params / steps
        bench_time(traffic, moved, ceiling=EXACT_BYTES, unit="bytes/parameter/step")
    seconds = sum(us.total.seconds[1:]) / steps
    running = seconds - ours.stall_seconds / steps
    bench.rate(unstalled, running, ceiling=seconds, unit="s", repeats=steps)


def check_losses(bench: Bench, label: str, plain: Contestant, tiered: Sequence[Contestant]) -> None:
    """A step time means nothing if it trained something else."""
    for contestant in (plain, *tiered):
        note(f"{label}: losses of {contestant.name}: {' '.join(f'{x:.5f}' for x in contestant.total.losses)}")
    for contestant in tiered:
        pairs = zip(contestant.total.losses, plain.total.losses, strict=True)
        difference = max(abs(ours - theirs) for ours, theirs in pairs)
        if not difference <= LOSS_DIFFERENCE_MAX:
            raise TieredError(f"{label}: the losses of {contestant.name} and plain torch differ by {difference:.3g}")
    first, *others = tiered
    for other in others:
        equal = sum(a == b for a, b in zip(other.total.losses, first.total.losses, strict=True))
        count = len(first.total.losses)
        bench.rate(f"{label}-loss-{first.name}/{other.name}", equal, ceiling=count, unit="equal losses", repeats=count)
        if equal < count:
            raise TieredError(f"{label}: only {equal} of {count} losses of {first.name} and {other.name} are equal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="300m", help="parameters of the model (default: 300m)")
    parser.add_argument("--steps", type=int, default=6, help="steps after the first (default: 6)")
    parser.add_argument("--host-memory", default="1GiB", help="budget of the nvme contestant (default: 1GiB)")
    parser.add_argument("--folder", type=Path, help="swap files go below it (default: beside the current folder)")


def main(bench: Bench) -> None:
    given = bench.arguments
    size = "10m" if bench.smoke else given.size
    steps = 2 if bench.smoke else max(1, given.steps)
    job = Job(shape=SIZES[size], batch=1 if bench.smoke else 2, sequence=32 if bench.smoke else 256)
    with swap_folder(given.folder or Path.cwd().parent) as folder:
        rivals = {
            "nvme": everything_in("nvme", nvme=[folder], host_memory=given.host_memory),
            "host": everything_in("host"),
        }
        note(f"swap files in {folder}; nvme has {format_bytes(rivals['nvme'].host_memory or 0)} of host memory")
        compare(bench, size, job, rivals, steps=steps)


if __name__ == "__main__":
    sys.exit(run("train", "A training step against plain torch in memory.", main, add_arguments=add_arguments))
