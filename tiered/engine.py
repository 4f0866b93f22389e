"""The composition root: `shard` builds the parts and joins them; an `Engine` reports, waits and closes.

The only module that knows everyone. Data flows one way: FSDP2 asks cells, cells ask segments, segments ask the
swap manager, the swap manager asks the I/O engine.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiered import _native
from tiered.budgets import Budgets, measure
from tiered.config import Config
from tiered.errors import ClosedError, UsageError
from tiered.events import EventLog
from tiered.optim.grad_buffer import GradBuffer
from tiered.plan.placement import SETTING, Arena, Placement, UnitBytes, place, plan_arena
from tiered.plan.prefetch_queue import PrefetchQueue
from tiered.report import Report
from tiered.shard import ShardKind, Tier
from tiered.tiers.buffer_pool import BufferPool, Purpose
from tiered.tiers.copier import Copier, open_copier
from tiered.tiers.homes import Homes
from tiered.tiers.io.engine import IoEngine
from tiered.tiers.io.probe import open_engine, probe
from tiered.tiers.memory import Need, check_capacity, tune_malloc, usable_host_bytes
from tiered.tiers.nvme_store import NvmeStore, free_disk_bytes
from tiered.tiers.swap_manager import SwapManager
from tiered.zero import groups
from tiered.zero.build import Conversion, build, check_module
from tiered.zero.nursery import Nursery
from tiered.zero.runtime import Runtime
from tiered.zero.segment import MasterForm, Segment, Tools
from tiered.zero.units import LayoutRule, Unit, cell_of, find_blocks, lay_out
from tiered.zero.unshard import make_plain

log = logging.getLogger("tiered")

NURSERY_BYTES = 64 << 20
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the replaceable parts are made; tests put the fakes of `tiered.testing` here.

    Attributes:
        open_engine: an I/O engine by name and queue depth.
        open_copier: a copier for a device.
        arena: instead of the planned one.
        poison: fill recycled slots, so that whoever reads one too late sees wrong bytes.
        log_max: events that the engine's log keeps.
    """

    open_engine: Callable[[str, int], IoEngine] = open_engine
    open_copier: Callable[[torch.device], Copier] = open_copier
    arena: Arena | None = None
    poison: bool = False
    log_max: int = 0


def shard(
    model: nn.Module | Callable[[], nn.Module],
    config: Config | None = None,
    /,
    *,
    _parts: Parts = Parts(),
    **settings: Any,
) -> nn.Module:
    """Builds, shards and places a model; returns the module, ready for an ordinary training loop.

    A factory is run so that each parameter leaves memory for its tier as soon as it is registered: the model never
    exists whole. A finished module is converted parameter by parameter. Then FSDP2's `fully_shard` is applied to
    each repeated block and to the rest. Works with `torchrun`, and without it as a group of one rank.

    Args:
        model: a function without arguments that makes the module, or the module.
        config: a `Config`; or give its settings as keyword arguments.

    Raises:
        ConfigError: a setting is wrong.
        CapacityError: a budget or a disk is too small; nothing is left behind.
        StorageError: an `nvme` directory cannot be used.
    """
    if config is not None and settings:
        raise UsageError("give tiered.shard a Config or settings, not both")
    return _Assembly(config or Config(**settings), _parts).shard(model)


def engine(model: nn.Module) -> Engine:
    """The engine behind a model from `tiered.shard`. Raises UsageError for any other module."""
    try:
        return _engines[model]
    except KeyError:
        raise UsageError(f"{type(model).__name__} did not come from tiered.shard, so it has no engine") from None


