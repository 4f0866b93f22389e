"""`AdamW` and `Adam`: `torch.optim.Optimizer`s whose states live in tiers and whose arithmetic runs beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tiered.errors import UsageError
from tiered.optim import kernels
from tiered.optim.grad_buffer import GradientCell
from tiered.optim.kernels import AdamArgs
from tiered.optim.update import Part, kinds_of, run_update
from tiered.shard import ShardKind
from tiered.tensor import TieredTensor
from tiered.zero.cells import MasterCell, ParameterCell, StateCell, keeps_separate_master
from tiered.zero.runtime import Runtime
from tiered.zero.segment import Segment
from tiered.zero.units import cell_of, local_tensor, tensor_beside

STATES = {"exp_avg": ShardKind.EXP_AVG, "exp_avg_sq": ShardKind.EXP_AVG_SQ}


class Adam(torch.optim.Optimizer):
    """Adam with L2 weight decay, as `torch.optim.Adam` (Kingma and Ba, arXiv 1412.6980), over tiered parameters.

    Parameter groups, schedulers, closures, `state_dict` and `load_state_dict` work as torch's. States are fp32;
    a bf16 weight has an fp32 master, in `state[p]["master"]`. Space for the states is reserved here.

    Args:
        params: parameters or groups of a model from `tiered.shard`; ordinary ones among them are updated in place.
        lr, betas, eps, weight_decay, maximize: as in torch.

    Raises:
        UsageError: no parameter belongs to a model from `tiered.shard`, or `amsgrad` is asked for.
        CapacityError: the states do not fit where the config puts them.
    """

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError("amsgrad needs a third state, which tiered does not keep: use amsgrad=False")
        for name, value, good in (
            ("lr", float(lr), float(lr) >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not good:
                raise ValueError(f"{type(self).__name__}: {name} = {value} is out of range")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        if not any(cell_of(parameter) for parameter in self._parameters()):
            raise UsageError(
                f"{type(self).__name__}: no parameter belongs to a model from tiered.shard; call tiered.shard "
                "first and make the optimizer from its model.parameters()"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self.state[parameter] = self._new_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what `closure` returns.

        Raises StorageError when bytes could not be moved; the tensor is named.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: dict[Runtime, dict[Segment, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                cell = cell_of(parameter)
                self._check_states(parameter, cell)
                args = self._next_args(group, parameter)
                if cell is None:
                    self._update_plain(parameter, args)
                    continue
                segment, runtime = cell.place, _runtime(cell)
                gradient = self._gradient(parameter, cell)
                start = cell.offset
                scaled = replace(args, grad_scale=gradient.scale)
                part = Part(start, start + cell.live_numel, scaled, gradient)
                if cell.live_numel:
                    work[runtime][segment].append(part)
        for runtime, segments in work.items():
            runtime.gradients.flush()
            in_order = sorted(segments, key=lambda segment: (segment.unit, segment.index))
            run_update(
                runtime.tools.manager,
                [(segment, sorted(segments[segment], key=_start)) for segment in in_order],
                slot_count=runtime.slot_count,
                next_use=runtime.queue.next_use,
            )
            runtime.queue.hint()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients so that their common 2-norm is at most `max_norm`; returns the norm before.

        The same result as `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` without a pass over the
        gradients: norms are taken as gradients arrive, and the factor is applied inside the update.
        """
        total = torch.zeros((), dtype=torch.float64)
        plain = torch.zeros((), dtype=torch.float64)
        gradients: list[GradientCell] = []
        others: list[torch.Tensor] = []
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            cell = cell_of(parameter)
            if cell is None:
                others.append(parameter.grad)
                plain += local_tensor(parameter.grad).detach().double().pow(2).sum().cpu()
            else:
                gradients.append(self._gradient(parameter, cell))
                total += gradients[-1].norm() ** 2
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            on_device = total.to(gradients[0].device) if gradients else total
            torch.distributed.all_reduce(on_device)
            total = on_device.cpu()
        norm = (total + plain).sqrt().float()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the total norm of the gradients is {norm.item()}, so it cannot be clipped to")
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for gradient in gradients:
            gradient.multiply(factor)
        for grad in others:
            grad.mul_(factor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients set to None also give up their bytes on NVMe."""
        if set_to_none:
            for runtime, parameters in self._by_runtime().items():
                runtime.gradients.discard(parameters)
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states into their tiers, one at a time, without rounding them to the parameter's dtype.

        Accepts what `state_dict()` of this class or of torch's Adam gives: whole tensors, or this rank's DTensors.
        """
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("load_state_dict: the number of parameters in the groups differs from this optimizer's")
        if any(group.get("amsgrad") for group in groups):
            raise UsageError("load_state_dict: these states are amsgrad's, which tiered does not keep")
        for mine, loaded in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in loaded.items() if key != "params"})
            for parameter, number in zip(mine["params"], loaded["params"], strict=True):
                given = state_dict["state"].get(number, {})
                if parameter in self.state:
                    _reset(self.state[parameter], given)
                elif given:
                    self.state[parameter] = self._new_state(parameter)
                for name, value in given.items():
                    _load(self.state[parameter], name, value)

    # ---- bookkeeping ----

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _by_runtime(self) -> dict[Runtime, list[torch.Tensor]]:
        owners: dict[Runtime, list[torch.Tensor]] = defaultdict(list)
        for parameter in self._parameters():
            cell = cell_of(parameter)
            if cell is not None and cell.unit is not None:
                owners[cell.unit.runtime].append(parameter)
        return owners

    def _new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        step = torch.tensor(0.0, dtype=torch.float32)
        cell = cell_of(parameter)
        if cell is None:
            return {"step": step, **{name: torch.zeros_like(parameter) for name in STATES}}
        segment, runtime = cell.place, _runtime(cell)
        for kind in kinds_of(segment):
            if not segment.has(kind):
                runtime.place(segment, kind)
        cells: dict[str, StateCell | MasterCell] = {}
        cells.update({name: cell.new_state(kind) for name, kind in STATES.items()})
        if keeps_separate_master(cell):
            cells["master"] = MasterCell(cell)
        return {"step": step, **{name: tensor_beside(parameter, state) for name, state in cells.items()}}

    def _check_states(self, parameter: torch.Tensor, cell: ParameterCell | None) -> None:
        """A parameter that was frozen until now gets its states; one that another optimizer took over is refused."""
        if parameter not in self.state:
            self.state[parameter] = self._new_state(parameter)
        elif cell is not None:
            local = local_tensor(self.state[parameter]["exp_avg"])
            if isinstance(local, TieredTensor) and isinstance(local.cell, StateCell):
                local.cell.check_owner()

    def _next_args(self, group: dict[str, Any], parameter: torch.Tensor) -> AdamArgs:
        state = self.state[parameter]
        state["step"] += 1
        return AdamArgs(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
            decoupled=self._decoupled,
            maximize=group["maximize"],
        )

    def _gradient(self, parameter: torch.Tensor, cell: ParameterCell) -> GradientCell:
        gradients = _runtime(cell).gradients
        gradients.adopt(parameter)
        return gradients.cell_for(cell)

    def _update_plain(self, parameter: torch.Tensor, args: AdamArgs) -> None:
        """A parameter that tiered does not hold: same arithmetic, in memory."""
        state, grad = self.state[parameter], parameter.grad
        if grad is None:
            raise AssertionError("an update without a gradient")
        tensors = [local_tensor(t) for t in (parameter, grad, state["exp_avg"], state["exp_avg_sq"])]
        host = [t.detach().reshape(-1).to("cpu", torch.float32, copy=True) for t in tensors]
        kernels.adam_f32(host[0], host[1], host[2], host[3], args)
        for index in (0, 2, 3):
            tensors[index].detach().copy_(host[index].view(tensors[index].shape))


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101)."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


