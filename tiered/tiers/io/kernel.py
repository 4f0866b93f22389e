"""What libaio and io_uring share: a queue in the kernel that signals an eventfd."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tiered import _native
from tiered._native import IoPiece, IoResult
from tiered.errors import ConfigError
from tiered.tiers.io.engine import BaseEngine


class KernelQueue(Protocol):
    def submit(self, pieces: Sequence[IoPiece]) -> int: ...

    def reap(self) -> list[IoResult]: ...

    def close(self) -> None: ...


class KernelEngine(BaseEngine):
    """An engine over `open_queue(queue_depth, eventfd)`; `refusals` explains the errnos of opening it."""

    def __init__(
        self,
        name: str,
        queue_depth: int,
        *,
        open_queue: Callable[[int, int], KernelQueue],
        refusals: Mapping[int, str],
    ) -> None:
        super().__init__(name, queue_depth)
        try:
            if not _native.available():
                raise _refusal(name, _native.unavailable_reason())
            self._queue = open_queue(queue_depth, self.fileno())
        except OSError as error:
            self._wakeup.close()
            number = error.errno or 0
            raise _refusal(name, refusals.get(number, f"{os.strerror(number)} (errno {number})")) from error
        except ConfigError:
            self._wakeup.close()
            raise

    def _start(self, pieces: Sequence[IoPiece]) -> int:
        return self._queue.submit(pieces)

    def _collect(self) -> list[IoResult]:
        return self._queue.reap()

    def _release(self) -> None:
        self._queue.close()


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f'io_engine "{name}" cannot work here: {reason}. "auto" takes one that can')
