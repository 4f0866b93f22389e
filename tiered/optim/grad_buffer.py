"""Gradients on the host: taken from FSDP2 after reduce-scatter, accumulated in fp32, read by the update.

[Note: narrow gradients] With one backward per step a gradient is kept in the compute dtype in which it was
computed, which loses nothing. A second backward before the step widens the segment's gradients to fp32 for good, so
that sums are fp32 sums; the first summand was exact either way.

[Note: scale] Clipping multiplies all gradients by one number. It is remembered here and applied in fp32 by whoever
reads next, which is the same multiplication without the pass over the bytes.

[Note: one gradient at a time] A parameter has room for one gradient. A tensor that stood for an earlier one raises
when it is used: it would show the bytes of the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tiered.errors import UsageError
from tiered.events import EventLog
from tiered.shard import Shard, ShardKind
from tiered.tensor import TieredTensor, is_tiered, materialize
from tiered.tiers.copier import Fence
from tiered.tiers.swap_manager import Access, Outcome, SwapManager
from tiered.zero.cells import ParameterCell, SimpleCell
from tiered.zero.segment import Segment
from tiered.zero.units import cell_of, local_tensor, tensor_beside

aten = torch.ops.aten

NORM_NUMEL = 1 << 12
"""Elements per partial norm, counted from the start of the parameter: the norm does not depend on the arena."""

NORM_BLOCKS_MAX = 1 << 10
"""Partial norms that are computed together, which bounds the fp32 copy they need."""


class GradBuffer:
    """All gradients of one engine.

    Args:
        manager: moves their shards.
        place: reserves the gradient bytes of a segment before the first one arrives.
        events: counts what comes from the device.
    """

    def __init__(self, manager: SwapManager, place: Callable[[Segment], None], events: EventLog) -> None:
        self._manager = manager
        self.events = events
        self._place = place
        self._cells: dict[ParameterCell, GradientCell] = {}
        self._open: Shard | None = None
        self._fence: Fence | None = None
        self.wants_norms = False

    def take(self, parameter: torch.Tensor) -> None:
        """The hook: moves a gradient that FSDP2 just made from the device to its tier.

        `parameter.grad` becomes a tensor over the tier, onto which FSDP2 adds later micro-batches by itself.
        """
        grad, cell = parameter.grad, cell_of(parameter)
        if grad is None or cell is None:
            return
        if is_tiered(local_tensor(grad)):
            self.adopt(parameter)
            return
        self._renew(cell).begin(local_tensor(grad).detach().reshape(-1))  # exact: see [Note: narrow gradients]
        self._show(parameter, cell)

    def adopt(self, parameter: torch.Tensor) -> None:
        """Moves a gradient that the user set, if it is not in its tier already."""
        grad, cell = parameter.grad, cell_of(parameter)
        if grad is None or cell is None:
            return
        if isinstance(parameter, DTensor) and not isinstance(grad, DTensor):  # whole: this rank keeps its slice
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local = local_tensor(grad).detach()
        if isinstance(local, TieredTensor):
            if cell in self._cells and _is_all_of(local, self._cells[cell]):
                return
            local = materialize(local)  # the gradient of another parameter, or another view of this one's
        self._renew(cell).write(0, local.reshape(-1).cpu())
        self._show(parameter, cell)

    def _renew(self, cell: ParameterCell) -> GradientCell:
        """A new gradient for `cell`; see [Note: one gradient at a time]."""
        if cell in self._cells:
            self._cells.pop(cell).retire()
        return self.cell_for(cell)

    def _show(self, parameter: torch.Tensor, cell: ParameterCell) -> None:
        """Makes `parameter.grad` a tensor over the tier."""
        parameter.grad = tensor_beside(parameter, self._cells[cell])

    def cell_for(self, cell: ParameterCell) -> GradientCell:
        """The gradient of a parameter, with its bytes reserved."""
        if cell not in self._cells:
            self._cells[cell] = GradientCell(cell, self)
        segment = self._cells[cell].segment
        if not segment.has(ShardKind.GRAD):
            self._place(segment)
        return self._cells[cell]

    def open(self, shard: Shard) -> None:
        """Pins `shard` for writing; the one before it is released, so that a packed shard is written once."""
        if shard is not self._open:
            self.flush()
            self._manager.acquire((shard,), Access.UPDATE).wait()
            self._open = shard

    def written(self, fence: Fence | None) -> None:
        """A copy into the open shard was enqueued."""
        self._fence = fence or self._fence

    def flush(self) -> None:
        """Releases the open shard; what was taken so far may be read."""
        shard, fence = self._open, self._fence
        self._open = self._fence = None
        if shard is not None:
            self._manager.release((shard,), Outcome.MODIFIED, fence=fence)

    def widen(self, segment: Segment) -> None:
        """Makes the gradients of a segment fp32; see [Note: narrow gradients]."""
        self.flush()
        cells = [g for g in self._cells.values() if g.segment is segment]
        values = {g: g.read_stored(0, g.numel) for g in cells}
        narrow = segment.shards(ShardKind.GRAD)
        segment.wide_gradients = True
        try:
            self._place(segment)
        except BaseException:  # no room: the narrow ones are still there
            segment.wide_gradients = False
            raise
        segment.give_back(narrow)
        for gradient, stored in values.items():
            gradient.write_stored(stored.float())

    def discard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Says that the gradients of `parameters` are not needed any more (`zero_grad`)."""
        self.flush()
        cells = (cell_of(parameter) for parameter in parameters)
        gone = {cell for cell in cells if cell is not None and cell in self._cells}
        segments = {cell.segment for cell in gone if cell.segment is not None}
        for segment in segments:
            owners = [cell for cell in self._cells if cell.segment is segment]
            if all(cell in gone for cell in owners) and segment.has(ShardKind.GRAD):
                self._manager.discard(segment.shards(ShardKind.GRAD))
        for cell in gone:
            self._cells.pop(cell).retire()


