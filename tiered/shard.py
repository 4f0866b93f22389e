"""The words for bytes that live in a tier: tier, kind, key, shard, and the one state machine of a shard.

This room knows no disk, no device and no model. `tiered.tiers.swap_manager.SwapManager` is the only
writer of `Shard.state`, on its own thread, and only through `Shard.move_to`.

    STORED ---> READING ---> HOST_CLEAN <--> UPLOADING          DEVICE (home on the device: no edges)
      ^  \\         |           |   ^  \\
      |   \\        v      dirty |   |   +--> DOWNLOADING (gradients and edits arrive from the device)
      |    \\    FAILED          v   |             |
      |     +----> HOST_CLEAN  HOST_DIRTY <------+
      |    (overwrite: no read)  |   ^
      +--- evict, discard        v   |
                               WRITING ---> HOST_CLEAN or FAILED

| edge                                  | performed by                    | lease                |
|---------------------------------------|---------------------------------|----------------------|
| STORED -> READING                     | `_start_read`                   | taken                |
| STORED -> HOST_CLEAN                  | `_admit` (overwrite or blank)   | taken                |
| READING -> HOST_CLEAN                 | `_finish_read`                  | kept                 |
| READING -> FAILED                     | `_finish_read`                  | given back           |
| FAILED -> READING                     | `_start_read` (another try)     | taken                |
| HOST_CLEAN -> UPLOADING               | `_rest`                         | kept                 |
| UPLOADING -> HOST_CLEAN               | `_poll_fences`, `_soil`         | kept                 |
| HOST_CLEAN -> DOWNLOADING             | `_rest`                         | kept                 |
| DOWNLOADING -> HOST_DIRTY             | `_poll_fences`                  | kept                 |
| HOST_CLEAN -> HOST_DIRTY              | `_soil`                         | kept                 |
| HOST_DIRTY -> WRITING                 | `_start_write`                  | kept                 |
| WRITING -> HOST_CLEAN                 | `_finish_write`                 | kept                 |
| WRITING -> FAILED                     | `_finish_write`                 | kept (last copy)     |
| HOST_CLEAN -> STORED                  | `_evict`, `_discard`            | given back           |
| HOST_DIRTY -> STORED                  | `_discard` (bytes not needed)   | given back           |

Invariants: (1) a shard has one state and one writer. (2) A lease is held exactly in the states between
READING and WRITING, and in FAILED after a write. (3) Bytes are never modified in WRITING or UPLOADING.
(4) HOST_DIRTY becomes STORED only through WRITING or by discarding. (5) A pinned shard is never evicted.
(6) FAILED after a read is left by reading again; FAILED after a write is final. A shard whose home is host
memory or the device never moves: it stays in HOST_CLEAN or DEVICE for life, with its buffer.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tiered.tiers.buffer_pool import Lease
    from tiered.tiers.nvme_store import Extent


class Tier(IntEnum):
    """A place for bytes, fastest first."""

    DEVICE = 0
    HOST = 1
    NVME = 2


class ShardKind(IntEnum):
    """What the bytes are. PARAM is in the compute dtype; MASTER is what the fp32 master has beyond it."""

    PARAM = 0
    MASTER = 1
    EXP_AVG = 2
    EXP_AVG_SQ = 3
    GRAD = 4


class ShardKey(NamedTuple):
    """Name of a shard, the same on every rank; sorts in model order."""

    unit: int
    segment: int
    kind: ShardKind
    piece: int


class ShardState(Enum):
    """See the diagram at the top of this file."""

    STORED = "stored"
    READING = "reading"
    HOST_CLEAN = "host_clean"
    HOST_DIRTY = "host_dirty"
    UPLOADING = "uploading"
    DOWNLOADING = "downloading"
    WRITING = "writing"
    DEVICE = "device"
    FAILED = "failed"


LEGAL_EDGES: frozenset[tuple[ShardState, ShardState]] = frozenset(
    {
        (ShardState.STORED, ShardState.READING),
        (ShardState.STORED, ShardState.HOST_CLEAN),
        (ShardState.READING, ShardState.HOST_CLEAN),
        (ShardState.READING, ShardState.FAILED),
        (ShardState.FAILED, ShardState.READING),
        (ShardState.HOST_CLEAN, ShardState.UPLOADING),
        (ShardState.UPLOADING, ShardState.HOST_CLEAN),
        (ShardState.HOST_CLEAN, ShardState.DOWNLOADING),
        (ShardState.DOWNLOADING, ShardState.HOST_DIRTY),
        (ShardState.HOST_CLEAN, ShardState.HOST_DIRTY),
        (ShardState.HOST_DIRTY, ShardState.WRITING),
        (ShardState.WRITING, ShardState.HOST_CLEAN),
        (ShardState.WRITING, ShardState.FAILED),
        (ShardState.HOST_CLEAN, ShardState.STORED),
        (ShardState.HOST_DIRTY, ShardState.STORED),
    }
)

NEVER_USED = 1 << 62
"""`Shard.next_use` of a shard that no plan expects to need again: the first to be evicted."""


class Shard:
    """At most one slot's worth of one kind of a segment: what moves in one go.

    Attributes:
        key: its name.
        label: the tensor or tensors it holds, for error messages.
        nbytes: payload bytes.
        home: the tier where the bytes rest.
        extent: place on NVMe (home NVME only).
        buffer: 1-D uint8 tensor with the bytes while they are in memory, else None.
        lease: right to `buffer` when it is a staging slot.
        pins: how many acquisitions hold the bytes now.
        blank: nothing was written yet (or it was discarded): the bytes read as zeros.
        next_use: position in the trace at which the bytes are expected next; the largest is evicted first.
    """

    __slots__ = (
        "blank",
        "buffer",
        "extent",
        "home",
        "key",
        "label",
        "lease",
        "nbytes",
        "next_use",
        "pins",
        "state",
    )

    def __init__(
        self,
        key: ShardKey,
        label: str,
        nbytes: int,
        *,
        home: Tier,
        extent: Extent | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self.key = key
        self.label = label
        self.nbytes = nbytes
        self.home = home
        self.extent = extent
        self.buffer = buffer
        self.lease: Lease | None = None
        self.pins = 0
        self.blank = True
        self.next_use = NEVER_USED
        self.state = {
            Tier.NVME: ShardState.STORED,
            Tier.HOST: ShardState.HOST_CLEAN,
            Tier.DEVICE: ShardState.DEVICE,
        }[home]

    def move_to(self, state: ShardState) -> None:
        """Takes one edge of the diagram; any other is a bug of the caller."""
        if (self.state, state) not in LEGAL_EDGES:
            raise AssertionError(f"shard {self.key} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The payload as a 1-D tensor of `dtype`; only between acquire and release."""
        if self.buffer is None:
            raise AssertionError(f"shard {self.key} has no bytes in memory ({self.state.name})")
        return self.buffer[: self.nbytes].view(dtype)

    def __repr__(self) -> str:
        return f"Shard({self.key}, {self.state.name}, {self.nbytes} B, pins={self.pins})"
