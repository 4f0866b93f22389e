"""What tiered cannot do is refused before training, and the message says what to do instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiered


def test_float16_cannot_be_trained_but_can_be_frozen() -> None:
    with pytest.raises(tiered.UsageError, match="float32 or bfloat16"):
        tiered.shard(nn.Linear(4, 4, dtype=torch.float16))
    frozen = nn.Linear(4, 4, dtype=torch.float16).requires_grad_(False)
    expected = frozen.weight.detach().clone()
    model = tiered.shard(frozen)
    assert torch.equal(model.weight.full_tensor(), expected)
    tiered.engine(model).close()


def test_two_trained_dtypes_in_one_block_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, dtype=torch.bfloat16))
    with pytest.raises(tiered.UsageError, match=r"1\.weight .*bfloat16"):
        tiered.shard(model)


def test_amsgrad_and_bad_hyperparameters_are_refused() -> None:
    model = tiered.shard(nn.Linear(4, 4))
    with pytest.raises(tiered.UsageError, match="amsgrad"):
        tiered.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="betas"):
        tiered.AdamW(model.parameters(), betas=(1.0, 0.9))
    tiered.engine(model).close()


def test_an_optimizer_over_foreign_parameters_is_refused() -> None:
    with pytest.raises(tiered.UsageError, match=r"tiered\.shard"):
        tiered.AdamW(nn.Linear(4, 4).parameters())


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(tiered.UsageError, match="list"):
        tiered.shard(list)  # type: ignore[arg-type, return-value]


def test_a_module_that_was_not_sharded_has_no_engine() -> None:
    with pytest.raises(tiered.UsageError, match=r"tiered\.shard"):
        tiered.engine(nn.Linear(2, 2))


def test_config_and_settings_together_are_refused() -> None:
    with pytest.raises(tiered.UsageError, match="not both"):
        tiered.shard(nn.Linear(2, 2), tiered.Config(), prefetch_units=1)


def test_too_small_a_device_budget_is_a_table(tmp_path: object) -> None:
    with pytest.raises(tiered.CapacityError, match="device_memory") as caught:
        tiered.shard(nn.Linear(512, 512), device_memory="64KiB")
    assert "root unit" in str(caught.value)


def test_too_small_a_host_budget_is_a_table() -> None:
    with pytest.raises(tiered.CapacityError, match="host_memory") as caught:
        tiered.shard(nn.Linear(512, 512), host_memory="2MiB")
    assert "exp_avg" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"host_memory": "2MiB"}, tiered.CapacityError), ({"device_memory": "64KiB"}, tiered.CapacityError)],
)
def test_a_refused_module_is_left_as_it_was(settings: dict[str, str], error: type[Exception]) -> None:
    model = nn.Linear(512, 512)
    parameters, values = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error):
        tiered.shard(model, **settings)
    for parameter, before, value in zip(model.parameters(), parameters, values, strict=True):
        assert parameter is before
        assert torch.equal(parameter, value)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()


def test_a_module_refused_half_way_is_given_back() -> None:
    """The first units are sharded already when a later one is refused."""
    blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
    odd = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, dtype=torch.bfloat16))
    model = nn.Sequential(nn.ModuleList(blocks), odd)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with pytest.raises(tiered.UsageError, match=r"1\.1\.weight"):
        tiered.shard(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert type(blocks[0]) is nn.Sequential
