"""What joins a sharded model to torch: process group and mesh, buffers, and the hooks on modules and parameters."""

from __future__ import annotations

import atexit
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from tiered.errors import UsageError
from tiered.optim.grad_buffer import GradBuffer
from tiered.plan.prefetch_queue import Mode, PrefetchQueue
from tiered.zero.units import cell_of


def open_mesh(device: torch.device) -> DeviceMesh:
    """A 1-D mesh over all ranks; makes the process group where the user made none.

    Under `torchrun` the group is the launched ranks, otherwise this process alone (no port is opened). A group made
    here lives until the process ends, for all engines: torch's DTensor caches keep each mesh, and so each group with
    its sockets, so a new one per engine would pile up. Users who want a group of their own make it first.
    """
    if not dist.is_initialized():
        _make_group(device)
        atexit.register(_destroy_group)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device, with its index, because torch and FSDP2 compare devices and "cuda" is not "cuda:0"."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _make_group(device: torch.device) -> None:
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_backend_of(device)}"
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    else:
        torch.empty(0, device=device)  # the mesh keeps the current device once there is one, instead of choosing
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _backend_of(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device.type)


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def ranks_on_this_node() -> int:
    """How many ranks share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))


def prepare_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers are never sharded or cast: they go to the device, and every rank gets rank 0's."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != device:
                buffer = module._buffers[name] = buffer.to(device)
            if dist.get_world_size() > 1:
                dist.broadcast(buffer, src=0)


def watch_gradients(model: nn.Module, gradients: GradBuffer) -> None:
    """Has each gradient taken to its tier as soon as FSDP2 has reduced it."""
    for parameter in model.parameters():
        if cell_of(parameter) is None:
            continue
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook needs it; a frozen parameter may be trained later
        cast(Any, parameter).register_post_accumulate_grad_hook(gradients.take)
        parameter.requires_grad_(trained)


def average_plain_gradients(model: nn.Module) -> None:
    """At several ranks, averages the gradients of parameters that are not sharded (scalars), once per backward.

    At the end of the backward, in the model's order, with zeros where this rank's batch did not use one: the ranks
    make the same collectives whatever they computed. Averaging what was averaged before changes nothing, so
    gradients may be accumulated over several backwards.
    """
    plain = [p for p in model.parameters() if cell_of(p) is None and p.numel()]
    if dist.get_world_size() == 1 or not plain:
        return
    queued = False

    def average() -> None:
        nonlocal queued
        queued = False
        for parameter in plain:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()

    def at_backward(gradient: torch.Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            cast(Any, Variable)._execution_engine.queue_callback(average)

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal queued
        queued = False  # an exception may have ended the last backward before its callback
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                cast(Any, tensor).register_hook(at_backward)

    model.register_forward_hook(after_forward)


def reduce_unused(model: nn.Module) -> None:
    """At several ranks, a parameter that one rank's batch did not use counts as a gradient of zeros there.

    Otherwise the ranks would reduce different sets of gradients: wrong sums or a crash (mixture of experts). A
    parameter that no rank used then has a gradient of zeros too, and so it decays. Needs torch 2.13.
    """
    if dist.get_world_size() > 1 and TorchVersion(torch.__version__) >= "2.13":
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)


def watch_passes(model: nn.Module, queue: PrefetchQueue) -> None:
    """Tells the prefetch queue where a pass begins, and whether gradients will be wanted."""

    depth = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal depth
        if depth == 0:
            forget_aborted_pass(cast(FSDPModule, model))
        depth += 1
        queue.begin_pass(Mode.TRAIN if torch.is_grad_enabled() else Mode.NO_GRAD)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth = max(0, depth - 1)

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)


def forget_aborted_pass(model: FSDPModule) -> None:
    """[Note: aborted passes] An exception in forward or backward leaves FSDP2's units half way: whole, and with
    gradients that were not reduced, which the next backward would add to its own. Before the next pass begins they
    are dropped. What was reduced is in `parameter.grad`, as it is without tiered, until `zero_grad`.
    """
    if torch._C._current_graph_task_id() != -1:  # a checkpoint of the whole model recomputes: a backward is running
        return
    groups = [
        group
        for module in cast(nn.Module, model).modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups(module)
    ]
    states = {group._training_state for group in groups}
    if states <= {TrainingState.IDLE}:
        return
    if TorchVersion(torch.__version__) < "2.13":
        if states <= {TrainingState.IDLE, TrainingState.FORWARD}:
            return
        raise UsageError(
            "an exception ended the last backward half way, and FSDP2 of torch before 2.13 cannot "
            "recover from that: its gradients would be wrong. Start again from a checkpoint, or use torch 2.13"
        )
    model.reset_iter_state()
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of one unit: a list in torch 2.13, one or none before."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def accept_whole_state_dicts(model: nn.Module) -> None:
    """Lets `load_state_dict` take ordinary whole tensors: each rank keeps its slice of them.

    With `assign=True` values are copied all the same: the parameters stay in their tiers and in their optimizer.
    """

    def distribute(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        local_metadata["assign_to_params_buffers"] = False
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            if (
                isinstance(parameter, DTensor)
                and isinstance(value, torch.Tensor)
                and not isinstance(value, DTensor)
                and value.shape == parameter.shape
            ):
                state_dict[prefix + name] = distribute_tensor(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )

    for module in model.modules():
        if module._parameters:
            cast(Any, module).register_load_state_dict_pre_hook(distribute)
