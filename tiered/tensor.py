"""`TieredTensor`: a tensor whose bytes live elsewhere.

It has true shape, dtype and device and no storage. FSDP2 asks for its bytes through `copy_` (see
`tiered.zero.cells`); every other operator loads what it names, runs, and writes back what it changed through
the same `Cell`, so that no copy of a value can be stale. Knows no disk and no schedule: those are the cell's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed.fsdp  # defines torch.ops.fsdp
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tiered.errors import UsageError

aten = torch.ops.aten


class Cell(Protocol):
    """The one owner of a tensor's value: `numel` elements of `dtype` in some tier.

    Attributes:
        name: for error messages.
        dtype: what users see.
        numel: elements, padding included.
        device: where users believe the tensor to be; `read` returns host tensors all the same.
    """

    name: str
    dtype: torch.dtype
    numel: int
    device: torch.device

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A new 1-D host tensor with elements [start, stop)."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Sets elements from `start` on to the 1-D host tensor `values`, in every copy there is."""
        ...

    def copy_to(self, start: int, target: torch.Tensor) -> None:
        """Fills the contiguous `target`, on any device, with elements from `start` on."""
        ...

    def padded_shard(self, source: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """The padded shard that FSDP2 asks for by `source.new_zeros(shape)`; None when that is not what it is."""
        ...

    def gather_input(self) -> torch.Tensor:
        """What FSDP2 gathers: the padded shard in the compute dtype. Raises UsageError where there is no such thing."""
        ...

    def exchange(self, values: torch.Tensor) -> TieredTensor:
        """A tensor with a cell of its own, in place of this one's, for values of another shape or dtype."""
        ...

    def intercept(self, operator: Any, args: tuple[Any, ...]) -> Any:
        """A chance to run an operator without moving bytes; NotImplemented to decline."""
        ...


class TieredTensor(torch.Tensor):
    """A strided window into a `Cell`; made by tiered, not by users.

    Operators with a TieredTensor argument work as for any tensor, at the price of moving its bytes. Views share
    the cell. Results are ordinary tensors.
    """

    _cell: Cell

    @staticmethod
    def __new__(
        cls: type[TieredTensor],
        cell: Cell,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        offset: int = 0,
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> TieredTensor:
        if stride is None:
            stride = torch.empty(tuple(size), device="meta").stride()
        make = cast(Any, torch.Tensor)._make_wrapper_subclass
        tensor: TieredTensor = make(
            cls,
            tuple(size),
            strides=tuple(stride),
            storage_offset=offset,
            dtype=dtype or cell.dtype,
            device=cell.device,
            requires_grad=requires_grad,
        )
        tensor._cell = cell
        return tensor

    @property
    def cell(self) -> Cell:
        """The owner of the bytes."""
        return self._cell

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TieredTensor({self._cell.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # `module.to(dtype)` and users do this
        if value is self:
            return
        if (value.shape, value.dtype) == (self.shape, self.dtype):
            store(self, materialize(value) if isinstance(value, TieredTensor) else value)
            return
        other = self._cell.exchange(value)
        cast(Any, torch.Tensor).data.__set__(self, other)  # shape and dtype
        self._cell = other.cell

    def numpy(self, *, force: bool = False) -> Any:
        return materialize(self).numpy(force=force)

    def tolist(self) -> Any:
        return materialize(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cast(Any, materialize(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = materialize(self).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """FSDP2 is about to gather: the padded shard in the compute dtype; its bytes move when FSDP2 copies it."""
        return (self._cell.gather_input(),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The gathered buffer is the parameter's storage: nothing to copy, nothing to free."""
        return None if out is not None else (all_gather_outputs[0], ())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or (_view if _is_view(func) else None)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_loaded(func, args, kwargs)


def is_tiered(value: object) -> bool:
    """Whether `value` is a TieredTensor (a Parameter over one included)."""
    return isinstance(value, TieredTensor)


def _span(tensor: torch.Tensor) -> int:
    """Elements of the cell from the tensor's first to its last, inclusive."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def materialize(tensor: TieredTensor) -> torch.Tensor:
    """The values as an ordinary tensor of the same shape, dtype, stride order and device."""
    cell, span, size = tensor.cell, _span(tensor), tensor.dtype.itemsize
    first, last = tensor.storage_offset() * size, (tensor.storage_offset() + span) * size  # in bytes
    start, stop = first // cell.dtype.itemsize, -(-last // cell.dtype.itemsize)
    flat = torch.empty(stop - start, dtype=cell.dtype, device=cell.device)
    if span:
        cell.copy_to(start, flat)
    if tensor.dtype != cell.dtype:  # a view of the bytes as another dtype
        skip = first - start * cell.dtype.itemsize
        flat = flat.view(torch.uint8)[skip : skip + span * size].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def store(tensor: TieredTensor, values: torch.Tensor) -> None:
    """Makes `values` (same shape) the value of `tensor`, in every tier and copy."""
    span = _span(tensor)
    if span == 0:
        return
    if tensor.dtype != tensor.cell.dtype:
        raise UsageError(f"{tensor.cell.name} cannot be written through a view as {tensor.dtype}")
    start = int(tensor.storage_offset())
    if tensor.is_contiguous():
        flat = values.detach().contiguous().view(-1)
    else:
        flat = torch.empty(span, dtype=tensor.dtype, device=values.device)
        if span != tensor.numel():  # the gaps belong to others
            flat.copy_(tensor.cell.read(start, start + span))
        flat.as_strided(tensor.shape, tensor.stride()).copy_(values)
    tensor.cell.write(start, flat.cpu())


def _like(tensor: TieredTensor, meta: torch.Tensor) -> TieredTensor:
    return TieredTensor(tensor.cell, meta.shape, meta.stride(), int(meta.storage_offset()), dtype=meta.dtype)


def _meta(tensor: TieredTensor) -> torch.Tensor:
    offset = tensor.storage_offset()
    room = torch.empty(offset + _span(tensor), dtype=tensor.dtype, device="meta")
    return room.as_strided(tensor.shape, tensor.stride(), offset)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether the operator's result shares the bytes of an argument that it does not change."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any view operator: run it on a meta tensor of the same geometry and keep the cell."""
    source = args[0]
    if not is_tiered(source):
        return NotImplemented
    result = func(_meta(source), *args[1:], **kwargs)
    return tree_map_only(torch.Tensor, lambda meta: _like(source, meta), result)


def _overwrite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place operators that do not look at the old value: nothing is read."""
    target = args[0]
    if not is_tiered(target) or any(is_tiered(a) for a in tree_flatten((args[1:], kwargs))[0]):
        return NotImplemented
    fresh = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cpu":
        fresh = fresh.to(generator.device)
    func(fresh, *args[1:], **kwargs)
    store(target, fresh)
    return target


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`: the way out of the tiers (FSDP2's gather) and the way in (loading, editing)."""
    target, source = args[0], args[1]
    if is_tiered(target):
        if is_tiered(source) and source.cell is target.cell and _same_window(source, target):
            return target
        values = materialize(source) if is_tiered(source) else source
        store(target, torch.empty(target.shape, dtype=target.dtype, device="cpu").copy_(values))
        return target
    if (
        source.is_contiguous()
        and target.is_contiguous()
        and target.shape == source.shape
        and target.dtype == source.dtype == source.cell.dtype
    ):
        source.cell.copy_to(source.storage_offset(), target.view(-1))
    else:
        target.copy_(materialize(source))
    return target


def _same_window(a: TieredTensor, b: TieredTensor) -> bool:
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source)
    return None


def _all_gather_copy_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FSDP2's copy of a unit's shards into its send buffer: straight from the tiers, piece by piece."""
    shards, output, numels, numel, rank = args
    send = output.narrow(0, numel * rank, numel)
    for target, shard in zip(torch.split(send, numels), shards, strict=True):
        target.copy_(shard)
    return send, output


def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`new_zeros`: how FSDP2 makes the padded shard of a parameter; see [Note: padded shards]."""
    source = args[0]
    if is_tiered(source) and kwargs.get("dtype") in (None, source.dtype):
        shard = source.cell.padded_shard(source, torch.Size(args[1]))
        if shard is not None:
            return shard
    return _metadata(func, args, kwargs)


def _metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Factories that look only at shape, dtype and device of their argument."""
    source = args[0]
    if not is_tiered(source):
        return NotImplemented
    device = kwargs.get("device") or source.device
    shape_donor = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return func(shape_donor, *args[1:], **{**kwargs, "device": device})


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(materialize(args[0]), *args[1:], **kwargs)


def _ask_cell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that some cells answer without moving bytes (norm and scaling of a gradient)."""
    first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    return first.cell.intercept(func, args) if is_tiered(first) and not kwargs else NotImplemented


def _run_on_loaded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The general case: load every TieredTensor, run, write back what the schema says was changed."""
    loaded: dict[int, torch.Tensor] = {}
    owners: dict[int, TieredTensor] = {}

    def load(tensor: TieredTensor) -> torch.Tensor:
        key = id(tensor)
        if key not in loaded:
            loaded[key] = materialize(tensor)
            owners[id(loaded[key])] = tensor
        return loaded[key]

    flat, spec = tree_flatten((args, kwargs))
    plain_args, plain_kwargs = tree_unflatten([load(a) if is_tiered(a) else a for a in flat], spec)
    result = func(*plain_args, **plain_kwargs)
    schema = func._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for changed in value if isinstance(value, (list, tuple)) else (value,):
            if is_tiered(changed):
                store(changed, loaded[id(changed)])
    if not schema.returns and result is None:
        return None
    return tree_map_only(torch.Tensor, lambda t: owners.get(id(t), t), result)


_OVERWRITES = (
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
)
_METADATA = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_ones.default,
    aten.new_full.default,
)
_ASK_CELL = (
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.mul_.Tensor,
    aten._foreach_mul_.Tensor,
    aten.add_.Tensor,
)
_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_HANDLERS: dict[Any, _Handler] = {
    **dict.fromkeys(_OVERWRITES, _overwrite),
    **dict.fromkeys(_METADATA, _metadata),
    **dict.fromkeys(_ASK_CELL, _ask_cell),
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.new_zeros.default: _new_zeros,
    aten._to_copy.default: _to_copy,
    torch.ops.fsdp.all_gather_copy_in.default: _all_gather_copy_in,
}
