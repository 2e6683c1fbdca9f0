"""The numbers of a step, and by how much those of two differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The results of a step: the terms of the loss; gradients, None where there are none; parameters and buffers afterwards."""

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def total_of(losses: Mapping[str, Tensor]) -> Tensor:
    """The sum of the terms of a loss."""
    total = sum(losses.values())
    assert isinstance(total, Tensor)
    return total


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, however it is nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from flat(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)


def telling(tensor: Tensor) -> Tensor:
    """Samples that show a difference: numbers between 0 and 1 in place of one and the same number."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or bool((tensor != tensor.flatten()[0]).any()):
        return tensor
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(tensor)


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative difference that is taken for rounding: half of the type's digits.

    Both sides call the same kernels on the same numbers, and mostly agree to the last bit; sums in another order leave some dozen
    roundings. What is dropped is a matter of per cent.
    """
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def off(own: Tensor, other: Tensor, floor: float) -> float:
    """The relative difference of two tensors in the norm; 0 where it is rounding."""
    if own.shape != other.shape:
        return float("inf")
    if own.layout == other.layout == torch.strided and torch.equal(own, other):
        return 0.0
    wide = torch.complex128 if own.is_complex() else torch.float64
    a, b = own.detach().to_dense().to(wide), other.detach().to_dense().to(wide)
    if bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return 0.0
    distance, scale = float((a - b).norm()), max(float(a.norm()), float(b.norm()))
    if distance <= max(floor, tolerance(own.dtype) * scale):  # false where it is not finite
        return 0.0
    return distance / scale if scale else float("inf")


def differing(own: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], *, joint: bool = True) -> dict[str, float]:
    """The differences of tensors, by name. None counts as a tensor of zeros.

    Args:
        joint: whether all come from one computation: one that is zero but for rounding may then be rounded otherwise, by what
            rounding leaves of the largest.
    """
    floats = [tensor for tensor in own.values() if tensor is not None and tensor.is_floating_point()]
    eps = max((torch.finfo(tensor.dtype).eps for tensor in floats), default=0.0)
    out = {}
    exact = {name: (a, b) for name, a in own.items() if not _same(a, b := other.get(name))}
    floor = (
        32 * eps * max((float(tensor.detach().to_dense().double().norm()) for tensor in floats), default=0.0)
        if exact and joint
        else 0.0
    )
    for name, (a, b) in exact.items():
        given = a if a is not None else b
        assert given is not None  # two that are None are equal
        zeros = torch.zeros_like(given.to_dense())
        if distance := off(a if a is not None else zeros, b if b is not None else zeros, floor):
            out[name] = distance
    return out


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if not a.layout == b.layout == torch.strided or a.shape != b.shape:
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def listed(found: Mapping[str, float], what: str) -> list[str]:
    """A phrase for each that differs, the most different first."""
    return [
        f"{what} {name} is off by {min(off, 9.99):.2g} of its norm"
        for name, off in sorted(found.items(), key=lambda item: -item[1])
    ]


def plain(value: Tensor) -> str:
    """A loss in words."""
    return f"{float(value):.6g}"
