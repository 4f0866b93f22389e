"""The owners of values: one cell per parameter shard, and cells for what else users see of it.

[Note: padded shards] FSDP2 makes a rank's shard of a parameter by `new_zeros(padded shape)` and a copy into it.
While a model is being sharded that makes a new cell. Later FSDP2 pads an unevenly sharded parameter again (before
the first forward and after every load): it asks the unpadded window of a cell for zeros of the cell's own shape,
and gets the cell itself, so that there is still one owner of the value.

A `ParameterCell` is born in the nursery (plain memory, spilled when there is too much of it) and moves into a
segment when its unit is laid out. There is one owner of "the value of a parameter": every write goes through
`Segment.write_logical`, which sets the compute weight and the master together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tiered.errors import ClosedError, UsageError
from tiered.shard import ShardKind
from tiered.tensor import TieredTensor
from tiered.zero.segment import MasterForm, Segment

if TYPE_CHECKING:
    from tiered.zero.nursery import Nursery
    from tiered.zero.units import Unit


class SimpleCell:
    """What all cells share: they answer no operator without moving bytes."""

    name: str
    dtype: torch.dtype
    numel: int
    device: torch.device

    def read(self, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError

    def copy_to(self, start: int, target: torch.Tensor) -> None:
        target.copy_(self.read(start, start + target.numel()))

    def padded_shard(self, source: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        return None

    def gather_input(self) -> torch.Tensor:
        raise UsageError(f"{self.name} is not a parameter, so it cannot be gathered")

    def exchange(self, values: torch.Tensor) -> TieredTensor:
        raise UsageError(f"{self.name} keeps its shape and dtype: cast the model before tiered.shard")

    def intercept(self, operator: Any, args: tuple[Any, ...]) -> Any:
        return NotImplemented


class ParameterCell(SimpleCell):
    """The value of a parameter, or of this rank's padded shard of one.

    Attributes:
        shape: shape of the (padded) tensor.
        unit: the unit it is gathered with, once laid out.
        segment, offset: its place, once laid out.
        live_numel: elements that are not padding.
    """

    def __init__(
        self,
        nursery: Nursery,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.numel = shape.numel()
        self.live_numel = self.numel
        self.device = device
        self.unit: Unit | None = None
        self.segment: Segment | None = None
        self.offset = 0
        self._states: dict[ShardKind, StateCell] = {}
        self._nursery = nursery
        self._values: torch.Tensor | None = None
        self._closed = False

    # ---- nursery ----

    @property
    def values(self) -> torch.Tensor | None:
        """The 1-D value while it is in plain memory."""
        return self._values

    def hold(self, values: torch.Tensor) -> None:
        """Keeps the 1-D `values` in plain memory."""
        self._values = values

    def spill(self, segment: Segment) -> None:
        """Moves the value from plain memory into `segment`, a place of its own on NVMe."""
        if self._values is None:
            raise AssertionError(f"{self.name} has no value in memory to spill")
        segment.copy_in(ShardKind.PARAM, 0, self._values)
        self.segment, self.offset, self._values = segment, 0, None

    def settle(self, unit: Unit, segment: Segment, offset: int, *, live_numel: int) -> None:
        """Moves the value to its final place in a unit's segment."""
        piece = 1 << 22
        for start in range(0, self.numel, piece):
            stop = min(self.numel, start + piece)
            segment.write_logical(offset + start, self.read(start, stop))
        self._nursery.remove(self)
        self.unit, self.segment, self.offset, self.live_numel = unit, segment, offset, live_numel

    def new_state(self, kind: ShardKind) -> StateCell:
        """A state of zeros, in the place that the segment has for it. An older one of this kind has lost its place."""
        older = self._states.pop(kind, None)
        state = self._states[kind] = StateCell(self, kind)
        if older is not None:
            older.retire()
            state.clear()
        return state

    def retire(self) -> None:
        """The value is not needed any more: another cell took over."""
        self._nursery.remove(self)
        self.close()

    def close(self) -> None:
        """From here on every access raises ClosedError."""
        self._closed = True
        self._values = None
        self.segment = None

    def padded_shard(self, source: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        if self.unit is not None:
            return TieredTensor(self, shape) if source.shape != self.shape == shape else None
        if not self._nursery.is_sharding:
            return None
        return self._nursery.adopt(self.name, torch.zeros(shape, dtype=self.dtype, device="cpu"), self.device)

    # ---- Cell ----

    def exchange(self, values: torch.Tensor) -> TieredTensor:
        if self.unit is not None:
            return super().exchange(values)
        other = self._nursery.adopt(self.name, values, self.device)
        self.retire()
        return other

    def gather_input(self) -> torch.Tensor:
        """The padded shard, as a tensor whose bytes move when FSDP2 copies it.

        So a shard goes from its slots straight into FSDP2's buffer, piece by piece, however large it is. The first
        parameter of a unit tells the prefetch queue that the unit is gathered now.
        """
        if self.unit is None:
            raise UsageError(f"{self.name} is not part of a sharded model yet")
        self.unit.begin_gather_of(self)
        return TieredTensor(GatherCell(self, self.unit), self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        if self._values is not None:
            return self._values[start:stop].clone()
        segment = self.place
        if self.unit is None:  # spilled: stored as it is
            out = torch.empty(stop - start, dtype=self.dtype, device="cpu")
            segment.copy_out(ShardKind.PARAM, self.offset + start, out)
            return out
        return segment.read_logical(self.offset + start, self.offset + stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        if self._values is not None:
            self._values[start : start + values.numel()].copy_(values)
        elif self.unit is None:
            self.place.copy_in(ShardKind.PARAM, self.offset + start, values.to(self.dtype))
        else:
            self.place.write_logical(self.offset + start, values)

    @property
    def place(self) -> Segment:
        """The segment that holds the value now. Raises ClosedError."""
        if self.segment is None:
            raise ClosedError(f"{self.name} has no bytes any more: its engine was closed")
        return self.segment


class GatherCell(SimpleCell):
    """What FSDP2 gathers of a parameter: the padded shard in the compute dtype, streamed as it is copied."""

    def __init__(self, parameter: ParameterCell, unit: Unit) -> None:
        segment = parameter.place
        self._events = unit.runtime.events
        self.next_use = unit.next_use
        self.name = parameter.name
        self.dtype = segment.compute_dtype
        self.numel = parameter.numel
        self.device = parameter.device
        self._segment = segment
        self._offset = parameter.offset

    def read(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        self.copy_to(start, out)
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        raise UsageError(f"the gathered form of {self.name} is read-only: edit the parameter itself")

    def copy_to(self, start: int, target: torch.Tensor) -> None:
        self._events.count_copy("to_device", target.nbytes)
        self._segment.copy_out(ShardKind.PARAM, self._offset + start, target, next_use=self.next_use)


class StateCell(SimpleCell):
    """One optimizer state of a parameter, fp32, in its tier."""

    def __init__(self, parameter: ParameterCell, kind: ShardKind) -> None:
        self.name = f"{parameter.name}.{kind.name.lower()}"
        self.dtype = torch.float32
        self.numel = parameter.live_numel
        self.device = parameter.device
        self._parameter = parameter
        self._kind = kind
        self._retired = False

    def retire(self) -> None:
        """Another optimizer's state takes the place."""
        self._retired = True

    def check_owner(self) -> None:
        """Raises UsageError when another optimizer has taken the place over."""
        if self._retired:
            raise UsageError(
                f"{self.name} belongs to another optimizer, which was made later over the same parameter: "
                "one parameter has the states of one tiered optimizer"
            )

    def clear(self) -> None:
        """Zeros."""
        piece = 1 << 22
        for start in range(0, self.numel, piece):
            self.write(start, torch.zeros(min(piece, self.numel - start), device="cpu"))

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.check_owner()
        out = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        at = self._parameter.offset + start
        self._parameter.place.copy_out(self._kind, at, out)
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        self.check_owner()
        at = self._parameter.offset + start
        self._parameter.place.copy_in(self._kind, at, values.float())


class MasterCell(SimpleCell):
    """The fp32 master of a lower-precision parameter; writing it sets the weight too."""

    def __init__(self, parameter: ParameterCell) -> None:
        self.name = f"{parameter.name}.master"
        self.dtype = torch.float32
        self.numel = parameter.live_numel
        self.device = parameter.device
        self._parameter = parameter

    def read(self, start: int, stop: int) -> torch.Tensor:
        at = self._parameter.offset
        return self._parameter.place.read_master(at + start, at + stop)

    def write(self, start: int, values: torch.Tensor) -> None:
        self._parameter.place.write_master(self._parameter.offset + start, values)


def keeps_separate_master(cell: ParameterCell) -> bool:
    """Whether users see a master beside the parameter (it has more bits than the parameter shows)."""
    segment = cell.place
    return segment.master is MasterForm.SPLIT and cell.dtype != torch.float32
