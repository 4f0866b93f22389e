"""A segment: parameters of one unit with one dtype, laid out one after another and stored kind by kind.

The layout is the same on every rank. Element `i` of the segment is element `i` of each kind, so an update works
on one range of elements in all kinds at once. Small tensors share a shard; a large one spans several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import torch

from tiered.errors import UsageError
from tiered.optim import kernels
from tiered.shard import NEVER_USED, Shard, ShardKey, ShardKind, Tier
from tiered.tiers.copier import Copier
from tiered.tiers.homes import Homes
from tiered.tiers.swap_manager import Access, Outcome, SwapManager

READ_AHEAD = 4
"""Shards that a sequential read or write asks for at a time."""

ALIGN_NUMEL = 64
"""Parameters start at multiples of this many elements: 128 bytes in bf16."""


class MasterForm(Enum):
    """How the fp32 master of a weight is kept (DESIGN 5)."""

    NONE = "none"  # the weight is its own master
    SPLIT = "split"  # bf16 compute weight + the low 16 bits


class Window(NamedTuple):
    """Part of a shard: elements [start, stop) of the segment are [low, low + stop - start) of the shard."""

    shard: Shard
    start: int
    stop: int
    low: int


class Tools(NamedTuple):
    """What a segment needs to move its bytes."""

    manager: SwapManager
    homes: Homes
    copier: Copier
    slot_bytes: int


class Segment:
    """See the module's docstring.

    Args:
        unit, index: its place in the model.
        logical_dtype: dtype that users see.
        compute_dtype: dtype of the weights in forward and backward, and of PARAM's bytes.
        master: form of the fp32 master.
    """

    def __init__(
        self,
        tools: Tools,
        unit: int,
        index: int,
        *,
        logical_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        master: MasterForm,
    ) -> None:
        self.tools = tools
        self.unit = unit
        self.index = index
        self.logical_dtype = logical_dtype
        self.compute_dtype = compute_dtype
        self.master = master
        self.numel = 0
        self.wide_gradients = compute_dtype == torch.float32
        self._names: list[tuple[int, str]] = []
        self._shards: dict[ShardKind, tuple[Shard, ...]] = {}

    # ---- layout ----

    def append(self, name: str, numel: int) -> int:
        """Gives a parameter its place; returns the offset of its first element."""
        offset = self.numel
        self._names.append((offset, name))
        self.numel += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
        return offset

    def dtype_of(self, kind: ShardKind) -> torch.dtype:
        """Dtype of the stored elements of `kind`."""
        if kind is ShardKind.PARAM:
            return self.compute_dtype
        if kind is ShardKind.MASTER:
            return torch.int16
        if kind is ShardKind.GRAD and not self.wide_gradients:
            return self.compute_dtype
        return torch.float32

    def has(self, kind: ShardKind) -> bool:
        """Whether `kind` has its place already."""
        return kind in self._shards

    def shards(self, kind: ShardKind) -> tuple[Shard, ...]:
        """All shards of `kind`, in order."""
        return self._shards[kind]

    def place(self, kind: ShardKind, tier: Tier) -> None:
        """Reserves the bytes of `kind` in `tier`; until written they read as zeros."""
        itemsize = self.dtype_of(kind).itemsize
        key = ShardKey(self.unit, self.index, kind, 0)
        self._shards[kind] = self.tools.homes.allocate(key, self._label(kind, itemsize), self.numel * itemsize, tier)

    def free(self, kind: ShardKind) -> None:
        """Gives the bytes of `kind` back; nothing of it may be in use."""
        self.give_back(self._shards.pop(kind, ()))

    def give_back(self, shards: tuple[Shard, ...]) -> None:
        """Gives shards back that this segment does not use any more."""
        self.tools.manager.drain()
        self.tools.manager.discard(shards)
        self.tools.homes.free(shards)

    def windows(self, kind: ShardKind, start: int, stop: int) -> Iterator[Window]:
        """The parts of `kind`'s shards that hold elements [start, stop), in order."""
        per_shard = self.tools.slot_bytes // self.dtype_of(kind).itemsize
        shards = self._shards[kind]
        for piece in range(start // per_shard, -(-stop // per_shard) if stop > start else 0):
            first = piece * per_shard
            low, high = max(start, first), min(stop, first + per_shard)
            yield Window(shards[piece], low, high, low - first)

    def _label(self, kind: ShardKind, itemsize: int) -> Callable[[int, int], str]:
        def label(start: int, stop: int) -> str:
            first, last = start // itemsize, max(start, stop - 1) // itemsize
            names = [n for i, (at, n) in enumerate(self._names) if at <= last and self._end(i) > first]
            more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
            return f"{names[0] if names else 'padding'}{more} [{kind.name.lower()}]"

        return label

    def _end(self, index: int) -> int:
        return self._names[index + 1][0] if index + 1 < len(self._names) else self.numel

    # ---- bytes of one kind ----

    def each_window(self, kind: ShardKind, start: int, stop: int, access: Access) -> Iterator[Window]:
        """Acquires the windows of [start, stop) in order, a few ahead; the caller releases each shard."""
        windows = list(self.windows(kind, start, stop))
        groups = ((w.shard,) for w in windows)
        manager = self.tools.manager
        stream = manager.stream(groups, access, window=READ_AHEAD, cause=kind.name.lower())
        for window, _ in zip(windows, stream, strict=True):
            yield window

    def copy_out(self, kind: ShardKind, start: int, target: torch.Tensor, *, next_use: int = NEVER_USED) -> None:
        """Fills 1-D `target`, on any device, with elements from `start` on."""
        dtype, tools = self.dtype_of(kind), self.tools
        for shard, low, high, at in self.each_window(kind, start, start + target.numel(), Access.READ):
            fence = None
            try:
                staged = shard.view(dtype)[at : at + high - low]
                fence = tools.copier.copy_out(target[low - start : high - start], staged)
            finally:
                tools.manager.release((shard,), Outcome.UNCHANGED, fence=fence, next_use=next_use)

    def copy_in(self, kind: ShardKind, start: int, values: torch.Tensor) -> None:
        """Sets elements from `start` on to 1-D `values`, from any device."""
        dtype, tools = self.dtype_of(kind), self.tools
        stop = start + values.numel()
        whole = start == 0 and stop >= self.numel
        access = Access.OVERWRITE if whole else Access.UPDATE
        for shard, low, high, at in self.each_window(kind, start, stop, access):
            fence = None
            try:
                staged = shard.view(dtype)[at : at + high - low]
                fence = tools.copier.copy_in(staged, values[low - start : high - start])
            finally:
                tools.manager.release((shard,), Outcome.MODIFIED, fence=fence)

    # ---- the weight as users see it ----

    def read_logical(self, start: int, stop: int) -> torch.Tensor:
        """Weights [start, stop) in the logical dtype, as a new host tensor."""
        weights = torch.empty(stop - start, dtype=self.compute_dtype, device="cpu")
        self.copy_out(ShardKind.PARAM, start, weights)
        if self.master is MasterForm.SPLIT and self.logical_dtype == torch.float32:
            return self._join(start, weights)
        return weights

    def read_master(self, start: int, stop: int) -> torch.Tensor:
        """The fp32 masters of [start, stop), as a new host tensor."""
        weights = torch.empty(stop - start, dtype=self.compute_dtype, device="cpu")
        self.copy_out(ShardKind.PARAM, start, weights)
        return self._join(start, weights) if self.master is MasterForm.SPLIT else weights.float()

    def write_logical(self, start: int, values: torch.Tensor) -> None:
        """Sets weights from `start` on; master and compute weight together, so they cannot disagree."""
        if self.master is MasterForm.SPLIT:
            self.write_master(start, values.float())
        else:
            self.copy_in(ShardKind.PARAM, start, values.to(self.compute_dtype))

    def write_master(self, start: int, values: torch.Tensor) -> None:
        """Sets fp32 masters from `start` on, and the compute weights that follow from them."""
        if self.master is MasterForm.NONE:
            self.copy_in(ShardKind.PARAM, start, values.to(self.compute_dtype))
            return
        high = torch.empty(values.numel(), dtype=torch.bfloat16, device="cpu")
        low = torch.empty(values.numel(), dtype=torch.int16, device="cpu")
        kernels.split_f32(values.contiguous(), high, low)
        self.copy_in(ShardKind.PARAM, start, high)
        if self.has(ShardKind.MASTER):
            self.copy_in(ShardKind.MASTER, start, low)
        elif self.logical_dtype == torch.float32:
            raise UsageError("the low halves of fp32 weights have no place yet")

    def _join(self, start: int, high: torch.Tensor) -> torch.Tensor:
        low = torch.zeros(high.numel(), dtype=torch.int16, device="cpu")
        if self.has(ShardKind.MASTER):
            self.copy_out(ShardKind.MASTER, start, low)
        out = torch.empty(high.numel(), dtype=torch.float32, device="cpu")
        kernels.join_f32(high, low, out)
        return out
