"""The libaio engine: Linux AIO, in the kernel since 2.6 and rarely forbidden.

It is asynchronous for O_DIRECT only: on a buffered file, and wherever the file system must wait for something
(allocating blocks, a full device queue), `io_submit` itself does the waiting. It stays correct, but the mover
stands still meanwhile. Completions set the eventfd through IOCB_FLAG_RESFD.
"""

from __future__ import annotations

import errno

from tiered._native import AioContext
from tiered.tiers.io.kernel import KernelEngine

_REFUSALS = {
    errno.ENOSYS: "this system has no Linux AIO",
    errno.EPERM: "Linux AIO is forbidden to this process (a seccomp filter?)",
    errno.EAGAIN: "the system's limit of AIO requests is used up (sysctl fs.aio-max-nr)",
}


class LibaioEngine(KernelEngine):
    def __init__(self, queue_depth: int) -> None:
        super().__init__("libaio", queue_depth, open_queue=AioContext, refusals=_REFUSALS)
