"""Units: which modules FSDP2 gathers together, and how the shards of one are laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tiered.errors import UsageError
from tiered.shard import NEVER_USED, Shard, ShardKind
from tiered.tensor import Cell, TieredTensor
from tiered.zero.cells import ParameterCell
from tiered.zero.runtime import Runtime
from tiered.zero.segment import MasterForm, Segment


class Unit:
    """The parameters of one `fully_shard` call, on this rank.

    Attributes:
        index: position in the order of sharding; the root is last.
        name: qualified name of the module.
        runtime: the engine's parts.
        cells: its parameters in FSDP2's order.
        next_use: trace position at which it is expected to be gathered again.
        segments: their bytes, one segment per dtype and per kind of use (trained, frozen).
    """

    def __init__(self, index: int, name: str, runtime: Runtime) -> None:
        self.runtime = runtime
        self.next_use = NEVER_USED
        self.index = index
        self.name = name
        self.cells: list[ParameterCell] = []
        self.segments: list[Segment] = []

    def begin_gather_of(self, cell: ParameterCell) -> None:
        """FSDP2 asks for `cell`; with the first one of the unit a gather begins."""
        if cell is self.cells[0]:
            self.next_use = self.runtime.queue.on_gather(self.index)

    def gathered_shards(self) -> list[Shard]:
        """What a gather of this unit reads, in order."""
        return [shard for segment in self.segments for shard in segment.shards(ShardKind.PARAM)]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model, in order: what is worth a unit of its own.

    The children of a ModuleList that have parameters, and the children of a Sequential whose class occurs more
    than once in it, outermost first. A block that shares a parameter with anything outside it stays with the root,
    because FSDP2 wants all owners of a parameter in one unit.
    """
    owners: Counter[int] = Counter()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] += 1
    return [(name, block) for name, block in _blocks(model, "") if _owns_its_parameters(block, owners)]


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    classes = Counter(type(child) for _, child in children)
    for name, child in children:
        repeated = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and classes[type(child)] > 1)
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList))
        if repeated and len(children) > 1 and not is_container and any(True for _ in child.parameters()):
            yield name, child
        else:
            yield from _blocks(child, f"{name}.")


def _owns_its_parameters(block: nn.Module, owners: Counter[int]) -> bool:
    inside: Counter[int] = Counter()
    for module in block.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                inside[id(parameter)] += 1
    return all(owners[key] == count for key, count in inside.items())


class LayoutRule:
    """Decides dtypes and form of the master for a parameter.

    Args:
        compute_dtype: dtype of floating-point weights in forward and backward; None: the parameter's own.
        split_masters: whether bf16 weights have fp32 masters.
    """

    def __init__(self, compute_dtype: torch.dtype | None, *, split_masters: bool) -> None:
        self._compute_dtype = compute_dtype
        self._split_masters = split_masters

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter of `dtype` computes."""
        if not dtype.is_floating_point or self._compute_dtype is None:
            return dtype
        return self._compute_dtype

    def master(self, dtype: torch.dtype, *, trained: bool) -> MasterForm:
        """Form of the master of a parameter of `dtype`. Raises UsageError for a type that cannot be trained."""
        compute = self.compute_dtype(dtype)
        if trained and dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"parameters of {dtype} cannot be trained: build the model in float32 or bfloat16 "
                "(compute_dtype chooses what it computes in), or freeze them with requires_grad_(False)"
            )
        if dtype == torch.float32 and compute == torch.bfloat16:
            return MasterForm.SPLIT
        if dtype == torch.bfloat16 and compute == torch.bfloat16 and self._split_masters:
            return MasterForm.SPLIT
        if dtype != compute:
            raise UsageError(f"weights of {dtype} cannot compute in {compute}: build the model in float32")
        return MasterForm.NONE


class Seat(NamedTuple):
    """Where a parameter will live once its segment's bytes are placed."""

    cell: ParameterCell
    segment: Segment
    offset: int
    live_numel: int


def lay_out(unit: Unit, module: nn.Module, rule: LayoutRule) -> list[Seat]:
    """Gives every parameter of a freshly sharded unit its seat in a segment; moves no bytes."""
    segments: dict[tuple[torch.dtype, bool], Segment] = {}
    seats: list[Seat] = []
    for name, parameter in module.named_parameters():
        cell = cell_of(parameter)
        if cell is None or cell.unit is not None:
            continue
        trained = parameter.requires_grad
        if trained and any(key != (cell.dtype, True) and key[1] for key in segments):
            raise UsageError(
                f"{name} of {unit.name or 'the root'} is trained in {cell.dtype}, others beside it are not: FSDP2 "
                "reduces the gradients of a block together, so cast the block to one dtype or freeze the odd ones"
            )
        segment = segments.get((cell.dtype, trained))
        if segment is None:
            segment = segments[cell.dtype, trained] = Segment(
                unit.runtime.tools,
                unit.index,
                len(segments),
                logical_dtype=cell.dtype,
                compute_dtype=rule.compute_dtype(cell.dtype),
                master=rule.master(cell.dtype, trained=trained),
            )
            unit.segments.append(segment)
        cell.name = f"{unit.name}.{name}" if unit.name else name
        seats.append(Seat(cell, segment, segment.append(cell.name, cell.numel), local_tensor(parameter).numel()))
        unit.cells.append(cell)
    return seats


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, gradient or state."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def cell_of(parameter: torch.Tensor) -> ParameterCell | None:
    """The cell behind a parameter, or None for a parameter that tiered does not hold."""
    local = local_tensor(parameter)
    if isinstance(local, TieredTensor) and isinstance(local.cell, ParameterCell):
        return local.cell
    return None


def tensor_beside(parameter: torch.Tensor, cell: Cell) -> torch.Tensor:
    """A gradient or state: a tensor over `cell`, shaped and sharded like `parameter`."""
    tiered = TieredTensor(cell, local_tensor(parameter).shape)
    if not isinstance(parameter, DTensor):
        return tiered
    return DTensor.from_local(
        tiered,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