class Engine:
    """Reports on, synchronizes and closes what `tiered.shard` started. A context manager that closes."""

    def __init__(
        self,
        runtime: Runtime,
        units: list[Unit],
        *,
        plan: Placement,
        parameter_count: int,
        config: Config,
        budgets: Budgets,
        io: tuple[str, str],
        resources: ExitStack,
        model: nn.Module,
    ) -> None:
        self._model = weakref.ref(model)
        self._runtime = runtime
        self._units = units
        self._plan = plan
        self._parameter_count = parameter_count
        self._config = config
        self._budgets = budgets
        self._io = io
        self._resources = resources
        self._closed = False

    @property
    def config(self) -> Config:
        return self._config

    @property
    def events(self) -> EventLog:
        """The ordered log and the counters."""
        return self._runtime.events

    def report(self) -> Report:
        """What was kept, moved and waited for; see `Report`."""
        events = self._runtime.events
        state: Counter[str] = Counter()
        tiers: Counter[str] = Counter({tier.name.lower(): 0 for tier in Tier})
        for unit in self._units:
            for segment in unit.segments:
                for kind in ShardKind:
                    if segment.has(kind):
                        for piece in segment.shards(kind):
                            state[kind.name.lower()] += piece.nbytes
                            tiers[piece.home.name.lower()] += piece.nbytes
        prefetch = events.prefetch
        return Report(
            parameter_count=self._parameter_count,
            state_bytes=dict(state),
            placement_bytes=dict(tiers),
            nvme_read_bytes=sum(events.read_bytes.values()),
            nvme_write_bytes=sum(events.write_bytes.values()),
            to_device_bytes=events.copied_bytes["to_device"],
            to_host_bytes=events.copied_bytes["to_host"],
            read_bytes_by_kind={kind.name.lower(): n for kind, n in events.read_bytes.items()},
            write_bytes_by_kind={kind.name.lower(): n for kind, n in events.write_bytes.items()},
            stall_seconds=dict(events.stall_seconds),
            prefetch_hits=prefetch["hit"] + prefetch["late"],
            prefetch_misses=prefetch["miss"],
            host_budget_bytes=self._budgets.host_bytes,
            host_arena_bytes=self._plan.arena.nbytes,
            device_budget_bytes=self._config.device_memory,
            device_peak_bytes=self._budgets.device_peak_bytes,
            io_engine=self._io[0],
            io_reason=self._io[1],
        )

    def reset_report(self) -> None:
        """Zeroes the counters, after what is in flight has been counted."""
        self.synchronize()
        self._runtime.events.reset()

    def synchronize(self) -> None:
        """Blocks until every byte is at home. Raises the error of a write that failed in the background."""
        self._runtime.gradients.flush()
        self._runtime.tools.manager.drain()

    def unshard(self) -> None:
        """Gives the model back as the ordinary module it was, parameters whole and in memory, and closes.

        Every rank calls it. Raises CapacityError, and changes nothing, where the whole model does not fit in memory.
        """
        model = self._model()
        if self._closed or model is None:
            raise ClosedError("the engine is closed: its model has no bytes to give back")
        whole_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        need = Need("all parameters, whole, on each rank of this machine", whole_bytes * groups.ranks_on_this_node())
        check_capacity([need], usable_host_bytes(), what="free host memory", smallest=need.nbytes)
        make_plain(model)
        self.close()

    def close(self) -> None:
        """Ends threads, frees memory and files. Idempotent.

        The model's parameters have no bytes afterwards, and using them raises ClosedError: export or `unshard` first.
        """
        if self._closed:
            return
        self._closed = True
        for unit in self._units:
            for cell in unit.cells:
                cell.close()
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_forgotten(engine: Engine) -> None:
    """For a model that nobody closed. The collector may run this on a mover, which cannot wait for its own end."""
    if threading.current_thread().daemon:
        threading.Thread(target=engine.close, name="tiered-close").start()
    else:
        engine.close()


