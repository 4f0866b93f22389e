"""The executor of the trace: says before each gather what to read ahead, and how soon each unit is next needed.

Bounded in units and in bytes. Never blocks, never fails; see [Note: the trace is a hint] in `plan/trace.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tiered.plan.trace import Trace
from tiered.shard import NEVER_USED, Shard, Tier
from tiered.tiers.swap_manager import SwapManager


class Mode(Enum):
    """Passes that are alike: each has a trace of its own."""

    TRAIN = "train"
    NO_GRAD = "no_grad"


class PrefetchQueue:
    """Issues reads ahead of the gathers.

    Args:
        manager: where hints go.
        prefetch_units: how many units beyond the current one are asked for; 0 turns prefetch off.
        prefetch_bytes: how many bytes of them at most.
    """

    def __init__(self, manager: SwapManager, *, prefetch_units: int, prefetch_bytes: int) -> None:
        self._manager = manager
        self._units_max = prefetch_units
        self._bytes_max = prefetch_bytes
        self._shards: Sequence[Sequence[Shard]] = ()
        self._traces: dict[Mode, Trace] = {mode: Trace(()) for mode in Mode}
        self._mode = Mode.TRAIN
        self._recorded: list[int] = []
        self._position = 0

    def set_shards(self, shards: Sequence[Sequence[Shard]]) -> None:
        """Tells which shards a gather of each unit needs, by unit number."""
        self._shards = shards

    def begin_pass(self, mode: Mode) -> None:
        """The root module's forward starts: what was recorded becomes the trace of its mode."""
        if self._recorded:
            self._traces[self._mode] = Trace(self._recorded)
        self._recorded = []
        self._mode = mode
        length = max(1, len(self._traces[mode]))
        self._position = -(-self._position // length) * length

    def on_gather(self, unit: int) -> int:
        """Unit `unit` is gathered now. Hints what comes next and returns the position of its next use."""
        self._recorded.append(unit)
        trace = self._traces[self._mode]
        found = trace.locate(unit, self._position) if len(trace) else None
        if found is None:
            return NEVER_USED
        self._position = found + 1
        self.hint()
        return trace.locate(unit, self._position) or NEVER_USED

    def next_use(self, unit: int) -> int:
        """Position at which the current trace next uses `unit`."""
        trace = self._traces[self._mode]
        found = trace.locate(unit, self._position) if len(trace) else None
        return NEVER_USED if found is None else found

    def hint(self) -> None:
        """Asks for the units that come next, as far as both limits allow."""
        trace = self._traces[self._mode]
        budget = self._bytes_max
        self._manager.advance(self._position - 1)  # the unit being gathered now is still needed
        for unit, position in trace.upcoming(self._position, self._units_max) if self._units_max else ():
            wanted = []
            for shard in self._shards[unit]:
                if shard.home is not Tier.NVME:
                    continue
                budget -= shard.nbytes
                if budget < 0:
                    break
                wanted.append(shard)
            if wanted:
                self._manager.prefetch(wanted, next_use=position)
            if budget < 0:
                return

    def trace(self, mode: Mode) -> Trace:
        """The trace in use for `mode`; empty before the second pass."""
        return self._traces[mode]
