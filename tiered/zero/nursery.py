"""Parameters between registration and their place in a unit.

The youngest stay in plain memory, because initialisation usually touches what was just made; beyond a limit the
oldest is written to NVMe. Where parameters live in memory anyway nothing is spilled.
"""

from __future__ import annotations

import torch

from tiered.shard import ShardKind, Tier
from tiered.tensor import TieredTensor
from tiered.zero.cells import ParameterCell
from tiered.zero.segment import MasterForm, Segment, Tools


class Nursery:
    """Holds the values of cells that are not laid out yet.

    Args:
        tools: how to reach NVMe.
        memory_bytes: values kept in memory at most (one at least); None: no limit, nothing is spilled.
    """

    def __init__(self, tools: Tools, *, memory_bytes: int | None) -> None:
        self._tools = tools
        self._memory_bytes = memory_bytes
        self._young: dict[ParameterCell, int] = {}
        self._spilled: dict[ParameterCell, Segment] = {}
        self._count = 0
        self.is_sharding = False  # while FSDP2 cuts parameters into shards

    def adopt(self, name: str, values: torch.Tensor, device: torch.device) -> TieredTensor:
        """Takes an ordinary tensor's values over; the result stands for it, on `device`."""
        host = values.detach().contiguous().cpu()
        cell = ParameterCell(self, name, host.shape, host.dtype, device)
        cell.hold(host.view(-1))
        self._young[cell] = host.nbytes
        self._spill_oldest()
        return TieredTensor(cell, host.shape)

    def remove(self, cell: ParameterCell) -> None:
        """Forgets a cell and gives back what its value took."""
        self._young.pop(cell, None)
        cell._values = None
        segment = self._spilled.pop(cell, None)
        if segment is not None:
            segment.free(ShardKind.PARAM)

    def _spill_oldest(self) -> None:
        if self._memory_bytes is None:
            return
        while len(self._young) > 1 and sum(self._young.values()) > self._memory_bytes:
            cell = next(iter(self._young))
            del self._young[cell]
            self._count += 1
            segment = Segment(
                self._tools,
                -self._count,
                0,
                logical_dtype=cell.dtype,
                compute_dtype=cell.dtype,
                master=MasterForm.NONE,
            )
            segment.append(cell.name, cell.numel)
            segment.place(ShardKind.PARAM, Tier.NVME)
            cell.spill(segment)
            self._spilled[cell] = segment
