"""The parts of an engine that a unit's parameters and the optimizer reach through their cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.events import EventLog
from tiered.plan.prefetch_queue import PrefetchQueue
from tiered.shard import ShardKind
from tiered.zero.segment import Segment, Tools

if TYPE_CHECKING:
    from tiered.optim.grad_buffer import GradBuffer


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """Made by `tiered.engine`; see there.

    Attributes:
        tools: manager, homes and copier.
        queue: the prefetch queue.
        gradients: the gradient buffer.
        events: counters and log.
        place: reserves one kind's bytes of a segment where the plan says.
        slot_count: staging slots in the arena.
    """

    tools: Tools
    queue: PrefetchQueue
    gradients: GradBuffer
    events: EventLog
    place: Callable[[Segment, ShardKind], None]
    slot_count: int
