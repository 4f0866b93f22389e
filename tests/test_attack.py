"""What users do that a tier must survive: odd gradients, new optimizers, casts, caught errors, foreign checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.support import MLP, launch, whole
from tiered.shard import Tier


class Fragile(MLP):
    """An MLP that can raise in the middle of its forward or of its backward."""

    breaks = ""

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.layers[0].weight.dtype)
        for i, layer in enumerate(self.layers):
            y = layer(y if i == 0 else nn.functional.gelu(y))
            if i == 1 and self.breaks == "forward":
                raise ArithmeticError("forward")
            if i == 1 and self.breaks == "backward":
                y.register_hook(_break)
        return (y.float() - x[:, :8]).square().mean()


def _break(gradient: Tensor) -> None:
    raise ArithmeticError("backward")


class Pair:
    """The same model twice, plain and tiered, so that one action can be done to both."""

    def __init__(self, folder: Path, factory: Callable[[], nn.Module] = MLP, **settings: Any) -> None:
        self.factory = factory
        folder.mkdir(exist_ok=True)
        self.tiered = self.build(lambda: tiered.shard(factory, nvme=[folder], host_memory="4MiB", **settings))
        self.plain = self.build(factory)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.new_optimizers()

    @property
    def models(self) -> tuple[Any, Any]:
        return self.tiered, self.plain

    def build(self, factory: Callable[[], nn.Module]) -> Any:
        torch.manual_seed(0)
        return factory()

    def new_optimizers(self) -> None:
        self.optimizers = [
            tiered.AdamW(self.tiered.parameters(), lr=1e-2, eps=1e-4),
            torch.optim.AdamW(self.plain.parameters(), lr=1e-2, eps=1e-4),
        ]

    def backward(self, seed: int = 0) -> None:
        for model in self.models:
            model(batch(seed)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for seed in range(steps):
            self.backward(seed)
            self.step()

    def assert_same(self, limit: float = 1e-6) -> None:
        plain = dict(self.plain.named_parameters())
        for name, parameter in self.tiered.named_parameters():
            assert torch.allclose(whole(parameter), plain[name], rtol=0, atol=limit), name


def batch(seed: int) -> Tensor:
    return MLP.batch(torch.Generator().manual_seed(seed), 4)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    result = Pair(tmp_path)
    yield result
    tiered.engine(result.tiered).close()


# ---- gradients ----


@pytest.mark.parametrize("dims", [0, 1, (0, 1), None])
def test_a_norm_of_a_gradient_along_dimensions(pair: Pair, dims: Any) -> None:
    pair.backward()
    ours, theirs = (torch.linalg.vector_norm(m.layers[0].weight.grad, dim=dims) for m in pair.models)
    torch.testing.assert_close(whole(ours), theirs)


def test_adding_to_a_transposed_gradient(pair: Pair) -> None:
    pair.backward()
    addend = torch.arange(16.0 * 33).view(16, 33)
    ours, theirs = (m.layers[0].weight.grad for m in pair.models)
    ours.to_local().t().add_(addend)
    theirs.t().add_(addend)
    torch.testing.assert_close(whole(ours), theirs)


def test_a_kept_gradient_never_shows_the_next_one(pair: Pair) -> None:
    pair.backward(0)
    kept, value = pair.tiered.layers[0].weight.grad, whole(pair.tiered.layers[0].weight.grad)
    assert torch.equal(whole(kept.clone()), value)
    pair.step()
    pair.backward(1)
    with pytest.raises(tiered.UsageError, match=r"old layers\.0\.weight\.grad.*clone"):
        whole(kept)


def test_gradients_that_the_user_moves_about(pair: Pair) -> None:
    pair.train(1)
    pair.backward()
    for model in pair.models:
        first, last = model.layers[0].bias, model.layers[1].bias
        last.grad = torch.zeros_like(last) + 0.5
        first.grad = first.grad * 3
    pair.step()
    pair.assert_same()


def test_another_parameters_gradient_is_a_copy(tmp_path: Path) -> None:
    both = Pair(tmp_path, lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Mean()))
    both.backward()
    for model in both.models:
        model[0].weight.grad = model[1].weight.grad
    both.step()
    both.assert_same()
    tiered.engine(both.tiered).close()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize("edit", [lambda g: g.div_(3), lambda g: g.clamp_(-0.1, 0.1), lambda g: g.copy_(g / 7)])
def test_an_edited_fp32_gradient_is_not_rounded_to_the_compute_dtype(
    tmp_path: Path, edit: Callable[[Tensor], Tensor]
) -> None:
    both = Pair(tmp_path, compute_dtype="bfloat16")
    both.backward()
    gradient = both.tiered.layers[0].weight.grad
    expected = whole(gradient).clone()
    edit(expected)
    edit(gradient)
    assert torch.equal(whole(gradient), expected)
    tiered.engine(both.tiered).close()


def _set_whole_gradient(folder: Path) -> float:
    model = tiered.shard(MLP, nvme=[folder], host_memory="4MiB")
    weight = model.layers[0].weight
    gradient = torch.arange(16.0 * 33).view(33, 16)
    weight.grad = gradient
    optimizer = tiered.AdamW(model.parameters(), betas=(0.0, 0.9))
    optimizer.step()
    return float((whole(optimizer.state[weight]["exp_avg"]) - gradient).abs().max())


def test_each_rank_takes_its_slice_of_a_whole_gradient(tmp_path: Path) -> None:
    assert launch(2, _set_whole_gradient, tmp_path, folder=tmp_path) == [0.0, 0.0]


def test_accumulation_in_fp32_stays_in_the_host_budget(tmp_path: Path) -> None:
    width = 512
    torch.manual_seed(0)
    model = tiered.shard(
        lambda: nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(8))),
        nvme=[tmp_path],
        host_memory="16MiB",
    )
    engine = tiered.engine(model)
    for _ in range(2):
        model(torch.ones(2, width, dtype=torch.bfloat16)).sum().backward()
    held = engine._runtime.tools.homes.used_bytes[Tier.HOST] + engine.report().host_arena_bytes
    assert held <= 16 << 20
    engine.close()


# ---- exceptions that are caught ----


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_training_goes_on_after_an_exception(tmp_path: Path, place: str) -> None:
    both = Pair(tmp_path, Fragile)
    both.train(1)
    for model, optimizer in zip(both.models, both.optimizers, strict=True):
        model.breaks = place
        with pytest.raises(ArithmeticError, match=place):
            model(batch(1)).backward()
        model.breaks = ""
        optimizer.zero_grad()
    both.train()
    both.assert_same()
    tiered.engine(both.tiered).close()


# ---- optimizers ----


def test_a_new_optimizer_starts_from_zeros_and_the_old_one_is_refused(pair: Pair) -> None:
    pair.train()
    old = pair.optimizers[0]
    pair.new_optimizers()
    pair.train()
    pair.assert_same()
    pair.backward()
    with pytest.raises(tiered.UsageError, match="another optimizer"):
        old.step()


def test_a_checkpoint_without_states_resets_them(pair: Pair) -> None:
    fresh = [copy.deepcopy(torch.optim.AdamW(MLP().parameters(), lr=1e-2, eps=1e-4).state_dict()) for _ in range(2)]
    pair.train()
    for optimizer, state_dict in zip(pair.optimizers, fresh, strict=True):
        optimizer.load_state_dict(state_dict)
    pair.train()
    pair.assert_same()


def test_states_of_another_shape_or_form_are_refused(pair: Pair) -> None:
    state_dict = torch.optim.AdamW(MLP().parameters()).state_dict()
    state_dict["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}}
    with pytest.raises(ValueError, match="shape"):
        pair.optimizers[0].load_state_dict(state_dict)
    with pytest.raises(tiered.UsageError, match="amsgrad"):
        pair.optimizers[0].load_state_dict(torch.optim.AdamW(MLP().parameters(), amsgrad=True).state_dict())


def test_a_parameter_that_was_frozen_may_be_trained_later(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = MLP()
        model.layers[1].requires_grad_(False)
        return model

    both = Pair(tmp_path, build)
    both.train(2)
    for model in both.models:
        model.requires_grad_(True)
    both.train()
    both.assert_same()
    tiered.engine(both.tiered).close()


# ---- how weights come in ----


def test_assigning_a_state_dict_keeps_parameters_in_tier_and_optimizer(pair: Pair) -> None:
    pair.train(1)
    torch.manual_seed(7)
    other = MLP().state_dict()
    pair.tiered.load_state_dict(other, assign=True)
    pair.plain.load_state_dict(other)
    assert all(isinstance(p.to_local(), tiered.TieredTensor) for p in pair.tiered.parameters())
    pair.train()
    pair.assert_same()


def _cast() -> nn.Module:
    return MLP().to(torch.bfloat16)


def _cast_twice() -> nn.Module:
    return MLP().double().float()


def _data() -> nn.Module:
    model = MLP()
    model.layers[0].weight.data = torch.ones(33, 16)
    return model


def _assign() -> nn.Module:
    model = MLP()
    model.load_state_dict(MLP().state_dict(), assign=True)
    return model


def _unregistered() -> nn.Module:
    model = MLP()
    model.layers[0]._parameters["weight"] = nn.Parameter(torch.randn(33, 16))
    return model


def _from_meta() -> nn.Module:
    with torch.device("meta"):
        model = MLP()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("factory", [_cast, _cast_twice, _data, _assign, _unregistered, _from_meta])
def test_whatever_a_factory_does_to_its_weights(tmp_path: Path, factory: Callable[[], nn.Module]) -> None:
    both = Pair(tmp_path, factory)
    plain = dict(both.plain.named_parameters())
    for name, parameter in both.tiered.named_parameters():
        assert isinstance(parameter.to_local(), tiered.TieredTensor), name
        assert parameter.dtype == plain[name].dtype
        assert torch.equal(whole(parameter), plain[name]), name
    tiered.engine(both.tiered).close()


def test_weights_without_values_or_sharded_already_are_refused(pair: Pair, tmp_path: Path) -> None:
    def meta() -> nn.Module:
        with torch.device("meta"):
            return MLP()

    for source in (meta, meta()):
        with pytest.raises(tiered.UsageError, match=r"layers\.0\.weight is on the meta device"):
            tiered.shard(source)
    for again in (pair.tiered, nn.Sequential(pair.tiered.layers[0], nn.Linear(33, 4))):
        with pytest.raises(tiered.UsageError, match="sharded already"):
            tiered.shard(again)
    pair.train()
    pair.assert_same()


def test_bf16_weights_unfrozen_after_sharding_have_fp32_masters(tmp_path: Path) -> None:
    """Frozen when sharded, trained later: the small updates must not be lost in bf16."""
    torch.manual_seed(0)
    model = tiered.shard(lambda: nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False))
    before = model.weight.full_tensor().clone()
    model.requires_grad_(True)
    optimizer = tiered.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(3):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    master = optimizer.state[model.weight]["master"].full_tensor()
    torch.testing.assert_close(master.clone(), before.float() - 3e-6, atol=2e-7, rtol=0)
    tiered.engine(model).close()


def test_gradients_are_still_there_when_there_is_no_room_to_widen_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiered.shard(nn.Linear(8, 8, dtype=torch.bfloat16))
    inputs = torch.ones(1, 8, dtype=torch.bfloat16)
    model(inputs).sum().backward()
    before = model.weight.grad.full_tensor().clone()

    def no_room(*_: object) -> None:
        raise tiered.CapacityError("full")

    buffer = tiered.engine(model)._runtime.gradients
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "_place", no_room)
        with pytest.raises(tiered.CapacityError):
            model(inputs).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor().clone(), before)
    tiered.engine(model).close()
