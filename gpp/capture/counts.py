"""The numbers that a stage's losses are divided by, from the rows of a mini-batch; `gpp.capture.items` finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpp.capture.codec import dtype_of
from gpp.graph.captured import Items, Kind, closure, node_references

Rows: TypeAlias = Callable[[int, int], dict[str, Tensor]]
"""Function (lo, hi) -> the rows of those samples of a pass by name."""

_AT_ONCE = 64
"""Samples whose labels are read at a time."""


class Counts:
    """The numbers that a stage's losses are divided by, for the parts of a mini-batch.

    Args:
        module: makes them, each under the name of its `Items`, from rows.
        items: what is done with each.
        batch: the only size that it runs at; None for any.
        dtype: in which the numbers are given; None for each in its own.

    `reads` are the names of the rows that they follow from.
    """

    def __init__(self, module: Any, items: tuple[Items, ...], batch: int | None, dtype: torch.dtype | None = None) -> None:
        self.module, self.items, self.batch = module, items, batch
        self._dtypes = {item.name: dtype or dtype_of(item.dtype) for item in items}
        self.reads: tuple[str, ...] = module.inputs

    def lacks(self, values: Mapping[str, Tensor]) -> bool:
        """Whether a stage's given values lack the numbers of items."""
        return self.items[0].name not in values

    def empty(self, values: Mapping[str, Tensor]) -> frozenset[str]:
        """Losses that count for nothing, because the samples have none of their items: their gradients would be no numbers."""
        shares = [item for item in self.items if item.kind == "share"]
        return frozenset(item.of for item in shares if not bool(values[item.name][0]))

    def beside(self, rows: Rows, labels: Rows, size: int) -> Rows:
        """See `StageModule.counting`."""
        held: tuple[int, dict[str, Tensor], Rows] | None = None

        def counted(lo: int, hi: int) -> dict[str, Tensor]:
            nonlocal held
            number = lo // size
            if held is None or held[0] != number:
                # Forwards come in order, so one mini-batch is enough to hold.
                ends = range(number * size, (number + 1) * size, _AT_ONCE)
                parts = [labels(at, min(at + _AT_ONCE, ends.stop)) for at in ends]
                whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
                held = number, whole, self.columns(whole)
            at, (_, known, columns) = number * size, held
            own = {name: known[name][lo - at : hi - at] for name in known} if rows is labels else rows(lo, hi)
            return {**own, **columns(lo - at, hi - at)}

        return counted

    def columns(self, rows: Mapping[str, Tensor]) -> Rows:
        """Function (lo, hi) -> by name what those samples of a mini-batch are given, once for each sample: [hi - lo].

        Args:
            rows: of the whole mini-batch, at least those in `reads`.
        """
        own = {name: rows[name] for name in self.reads}
        size = len(next(iter(own.values())))
        whole = self._made(own, 0, size)

        def of(lo: int, hi: int) -> dict[str, Tensor]:
            part = self._made(own, lo, hi) if any(item.kind == "share" for item in self.items) else whole
            numbers = {item.name: _part(item.kind, whole[item.name], part[item.name], hi - lo, size) for item in self.items}
            return {name: number.to(self._dtypes[name]).expand(hi - lo) for name, number in numbers.items()}

        return of

    def _made(self, rows: Mapping[str, Tensor], lo: int, hi: int) -> dict[str, Tensor]:
        """The numbers of samples [lo, hi), as scalars in float64."""
        step = self.batch or hi - lo
        with torch.no_grad():
            parts = [
                self.module(step, {name: tensor[at : at + step] for name, tensor in rows.items()}) for at in range(lo, hi, step)
            ]
        out = {}
        for item in self.items:
            numbers = torch.stack([part["metric:" + item.name].double() for part in parts])
            # Where there are several parts, a number is put together from theirs.
            inverse = item.kind == "inverse"
            out[item.name] = numbers.reciprocal().sum().reciprocal() if inverse else numbers.sum()
            if item.kind == "mean":
                out[item.name] = numbers.mean()
        return out


def _part(kind: Kind, whole: Tensor, part: Tensor, samples: int, size: int) -> Tensor:
    """The number for a part with `samples` of the mini-batch's `size` samples, from the number of the whole."""
    match kind:
        case "sum":
            return whole * samples / size
        case "inverse":
            return whole * size / samples
        case "share":
            return part / whole * size / samples
        case "mean":
            return whole


def near(a: float, b: float) -> bool:
    """Whether two numbers of float64 computations are one but for rounding."""
    return abs(a - b) <= 1e-6 * (1 + abs(a))


def needed_by(nodes: Mapping[str, Any], roots: Iterable[str]) -> set[str]:
    """Names of the nodes that some nodes need, these included."""
    return closure(roots, lambda name: needs(nodes[name]))


def needs(node: Any) -> list[str]:
    """Names of the nodes that must have run before a node: those that it reads, and those that write in place before it."""
    return [*node_references(node), *node.after]
