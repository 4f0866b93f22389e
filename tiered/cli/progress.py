"""Progress of a training run on standard error: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10  # about so many where nobody watches a bar


class Rates(NamedTuple):
    """Bytes moved so far, to show as speeds."""

    nvme_read_bytes: int
    nvme_write_bytes: int
    to_device_bytes: int
    to_host_bytes: int


class TrainingProgress:
    """Fed once a step; a context manager. One rank shows it, the others are silent."""

    def __init__(self, title: str, *, steps: int, tokens_per_step: int, shown: bool) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._title = title
        self._last_time = time.perf_counter()
        self._last_rates = Rates(0, 0, 0, 0)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=steps, status="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step_done(self, step: int, loss: float, rates: Rates | None) -> None:
        """`step` counts from 1; `rates` is None where nothing is tiered."""
        now = time.perf_counter()
        seconds = now - self._last_time
        status = f"loss {loss:.3f}  {self._tokens_per_step / seconds:,.0f} tokens/s"
        if rates is not None:
            moved = [(now - before) / seconds / 1e9 for now, before in zip(rates, self._last_rates, strict=True)]
            status += "  GB/s: NVMe {:.2f} read, {:.2f} written, device {:.2f} in, {:.2f} out".format(*moved)
            self._last_rates = rates
        self._last_time = now
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step in (1, self._steps) or step % -(-self._steps // LINES) == 0):
            self._console.print(f"{self._title} step {step}/{self._steps}  {status}", soft_wrap=True)
