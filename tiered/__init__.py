"""tiered: a storage hierarchy under PyTorch FSDP2. The public names, nothing else."""

from tiered.checkpoint.export import export_safetensors
from tiered.config import Config
from tiered.engine import Engine, engine, shard
from tiered.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptionError,
    StorageError,
    TieredError,
    UsageError,
)
from tiered.optim.adamw import Adam, AdamW
from tiered.report import Report
from tiered.tensor import TieredTensor

__all__ = [
    "Adam",
    "AdamW",
    "CapacityError",
    "ClosedError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "Engine",
    "Report",
    "StorageError",
    "TieredError",
    "TieredTensor",
    "UsageError",
    "engine",
    "export_safetensors",
    "shard",
]
