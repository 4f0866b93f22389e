"""Weights as one safetensors file, written tensor by tensor: memory holds one whole tensor at a time.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, offsets), the bytes.
The file appears under its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiered.errors import StorageError, TieredError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Entry(NamedTuple):
    """A tensor to be written; what it is, not yet its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def export_safetensors(model: nn.Module, path: str | Path) -> None:
    """Writes parameters and persistent buffers of `model` to `path`, tied ones once, from rank 0.

    Collective: every rank calls it. Where rank 0 cannot write, every rank raises.
    """
    tensors, tied = _distinct(model.state_dict(keep_vars=True))
    rank = dist.get_rank() if dist.is_initialized() else 0
    failure: Exception | None = None
    whole = (_whole(tensor) for tensor in tensors.values())
    if rank == 0:
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        try:
            write_safetensors(path, entries, whole, metadata={"format": "pt", **tied})
        except OSError as error:
            failure = error
    for _ in whole:  # the gathers are collective: ranks that write nothing, and a writer that failed, join them
        pass
    if dist.is_initialized() and dist.get_world_size() > 1:
        outcome = [None if failure is None else str(failure)]
        dist.broadcast_object_list(outcome, src=0)
        if rank != 0 and outcome[0] is not None:
            raise TieredError(f"rank 0 could not write the weights: {outcome[0]}")
    if failure is not None:
        raise failure


def write_safetensors(
    path: str | Path, entries: Iterable[Entry], tensors: Iterable[Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Writes the tensors one by one, in the order of their entries."""
    entries = list(entries)
    with _replacing(Path(path)) as file:
        file.write(_header(entries, metadata))
        for entry, tensor in zip(entries, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise ValueError(f"{entry.name} changed while it was written: {entry}, now {tensor.shape}")
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(data.numpy().data)


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        begin, end = end, end + torch.Size(entry.shape).numel() * entry.dtype.itemsize
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and for every further name the first one."""
    first_name: dict[int, str] = {}
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = first_name.setdefault(id(tensor), name)
        if first == name:
            distinct[name] = tensor
        else:
            tied[name] = first
    return distinct, tied


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    """The tensor with all its bytes in ordinary memory, wherever its shards live."""
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(gathered)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete and on the disk; else nothing is left."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError("write", str(path), error.errno or 0) from error
    finally:
        partial.unlink(missing_ok=True)
