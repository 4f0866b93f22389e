"""The named jobs of `tiered train`: a model's size and the defaults that fit it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tiered.models.transformer import SHAPES, Shape


class Preset(StrEnum):
    TINY = "tiny"
    DEMO = "demo"
    ONE_BILLION = "1b"
    THREE_BILLION = "3b"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a preset stands for; every value but the shape is a flag too."""

    shape: Shape
    steps: int
    batch: int
    sequence: int
    learning_rate: float
    activation_checkpointing: bool
    sample_tokens: int


JOBS = {
    Preset.TINY: Job(
        shape=SHAPES["tiny"],
        steps=50,
        batch=8,
        sequence=128,
        learning_rate=1e-3,
        activation_checkpointing=False,
        sample_tokens=160,
    ),
    Preset.DEMO: Job(
        shape=SHAPES["demo"],
        steps=100,
        batch=4,
        sequence=128,
        learning_rate=1e-3,
        activation_checkpointing=True,
        sample_tokens=80,
    ),
    Preset.ONE_BILLION: Job(
        shape=SHAPES["1b"],
        steps=20,
        batch=2,
        sequence=256,
        learning_rate=3e-4,
        activation_checkpointing=True,
        sample_tokens=32,
    ),
    Preset.THREE_BILLION: Job(
        shape=SHAPES["3b"],
        steps=3,
        batch=2,
        sequence=256,
        learning_rate=2e-4,
        activation_checkpointing=True,
        sample_tokens=8,
    ),
}
