"""The one door to the optimizer's arithmetic; it takes torch CPU tensors.

Every function works in place on 1-D contiguous tensors of one length (views into host buffers). It runs the
compiled kernel of csrc/adam.cpp where there is one, and torch operations in the same order and precision
where there is not: both give equal bits, for any thread count and any cut of a range into calls (see there,
[Note: Equal bits]). Stateless: the step counter is the caller's. It knows nothing of tiers, shards or files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from tiered import _native
from tiered._native import AdamScalars, ElementType
from tiered.errors import UsageError

_ELEMENT_TYPES = {
    torch.float32: ElementType.F32,
    torch.bfloat16: ElementType.BF16,
    torch.float16: ElementType.F16,
}
_PIECE_NUMEL = 1 << 16  # torch operations go through a range in pieces: small temporaries, warm caches


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamArgs:
    """One Adam or AdamW update, in torch's terms.

    Attributes:
        step: 1 for the first update.
        grad_scale: multiplies every gradient first (clipping, unscaling); 1.0 changes no bit.
        decoupled: decay the weights themselves (AdamW); False: add the decay to the gradient (Adam).
        maximize: ascend.
    """

    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    decoupled: bool = True
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise UsageError(f"step = {self.step}: an Adam update counts from 1")

    @property
    def bias_correction1(self) -> float:
        return 1 - float(self.betas[0] ** self.step)

    @property
    def bias_correction2_sqrt(self) -> float:
        return float((1 - self.betas[1] ** self.step) ** 0.5)


def adam_f32(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    args: AdamArgs,
    *,
    threads: int | None = None,
) -> None:
    """Updates fp32 weights and both moments; the gradient is fp32, bf16 or fp16."""
    numel = _check_update(grad, exp_avg, exp_avg_sq, param=(param, torch.float32))
    if _native.available():
        _native.adam_f32(
            numel,
            _scalars(args),
            param=param.data_ptr(),
            grad=grad.data_ptr(),
            grad_type=_ELEMENT_TYPES[grad.dtype],
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            threads=threads or thread_count(),
        )
        return
    for p, g, m, v in _pieces(param, grad, exp_avg, exp_avg_sq):
        _update(p, g, m, v, args)


def adam_split(
    hi: Tensor,
    lo: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    args: AdamArgs,
    *,
    threads: int | None = None,
) -> None:
    """Updates a split master and both moments: hi is the bf16 weight, lo (int16) the master's low 16 bits."""
    numel = _check_update(grad, exp_avg, exp_avg_sq, hi=(hi, torch.bfloat16), lo=(lo, torch.int16))
    if _native.available():
        _native.adam_split(
            numel,
            _scalars(args),
            hi=hi.data_ptr(),
            lo=lo.data_ptr(),
            grad=grad.data_ptr(),
            grad_type=_ELEMENT_TYPES[grad.dtype],
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            threads=threads or thread_count(),
        )
        return
    for h, low, g, m, v in _pieces(hi, lo, grad, exp_avg, exp_avg_sq):
        master = _join(h, low)
        _update(master, g, m, v, args)
        _split(master.masked_fill_(master.isnan(), torch.nan), h, low)


def adam_bf16(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    args: AdamArgs,
    *,
    threads: int | None = None,
) -> None:
    """Updates bf16 weights that have no master, and both fp32 moments; rounds to nearest even."""
    numel = _check_update(grad, exp_avg, exp_avg_sq, param=(param, torch.bfloat16))
    if _native.available():
        _native.adam_bf16(
            numel,
            _scalars(args),
            param=param.data_ptr(),
            grad=grad.data_ptr(),
            grad_type=_ELEMENT_TYPES[grad.dtype],
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            threads=threads or thread_count(),
        )
        return
    for p, g, m, v in _pieces(param, grad, exp_avg, exp_avg_sq):
        wide = p.float()
        _update(wide, g, m, v, args)
        p.copy_(wide)


def split_f32(source: Tensor, hi: Tensor, lo: Tensor, *, threads: int | None = None) -> None:
    """fp32 -> split master: hi rounds half away from zero, lo keeps the low 16 bits; nothing is lost."""
    numel = _check(source=(source, torch.float32), hi=(hi, torch.bfloat16), lo=(lo, torch.int16))
    if _native.available():
        _native.split_f32(
            numel, source.data_ptr(), hi=hi.data_ptr(), lo=lo.data_ptr(), threads=threads or thread_count()
        )
        return
    for s, h, low in _pieces(source, hi, lo):
        _split(s, h, low)


def join_f32(hi: Tensor, lo: Tensor, out: Tensor, *, threads: int | None = None) -> None:
    """Split master -> fp32."""
    numel = _check(out=(out, torch.float32), hi=(hi, torch.bfloat16), lo=(lo, torch.int16))
    if _native.available():
        _native.join_f32(numel, out.data_ptr(), hi=hi.data_ptr(), lo=lo.data_ptr(), threads=threads or thread_count())
        return
    for h, low, o in _pieces(hi, lo, out):
        o.view(torch.int32).copy_(_join(h, low).view(torch.int32))


