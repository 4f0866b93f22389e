"""Every error that tiered raises on purpose; each names the thing, the value and the remedy."""

from __future__ import annotations

import os


class TieredError(Exception):
    """Base class of all errors of this package."""


class ConfigError(TieredError, ValueError):
    """A setting is wrong: unknown key, wrong type, impossible value, contradiction."""


class CapacityError(TieredError, RuntimeError):
    """A budget, the machine's memory or a disk is too small; the text holds who needs what."""


class UsageError(TieredError, RuntimeError):
    """The library was called in a way it cannot honour."""


class ClosedError(TieredError, RuntimeError):
    """The engine was closed; its tensors have no bytes any more."""


class StorageError(TieredError, OSError):
    """An I/O request failed, or moved fewer bytes than it had to.

    Attributes:
        op: "read", "write", "open", "allocate", ...
        path: the file or directory.
        offset: byte offset in the file, or None where there is none.
        nbytes: bytes asked for, or None.
        errno: the operating system's number (0: a transfer ended early, at the end of the file).
        tensor: name of the tensor whose bytes moved, or None.
    """

    def __init__(
        self,
        op: str,
        path: str,
        errno: int,
        *,
        offset: int | None = None,
        nbytes: int | None = None,
        tensor: str | None = None,
        hint: str = "",
    ) -> None:
        reason = os.strerror(errno) if errno else "the file ends too early"
        where = "" if offset is None else f" at offset {offset}"
        size = "" if nbytes is None else f" of {nbytes} bytes"
        whose = "" if tensor is None else f" for {tensor}"
        text = f"{op}{size}{where} of {path}{whose} failed: {reason} (errno {errno})"
        super().__init__(errno, f"{text}. {hint}" if hint else text)
        self.op = op
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.tensor = tensor

    def __str__(self) -> str:
        return str(self.args[1])


class CorruptionError(TieredError, RuntimeError):
    """Bytes came back that are not those that were written."""
