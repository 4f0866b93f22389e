"""Files, page-aligned memory and a polling owner for the I/O tests."""

from __future__ import annotations

import mmap
import os
import select
from pathlib import Path

import numpy

from tiered.tiers.io.engine import IoCompletion, IoEngine, IoOp, IoRequest


class File:
    """An open file, and the requests on it."""

    def __init__(self, path: Path, content: bytes = b"", *, direct: bool = False) -> None:
        self.path = path
        self._memory: list[numpy.ndarray] = []  # a request holds an address only
        path.write_bytes(content)
        self.fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))

    def request(self, op: IoOp, offset: int, memory: numpy.ndarray, tag: int = 0) -> IoRequest:
        self._memory.append(memory)
        return IoRequest(op, self.fd, str(self.path), offset, memory.ctypes.data, memory.nbytes, tag)

    def read(self, offset: int, memory: numpy.ndarray, tag: int = 0) -> IoRequest:
        return self.request(IoOp.READ, offset, memory, tag)

    def write(self, offset: int, memory: numpy.ndarray, tag: int = 0) -> IoRequest:
        return self.request(IoOp.WRITE, offset, memory, tag)


def memory(content: int | bytes) -> numpy.ndarray:
    """Page-aligned bytes: zeros, or a copy of the content."""
    nbytes = content if isinstance(content, int) else len(content)
    array = numpy.frombuffer(mmap.mmap(-1, nbytes), dtype=numpy.uint8)
    if isinstance(content, bytes):
        array[:] = numpy.frombuffer(content, dtype=numpy.uint8)
    return array


def run(engine: IoEngine, requests: list[IoRequest]) -> list[IoCompletion]:
    """Moves all of them, however deep the engine is; completions in the order they came."""
    done: list[IoCompletion] = []
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    waiting = list(requests)
    while waiting or engine.in_flight:
        del waiting[: engine.submit(waiting)]
        assert poll.poll(20_000), "the descriptor must become readable when something completes"
        done += engine.reap()
    return done
