"""What an engine tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """Counters since `tiered.shard` or the last `engine.reset_report()`, of this rank.

    Attributes:
        parameter_count: elements of all parameters of the model, every rank's.
        state_bytes: by kind (param, master, exp_avg, exp_avg_sq, grad), what this rank keeps.
        placement_bytes: by tier (device, host, nvme), where it rests.
        nvme_read_bytes, nvme_write_bytes: moved by the I/O engine.
        to_device_bytes, to_host_bytes: weights copied out for a gather, gradients copied in.
        read_bytes_by_kind, write_bytes_by_kind: the same by kind.
        stall_seconds: by cause, how long the caller waited for bytes.
        prefetch_hits, prefetch_misses: demands that found their bytes there (or on their way), or did not.
        host_budget_bytes: the host budget; host_arena_bytes of it are staging slots.
        device_budget_bytes: the device budget, or None when there is no limit.
        device_peak_bytes: planned peak of unsharded units and gradients on the device.
        io_engine: name of the I/O engine, or "none"; io_reason says why, in one line.
    """

    parameter_count: int
    state_bytes: Mapping[str, int]
    placement_bytes: Mapping[str, int]
    nvme_read_bytes: int
    nvme_write_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    read_bytes_by_kind: Mapping[str, int]
    write_bytes_by_kind: Mapping[str, int]
    stall_seconds: Mapping[str, float]
    prefetch_hits: int
    prefetch_misses: int
    host_budget_bytes: int
    host_arena_bytes: int
    device_budget_bytes: int | None
    device_peak_bytes: int
    io_engine: str
    io_reason: str
