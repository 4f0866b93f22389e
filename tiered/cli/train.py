"""`tiered train`: train a language model whose state lives in tiers, and say what that took."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from tiered.checkpoint.export import export_safetensors
from tiered.cli import meters
from tiered.cli.compare import NO_OUTPUT, run_in_memory
from tiered.cli.config_flags import takes_config_flags
from tiered.cli.learners import Learner, PlainLearner, TieredLearner
from tiered.cli.presets import JOBS, Job, Preset
from tiered.cli.swap_folder import swap_folder
from tiered.cli.table import summary_table
from tiered.cli.training import Settings, run
from tiered.config import Config, Source, read_toml
from tiered.errors import ConfigError
from tiered.models.text import decode, encode
from tiered.models.transformer import Transformer
from tiered.tiers.memory import process_memory

PROMPT = "def "


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@takes_config_flags
def train(
    *,
    preset: Annotated[Preset, typer.Option(help="Model and defaults.")] = Preset.DEMO,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. [default: the preset's]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step and rank. [default: the preset's]")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Bytes of text in a sequence. [default: the preset's]")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights; bfloat16 has fp32 masters.")] = Dtype.BFLOAT16,
    learning_rate: Annotated[
        float | None,
        typer.Option("--lr", min=0.0, help="Largest learning rate of the schedule. [default: the preset's]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and sample.")] = 0,
    clip: Annotated[
        float, typer.Option(min=0.0, help="Largest norm of all gradients together; 0 clips nothing.")
    ] = 1.0,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Recompute activations in backward. [default: the preset's]",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where the swap folder, removed at the end, and the weights go.")
    ] = Path(),
    output: Annotated[
        Path | None,
        typer.Option(help='The weights. "none": no file. [default: tiered-PRESET.safetensors in --folder]'),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary as JSON to this file.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain torch in memory, where it fits, beside it.")
    ] = False,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="Run plain torch in memory instead; no tiers.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the keys of the flags below.")] = None,
    flags: Source,
) -> None:
    """Train a transformer on the source text of Python's standard library.

    By default parameters and optimizer states are on NVMe, and gradients where the host budget has room for them.
    """
    if (compare or in_memory) and _ranks() > 1:
        raise ConfigError("--compare and --in-memory (flags) are for one process: leave them out under torchrun")
    job = _job(
        preset,
        steps=steps,
        batch=batch,
        sequence=sequence,
        learning_rate=learning_rate,
        activation_checkpointing=activation_checkpointing,
    )
    output = folder / f"tiered-{preset.value}.safetensors" if output is None else output
    for flag, file in (("--output", output), ("--json", json_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {file} (flag): its directory does not exist")
    with swap_folder(folder) as swap:
        layers = [_defaults(swap), *([read_toml(config)] if config else []), flags]
        settled = Config.from_sources(*layers)
        built = getattr(torch, dtype.value)
        weight_dtype, compute_dtype = _dtypes(built, settled.compute_dtype)
        if weight_dtype == built:  # nothing for tiered to cast
            settled = settled.model_copy(update={"compute_dtype": "auto"})
        settings = Settings(
            preset=preset,
            job=job,
            dtype=built,
            weight_dtype=weight_dtype,
            compute_dtype=compute_dtype,
            seed=seed,
            clip=clip,
        )
        beside = run_in_memory(settings, scratch=swap) if compare else None
        _train(settings, settled, in_memory=in_memory, output=output, json_file=json_file, beside=beside)


def _train(
    settings: Settings,
    config: Config,
    *,
    in_memory: bool,
    output: Path,
    json_file: Path | None,
    beside: dict[str, Any] | None,
) -> None:
    meters.reset_peak()
    baseline = process_memory().rss_bytes
    with closing(_learner(settings, config, in_memory=in_memory)) as learner:
        values = run(settings, learner, baseline_rss_bytes=baseline).as_json()
        first = not dist.is_initialized() or dist.get_rank() == 0
        if output != NO_OUTPUT:  # before anything else can fail
            export_safetensors(learner.model, output)
        if json_file and first:
            json_file.write_text(json.dumps(values | {"in_memory": beside}, indent=1) + "\n")
        if first:
            _show(summary_table(values, beside))
            if output != NO_OUTPUT:
                _show(f"weights: {output}")
        sample = _sample(learner, settings)
        if first:
            _show(sample)


def _learner(settings: Settings, config: Config, *, in_memory: bool) -> Learner:
    rate = settings.job.learning_rate
    if in_memory:
        return PlainLearner(settings.build, weight_dtype=settings.weight_dtype, learning_rate=rate)
    return TieredLearner(settings.build, config, learning_rate=rate)


def _sample(learner: Learner, settings: Settings) -> str:
    model = cast(Transformer, learner.model)
    prompt = encode(PROMPT).to(next(model.parameters()).device)
    return decode(model.generate(prompt, settings.job.sample_tokens, seed=settings.seed))


def _job(preset: Preset, **changes: Any) -> Job:
    return replace(JOBS[preset], **{name: value for name, value in changes.items() if value is not None})


def _defaults(swap: Path) -> Source:
    """Everything on NVMe, unless a file or a flag says otherwise."""
    return Source("default of tiered train", {"parameters": "nvme", "optimizer_states": "nvme", "nvme": str(swap)})


def _dtypes(built: torch.dtype, asked: str) -> tuple[torch.dtype, torch.dtype]:
    """The types of the weights in forward and backward, and of the arithmetic.

    Arithmetic wider than the weights is the model's affair; weights narrower than those built are tiered's.
    """
    if asked == "auto":
        slow = built == torch.bfloat16 and not (torch.cuda.is_available() or meters.cpu_multiplies_bfloat16())
        if slow and _rank() == 0:
            print("tiered: this CPU has no bfloat16 arithmetic: computing in float32", file=sys.stderr)
        compute = torch.float32 if slow else built
    else:
        compute = getattr(torch, asked)
    return (built if compute == torch.float32 else compute), compute


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _show(what: object) -> None:
    if isinstance(what, str):  # bytes of a sample that the terminal has no character for
        encoding = sys.stdout.encoding or "ascii"
        what = what.encode(encoding, errors="backslashreplace").decode(encoding)
    Console(highlight=False, markup=False, soft_wrap=isinstance(what, str)).print(what)
