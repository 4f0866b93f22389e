"""The update: for every group of shards, states in, one kernel call, states and weights out.

Reads, arithmetic and writes overlap: while a group is computed the next ones are being read and the last ones
written. Knows the layout, not the optimizer's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiered.optim import kernels
from tiered.optim.grad_buffer import GradientCell
from tiered.optim.kernels import AdamArgs
from tiered.shard import Shard, ShardKind
from tiered.tiers.swap_manager import Access, Outcome, SwapManager
from tiered.zero.segment import MasterForm, Segment, Window

GROUPS_AHEAD_MAX = 4


class Part(NamedTuple):
    """Elements [start, stop) of a segment: one parameter, with what its update needs."""

    start: int
    stop: int
    args: AdamArgs
    gradient: GradientCell


class Group(NamedTuple):
    """What is in memory together: the same range of elements in every kind."""

    segment: Segment
    parts: tuple[Part, ...]
    shards: tuple[Shard, ...]


def kinds_of(segment: Segment) -> tuple[ShardKind, ...]:
    """The kinds that an update of `segment` reads; all but the gradient are written."""
    master = (ShardKind.MASTER,) if segment.master is MasterForm.SPLIT else ()
    return (ShardKind.PARAM, *master, ShardKind.EXP_AVG, ShardKind.EXP_AVG_SQ, ShardKind.GRAD)


def run_update(
    manager: SwapManager,
    work: Sequence[tuple[Segment, Sequence[Part]]],
    *,
    slot_count: int,
    next_use: Callable[[int], int],
) -> None:
    """Updates every part of `work` in order.

    Args:
        slot_count: staging slots that may be held at once.
        next_use: by unit number, where the trace needs its weights again.
    """
    groups = [group for segment, parts in work for group in _groups(segment, parts)]
    widest = max((len(group.shards) for group in groups), default=1)
    window = max(1, min(GROUPS_AHEAD_MAX, slot_count // (2 * widest)))
    stream = manager.stream((g.shards for g in groups), Access.UPDATE, window=window, cause="update")
    for group, _ in zip(groups, stream, strict=True):
        written = tuple(shard for shard in group.shards if shard.key.kind is not ShardKind.GRAD)
        read = tuple(shard for shard in group.shards if shard.key.kind is ShardKind.GRAD)
        try:
            for part in group.parts:
                _compute(group.segment, part)
        finally:
            manager.release(read, Outcome.UNCHANGED)
            manager.release(written, Outcome.MODIFIED, next_use=next_use(group.segment.unit))


def _groups(segment: Segment, parts: Sequence[Part]) -> Iterator[Group]:
    """Cuts a segment where its narrowest kind changes shard, and leaves out what no part touches."""
    kinds = kinds_of(segment)
    narrowest = min(segment.dtype_of(kind).itemsize for kind in kinds)
    step = segment.tools.slot_bytes // narrowest
    for first in range(0, segment.numel, step):
        last = min(first + step, segment.numel)
        inside = tuple(
            part._replace(start=max(part.start, first), stop=min(part.stop, last))
            for part in parts
            if part.start < last and part.stop > first
        )
        if inside:
            start, stop = inside[0].start, inside[-1].stop
            shards = [w.shard for kind in kinds for w in segment.windows(kind, start, stop)]
            yield Group(segment, inside, tuple(shards))


def _compute(segment: Segment, part: Part) -> None:
    """One kernel call per stretch that lies in one shard of every kind."""
    kinds = kinds_of(segment)
    step = segment.tools.slot_bytes // max(segment.dtype_of(kind).itemsize for kind in kinds)
    start = part.start
    while start < part.stop:
        stop = min(part.stop, (start // step + 1) * step)
        views = {kind: _Operand(segment, next(segment.windows(kind, start, stop))) for kind in kinds}
        _call_kernel(segment, part.args, views)
        for kind, operand in views.items():
            if kind is not ShardKind.GRAD:
                operand.put_back()
        start = stop


class _Operand:
    """One kind's elements as a host tensor; a shard at home on an accelerator is computed on in a copy."""

    def __init__(self, segment: Segment, window: Window) -> None:
        view = window.shard.view(segment.dtype_of(window.shard.key.kind))
        self._home = view[window.low : window.low + window.stop - window.start]
        self.host = self._home.cpu()

    def put_back(self) -> None:
        if self.host is not self._home:
            self._home.copy_(self.host)


def _call_kernel(segment: Segment, args: AdamArgs, views: dict[ShardKind, _Operand]) -> None:
    param, grad = views[ShardKind.PARAM].host, views[ShardKind.GRAD].host
    states = views[ShardKind.EXP_AVG].host, views[ShardKind.EXP_AVG_SQ].host
    if segment.master is MasterForm.SPLIT:
        kernels.adam_split(param, views[ShardKind.MASTER].host, grad, *states, args)
    elif segment.compute_dtype == torch.bfloat16:
        kernels.adam_bf16(param, grad, *states, args)
    else:
        kernels.adam_f32(param, grad, *states, args)
