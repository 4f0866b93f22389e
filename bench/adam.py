"""How near is the optimizer's arithmetic to the speed of memory, and how far ahead of what torch users write?

    python bench/adam.py [--smoke] [--json FILE] [--case PATTERN]

The ceiling is the memory traffic of an fp32 update without its arithmetic, in bytes a second. Every
contestant has memory of its own, starts from the same values and must arrive at the same weights.
"""

from __future__ import annotations

import sys

import torch
from _harness import Bench, alternate, note, run
from torch import Tensor

from tiered import _native
from tiered.errors import TieredError
from tiered.optim import kernels
from tiered.optim.kernels import AdamArgs

TRAFFIC_BYTES = 28  # read p, g, m, v; write p, m, v
F32_BYTES = 28
SPLIT_BYTES = 26  # read hi, lo, g (2 each), m, v; write hi, lo, m, v
LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1


class Traffic:
    """The ceiling."""

    def __init__(self, numel: int) -> None:
        self.arrays = [torch.zeros(numel) for _ in range(4)]

    def step(self) -> None:
        a, b, c, d = self.arrays
        _native.traffic_f32(
            a.numel(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            d=d.data_ptr(),
            threads=kernels.thread_count(),
        )


class Ours:
    """tiered on fp32 weights."""

    def __init__(self, start: Tensor, grad: Tensor) -> None:
        self.grad, self.param, self.steps = grad, start.clone(), 0
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(start), torch.zeros_like(start)

    def args(self) -> AdamArgs:
        self.steps += 1
        return AdamArgs(lr=LR, step=self.steps, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def step(self) -> None:
        kernels.adam_f32(self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.args())

    def master(self) -> Tensor:
        return self.param


class OursSplit(Ours):
    """tiered on a split master: bf16 weights and their low halves, bf16 gradients."""

    def __init__(self, start: Tensor, grad: Tensor) -> None:
        super().__init__(start, grad)
        self.hi, self.lo = start.to(torch.bfloat16), torch.empty_like(start, dtype=torch.int16)
        kernels.split_f32(start, self.hi, self.lo)

    def step(self) -> None:
        kernels.adam_split(self.hi, self.lo, self.grad, self.exp_avg, self.exp_avg_sq, self.args())

    def master(self) -> Tensor:
        kernels.join_f32(self.hi, self.lo, self.param)
        return self.param


class Fused:
    """torch's fused AdamW on fp32 weights."""

    def __init__(self, start: Tensor, grad: Tensor) -> None:
        self.grad, self.param = grad, start.clone()
        self.param.grad = grad
        self.optimizer = torch.optim.AdamW([self.param], lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self) -> None:
        self.optimizer.step()


class FusedThreePass(Fused):
    """What torch users write for bf16: cast the gradient, update an fp32 master, copy it back."""

    def __init__(self, start: Tensor, grad: Tensor) -> None:
        super().__init__(start, grad.float())
        self.weight, self.narrow_grad = start.to(torch.bfloat16), grad

    def step(self) -> None:
        self.grad.copy_(self.narrow_grad)
        super().step()
        self.weight.copy_(self.param)


def compare(
    bench: Bench,
    form: str,
    *,
    ours: type[Ours],
    fused: type[Fused],
    rival: str,
    grad_dtype: torch.dtype,
    step_bytes: int,
) -> None:
    """One form of the update against the ceiling and against torch."""
    against_ceiling, against_rival = f"{form}/traffic", f"{form}/{rival}"
    if not bench.wants(against_ceiling, against_rival):
        return
    numel, repeats = (1 << 18, 3) if bench.smoke else (1 << 26, 9)
    torch.manual_seed(0)
    start, grad = torch.randn(numel) * 0.02, (torch.randn(numel) * 1e-3).to(grad_dtype)
    us, them = ours(start, grad), fused(start, grad)
    contestants = {"us": us.step, "them": them.step}
    if _native.available():
        contestants["traffic"] = Traffic(numel).step
    seconds = alternate(contestants, repeats=repeats)
    if not torch.allclose(us.master(), them.param, rtol=1e-5, atol=1e-6):
        raise TieredError(f"{form}: the weights differ from torch's, so its speed means nothing")

    if "traffic" in seconds:
        bench.rate(
            against_ceiling,
            step_bytes * numel / seconds["us"] / 1e9,
            ceiling=TRAFFIC_BYTES * numel / seconds["traffic"] / 1e9,
            unit="GB/s",
            repeats=repeats,
        )
    bench.time(
        against_rival,
        seconds["us"] / numel * 1e9,
        ceiling=seconds["them"] / numel * 1e9,
        unit="ns/parameter",
        repeats=repeats,
    )


def main(bench: Bench) -> None:
    torch.set_num_threads(kernels.thread_count())
    isa = _native.kernel_isa() if _native.available() else _native.unavailable_reason()
    note(f"{kernels.thread_count()} threads, kernels: {isa}")
    compare(
        bench,
        "adamw-f32",
        ours=Ours,
        fused=Fused,
        rival="torch-fused",
        grad_dtype=torch.float32,
        step_bytes=F32_BYTES,
    )
    compare(
        bench,
        "adamw-split-bf16",
        ours=OursSplit,
        fused=FusedThreePass,
        rival="torch-three-pass",
        grad_dtype=torch.bfloat16,
        step_bytes=SPLIT_BYTES,
    )


if __name__ == "__main__":
    sys.exit(run("adam", "CPU AdamW against memory bandwidth and torch.", main))
