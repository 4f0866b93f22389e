"""Where FSDP2 meets the tiers: what a gather hands over, and what a gradient hook takes."""

from __future__ import annotations

from typing import Any

import torch

from tiered.errors import UsageError
from tiered.tensor import TieredTensor
from tiered.zero.cells import GatherCell, ParameterCell


def gather_input(shard: TieredTensor) -> tuple[tuple[torch.Tensor, ...], Any]:
    """The answer to `fsdp_pre_all_gather`: the padded shard, as a tensor whose bytes move when FSDP2 copies it.

    So a shard goes from its slot straight into FSDP2's buffer, piece by piece, however large it is. The first
    parameter of a unit tells the prefetch queue that the unit is gathered now.
    """
    cell = shard.cell
    if not isinstance(cell, ParameterCell) or cell.unit is None:
        raise UsageError(f"{cell.name} is not part of a sharded model (was its engine closed?)")
    unit = cell.unit
    unit.begin_gather_of(cell)
    gathered = GatherCell(cell)
    gathered.next_use = unit.next_use
    return (TieredTensor(gathered, cell.shape),), None