class _Assembly:
    """Builds the parts in order; what was built is taken down again when a later part fails."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._resources = ExitStack()

    def shard(self, source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        with ExitStack() as undo:
            undo.push(self._resources)
            model = self._shard(source)
            undo.pop_all()
        return model

    def _shard(self, source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        self._open_machine()
        if not isinstance(source, nn.Module):
            model = build(source, self._nursery, self._device)
            return self._join(model, self._make_plan(model))
        check_module(source)
        blocks = self._make_plan(source)
        conversion = Conversion(source, self._nursery, self._device)
        try:
            self._join(source, blocks)
        except BaseException:
            conversion.undo()
            raise
        conversion.commit()
        return source

    def _open_machine(self) -> None:
        """Everything that does not depend on the model: process group, budgets, arena, tiers, mover."""
        config = self._config
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if device.type == "cpu":
            tune_malloc()
        if not _native.available():
            log.warning("tiered runs without its compiled part: %s", _native.unavailable_reason())
        self._mesh = groups.open_mesh(device)
        self._device = groups.device_of(self._mesh)
        self._budgets = Budgets(config, ranks_here=groups.ranks_on_this_node())
        self._arena = self._parts.arena or plan_arena(self._budgets.host_bytes, uses_nvme=bool(config.nvme))
        self._events = EventLog(log_max=self._parts.log_max)
        tools, self._io = self._open_tiers(self._arena)
        prefetch_bytes = config.prefetch_bytes or max(self._arena.slot_bytes, self._arena.nbytes // 2)
        self._runtime = Runtime(
            tools=tools,
            queue=PrefetchQueue(tools.manager, prefetch_units=config.prefetch_units, prefetch_bytes=prefetch_bytes),
            gradients=GradBuffer(tools.manager, lambda segment: self._place(segment, ShardKind.GRAD), self._events),
            events=self._events,
            place=self._place,
            slot_count=self._arena.slot_count,
        )
        spills = bool(config.nvme) and config.parameters in ("auto", "nvme")
        nursery_bytes = min(NURSERY_BYTES, self._budgets.host_bytes // 4) if spills else None
        self._nursery = Nursery(tools, memory_bytes=nursery_bytes)
        self._rule = LayoutRule(DTYPES[config.compute_dtype], split_masters=config.master_dtype == "float32")

    def _make_plan(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Units, their sizes, their tiers; refuses what does not fit before anything is moved. Returns the units."""
        world_size = self._mesh.size()
        blocks = [*find_blocks(model), ("", model)]
        sizes = measure(blocks, self._rule, world_size=world_size)
        self._budgets.check_device(sizes[:-1], sizes[-1], world_size=world_size)
        self._placement = place(sizes, self._config, self._arena, host_budget_bytes=self._budgets.host_bytes)
        self._check_disk(sizes)
        return blocks

    def _join(self, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> nn.Module:
        """FSDP2 around every unit, every parameter in its place, hooks on: from here on the model trains."""
        runtime = self._runtime
        groups.prepare_buffers(model, self._device)
        parameter_count = sum(parameter.numel() for parameter in model.parameters())
        units = [self._shard_unit(index, name, module) for index, (name, module) in enumerate(blocks)]
        runtime.queue.set_shards([unit.gathered_shards() for unit in units])
        groups.watch_gradients(model, runtime.gradients)
        groups.reduce_unused(model)
        groups.average_plain_gradients(model)
        groups.watch_passes(model, runtime.queue)
        groups.accept_whole_state_dicts(model)
        runtime.tools.manager.drain()
        result = Engine(
            runtime,
            units,
            plan=self._placement,
            parameter_count=parameter_count,
            config=self._config,
            budgets=self._budgets,
            io=self._io,
            resources=self._resources,
            model=model,
        )
        _engines[model] = result
        weakref.finalize(model, _close_forgotten, result)
        return model

    def _open_tiers(self, arena: Arena) -> tuple[Tools, tuple[str, str]]:
        config, resources = self._config, self._resources
        store: NvmeStore | None = None
        io_engine: IoEngine | None = None
        pool: BufferPool | None = None
        io = ("none", "nothing lives on NVMe")
        slot_bytes = arena.slot_bytes
        if config.nvme:
            results = [
                probe(
                    Path(directory),
                    engine=config.io_engine,
                    queue_depth=config.io_queue_depth,
                    block_bytes=config.io_block_bytes,
                )
                for directory in config.nvme
            ]
            names = {result.engine for result in results}
            name = names.pop() if len(names) == 1 else "aiofiles"
            io = (name, "; ".join(result.reason for result in results))
            buffered = not all(result.direct for result in results)
            log.log(logging.WARNING if buffered else logging.INFO, "I/O engine: %s", io[1])
            store = NvmeStore(
                config.nvme,
                rank=groups.rank(),
                direct={path: result.direct for path, result in zip(config.nvme, results, strict=True)},
            )
            resources.callback(store.close)
            for path in store.removed:
                log.warning("removed %s, left behind by a run that died", path)
            reserve = {Purpose.DEMAND: max(1, arena.slot_count // 4)}
            pool = BufferPool(
                slot_bytes,
                arena.slot_count,
                reserve=reserve,
                register=self._device.type != "cpu",
                poison=self._parts.poison,
            )
            resources.callback(pool.close)
            io_engine = self._parts.open_engine(name, config.io_queue_depth)
        homes = Homes(store, self._device, slot_bytes=slot_bytes)
        resources.callback(homes.close)
        manager = SwapManager(pool, store, io_engine, io_block_bytes=config.io_block_bytes, events=self._events)
        resources.callback(manager.close)
        copier = self._parts.open_copier(self._device)
        return Tools(manager, homes, copier, slot_bytes), io

    def _check_disk(self, unit_bytes: list[UnitBytes]) -> None:
        """Everything that the plan puts on NVMe, optimizer states included, must fit before anything is moved."""
        if not self._config.nvme:
            return
        needs: Counter[str] = Counter()
        for (unit, kind), tier in self._placement.tiers.items():
            if tier is Tier.NVME:
                needs[kind.name.lower()] += unit_bytes[unit].kinds[kind] * groups.ranks_on_this_node()
        check_capacity(
            [Need(f"{kind} of all ranks on this machine", nbytes) for kind, nbytes in needs.items()],
            free_disk_bytes(self._config.nvme),
            what=f"free disk of {', '.join(map(str, self._config.nvme))}",
            smallest=sum(needs.values()),
        )

    def _place(self, segment: Segment, kind: ShardKind) -> None:
        tier = self._placement.tiers.get((segment.unit, kind))
        if tier is None:  # trained although it was frozen when the model was sharded
            tier = Tier.NVME if self._config.nvme else Tier.HOST
        if tier is Tier.HOST and self._config.nvme and getattr(self._config, SETTING[kind]) == "auto":
            # gradients that became fp32 take more than was planned, and so do padded small tensors
            nbytes = segment.numel * segment.dtype_of(kind).itemsize
            used = self._arena.nbytes + self._runtime.tools.homes.used_bytes[Tier.HOST]
            tier = Tier.HOST if used + nbytes <= self._budgets.host_bytes else Tier.NVME
        segment.place(kind, tier)

    def _shard_unit(self, index: int, name: str, module: nn.Module) -> Unit:
        """`fully_shard` on one module; its parameters move from the nursery to their place."""
        before = {cell for p in module.parameters() if (cell := cell_of(p)) and cell.unit is None}
        self._nursery.is_sharding = True
        try:
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=True,
                mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[self._config.compute_dtype]),
                ignored_params={parameter for parameter in module.parameters() if cell_of(parameter) is None},
            )
        finally:
            self._nursery.is_sharding = False
        unit = Unit(index, name, self._runtime)
        seats = lay_out(unit, module, self._rule)
        for segment in unit.segments:
            self._place(segment, ShardKind.PARAM)
            if segment.master is MasterForm.SPLIT and segment.logical_dtype == torch.float32:
                self._place(segment, ShardKind.MASTER)
        for seat in seats:
            seat.cell.settle(unit, seat.segment, seat.offset, live_numel=seat.live_numel)
        for cell in before - {seat.cell for seat in seats}:
            cell.retire()
        return unit
