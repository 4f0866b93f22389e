"""The update arithmetic: right against float64 and torch, and equal to the bit however it is computed."""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiered import _native
from tiered.errors import UsageError
from tiered.optim import kernels
from tiered.optim.kernels import AdamArgs

GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = ["native", "torch"]
INF, NAN = float("inf"), float("nan")

ADAM_CPP = Path(__file__).parents[2] / "csrc" / "adam.cpp"
LEVELS = ["x86-64", "x86-64-v3", "x86-64-v4"]

needs_native = pytest.mark.skipif(not _native.available(), reason="nothing was compiled here")


def checked(examples: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """hypothesis.given without a deadline: timing decides nothing here."""
    return lambda test: settings(max_examples=examples, deadline=None)(given(*strategies)(test))


def levels_here() -> list[str]:
    isa = _native.kernel_isa() if _native.available() else "generic"
    return LEVELS[: LEVELS.index(isa) + 1] if isa in LEVELS else LEVELS[:1]


@contextmanager
def way(name: str) -> Iterator[None]:
    """Computes natively, or as on a machine where nothing was compiled."""
    if name == "native" and not _native.available():
        pytest.skip("nothing was compiled here")
    with patch.object(_native, "available", return_value=name == "native"):
        yield


# ---- inputs and comparison ---------------------------------------------------------------------------------


@st.composite
def adam_args(draw: st.DrawFn) -> AdamArgs:
    return AdamArgs(
        lr=draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.5])),
        step=draw(st.sampled_from([1, 2, 17, 100_000])),
        betas=draw(st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.0), (0.3, 0.5), (0.5, 0.99)])),
        eps=draw(st.sampled_from([0.0, 1e-8, 1e-4])),
        weight_decay=draw(st.sampled_from([0.0, 0.01, 0.3])),
        grad_scale=draw(st.sampled_from([1.0, 0.3711, 1 / 65536, 3.0])),
        decoupled=draw(st.booleans()),
        maximize=draw(st.booleans()),
    )


numels = st.integers(0, 4097)
offsets = st.integers(0, 5)
seeds = st.integers(0, 2**32 - 1)
grad_dtypes = st.sampled_from(GRAD_DTYPES)


def spread(numel: int, seed: int) -> Tensor:
    """fp32 numbers of both signs and many sizes, subnormal ones, zeros, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(numel, generator=generator) * 50 - 45
    numbers = torch.randn(numel, generator=generator) * 10.0**exponent
    chosen = torch.tensor([0.0, -0.0, 1e-45, -3e-39, 1.0, 3e38, INF, -INF, NAN])
    which = torch.randint(0, 200, (numel,), generator=generator)
    return torch.where(which < len(chosen), chosen[which.clamp(max=len(chosen) - 1)], numbers)


def ordinary(numel: int, seed: int) -> Tensor:
    """Numbers such as gradients are made of."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (torch.rand(numel, generator=generator) * 6 - 6)
    return torch.randn(numel, generator=generator) * sizes


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """The same values `offset` elements into a buffer of their own, so at any alignment."""
    buffer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    buffer[offset:] = tensor
    return buffer[offset:]


