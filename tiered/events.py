"""What happened: counters of bytes, stalls and prefetches, and the ordered log that tests and reports read.

Knows nothing of disks, devices or models. One `EventLog` belongs to one engine; any thread may add to it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tiered.shard import ShardKey, ShardKind


class Event(NamedTuple):
    """One entry of the log. `what` is a verb such as "read", "write_done", "gather", "update", "evict"."""

    time_us: int
    what: str
    key: ShardKey | None
    detail: str


class EventLog:
    """Counters that are always on, and an ordered log of the last `log_max` events (0: no log)."""

    def __init__(self, *, log_max: int = 0) -> None:
        self._lock = threading.Lock()
        self._log: deque[Event] | None = deque(maxlen=log_max) if log_max else None
        self._clear()

    def _clear(self) -> None:
        self.read_bytes: Counter[ShardKind] = Counter()
        self.write_bytes: Counter[ShardKind] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.stall_seconds: defaultdict[str, float] = defaultdict(float)
        self.prefetch: Counter[str] = Counter()

    def reset(self) -> None:
        """Zeroes the counters; the log stays."""
        with self._lock:
            self._clear()

    def count_read(self, kind: ShardKind, nbytes: int) -> None:
        self.read_bytes[kind] += nbytes

    def count_write(self, kind: ShardKind, nbytes: int) -> None:
        self.write_bytes[kind] += nbytes

    def count_copy(self, direction: str, nbytes: int) -> None:
        """`direction` is "to_device" (weights that are gathered) or "to_host" (gradients)."""
        self.copied_bytes[direction] += nbytes

    def count_prefetch(self, outcome: str) -> None:
        """`outcome` is "hit" (bytes were there), "late" (on their way) or "miss" (not asked for)."""
        self.prefetch[outcome] += 1

    @contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Adds the time spent inside to the stall of `cause`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds[cause] += time.perf_counter() - start

    def record(self, what: str, key: ShardKey | None = None, detail: str = "") -> None:
        """Appends to the log where one is kept."""
        if self._log is not None:
            self._log.append(Event(time.monotonic_ns() // 1000, what, key, detail))

    def events(self) -> list[Event]:
        """The log so far, oldest first."""
        return list(self._log or ())
