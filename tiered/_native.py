"""The only importer of the compiled module: typed functions over addresses and sizes.

Addresses are ints (`tensor.data_ptr()`); the caller keeps the memory alive. The GIL is released during every
call. Where nothing was compiled the package works without this module: ask `available()` before anything else
here, everything else raises UsageError then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any, NamedTuple

from tiered.errors import UsageError

_module: Any = None
_reason = ""
try:
    _module = import_module("tiered._tiered_native")
except ImportError as error:
    _reason = f"no compiled module ({error}); where gcc or clang is found, `pip install` builds it"


def available() -> bool:
    """Whether the compiled module is there."""
    return _module is not None


def unavailable_reason() -> str:
    """One line for the user: why it is not there and what would help; empty where it is."""
    return _reason


def aio_provider() -> str:
    """Who provides Linux AIO: "libaio", "system calls" (our stand-in), or "none" (not Linux)."""
    return _text(_lib().tiered_aio_provider())


def kernel_isa() -> str:
    """The instruction set that the kernels run on here."""
    return _text(_lib().tiered_kernel_isa())


# ---- optimizer kernels -------------------------------------------------------------------------------------


class ElementType(IntEnum):
    """Element types of gradients."""

    F32 = 0
    BF16 = 1
    F16 = 2


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """One update's scalars; the caller computes everything that depends on the step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction1: float  # 1 - beta1**step
    bias_correction2_sqrt: float  # sqrt(1 - beta2**step)
    grad_scale: float = 1.0
    decoupled: bool = True  # AdamW; False: Adam with L2 decay
    maximize: bool = False


def adam_f32(
    numel: int,
    scalars: AdamScalars,
    *,
    param: int,
    grad: int,
    grad_type: ElementType,
    exp_avg: int,
    exp_avg_sq: int,
    threads: int,
) -> None:
    """Updates fp32 weights and both moments in place."""
    _lib().tiered_adam_f32(
        numel,
        _pointer("float *", param),
        _pointer("void *", grad),
        grad_type,
        _pointer("float *", exp_avg),
        _pointer("float *", exp_avg_sq),
        _adam(scalars),
        threads,
    )


def adam_split(
    numel: int,
    scalars: AdamScalars,
    *,
    hi: int,
    lo: int,
    grad: int,
    grad_type: ElementType,
    exp_avg: int,
    exp_avg_sq: int,
    threads: int,
) -> None:
    """Updates a split master (bf16 weight and low 16 bits) and both moments in place."""
    _lib().tiered_adam_split(
        numel,
        _pointer("uint16_t *", hi),
        _pointer("uint16_t *", lo),
        _pointer("void *", grad),
        grad_type,
        _pointer("float *", exp_avg),
        _pointer("float *", exp_avg_sq),
        _adam(scalars),
        threads,
    )


def adam_bf16(
    numel: int,
    scalars: AdamScalars,
    *,
    param: int,
    grad: int,
    grad_type: ElementType,
    exp_avg: int,
    exp_avg_sq: int,
    threads: int,
) -> None:
    """Updates bf16 weights that have no master, and both moments, in place."""
    _lib().tiered_adam_bf16(
        numel,
        _pointer("uint16_t *", param),
        _pointer("void *", grad),
        grad_type,
        _pointer("float *", exp_avg),
        _pointer("float *", exp_avg_sq),
        _adam(scalars),
        threads,
    )


def split_f32(numel: int, source: int, *, hi: int, lo: int, threads: int) -> None:
    """fp32 -> split master."""
    _lib().tiered_split_f32(
        numel, _pointer("float *", source), _pointer("uint16_t *", hi), _pointer("uint16_t *", lo), threads
    )


def join_f32(numel: int, target: int, *, hi: int, lo: int, threads: int) -> None:
    """Split master -> fp32."""
    _lib().tiered_join_f32(
        numel, _pointer("uint16_t *", hi), _pointer("uint16_t *", lo), _pointer("float *", target), threads
    )


def accumulate_f32(numel: int, accumulator: int, *, addend: int, addend_type: ElementType, threads: int) -> None:
    """accumulator += addend, in fp32."""
    _lib().tiered_accumulate_f32(
        numel, _pointer("float *", accumulator), _pointer("void *", addend), addend_type, threads
    )


def traffic_f32(numel: int, *, a: int, b: int, c: int, d: int, threads: int) -> None:
    """The memory traffic of `adam_f32` without its arithmetic: the ceiling for benchmarks."""
    _lib().tiered_traffic_f32(numel, *(_pointer("float *", address) for address in (a, b, c, d)), threads)


