"""What a run is measured with: the kernel's counters of this process, the processor's abilities, autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PROCESS = Path("/proc/self")
RESET_PEAK = "5"  # written to clear_refs: the peak starts again from what is resident now


class KernelIo(NamedTuple):
    """Bytes this process caused to be fetched from and sent to storage."""

    read_bytes: int
    write_bytes: int


def reset_peak() -> None:
    """Where the kernel allows it; else the peak includes what was before."""
    try:
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return


def kernel_io() -> KernelIo:
    fields = dict(line.split(": ") for line in (PROCESS / "io").read_text().splitlines())
    return KernelIo(int(fields["read_bytes"]), int(fields["write_bytes"]))


def cpu_multiplies_bfloat16() -> bool:
    """Whether bfloat16 products run in hardware; in software they are several times slower than fp32."""
    words = Path("/proc/cpuinfo").read_text().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def saved_for_backward_bytes(build_loss: Callable[[], tuple[torch.nn.Module, Tensor]]) -> int:
    """What autograd keeps of one forward, parameters not counted; `build_loss` runs on the meta device."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model, _loss = build_loss()
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())
