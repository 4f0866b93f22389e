"""Where shards rest: carves host memory, device memory and NVMe extents into shards, and takes them back.

Knows bytes, not models. One run of bytes (one kind of one segment) has one home; in memory it is one exact
allocation, on NVMe one extent per shard, so that a shard is one sequential transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from tiered.errors import UsageError
from tiered.shard import Shard, ShardKey, Tier
from tiered.tiers.buffer_pool import HostRegion, allocate_host
from tiered.tiers.nvme_store import NvmeStore


class Homes:
    """Allocates and frees shards in every tier, and counts their bytes.

    Args:
        store: NVMe space, or None when nothing may live there.
        device: the device tier's device.
        slot_bytes: the largest shard.
    """

    def __init__(self, store: NvmeStore | None, device: torch.device, *, slot_bytes: int) -> None:
        self._store = store
        self._device = device
        self._slot_bytes = slot_bytes
        self._regions: dict[Shard, HostRegion] = {}
        self.used_bytes: Counter[Tier] = Counter()

    def allocate(
        self,
        key: ShardKey,
        label: Callable[[int, int], str],
        nbytes: int,
        tier: Tier,
    ) -> tuple[Shard, ...]:
        """Shards for `nbytes` in `tier`, in order; `key.piece` counts up.

        `label(start, stop)` names what lies in a byte range. Raises CapacityError when the tier is full.
        """
        cuts = [(start, min(start + self._slot_bytes, nbytes)) for start in range(0, nbytes, self._slot_bytes)]
        shards: list[Shard] = []
        whole: torch.Tensor | None = None
        region: HostRegion | None = None
        if tier is Tier.HOST:
            region = allocate_host(nbytes, register=self._device.type != "cpu")
            whole = region.tensor
        elif tier is Tier.DEVICE:
            whole = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for piece, (start, stop) in enumerate(cuts):
            name = key._replace(piece=piece)
            if whole is not None:
                shards.append(Shard(name, label(start, stop), stop - start, home=tier, buffer=whole[start:stop]))
                continue
            if self._store is None:
                raise UsageError("a shard was placed on NVMe, but the config names no `nvme` directory")
            try:
                extent = self._store.allocate(stop - start)
            except BaseException:
                self.free(tuple(shards))
                raise
            shards.append(Shard(name, label(start, stop), stop - start, home=tier, extent=extent))
            self.used_bytes[tier] += extent.nbytes
        if whole is not None:
            self.used_bytes[tier] += nbytes
        if region is not None and shards:
            self._regions[shards[0]] = region
        return tuple(shards)

    def free(self, shards: tuple[Shard, ...]) -> None:
        """Takes a whole run back. Nobody may hold or move its shards any more."""
        for shard in shards:
            if shard.extent is not None and self._store is not None:
                self._store.free(shard.extent)
                self.used_bytes[shard.home] -= shard.extent.nbytes
            else:
                self.used_bytes[shard.home] -= shard.nbytes
                shard.buffer = None
        if shards and (region := self._regions.pop(shards[0], None)) is not None:
            region.close()

    def close(self) -> None:
        """Frees all host memory; NVMe space goes with the store."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
