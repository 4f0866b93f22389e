"""The io_uring engine: asynchronous for direct and for buffered files alike.

What cannot be done at once the kernel gives to a worker of its own, so submitting never waits. It needs Linux
5.6, and containers often forbid it. The kernel cancels the requests of a thread that ends: the thread that
submitted also closes. Completions set the eventfd through IORING_REGISTER_EVENTFD.
"""

from __future__ import annotations

import errno

from tiered._native import UringRing
from tiered.tiers.io.kernel import KernelEngine

_REFUSALS = {
    errno.ENOSYS: "this system or build has no io_uring",
    errno.EOPNOTSUPP: "io_uring is too old here (Linux 5.6 or later is needed)",
    errno.EPERM: "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or a seccomp filter)",
    errno.ENOMEM: "the rings do not fit into the locked memory allowed (ulimit -l); lower io_queue_depth",
}


class UringEngine(KernelEngine):
    def __init__(self, queue_depth: int) -> None:
        super().__init__("io_uring", queue_depth, open_queue=UringRing, refusals=_REFUSALS)
