"""A TieredTensor behaves as the ordinary tensor it stands for, wherever its bytes are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiered
from tiered.tensor import TieredTensor
from tiered.zero.units import local_tensor

TIERS = ("host", "nvme", "device")


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(70, 1100, dtype=dtype))  # several slots of the smallest arena
        self.small = nn.Parameter(torch.randn(6, 5, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return self.large.float().square().mean() + self.small.float().square().mean()


@pytest.fixture(params=[(tier, dtype) for tier in TIERS for dtype in ("float32", "bfloat16", "split")], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Weights, Weights]]:
    """(tiered, plain) with the same values; "split" is an fp32 model that computes in bf16."""
    tier, kind = request.param
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    torch.manual_seed(0)
    plain = Weights(dtype)
    torch.manual_seed(0)
    model = tiered.shard(
        lambda: Weights(dtype),
        parameters=tier,
        gradients=tier,
        optimizer_states=tier,
        nvme=[tmp_path] if tier == "nvme" else [],
        host_memory="4MiB",
        compute_dtype="bfloat16" if kind == "split" else "auto",
    )
    yield model, plain
    tiered.engine(model).close()
    assert not list(tmp_path.iterdir())


def same(model: Weights, plain: Weights) -> bool:
    return torch.equal(model.large.full_tensor(), plain.large) and torch.equal(model.small.full_tensor(), plain.small)


READS: list[Callable[[torch.Tensor], object]] = [
    lambda t: t.norm(),
    lambda t: t.sum(),
    lambda t: t + 1,
    lambda t: t @ t.T,
    lambda t: t[2:5, 1:4].clone(),
    lambda t: t.T.contiguous(),
    lambda t: t.view(-1)[7],
    lambda t: t.reshape(5, -1),
    lambda t: t.float().mean(0),
    lambda t: torch.cat([t, t]),
    lambda t: t.chunk(2)[1].clone(),
    lambda t: t.flatten()[::3].clone(),
    lambda t: t.diagonal().clone(),
    lambda t: t.isfinite().all(),
    lambda t: t.view(torch.uint8).clone(),
    lambda t: t.unfold(0, 2, 1).clone(),
    lambda t: torch.zeros_like(t),
    lambda t: t.new_zeros(3, 2),
    lambda t: t.movedim(0, 1).clone(),
]
WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda t: t.mul_(0.5),
    lambda t: t.zero_(),
    lambda t: t.fill_(0.25),
    lambda t: t.copy_(torch.arange(t.numel()).view(t.shape) % 7),
    lambda t: t[1].fill_(3.0),
    lambda t: t[:, 2].add_(1.0),
    lambda t: t.T.mul_(2.0),
    lambda t: t.view(-1)[3:9].zero_(),
    lambda t: t.__setitem__((0, slice(1, 3)), 7.0),
    lambda t: t.masked_fill_(t > 0, -1.0),
    lambda t: nn.init.normal_(t, std=0.02),
    lambda t: nn.init.uniform_(t),
    lambda t: nn.init.trunc_normal_(t, std=0.02) if t.dtype == torch.float32 else t,
    lambda t: nn.init.kaiming_uniform_(t) if t.dtype == torch.float32 else t,
    lambda t: nn.init.orthogonal_(t) if t.dtype == torch.float32 else t,
    lambda t: nn.init.constant_(t, 0.125),
    lambda t: t.clamp_(-0.5, 0.5),
    lambda t: t.data.mul_(2),
]


@torch.no_grad()
def test_every_read_equals_the_plain_one(pair: tuple[Weights, Weights]) -> None:
    model, plain = pair
    for read in READS:
        got, expected = read(local_tensor(model.small)), read(plain.small.detach())
        assert type(got) is torch.Tensor or isinstance(got, TieredTensor)
        assert torch.equal(got.clone(), expected), read
    assert torch.equal(
        local_tensor(model.large) @ torch.ones(1100, dtype=plain.large.dtype),
        plain.large @ torch.ones(1100, dtype=plain.large.dtype),
    )
    assert same(model, plain)


@torch.no_grad()
def test_every_write_equals_the_plain_one(pair: tuple[Weights, Weights]) -> None:
    model, plain = pair
    for write in WRITES:
        for name in ("small", "large"):
            torch.manual_seed(1)
            write(local_tensor(getattr(model, name)))
            torch.manual_seed(1)
            write(getattr(plain, name).data)
        assert same(model, plain), write


@torch.no_grad()
@given(st.lists(st.sampled_from(WRITES), min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 6))
def test_writes_to_random_windows(writes: list[Callable[[torch.Tensor], object]], start: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Weights()
    torch.manual_seed(0)
    model = tiered.shard(Weights)
    for write in writes:
        if write.__code__.co_names and "init" in write.__code__.co_names:
            continue  # initialisers want whole matrices
        window = slice(start, start + size)
        try:
            write(plain.large.data[window, start : start + 9])
        except (IndexError, RuntimeError):  # the plain tensor refuses it as well
            continue
        write(local_tensor(model.large)[window, start : start + 9])
    assert same(model, plain)
    tiered.engine(model).close()


def test_a_new_tensor_never_shares_bytes(pair: tuple[Weights, Weights]) -> None:
    model, plain = pair
    with torch.no_grad():
        for make in (torch.zeros_like, torch.empty_like, torch.clone, lambda p: p.new_zeros(p.shape), copy.deepcopy):
            make(local_tensor(model.small)).fill_(9.0)
    assert same(model, plain)


def test_copies_leave_the_tier(pair: tuple[Weights, Weights]) -> None:
    model, plain = pair
    local = local_tensor(model.small)
    for other in (copy.deepcopy(local), pickle.loads(pickle.dumps(local.detach()))):
        assert not isinstance(other, TieredTensor)
        assert torch.equal(other, plain.small)
    if plain.small.dtype == torch.float32:
        assert np.array_equal(local.detach().numpy(), plain.small.detach().numpy())
    assert local.tolist() == plain.small.tolist()


def test_shape_dtype_and_text_are_true(pair: tuple[Weights, Weights]) -> None:
    model, plain = pair
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.shape, parameter.dtype, parameter.numel()) == (other.shape, other.dtype, other.numel())
        assert str(tuple(other.shape)) in repr(local_tensor(parameter))


def test_writing_a_weight_refreshes_its_master(pair: tuple[Weights, Weights]) -> None:
    """FAULTS row 10: weights loaded after training, then the next step puts stale masters back over them."""
    model, plain = pair
    optimizer = tiered.AdamW(model.parameters(), lr=0.5)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not same(model, plain)
    model.load_state_dict(plain.state_dict())
    assert same(model, plain)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model().backward()
    optimizer.step()  # with lr 0 this writes every master back as a weight
    assert same(model, plain)
