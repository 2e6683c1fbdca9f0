"""What is known of an operator of torch before its inputs are: what it writes to, and the form of what it returns.

A form is learned by running the operator once on zeros of the same forms. So strides are those that the real kernel makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

aten = torch.ops.aten

_HOST = {aten.set_.source_Tensor, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.record_stream.default}
_VIEWS = {aten._unsafe_view.default, aten.lift.default, aten.lift_fresh.default, aten._reshape_alias.default}
# Kernels whose schemas do not tell what they write to, and when: operator -> (written arguments, the one that decides).
_SILENT = {aten.native_batch_norm.default: ((3, 4), 5)}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What a schema says.

    Args:
        on_host: it computes nothing: a view, or a change of what a tensor is.
        waits: its result, or the form of it, hangs on the values of its inputs, so the host waits for it.
        indexed: as `waits` if an index is a mask.
        draws: it may draw random numbers.
        writes: positions of the arguments that it writes to.
        written: names of such arguments among the keywords.
    """

    name: str
    on_host: bool
    waits: bool
    indexed: bool
    draws: bool
    writes: tuple[int, ...]
    written: tuple[str, ...]
    silent: tuple[tuple[int, ...], int] | None
    device: bool


def operator(func: torch._ops.OpOverload) -> Operator:
    """What the schema of an operator says."""
    schema = func._schema
    writes = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns) and not writes
    indexed = func in _INDEXED
    dynamic = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    return Operator(
        name=str(func).removeprefix("aten.").removesuffix(".default"),
        on_host=view or torch.Tag.inplace_view in func.tags or func in _HOST or func in _VIEWS,
        waits=dynamic and not indexed,
        indexed=indexed,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        writes=tuple(i for i, a in writes if not a.kwarg_only),
        written=tuple(a.name for _, a in writes if a.kwarg_only),
        silent=_SILENT.get(func),
        device=any(a.name == "device" for a in schema.arguments),
    )


@final
@dataclass(frozen=True, slots=True)
class New:
    """A result in memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True, slots=True)
class Same:
    """A result that is one of the input tensors."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A result that is a view of one of the input tensors."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


Form = Any
"""What an operator returns, with New, Same and Part in place of tensors."""


def form_of(result: object, inputs: Sequence[torch.Tensor]) -> Form:
    """The form of what an operator has returned for these inputs."""
    if isinstance(result, torch.Tensor):
        for i, one in enumerate(inputs):
            if result is one:
                return Same(i)
        storage = result.untyped_storage()._cdata
        for i, one in enumerate(inputs):
            if storage == one.untyped_storage()._cdata:
                return Part(i, tuple(result.shape), result.stride(), int(result.storage_offset() - one.storage_offset()))
        return New(tuple(result.shape), result.stride(), result.dtype)
    if isinstance(result, list | tuple):
        return type(result)([form_of(one, inputs) for one in result])
    return result


def zeros(key: tuple[torch.dtype, Sequence[int], Sequence[int], int]) -> torch.Tensor:
    """A tensor of zeros of this type, shape and strides, at offset 0."""
    dtype, shape, stride, _ = key
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def substitute(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """A copy of an argument with other tensors in the places of its own, by their identity."""
    if isinstance(value, torch.Tensor):
        return tensors[id(value)]
    if isinstance(value, list | tuple):
        return type(value)([substitute(one, tensors) for one in value])
    return value
