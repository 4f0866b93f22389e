"""The way back: a sharded model becomes the ordinary module that it was.

[Note: leaving FSDP2] `fully_shard` has no inverse. What it did to a module is undone here piece by piece: the class
it put in front, its hooks, its entry in torch's registries of composable APIs. This is the only place that touches
those private names; a test builds, trains, unshards and shards again on every supported torch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tiered.tensor import TieredTensor, materialize

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FLAG_TABLES = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def whole_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each sharded parameter with its whole value on its device, one at a time. A collective: every rank calls it."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            whole = cast(DTensor, parameter.detach()).full_tensor()
            yield parameter, materialize(whole) if isinstance(whole, TieredTensor) else whole


def make_plain(model: nn.Module) -> None:
    """Replaces every sharded parameter by an ordinary one and takes FSDP2's and tiered's hooks off."""
    plain: dict[int, nn.Parameter] = {}
    for parameter, whole in whole_parameters(model):
        plain[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, owned in module._parameters.items():
            if owned is not None:
                module._parameters[name] = plain.get(id(owned), owned)
        remove_hooks(module)
        if isinstance(module, FSDPModule):
            module.__class__ = type(module).__bases__[1]
        module.__dict__.pop(STATE_KEY, None)
        module.__dict__.pop(REGISTRY_KEY, None)
        _composable_state._module_state_mapping.pop(module, None)


def remove_hooks(module: nn.Module) -> None:
    """Removes the hooks that FSDP2 and tiered put on `module`; the user's stay."""
    for table in _HOOK_TABLES:
        hooks: MutableMapping[int, Any] = module.__dict__.get(table, {})
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]
            for flags in _FLAG_TABLES:
                module.__dict__.get(flags, {}).pop(key, None)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps load_state_dict hooks
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith(("torch.distributed.fsdp", "tiered."))