def bits(tensor: Tensor) -> Tensor:
    """What must be equal: the bits, except which NaN a NaN is."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(tensor.dtype, tensor.dtype)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, NAN), tensor)
    return tensor.view(integers)


def same_bits(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    hi, lo = master.to(torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    kernels.split_f32(master, hi, lo)
    return hi, lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    out = torch.empty(hi.numel())
    kernels.join_f32(hi, lo, out)
    return out


# ---- equal bits in every way -------------------------------------------------------------------------------

Form = tuple[Callable[..., None], Callable[[Tensor], tuple[Tensor, ...]]]
FORMS: dict[str, Form] = {
    "f32": (kernels.adam_f32, lambda master: (master.clone(),)),
    "split": (kernels.adam_split, split),
    "bf16": (kernels.adam_bf16, lambda master: (master.to(torch.bfloat16),)),
}
forms = st.sampled_from(sorted(FORMS))


def start(form: str, numel: int, seed: int) -> tuple[Tensor, ...]:
    return (*FORMS[form][1](spread(numel, seed)), spread(numel, seed + 2), spread(numel, seed + 3).abs())


def updated(
    form: str, state: tuple[Tensor, ...], grad: Tensor, args: AdamArgs, *, threads: int = 1, offset: int = 0
) -> tuple[Tensor, ...]:
    """The state after one update of a copy of it."""
    *weights, exp_avg, exp_avg_sq = (at_offset(tensor, offset) for tensor in state)
    FORMS[form][0](*weights, at_offset(grad, offset), exp_avg, exp_avg_sq, args, threads=threads)
    return (*weights, exp_avg, exp_avg_sq)


@needs_native
@checked(100, forms, numels, offsets, seeds, grad_dtypes, adam_args())
def test_native_and_torch_give_equal_bits(
    form: str, numel: int, offset: int, seed: int, grad_dtype: torch.dtype, args: AdamArgs
) -> None:
    state, grad = start(form, numel, seed), spread(numel, seed + 1).to(grad_dtype)
    with way("native"):
        native = updated(form, state, grad, args, offset=offset)
    with way("torch"):
        assert same_bits(native, updated(form, state, grad, args))


@needs_native
@checked(20, forms, seeds, grad_dtypes, adam_args(), st.data())
def test_neither_threads_nor_cuts_change_a_bit(
    form: str, seed: int, grad_dtype: torch.dtype, args: AdamArgs, data: st.DataObject
) -> None:
    numel = 5 * (1 << 14) + 77  # enough for five threads
    state, grad = start(form, numel, seed), spread(numel, seed + 1).to(grad_dtype)
    whole = updated(form, state, grad, args, threads=1)
    assert same_bits(whole, updated(form, state, grad, args, threads=data.draw(st.integers(2, 5))))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, numel), max_size=4))), numel]
    pieces = [
        updated(form, tuple(tensor[a:b] for tensor in state), grad[a:b], args, threads=2) for a, b in pairwise(cuts)
    ]
    assert same_bits(whole, tuple(torch.cat(parts) for parts in zip(*pieces, strict=True)))


@pytest.mark.parametrize("name", WAYS)
def test_the_torch_way_goes_piece_by_piece_over_long_ranges(name: str) -> None:
    numel = 2 * (1 << 16) + 3
    args, grad = AdamArgs(lr=1e-2, step=3, weight_decay=0.1), ordinary(numel, 1)
    state = (ordinary(numel, 0), ordinary(numel, 2), ordinary(numel, 3).abs())
    with way(name):
        whole = updated("f32", state, grad, args)
        end = updated("f32", tuple(tensor[-5:] for tensor in state), grad[-5:], args)
    assert same_bits(end, tuple(tensor[-5:] for tensor in whole))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_every_instruction_set_gives_equal_bits(level: str, grad_dtype: torch.dtype, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() != "x86_64" or level not in levels_here():
        pytest.skip(f"cannot compile for, or run, {level} here")
    library = tmp_path / "adam.so"
    flags = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
    flags += [f"-march={level}", "-DTIERED_ONE_COPY", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(ADAM_CPP), "-o", str(library)], check=True)

    args = AdamArgs(lr=1e-2, step=3, betas=(0.9, 0.95), weight_decay=0.1, grad_scale=0.3711)
    hi, lo, exp_avg, exp_avg_sq = start("split", 50_001, 5)
    grad = spread(50_001, 6).to(grad_dtype)
    expected = updated("split", (hi, lo, exp_avg, exp_avg_sq), grad, args)
    scalars = [args.lr, *args.betas, args.eps, args.weight_decay]
    scalars += (args.bias_correction1, args.bias_correction2_sqrt, args.grad_scale)
    ctypes.CDLL(str(library)).tiered_adam_split(
        ctypes.c_int64(hi.numel()),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (hi, lo, grad)),
        GRAD_DTYPES.index(grad_dtype),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (exp_avg, exp_avg_sq)),
        struct.pack("8d2i", *scalars, 1, 0),
        1,
    )
    assert same_bits((hi, lo, exp_avg, exp_avg_sq), expected)


@needs_native
def test_flush_denormal_of_the_caller_changes_nothing_and_survives() -> None:
    state = (torch.full((40_000,), 1e-39), torch.full((40_000,), 1e-40), torch.zeros(40_000))
    grad, args = torch.full((40_000,), 2e-41), AdamArgs(lr=1e-3, step=5)
    plain = updated("f32", state, grad, args, threads=2)
    assert plain[1].abs().min() > 0
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush")
        flushed = updated("f32", state, grad, args, threads=2)
        caller_still_flushes = (torch.full((8,), 1e-40) * 0.5).eq(0).all()
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(plain, flushed)
    assert caller_still_flushes


# ---- right numbers -----------------------------------------------------------------------------------------


def torch_optimizer(param: Tensor, args: AdamArgs, *, fused: bool) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if args.decoupled else torch.optim.Adam
    return kind(
        [param],
        lr=args.lr,
        betas=args.betas,
        eps=args.eps,
        weight_decay=args.weight_decay,
        maximize=args.maximize,
        foreach=False,
        fused=fused,
    )


def torch_steps(start: Tensor, grads: list[Tensor], args: AdamArgs, *, fused: bool = False) -> Tensor:
    param = start.clone().requires_grad_()
    optimizer = torch_optimizer(param, args, fused=fused)
    for grad in grads:
        param.grad = grad.to(param.dtype) * args.grad_scale
        optimizer.step()
    return param.detach()


def our_steps(start: Tensor, grads: list[Tensor], args: AdamArgs) -> Tensor:
    param, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, grad in enumerate(grads, 1):
        kernels.adam_f32(param, grad, exp_avg, exp_avg_sq, replace(args, step=step))
    return param


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_as_close_to_float64_as_fused_torch(
    name: str, maximize: bool, decoupled: bool, grad_dtype: torch.dtype
) -> None:
    args = AdamArgs(lr=1e-3, step=1, betas=(0.9, 0.95), weight_decay=0.1, decoupled=decoupled, maximize=maximize)
    param = ordinary(20_003, 0)
    grads = [ordinary(20_003, seed).to(grad_dtype) for seed in range(1, 21)]
    exact = torch_steps(param.double(), grads, args)
    with way(name):
        ours = (our_steps(param, grads, args).double() - exact).abs()
    fused = (torch_steps(param, [g.float() for g in grads], args, fused=True).double() - exact).abs()
    assert ours.max() <= 1.5 * fused.max()
    assert ours.mean() <= 1.2 * fused.mean()


@pytest.mark.parametrize("name", WAYS)
@checked(30, seeds, adam_args())
def test_every_setting_means_what_it_means_in_torch(name: str, seed: int, args: AdamArgs) -> None:
    # An update is lr * m / (sqrt(v) + eps): where a gradient cancels, rounding is magnified by lr / eps.
    args = replace(args, eps=1e-2)
    param, grads = ordinary(257, seed), [ordinary(257, seed + i) for i in range(3)]
    exact = torch_steps(param.double(), grads, args)
    with way(name):
        ours = our_steps(param, grads, args)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-6 + 1e-4 * args.lr)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_what_is_not_an_ordinary_number_behaves_as_in_torch(name: str, decoupled: bool) -> None:
    values = [0.0, -0.0, 1e-45, 2e-39, -1e-38, 1.0, 1e20, -3e38, INF, -INF, NAN]
    param, grad = (grid.flatten() for grid in torch.meshgrid(*2 * [torch.tensor(values)], indexing="ij"))
    for weight_decay in (0.0, 0.1):
        args = AdamArgs(lr=1e-3, step=1, weight_decay=weight_decay, decoupled=decoupled)
        theirs = torch_steps(param, [grad, grad], args)
        with way(name):
            ours = our_steps(param, [grad, grad], args)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", WAYS)
def test_subnormal_gradients_reach_the_moments(name: str) -> None:
    moment = torch.zeros(100)
    with way(name):
        grad = torch.full((100,), 1e-40)
        kernels.adam_f32(torch.ones(100), grad, moment, torch.zeros(100), AdamArgs(lr=1e-3, step=1))
    torch.testing.assert_close(moment, torch.full((100,), 1e-41), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", WAYS)
@checked(30, forms, seeds, adam_args(), st.sampled_from([0.25, 0.3711, 1.0]))
def test_scale_and_ascent_equal_a_gradient_prepared_by_hand(
    name: str, form: str, seed: int, args: AdamArgs, scale: float
) -> None:
    state, grad = start(form, 300, seed), spread(300, seed + 1)
    prepared = -(grad * scale) if args.maximize else grad * scale
    with way(name):
        inside = updated(form, state, grad, replace(args, grad_scale=scale))
        assert same_bits(inside, updated(form, state, prepared, replace(args, grad_scale=1.0, maximize=False)))


@pytest.mark.parametrize("name", WAYS)
def test_without_momentum_exp_avg_is_the_gradient(name: str) -> None:
    grad = ordinary(1000, 1)
    with way(name):
        _, exp_avg, _ = updated(
            "f32",
            (ordinary(1000, 0), ordinary(1000, 2) * 1e6, torch.zeros(1000)),
            grad,
            AdamArgs(lr=0.1, step=1, betas=(0.0, 0.9)),
        )
    assert torch.equal(exp_avg, grad)


@pytest.mark.parametrize("name", WAYS)
@checked(30, numels, seeds, grad_dtypes, adam_args())
def test_narrow_weights_are_updated_as_their_fp32_values(
    name: str, numel: int, seed: int, grad_dtype: torch.dtype, args: AdamArgs
) -> None:
    grad = spread(numel, seed + 1).to(grad_dtype)
    with way(name):
        hi, lo, *moments = start("split", numel, seed)
        expected = updated("f32", (join(hi, lo), *moments), grad, args)
        hi, lo, *after = updated("split", (hi, lo, *moments), grad, args)
        assert same_bits((join(hi, lo), *after), expected)
        param = start("bf16", numel, seed)[0]
        wide, *expected_moments = updated("f32", (param.float(), *moments), grad, args)
        narrow, *after = updated("bf16", (param, *moments), grad, args)
        assert same_bits((narrow, *after), (wide.to(torch.bfloat16), *expected_moments))


# ---- the split master --------------------------------------------------------------------------------------


def patterns(integers: Tensor) -> Tensor:
    """fp32 numbers that have the low 32 bits of these integers."""
    return integers.to(torch.int32).view(torch.float32)


def assert_rebuilds(master: Tensor) -> None:
    assert torch.equal(join(*split(master)).view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize("name", WAYS)
@checked(100, numels, offsets, seeds)
def test_join_undoes_split_for_random_patterns(name: str, numel: int, offset: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    master = at_offset(patterns(torch.randint(0, 2**32, (numel,), generator=generator)), offset)
    with way(name):
        assert_rebuilds(master)


@pytest.mark.parametrize("name", WAYS)
def test_join_undoes_split_at_every_low_half(name: str) -> None:
    edges = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
    his = torch.tensor([*edges, *(edge | 0x8000 for edge in edges)])
    with way(name):
        assert_rebuilds(patterns((his[:, None] << 16 | torch.arange(1 << 16)[None, :]).flatten()))


@pytest.mark.slow
def test_join_undoes_split_for_all_patterns() -> None:
    step = 1 << 24
    for first in range(0, 1 << 32, step):
        assert_rebuilds(patterns(torch.arange(first, first + step)))


@pytest.mark.parametrize("name", WAYS)
def test_hi_is_the_nearest_bf16_with_halves_away_from_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    master = patterns(torch.randint(0, 2**32, (20_000,), generator=generator))
    master = torch.cat([master[master.isfinite()], torch.tensor([INF, -INF, 3.4e38, -3.4e38, 0.0, -0.0])])
    halves = master.view(torch.int32) & 0xFFFF == 0x8000
    with way(name):
        hi, _ = split(master)
        assert same_bits((hi[~halves],), (master[~halves].to(torch.bfloat16),))
        ties = patterns((torch.arange(0x7F7F) << 16) + 0x8000)
        assert torch.equal(split(ties)[0].view(torch.int16), (torch.arange(0x7F7F) + 1).to(torch.int16))


@pytest.mark.parametrize("name", WAYS)
def test_an_update_never_lets_a_nan_look_like_a_number(name: str) -> None:
    odd_nans = [0x7F800001, 0x7F807FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000]
    with way(name):
        hi, lo = split(patterns(torch.tensor(odd_nans)))
        assert not hi.isnan().all()  # the price of a split that keeps every bit
        zeros = torch.zeros(len(odd_nans))
        kernels.adam_split(hi, lo, zeros, zeros.clone(), zeros.clone(), AdamArgs(lr=1e-3, step=1))
        assert hi.isnan().all()
        assert join(hi, lo).isnan().all()


# ---- accumulation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
@checked(100, numels, offsets, seeds, grad_dtypes)
def test_accumulation_is_one_fp32_addition(name: str, numel: int, offset: int, seed: int, dtype: torch.dtype) -> None:
    total, addend = (
        at_offset(spread(numel, seed), offset),
        at_offset(spread(numel, seed + 1).to(dtype), offset),
    )
    expected = total + addend.float()
    with way(name):
        kernels.accumulate_f32(total, addend, threads=2)
    assert same_bits((total,), (expected,))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_narrow_number_is_read_right(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    total = torch.full((1 << 16,), -0.0)  # the one number that changes none it is added to
    with way(name):
        kernels.accumulate_f32(total, every)
    assert same_bits((total,), (every.float(),))


# ---- at the door -------------------------------------------------------------------------------------------


def test_wrong_tensors_are_refused_by_name() -> None:
    def update(**changed: Tensor) -> None:
        tensors = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
        param, grad, exp_avg, exp_avg_sq = (tensors | changed).values()
        kernels.adam_f32(param, grad, exp_avg, exp_avg_sq, AdamArgs(lr=1e-3, step=1))

    update()
    with pytest.raises(UsageError, match=r"grad is torch.float64; it must be torch.float32 or torch.bfloat16"):
        update(grad=torch.zeros(4, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"param is torch.bfloat16"):
        update(param=torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match=r"exp_avg is on meta"):
        update(exp_avg=torch.zeros(4, device="meta"))
    with pytest.raises(UsageError, match=r"exp_avg_sq has shape \(2, 2\)"):
        update(exp_avg_sq=torch.zeros(2, 2))
    with pytest.raises(UsageError, match=r"grad has shape \(4,\) and stride \(2,\)"):
        update(grad=torch.zeros(8)[::2])
    with pytest.raises(UsageError, match=r"grad has 5 elements but param has 4"):
        update(grad=torch.zeros(5))
    with pytest.raises(UsageError, match=r"lo is torch.int32"):
        kernels.join_f32(torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int32), torch.zeros(4))
    with pytest.raises(UsageError, match=r"step = 0"):
        AdamArgs(lr=1e-3, step=0)


def test_threads_are_the_cpus_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cgroup_cpus", lambda: 6.5)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    counts = []
    for ranks in ("1", "2", "16"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        kernels.thread_count.cache_clear()
        counts.append(kernels.thread_count())
    kernels.thread_count.cache_clear()
    assert counts == [6, 3, 1]


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "mount"
    for folder, quota in {"": "max 100000", "a": "150000 100000", "a/b": "400000 100000"}.items():
        (mount / folder).mkdir(parents=True, exist_ok=True)
        (mount / folder / "cpu.max").write_text(quota + "\n")
    old = mount / "cpu" / "job"
    old.mkdir(parents=True)
    (old / "cpu.cfs_period_us").write_text("100000\n")

    def cpus(groups: str, quota: str = "-1") -> float:
        membership.write_text(groups)
        (old / "cpu.cfs_quota_us").write_text(quota + "\n")
        return kernels.cgroup_cpus(membership, mount)

    assert cpus("0::/\n") == INF
    assert cpus("0::/a/b\n") == 1.5
    assert cpus("0::/not/visible/here\n") == INF
    assert cpus("4:memory:/job\n3:cpu,cpuacct:/job\n", "-1") == INF
    assert cpus("4:memory:/job\n3:cpu,cpuacct:/job\n", "50000") == 0.5
    assert kernels.cgroup_cpus(tmp_path / "no such file", mount) == INF
