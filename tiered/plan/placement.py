"""Which tier each kind of each unit rests in: a pure function of sizes and budgets, made before training.

Host memory goes where a byte of it saves most traffic: gradients first (each would be written and read again),
then weights (read twice a step), then states. The pattern of use is cyclic, so a fixed resident part is better than
any replacement policy (DESIGN 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiered.config import Config
from tiered.errors import CapacityError
from tiered.shard import ShardKind, Tier
from tiered.tiers.memory import Need, check_capacity

ORDER = (ShardKind.GRAD, ShardKind.PARAM, ShardKind.MASTER, ShardKind.EXP_AVG, ShardKind.EXP_AVG_SQ)
SETTING = {
    ShardKind.PARAM: "parameters",
    ShardKind.GRAD: "gradients",
    ShardKind.MASTER: "optimizer_states",
    ShardKind.EXP_AVG: "optimizer_states",
    ShardKind.EXP_AVG_SQ: "optimizer_states",
}
SLOTS_MIN = 24
SLOT_BYTES_MIN = 64 << 10
SLOT_BYTES_MAX = 4 << 20
ARENA_BYTES_MAX = 1 << 30


class Arena(NamedTuple):
    """The staging arena: `slot_count` slots of `slot_bytes`."""

    slot_bytes: int
    slot_count: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.slot_count


class UnitBytes(NamedTuple):
    """What this rank stores of one unit, by kind, in bytes."""

    name: str
    kinds: Mapping[ShardKind, int]


class Placement(NamedTuple):
    """The plan: a tier for every (unit, kind), and the arena."""

    tiers: Mapping[tuple[int, ShardKind], Tier]
    arena: Arena

    def bytes_in(self, units: Sequence[UnitBytes], tier: Tier) -> int:
        """Bytes that rest in `tier` under this plan."""
        return sum(units[unit].kinds[kind] for (unit, kind), home in self.tiers.items() if home is tier)


def plan_arena(host_budget_bytes: int, *, uses_nvme: bool) -> Arena:
    """Half of the host budget, up to 1 GiB, in slots small enough that there are many; none without NVMe.

    Raises CapacityError when the budget cannot hold the smallest arena.
    """
    if not uses_nvme:
        return Arena(SLOT_BYTES_MAX, 0)
    smallest = SLOTS_MIN * SLOT_BYTES_MIN
    if host_budget_bytes < smallest:
        need = [Need("staging arena, at least", smallest)]
        check_capacity(need, host_budget_bytes, what="host_memory", smallest=smallest)
    arena_bytes = max(smallest, min(host_budget_bytes // 2, ARENA_BYTES_MAX))
    slot_bytes = SLOT_BYTES_MAX
    while slot_bytes > SLOT_BYTES_MIN and arena_bytes // slot_bytes < 2 * SLOTS_MIN:
        slot_bytes //= 2
    return Arena(slot_bytes, arena_bytes // slot_bytes)


def place(units: Sequence[UnitBytes], config: Config, arena: Arena, *, host_budget_bytes: int) -> Placement:
    """Assigns tiers; "auto" means host memory while the budget lasts, then NVMe.

    Raises CapacityError with a table when what must be in host memory does not fit.
    """
    left = host_budget_bytes - arena.nbytes
    tiers: dict[tuple[int, ShardKind], Tier] = {}
    forced: list[Need] = []
    for kind in ORDER:
        setting = getattr(config, SETTING[kind])
        for index, unit in enumerate(units):
            nbytes = unit.kinds.get(kind, 0)
            if not nbytes:
                continue
            if setting == "host" or (setting == "auto" and not config.nvme):
                tiers[index, kind] = Tier.HOST
                forced.append(Need(f"{kind.name.lower()} of {unit.name or 'the root'}", nbytes))
                left -= nbytes
            elif setting != "auto":
                tiers[index, kind] = Tier[setting.upper()]
    if left < 0:
        check_capacity(
            [Need("staging arena", arena.nbytes), *_by_kind(forced)],
            host_budget_bytes,
            what="host_memory",
            smallest=host_budget_bytes - left,
        )
        raise CapacityError(f"host_memory is {-left} bytes too small")
    for kind in ORDER:
        for index, unit in enumerate(units):
            nbytes = unit.kinds.get(kind, 0)
            if not nbytes or (index, kind) in tiers:
                continue
            fits = nbytes <= left
            tiers[index, kind] = Tier.HOST if fits else Tier.NVME
            left -= nbytes if fits else 0
    return Placement(tiers, arena)


def _by_kind(needs: Sequence[Need]) -> list[Need]:
    sums: dict[str, int] = {}
    for need in needs:
        kind = need.name.split(" of ")[0]
        sums[kind] = sums.get(kind, 0) + need.nbytes
    return [Need(name, nbytes) for name, nbytes in sums.items()]