def _runtime(cell: ParameterCell) -> Runtime:
    if cell.unit is None:
        raise UsageError(f"{cell.name} is not part of a sharded model (was its engine closed?)")
    return cell.unit.runtime


def _start(part: Part) -> int:
    return part.start


def _reset(state: dict[str, Any], given: dict[str, Any]) -> None:
    """Zeroes what a checkpoint does not hold, as in a new optimizer. The master stays: it is the weight's value."""
    for name in ("step", *STATES):
        if name not in given:
            local_tensor(state[name]).zero_()


def _load(state: dict[str, Any], name: str, value: Any) -> None:
    mine = state.get(name)
    if name == "step":
        state["step"] = torch.tensor(float(value), dtype=torch.float32)
    elif not isinstance(mine, torch.Tensor):
        raise ValueError(f"load_state_dict: this optimizer keeps no state {name!r} (it keeps {', '.join(state)})")
    elif value.shape != mine.shape:
        raise ValueError(f"load_state_dict: a {name} of shape {tuple(value.shape)} is not one of {tuple(mine.shape)}")
    elif isinstance(mine, DTensor) and not isinstance(value, DTensor):
        whole = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
        mine.to_local().copy_(whole.to_local())
    else:
        local_tensor(mine).copy_(local_tensor(value))
