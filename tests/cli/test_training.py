"""The parts of a run that are arithmetic: schedule, summaries of several ranks, meters, the table."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tiered.cli import meters
from tiered.cli.presets import JOBS, Preset
from tiered.cli.summary import Moved, State, Summary
from tiered.cli.table import summary_table
from tiered.cli.training import WARM_UP_STEPS, Settings, activation_bytes, learning_rate_factor

TINY = Settings(
    preset=Preset.TINY,
    job=JOBS[Preset.TINY],
    dtype=torch.float32,
    weight_dtype=torch.float32,
    compute_dtype=torch.float32,
    seed=0,
    clip=1.0,
)
SUMMARY = Summary(
    preset="tiny",
    engine="tiered",
    dtype="bfloat16",
    compute_dtype="bfloat16",
    ranks=2,
    batch=1,
    sequence=8,
    steps=10,
    params=1000,
    activation_bytes=1 << 20,
    losses=[5.0, 4.0],
    loss_first=5.0,
    loss_last=4.0,
    loss_mean_last=4.5,
    step_seconds=0.5,
    tokens_per_second=32.0,
    peak_rss_bytes=300,
    baseline_rss_bytes=100,
    moved=Moved(nvme_read_bytes=70_000, kernel_read_bytes=70_000, stall_seconds={"param": 1.0}),
    state=State(bytes_by_kind={"param": 1000}, bytes_by_tier={"nvme": 1000}, io_engine="libaio"),
)


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 100])
def test_schedule_warms_up_and_falls(steps: int) -> None:
    factors = [learning_rate_factor(step, steps) for step in range(steps)]
    top = factors.index(max(factors))
    assert max(factors) == (1 if steps >= WARM_UP_STEPS else steps / WARM_UP_STEPS)
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert min(factors) > 0


def test_ranks_add_bytes_and_keep_the_largest_peak() -> None:
    other = replace(SUMMARY, peak_rss_bytes=400, moved=Moved(nvme_read_bytes=50_000, stall_seconds={"param": 2.0}))
    values = Summary.over_ranks([SUMMARY, other]).as_json()
    assert values["nvme_read_bytes_per_param_step"] == 12.0
    assert values["state_bytes"] == 2000
    assert values["peak_rss_bytes"] == 400
    assert values["stall_seconds"] == 2.0


def test_table_shows_both_runs() -> None:
    values = SUMMARY.as_json()
    text = io.StringIO()
    Console(file=text, width=200).print(summary_table(values, values | {"engine": "torch in memory"}))
    assert "torch in memory" in text.getvalue()
    assert "7.00 bytes a parameter and step (the kernel counts +0.00)" in text.getvalue()


def test_checkpointing_keeps_fewer_activations() -> None:
    recomputed = replace(TINY, job=replace(TINY.job, activation_checkpointing=True))
    assert 0 < activation_bytes(recomputed) < activation_bytes(TINY) / 4


def test_activations_of_a_known_function() -> None:
    def loss() -> tuple[torch.nn.Module, torch.Tensor]:
        model = torch.nn.Linear(8, 8, bias=False)
        return model, model(torch.empty(4, 8)).exp().sum()

    assert meters.saved_for_backward_bytes(loss) == 2 * 4 * 8 * 4  # the input, and the result of exp


def test_kernel_counts_never_fall() -> None:
    before = meters.kernel_io()
    after = meters.kernel_io()
    assert after.read_bytes >= before.read_bytes >= 0
    assert after.write_bytes >= before.write_bytes >= 0
