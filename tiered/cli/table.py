"""The summary of a run as a table for people, from the values that the JSON file holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tiered.cli.summary import IN_MEMORY
from tiered.config import format_bytes

Values = Mapping[str, Any]


def summary_table(values: Values, beside: Values | None) -> Table:
    """One column for the run, and one for the same run in memory where there was one."""
    title = f"preset {values['preset']}, {values['steps']} steps, world size {values['ranks']}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = [values] if beside is None else [values, beside]
    for column in columns:
        table.add_column(column["engine"])
    rows = [common_rows(column) | tier_rows(column) for column in columns]
    for name in rows[0]:
        table.add_row(name, *(row.get(name, "") for row in rows))
    return table


def common_rows(values: Values) -> dict[str, str]:
    above = values["peak_rss_bytes"] - values["baseline_rss_bytes"]
    kinds = values["state_bytes_by_kind"]
    return {
        "parameters": f"{values['params'] / 1e6:,.1f} M",
        "type": f"{values['dtype']}, computed in {values['compute_dtype']}",
        "training state": f"{format_bytes(values['state_bytes'])}: {_sizes(kinds)}",
        "kept in": _sizes(values["state_bytes_by_tier"]),
        "loss": f"{values['loss_first']:.3f} at first, {values['loss_mean_last']:.3f} over the last 10 steps",
        "step": f"{values['step_seconds']:.3f} s, {values['tokens_per_second']:,.0f} tokens/s",
        "peak resident memory": f"{format_bytes(above)} above {format_bytes(values['baseline_rss_bytes'])}",
        "activations": f"about {format_bytes(values['activation_bytes'])} of it",
    }


def tier_rows(values: Values) -> dict[str, str]:
    """Empty for a run without tiers."""
    if values["engine"] == IN_MEMORY:
        return {}
    budget, peak = values["device_budget_bytes"], format_bytes(values["device_peak_bytes"])
    causes = ", ".join(
        f"{cause} {seconds:.2f}" for cause, seconds in values["stall_seconds_by_cause"].items() if seconds >= 0.005
    )
    return {
        "host budget": format_bytes(values["host_budget_bytes"]),
        "device budget": f"{'none' if budget is None else format_bytes(budget)}, planned peak {peak}",
        "NVMe read": _traffic(values, "read"),
        "NVMe written": _traffic(values, "write"),
        "I/O engine": values["io_engine"],
        "stalled": f"{values['stall_seconds']:.2f} s" + (f": {causes}" if causes else ""),
        "prefetch": f"{values['prefetch_hits']} in time, {values['prefetch_misses']} not",
    }


def _traffic(values: Values, way: str) -> str:
    counted = values[f"nvme_{way}_bytes_per_param_step"]
    kernel = values[f"kernel_{way}_bytes_per_param_step"]
    return f"{counted:.2f} bytes a parameter and step (the kernel counts {kernel - counted:+.2f})"


def _sizes(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
