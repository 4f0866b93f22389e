"""The same run with plain torch in memory, in a process of its own: neither disturbs the other's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tiered.cli.training import Settings, activation_bytes
from tiered.config import format_bytes
from tiered.tiers.memory import usable_host_bytes

NO_OUTPUT = Path("none")


def run_in_memory(settings: Settings, *, scratch: Path) -> dict[str, Any] | None:
    """The same run with plain torch, in a process of its own; None (and why) where it cannot be had."""
    needed = _in_memory_bytes(settings)
    free = usable_host_bytes()
    if needed > free:
        text = f"plain torch needs about {format_bytes(needed)}, {format_bytes(free)} are free"
        print(f"tiered: no comparison: {text}", file=sys.stderr)
        return None
    result = scratch / "in_memory.json"
    job = settings.job
    checkpointing = "" if job.activation_checkpointing else "no-"
    arguments = {
        "--preset": settings.preset.value,
        "--steps": job.steps,
        "--batch": job.batch,
        "--sequence": job.sequence,
        "--dtype": str(settings.dtype).removeprefix("torch."),
        "--compute-dtype": str(settings.compute_dtype).removeprefix("torch."),
        "--lr": job.learning_rate,
        "--seed": settings.seed,
        "--clip": settings.clip,
        "--folder": scratch,
        "--output": NO_OUTPUT,
        "--json": result,
    }
    command = [sys.executable, "-m", "tiered.cli", "train", "--in-memory"]
    command += [f"--{checkpointing}activation-checkpointing"]
    command += [str(part) for pair in arguments.items() for part in pair]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        print(f"tiered: no comparison: plain torch ended with code {code}", file=sys.stderr)
        return None
    values: dict[str, Any] = json.loads(result.read_text())
    return values


def _in_memory_bytes(settings: Settings) -> int:
    """What plain torch holds at its peak: weights, gradients, moments, masters of narrow weights."""
    own = settings.weight_dtype.itemsize * 2
    masters = 0 if settings.weight_dtype == torch.float32 else 8
    return settings.job.shape.parameter_count * (own + masters + 8) + activation_bytes(settings)
