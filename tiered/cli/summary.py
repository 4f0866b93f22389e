"""What a training run took: the values behind the table and the JSON file of `tiered train`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tiered.cli.meters import KernelIo
from tiered.report import Report

IN_MEMORY = "torch in memory"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes to and from NVMe during the steps, as the I/O engine and as the kernel counted them; waiting."""

    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    kernel_read_bytes: int = 0
    kernel_write_bytes: int = 0
    stall_seconds: Mapping[str, float]
    prefetch_hits: int = 0
    prefetch_misses: int = 0

    @classmethod
    def between(cls, before: KernelIo, after: KernelIo, report: Report | None) -> Moved:
        if report is None:
            return cls(stall_seconds={})
        return cls(
            nvme_read_bytes=report.nvme_read_bytes,
            nvme_write_bytes=report.nvme_write_bytes,
            kernel_read_bytes=after.read_bytes - before.read_bytes,
            kernel_write_bytes=after.write_bytes - before.write_bytes,
            stall_seconds=dict(report.stall_seconds),
            prefetch_hits=report.prefetch_hits,
            prefetch_misses=report.prefetch_misses,
        )


@dataclass(frozen=True, kw_only=True)
class State:
    """The training state and the budgets it was held in."""

    bytes_by_kind: Mapping[str, int]
    bytes_by_tier: Mapping[str, int]
    host_budget_bytes: int = 0
    device_budget_bytes: int | None = None
    device_peak_bytes: int = 0
    io_engine: str = "none"
    io_reason: str = ""

    @classmethod
    def of(cls, report: Report) -> State:
        return cls(
            bytes_by_kind=dict(report.state_bytes),
            bytes_by_tier=dict(report.placement_bytes),
            host_budget_bytes=report.host_budget_bytes,
            device_budget_bytes=report.device_budget_bytes,
            device_peak_bytes=report.device_peak_bytes,
            io_engine=report.io_engine,
            io_reason=report.io_reason,
        )

    @classmethod
    def in_memory(cls, params: int, dtype: torch.dtype) -> State:
        """Weights and gradients in their own type; fp32 masters for narrower weights; two fp32 moments."""
        kinds = {"param": params * dtype.itemsize, "grad": params * dtype.itemsize}
        if dtype != torch.float32:
            kinds |= {"master": params * 4}
        kinds |= {"exp_avg": params * 4, "exp_avg_sq": params * 4}
        return cls(bytes_by_kind=kinds, bytes_by_tier={"host": sum(kinds.values())})


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run, of one or more ranks."""

    preset: str
    engine: str
    dtype: str
    compute_dtype: str
    ranks: int
    batch: int
    sequence: int
    steps: int
    params: int
    activation_bytes: int
    losses: list[float]
    loss_first: float
    loss_last: float
    loss_mean_last: float
    step_seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    baseline_rss_bytes: int
    moved: Moved
    state: State

    @classmethod
    def over_ranks(cls, summaries: Sequence[Summary]) -> Summary:
        """Bytes of all ranks together; the largest peak, budget and stall of any."""
        moved = [summary.moved for summary in summaries]
        state = [summary.state for summary in summaries]
        largest = max(summaries, key=lambda summary: summary.peak_rss_bytes - summary.baseline_rss_bytes)
        return replace(
            largest,
            moved=Moved(
                nvme_read_bytes=sum(part.nvme_read_bytes for part in moved),
                nvme_write_bytes=sum(part.nvme_write_bytes for part in moved),
                kernel_read_bytes=sum(part.kernel_read_bytes for part in moved),
                kernel_write_bytes=sum(part.kernel_write_bytes for part in moved),
                stall_seconds=max((part.stall_seconds for part in moved), key=lambda part: sum(part.values())),
                prefetch_hits=sum(part.prefetch_hits for part in moved),
                prefetch_misses=sum(part.prefetch_misses for part in moved),
            ),
            state=replace(
                largest.state,
                bytes_by_kind=_total(part.bytes_by_kind for part in state),
                bytes_by_tier=_total(part.bytes_by_tier for part in state),
                device_peak_bytes=max(part.device_peak_bytes for part in state),
            ),
        )

    def per_param_step(self, nbytes: int) -> float:
        return nbytes / (self.params * self.steps)

    def as_json(self) -> dict[str, Any]:
        """Flat, with the names that DESIGN section 10 promises and a few more."""
        moved, state = self.moved, self.state
        flat = {key: value for key, value in asdict(self).items() if key not in ("moved", "state")}
        return flat | {
            "state_bytes": sum(state.bytes_by_kind.values()),
            "state_bytes_by_kind": state.bytes_by_kind,
            "state_bytes_by_tier": state.bytes_by_tier,
            "host_budget_bytes": state.host_budget_bytes,
            "device_budget_bytes": state.device_budget_bytes,
            "device_peak_bytes": state.device_peak_bytes,
            "io_engine": state.io_engine,
            "io_reason": state.io_reason,
            "nvme_read_bytes_per_param_step": self.per_param_step(moved.nvme_read_bytes),
            "nvme_write_bytes_per_param_step": self.per_param_step(moved.nvme_write_bytes),
            "kernel_read_bytes_per_param_step": self.per_param_step(moved.kernel_read_bytes),
            "kernel_write_bytes_per_param_step": self.per_param_step(moved.kernel_write_bytes),
            "stall_seconds": sum(moved.stall_seconds.values()),
            "stall_seconds_by_cause": moved.stall_seconds,
            "prefetch_hits": moved.prefetch_hits,
            "prefetch_misses": moved.prefetch_misses,
        }


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
