"""Sharded construction: every parameter leaves memory as soon as it is registered, so the model never exists whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.errors import UsageError
from tiered.tensor import TieredTensor, is_tiered, materialize
from tiered.zero.nursery import Nursery
from tiered.zero.unshard import make_plain


def build(factory: Callable[[], nn.Module], nursery: Nursery, device: torch.device) -> nn.Module:
    """Runs `factory` with every parameter going to the nursery at registration.

    With the same seed the values equal those of plain construction on the CPU, bit for bit: initialisation runs
    on host tensors of the same shape in the same order. Raises UsageError when the result is not a module.
    """
    with _adopting(nursery, device):
        model = factory()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the factory returned {type(model).__name__}, not a torch.nn.Module")
    check_module(model)
    Conversion(model, nursery, device).commit()  # what came in without being registered, or got its values later
    return model


class Conversion:
    """Moves the parameters of a finished module to the nursery, one by one.

    Until `commit` the module can have its own Parameter objects back, with their values. After it they are retired:
    an optimizer that was made from them raises at its first step.
    """

    def __init__(self, model: nn.Module, nursery: Nursery, device: torch.device) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        adopted: dict[nn.Parameter, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is None or is_tiered(parameter):
                    continue
                if parameter not in adopted and stays_plain(parameter):  # what was adopted has no elements any more
                    continue
                self._places.append((module, key, parameter))
                if parameter not in adopted:
                    name = f"{prefix}.{key}" if prefix else key
                    adopted[parameter] = _adopt(name, parameter, nursery, device)
                    parameter.data = parameter.data.new_empty(0)
                module._parameters[key] = adopted[parameter]

    def commit(self) -> None:
        """The module stays converted."""
        for _, _, parameter in self._places:
            parameter.__class__ = RetiredParameter

    def undo(self) -> None:
        """Gives the module back as it was. A collective where something was sharded already."""
        make_plain(self._model)
        for module, key, parameter in self._places:
            current = module._parameters[key]
            if current is not None and current is not parameter:
                values = materialize(current) if isinstance(current, TieredTensor) else current
                parameter.data = values.detach().to(parameter.device)
                module._parameters[key] = parameter


class RetiredParameter(nn.Parameter):
    """What is left of a Parameter whose module was sharded: using it in an optimizer is an error, not silence."""

    @property
    def grad(self) -> NoReturn:
        raise UsageError(
            "this parameter was replaced when its model was given to tiered.shard, so an optimizer made before "
            "would train nothing: make the optimizer from model.parameters() after tiered.shard"
        )

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            self.grad  # noqa: B018  (raises)


def stays_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter stays ordinary and replicated: FSDP2 cannot shard scalars or tensors without elements."""
    return parameter.ndim == 0 or parameter.numel() == 0 or isinstance(parameter, nn.parameter.UninitializedParameter)


def check_module(model: nn.Module) -> None:
    """Raises UsageError when `model` has parameters that cannot be taken."""
    for name, parameter in model.named_parameters():
        check_parameter(name, parameter)


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raises UsageError for a parameter that has no values yet, or whose values belong to another sharding."""
    if parameter.is_meta:
        raise UsageError(
            f"{name} is on the meta device, so it has no values to train: build the model on the CPU, in a factory "
            "given to tiered.shard, where it does not exist whole either, or give it values first"
        )
    if isinstance(parameter, DTensor):
        raise UsageError(f"{name} is sharded already (it is a DTensor): tiered.shard takes a plain module, once")


def _adopt(name: str, parameter: nn.Parameter, nursery: Nursery, device: torch.device) -> nn.Parameter:
    tensor = nursery.adopt(name, parameter, device)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


@contextmanager
def _adopting(nursery: Nursery, device: torch.device) -> Iterator[None]:
    def on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or is_tiered(parameter) or stays_plain(parameter):
            return None
        if parameter.is_meta:  # its values come later
            return None
        return _adopt(f"{type(module).__name__}.{name}", parameter, nursery, device)

    handle = register_module_parameter_registration_hook(cast(Any, on_registration))
    try:
        yield
    finally:
        handle.remove()