# ---- I/O ---------------------------------------------------------------------------------------------------


class IoPiece(NamedTuple):
    """One positioned transfer as the kernel sees it; `slot` comes back with its result."""

    slot: int
    write: bool
    fd: int
    offset: int
    address: int
    nbytes: int


class IoResult(NamedTuple):
    """`result` is the number of bytes moved, or -errno."""

    slot: int
    result: int


class AioContext:
    """A Linux AIO context through libaio's interface that signals an eventfd. OSError where it is refused."""

    def __init__(self, capacity: int, eventfd: int) -> None:
        self._ffi, self._calls = _ffi(), _lib()
        self._capacity = capacity
        self._iocbs = self._ffi.new("struct iocb[]", capacity)
        self._order = self._ffi.new("struct iocb *[]", capacity)
        self._events = self._ffi.new("struct io_event[]", capacity)
        for i in range(capacity):
            self._iocbs[i].u.c.flags = self._calls.TIERED_IOCB_FLAG_RESFD
            self._iocbs[i].u.c.resfd = eventfd
        context = self._ffi.new("io_context_t *")
        _check(self._calls.io_setup(capacity, context))
        self._context = context[0]

    def submit(self, pieces: Sequence[IoPiece]) -> int:
        """How many, from the front, the kernel took; or -errno, which is about the first piece."""
        for i, piece in enumerate(pieces):
            iocb = self._iocbs[i]  # the kernel copies it during the call
            iocb.data = self._ffi.cast("void *", piece.slot)
            iocb.aio_lio_opcode = self._calls.IO_CMD_PWRITE if piece.write else self._calls.IO_CMD_PREAD
            iocb.aio_fildes = piece.fd
            iocb.u.c.buf = self._ffi.cast("void *", piece.address)
            iocb.u.c.nbytes = piece.nbytes
            iocb.u.c.offset = piece.offset
            self._order[i] = self._ffi.addressof(iocb)
        return int(self._calls.io_submit(self._context, len(pieces), self._order))

    def reap(self) -> list[IoResult]:
        """Everything that has completed; never waits."""
        no_wait = (0, self._capacity, self._events, self._ffi.NULL)
        count = _check(self._calls.io_getevents(self._context, *no_wait))
        return [
            IoResult(int(self._ffi.cast("uintptr_t", event.data)), int(self._ffi.cast("long", event.res)))
            for event in self._events[0:count]
        ]

    def close(self) -> None:
        _check(self._calls.io_destroy(self._context))


class UringRing:
    """An io_uring that signals an eventfd. OSError where it is refused."""

    def __init__(self, capacity: int, eventfd: int) -> None:
        self._ffi, self._calls = _ffi(), _lib()
        self._capacity = capacity
        self._pieces = self._ffi.new("tiered_uring_piece[]", capacity)
        self._results = self._ffi.new("tiered_uring_result[]", capacity)
        ring = self._ffi.new("tiered_uring **")
        _check(self._calls.tiered_uring_open(capacity, eventfd, ring))
        self._ring = ring[0]

    def submit(self, pieces: Sequence[IoPiece]) -> int:
        """How many, from the front, the kernel took; or -errno when it took none."""
        for i, piece in enumerate(pieces):
            entry = self._pieces[i]
            entry.slot, entry.write, entry.fd, entry.offset, entry.address, entry.nbytes = piece
        return int(self._calls.tiered_uring_submit(self._ring, self._pieces, len(pieces)))

    def reap(self) -> list[IoResult]:
        """Everything that has completed; never waits."""
        count = self._calls.tiered_uring_reap(self._ring, self._results, self._capacity)
        return [IoResult(entry.slot, entry.result) for entry in self._results[0:count]]

    def close(self) -> None:
        self._calls.tiered_uring_close(self._ring)


# ---- helpers -----------------------------------------------------------------------------------------------


def _lib() -> Any:
    if _module is None:
        raise UsageError(_reason)
    return _module.lib


def _ffi() -> Any:
    if _module is None:
        raise UsageError(_reason)
    return _module.ffi


def _text(string: Any) -> str:
    return str(_ffi().string(string).decode())


def _pointer(kind: str, address: int) -> Any:
    return _ffi().cast(kind, address)


def _adam(scalars: AdamScalars) -> Any:
    return _ffi().new("tiered_adam *", asdict(scalars))


def _check(status: int) -> int:
    """The status, or the OSError that a negative one means."""
    if status < 0:
        raise OSError(-status, f"errno {-status}")
    return status
