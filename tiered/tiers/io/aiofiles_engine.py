"""The aiofiles engine: works wherever Python does, with nothing compiled.

A file object of aiofiles has one position, so two concurrent "seek, then read" would get each other's bytes.
Its other half is what we want: `aiofiles.os.wrap` makes a coroutine function of any blocking call, here of
preadv and pwritev, which carry their own offset and leave the caller's descriptor alone. They run on a few
threads of ours, without the GIL while the kernel works; the event loop has a thread of its own and sets the
wake-up after each result.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import aiofiles.os

from tiered._native import IoPiece, IoResult
from tiered.tiers.io.engine import BaseEngine

_THREADS_MAX = 16

_preadv = aiofiles.os.wrap(os.preadv)
_pwritev = aiofiles.os.wrap(os.pwritev)


class AiofilesEngine(BaseEngine):
    def __init__(self, queue_depth: int) -> None:
        super().__init__("aiofiles", queue_depth)
        self._results: deque[IoResult] = deque()  # appended by the loop's thread, taken by the owner's
        self._executor = ThreadPoolExecutor(min(queue_depth, _THREADS_MAX), "tiered-aiofiles")
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="tiered-aiofiles", daemon=True)
        self._thread.start()

    def _start(self, pieces: Sequence[IoPiece]) -> int:
        for piece in pieces:
            asyncio.run_coroutine_threadsafe(self._move(piece), self._loop)
        return len(pieces)

    async def _move(self, piece: IoPiece) -> None:
        memory = (ctypes.c_char * piece.nbytes).from_address(piece.address)
        call = _pwritev if piece.write else _preadv
        try:
            result = await call(piece.fd, [memory], piece.offset, executor=self._executor)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        self._results.append(IoResult(piece.slot, result))
        self._wakeup.set()

    def _collect(self) -> list[IoResult]:
        return [self._results.popleft() for _ in range(len(self._results))]

    def _release(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()
        self._loop.close()
