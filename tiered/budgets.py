"""What this process may use and what a model will take, in bytes, before anything is moved."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from tiered.config import Config
from tiered.plan.placement import UnitBytes
from tiered.shard import ShardKind
from tiered.tiers.memory import Need, check_capacity, usable_host_bytes
from tiered.zero.build import stays_plain
from tiered.zero.segment import MasterForm
from tiered.zero.units import LayoutRule

HOST_SHARE = 0.8
"""Part of the free host memory that `host_memory = "auto"` takes, divided among the ranks of the node."""


class Budgets:
    """Bytes that may be used, and that will be."""

    def __init__(self, config: Config, *, ranks_here: int) -> None:
        usable = usable_host_bytes()
        self.host_bytes = config.host_memory or int(usable * HOST_SHARE) // ranks_here
        if config.host_memory is not None:
            check_capacity(
                [Need("host_memory, of each rank on this machine", config.host_memory)] * ranks_here,
                usable,
                what="free host memory",
                smallest=config.host_memory * ranks_here,
            )
        self.device_bytes = config.device_memory
        self.device_peak_bytes = 0

    def check_device(self, blocks: list[UnitBytes], root: UnitBytes, *, world_size: int) -> None:
        """FSDP2 keeps the root, a unit and its neighbour whole, and in backward a unit's gradients twice."""
        sizes = [*sorted((_whole_bytes(unit, world_size) for unit in blocks), reverse=True), 0, 0]
        whole_root = _whole_bytes(root, world_size)
        needs = [
            Need("weights of the root unit, whole", whole_root),
            Need("weights of the two largest blocks, whole", sizes[0] + sizes[1]),
            Need("gradients of the largest unit, whole and being reduced", 2 * max(whole_root, sizes[0])),
        ]
        self.device_peak_bytes = sum(need.nbytes for need in needs)
        if self.device_bytes is not None:
            peak = self.device_peak_bytes
            check_capacity(needs, self.device_bytes, what="device_memory", smallest=peak)


def _whole_bytes(unit: UnitBytes, world_size: int) -> int:
    return unit.kinds.get(ShardKind.PARAM, 0) * world_size


def measure(named: list[tuple[str, nn.Module]], rule: LayoutRule, *, world_size: int) -> list[UnitBytes]:
    """What this rank will store of each unit, before anything is sharded."""
    seen: set[int] = set()
    measured: list[UnitBytes] = []
    for name, module in named:
        kinds: Counter[ShardKind] = Counter()
        for parameter in module.parameters():
            if stays_plain(parameter) or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            rows = -(-parameter.shape[0] // world_size)
            numel = rows * (parameter.numel() // parameter.shape[0])
            compute = rule.compute_dtype(parameter.dtype)
            master = rule.master(parameter.dtype, trained=parameter.requires_grad)
            kinds[ShardKind.PARAM] += numel * compute.itemsize
            if master is MasterForm.SPLIT and (parameter.requires_grad or parameter.dtype == torch.float32):
                kinds[ShardKind.MASTER] += numel * 2
            if parameter.requires_grad:
                kinds[ShardKind.GRAD] += numel * compute.itemsize
                kinds[ShardKind.EXP_AVG] += numel * 4
                kinds[ShardKind.EXP_AVG_SQ] += numel * 4
        measured.append(UnitBytes(name, dict(kinds)))
    return measured