def accumulate_f32(accumulator: Tensor, addend: Tensor, *, threads: int | None = None) -> None:
    """accumulator += addend, in fp32; the addend is fp32, bf16 or fp16."""
    numel = _check(accumulator=(accumulator, torch.float32), addend=(addend, *_ELEMENT_TYPES))
    if _native.available():
        _native.accumulate_f32(
            numel,
            accumulator.data_ptr(),
            addend=addend.data_ptr(),
            addend_type=_ELEMENT_TYPES[addend.dtype],
            threads=threads or thread_count(),
        )
        return
    for total, term in _pieces(accumulator, addend):
        total.add_(term.float())


@cache
def thread_count() -> int:
    """Threads for one call: the CPUs that this process may use, shared among the ranks on this machine.

    OMP_NUM_THREADS is not asked: torchrun sets it to 1, which would halve the memory bandwidth or worse.
    """
    cpus = min(len(os.sched_getaffinity(0)), cgroup_cpus())
    return max(1, int(cpus) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cgroup_cpus(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float:
    """How many CPUs' time the control groups of this process allow; infinity where none sets a limit."""
    limits = [inf]
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / "cpu" if controllers else mount
        group = root / name.lstrip("/")
        limits += [_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return min(limits)


def _quota(folder: Path) -> float:
    if (folder / "cpu.max").exists():  # version 2: "max 100000" or "150000 100000"
        quota, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").exists():  # version 1: -1 for no limit
        quota = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    else:
        return inf
    return inf if quota in ("max", "-1") else int(quota) / int(period)


# ---- the same arithmetic in torch operations ---------------------------------------------------------------


def _update(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, args: AdamArgs) -> None:
    """`adam_element` of csrc/adam.cpp, one by one: no lerp, addcmul or addcdiv, which may fuse."""
    l2 = 0.0 if args.decoupled else _rounded(args.weight_decay)
    decay = 1 - args.lr * args.weight_decay if args.decoupled else 1.0
    weight1 = _rounded(1 - args.betas[0])
    beta2 = args.betas[1]
    g = grad.float() * (-args.grad_scale if args.maximize else args.grad_scale)
    if l2 != 0:
        g += p * l2
    p *= decay
    difference = g - m
    if weight1 < 0.5:
        m += difference * weight1
    else:
        torch.sub(g, difference * (1 - weight1), out=m)
    v *= beta2
    v += g * (1 - beta2) * g
    root = v.double().sqrt().float()  # fp32 sqrt is MKL's where torch has it, which is not correctly rounded
    denominator = root / args.bias_correction2_sqrt + args.eps
    p += m * -(args.lr / args.bias_correction1) / denominator


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """[Note: Split master] in csrc/adam.cpp."""
    bits = master.view(torch.int32)
    hi.view(torch.int16).copy_((bits >> 16) + ((bits >> 15) & 1))
    lo.copy_(bits)


def _join(hi: Tensor, lo: Tensor) -> Tensor:
    low = lo.to(torch.int32) & 0xFFFF
    high = hi.view(torch.int16).to(torch.int32) - (low >> 15)
    return ((high << 16) | low).view(torch.float32)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for first in range(0, tensors[0].numel(), _PIECE_NUMEL):
        yield tuple(tensor.detach()[first : first + _PIECE_NUMEL] for tensor in tensors)


def _rounded(x: float) -> float:
    """To fp32 and back."""
    return float(torch.tensor(x, dtype=torch.float32).item())


# ---- at the door -------------------------------------------------------------------------------------------


def _scalars(args: AdamArgs) -> AdamScalars:
    return AdamScalars(
        lr=args.lr,
        beta1=args.betas[0],
        beta2=args.betas[1],
        eps=args.eps,
        weight_decay=args.weight_decay,
        bias_correction1=args.bias_correction1,
        bias_correction2_sqrt=args.bias_correction2_sqrt,
        grad_scale=args.grad_scale,
        decoupled=args.decoupled,
        maximize=args.maximize,
    )


def _check_update(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **weights: tuple[Tensor, torch.dtype]) -> int:
    return _check(
        **weights,
        grad=(grad, *_ELEMENT_TYPES),
        exp_avg=(exp_avg, torch.float32),
        exp_avg_sq=(exp_avg_sq, torch.float32),
    )


def _check(**arguments: tuple[Tensor, *tuple[torch.dtype, ...]]) -> int:
    """The common length. What follows sees addresses only, so a mistake must end here."""
    first, (model, *_) = next(iter(arguments.items()))
    for name, (tensor, *dtypes) in arguments.items():
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise UsageError(f"{name} is {tensor.dtype}; it must be {wanted}")
        if tensor.device.type != "cpu":
            raise UsageError(f"{name} is on {tensor.device}; the kernels work on host memory")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise UsageError(
                f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}; it must be 1-D and contiguous"
            )
        if tensor.numel() != model.numel():
            raise UsageError(f"{name} has {tensor.numel()} elements but {first} has {model.numel()}")
    return model.numel()