class GradientCell(SimpleCell):
    """The gradient of one parameter shard; users see it in the parameter's dtype."""

    def __init__(self, parameter: ParameterCell, buffer: GradBuffer) -> None:
        self.name = f"{parameter.name}.grad"
        self.dtype = parameter.dtype
        self.numel = parameter.live_numel
        self.device = parameter.device
        self.scale = 1.0
        self._segment = parameter.place
        self._retired = False
        self._offset = parameter.offset
        self._buffer = buffer
        self._norm: float | None = None

    @property
    def segment(self) -> Segment:
        """Where the bytes are. Raises UsageError when they are another gradient's by now."""
        if self._retired:
            raise UsageError(
                f"this is an old {self.name}: zero_grad or a later backward has given its bytes to the next one. "
                "Clone a gradient to keep it: parameter.grad.clone()"
            )
        return self._segment

    def retire(self) -> None:
        """The parameter's next gradient takes the bytes; see [Note: one gradient at a time]."""
        self._retired = True

    # ---- writing ----

    def begin(self, values: torch.Tensor) -> None:
        """Replaces the gradient by 1-D `values` from the device."""
        self.scale = 1.0
        self._norm = norm_of(values) if self._buffer.wants_norms else None
        self.write_stored(values)

    def accumulate(self, values: torch.Tensor) -> None:
        """Adds 1-D `values`, in fp32."""
        if not self.segment.wide_gradients:
            self._buffer.widen(self.segment)
        total = self._read_fp32(0, self.numel)
        total += values.detach().to("cpu", torch.float32)
        self.begin(total)

    def multiply(self, factor: float) -> None:
        """Scales the gradient; see [Note: scale]."""
        if factor == 1.0:
            return
        if self.scale != 1.0:  # one factor is exact, a product of two would not be
            if not self.segment.wide_gradients:
                self._buffer.widen(self.segment)
            self.write_stored(self._read_fp32(0, self.numel))
            self.scale = 1.0
        self.scale = factor
        self._norm = None

    def write_stored(self, values: torch.Tensor) -> None:
        """Sets the stored elements, in the stored dtype."""
        segment = self.segment
        dtype, tools = segment.dtype_of(ShardKind.GRAD), segment.tools
        self._buffer.events.count_copy("to_host", self.numel * dtype.itemsize)
        for shard, low, high, at in segment.windows(ShardKind.GRAD, self._offset, self._offset + self.numel):
            self._buffer.open(shard)
            part = values[low - self._offset : high - self._offset]
            self._buffer.written(tools.copier.copy_in(shard.view(dtype)[at : at + high - low], part))

    # ---- reading ----

    def norm(self) -> float:
        """The 2-norm of this rank's part."""
        self._buffer.wants_norms = True
        if self._norm is None:
            self._norm = norm_of(self._read_fp32(0, self.numel))
        return self._norm

    def read_stored(self, start: int, stop: int) -> torch.Tensor:
        """Elements as they are stored, without the scale."""
        self._buffer.flush()
        out = torch.empty(stop - start, dtype=self.segment.dtype_of(ShardKind.GRAD), device="cpu")
        self.segment.copy_out(ShardKind.GRAD, self._offset + start, out)
        return out

    def _read_fp32(self, start: int, stop: int) -> torch.Tensor:
        values = self.read_stored(start, stop).float()
        return values if self.scale == 1.0 else values.mul_(torch.tensor(self.scale, dtype=torch.float32, device="cpu"))

    # ---- Cell ----

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._read_fp32(start, stop).to(self.dtype)

    def write(self, start: int, values: torch.Tensor) -> None:
        if self.dtype == torch.float32 and not self.segment.wide_gradients:  # any fp32 values, not a computed gradient
            self._buffer.widen(self.segment)
        if start == 0 and values.numel() == self.numel and not self.segment.wide_gradients:
            self.begin(values)
            return
        whole = self._read_fp32(0, self.numel)
        whole[start : start + values.numel()].copy_(values)
        self.begin(whole)

    def intercept(self, operator: Any, args: tuple[Any, ...]) -> Any:
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        cells = [t.cell for t in tensors if isinstance(t, TieredTensor) and isinstance(t.cell, GradientCell)]
        if len(cells) != len(tensors) or not all(map(_is_all_of, tensors, cells)):
            return NotImplemented
        if operator in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
            power, *dims_and_more = args[1:] or (2,)
            if power != 2 or any(dims_and_more):  # along dimensions, or keeping them
                return NotImplemented
            norms = [torch.tensor(cell.norm(), dtype=torch.float32, device=cell.device) for cell in cells]
            return norms if tensors is args[0] else norms[0]
        other = args[1]
        if operator is aten.add_.Tensor:
            if not isinstance(other, torch.Tensor) or other.shape != tensors[0].shape:
                return NotImplemented
            values = (materialize(other) if isinstance(other, TieredTensor) else other).reshape(-1)
            cells[0].accumulate(values)
            return args[0]
        if isinstance(other, torch.Tensor) and other.numel() != 1:
            return NotImplemented
        factor = float(other)
        for cell in cells:
            cell.multiply(factor)
        return args[0] if operator is aten.mul_.Tensor else None


def _is_all_of(tensor: torch.Tensor, cell: GradientCell) -> bool:
    """Whether `tensor` shows all of `cell`, element after element."""
    whole = tensor.numel() == cell.numel and tensor.is_contiguous() and tensor.dtype == cell.dtype
    return whole and isinstance(tensor, TieredTensor) and tensor.cell is cell


def norm_of(values: torch.Tensor) -> float:
    """2-norm of a 1-D tensor: fp32 norms of fixed blocks, summed exactly. Independent of where the bytes were."""
    norms = []
    for piece in torch.split(values, NORM_BLOCKS_MAX * NORM_NUMEL):
        even = piece.numel() // NORM_NUMEL * NORM_NUMEL
        norms.append(torch.linalg.vector_norm(piece[:even].view(-1, NORM_NUMEL).float(), dim=1))
        norms.append(torch.linalg.vector_norm(piece[even:].float()).view(1))
    return math.sqrt(math.fsum(norm**2 for norm in torch.cat(norms).tolist()))  # a device is waited for once
