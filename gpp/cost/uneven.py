"""Samples that make unequal work of some operators: pictures of a text, tokens of a sequence.

The *amount* of a sample is the share of an operator's full work that it makes, in 0..1: the share of true elements in its row of a
mask that the model is given. torch's own operators do the same whatever values they get, so what varies are operators of a user's
own and hand-written blocks that read the mask. Times are known at the full amount; those of n samples of amount a are those of
n * a full samples.

Micro-batches are even when the samples of a mini-batch are dealt out so that sums of amounts are alike: number partitioning with
as many samples in each part (Karmarkar and Karp, "The differencing method of set partitioning", 1982, has what is known of it; the
longest-first rule is Graham's, 1969). DIP (arXiv 2504.14145) and Spindle (ASPLOS '25) balance multi-modal batches likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heapreplace
from math import floor
from typing import Annotated, final

import numpy as np
from pydantic import Field

from gpp.cost.models.base import OpTimes
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured, node_references
from gpp.graph.op_graph import OpGraph
from gpp.settings import settings

Quantile = Annotated[float, Field(gt=0, lt=1)]
"""A share of the steps: the chosen plan's are no longer than its time in that share of them."""


@final
@settings("uneven")
class UnevenSamples:
    """Where the work differs from sample to sample, and what follows.

    Args:
        amount: the model's input that says so, a mask [batch, ...] of booleans: the share of it that is true is the share of the
            full work that a sample makes of operators of one's own and blocks that read it. None: all samples are alike.
        evened: whether the samples of a mini-batch are dealt out to micro-batches of equal work, instead of in their order.
        quantile: of the steps' times, by which the plan is chosen; planners see the mean amount.
    """

    amount: str | None = None
    evened: bool = True
    quantile: Quantile = 0.9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Varying:
    """The amounts of a problem's samples.

    Args:
        shares: of each operator's work, the part that grows with the amount.
        amount: mean amount of the samples that times are asked for.
        batches: amounts of the samples of mini-batches, [steps][minibatch_size], as they are drawn.
        evened, quantile: as `UnevenSamples` has them.
        judged: whether a plan is judged elsewhere, so that planners see the mean alone.
    """

    shares: tuple[float, ...]
    amount: float
    batches: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)
    evened: bool = True
    quantile: float = 0.9
    judged: bool = False

    def at(self, amount: float) -> Varying:
        """The same for samples of another mean amount."""
        return replace(self, amount=amount)

    def times(self, of: Callable[[int], OpTimes], samples: int) -> OpTimes:
        """Times of operators for so many samples of this amount, from those of full samples: linear between whole numbers of them,
        and below one as between one and two."""
        full, share = of(samples), np.array(self.shares)
        low = max(floor(samples * self.amount), 1)
        part, one, two = samples * self.amount - low, of(low), of(low + 1)

        def mixed(name: str) -> np.ndarray:
            first, second = getattr(one, name), getattr(two, name)
            return (1.0 - share) * getattr(full, name) + share * np.maximum(first + part * (second - first), 0.0)

        return OpTimes(forward_s=mixed("forward_s"), backward_s=mixed("backward_s"), weight_s=mixed("weight_s"))

    def order(self, amounts: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """The amounts of a mini-batch in the order in which they are run; `bounds` as `evened` has them."""
        return amounts[evened(amounts, bounds)] if self.evened and len(amounts) == bounds[-1] else amounts


def varying_shares(captured: Captured, graph: OpGraph, amount: str) -> tuple[float, ...]:
    """Of each operator of `graph`, the share of its FLOPs in what varies with the amount.

    Raises:
        InvalidConfig: the model has no such input, or it is no mask, or nothing that varies reads it.
    """
    row = captured.rows.get(amount)
    if row is None or row.dtype != "bool":
        masks = [name for name, node in captured.rows.items() if node.dtype == "bool" and name in captured.inputs]
        rule = f"must be an input of booleans; those of the model are: {', '.join(masks) or 'none'}"
        raise InvalidConfig("uneven.amount", amount, rule, f"set uneven.amount={masks[0] if masks else 'null'}")
    reading = {row.name}
    for node in captured.nodes:  # in the order of execution
        if node.free and reading & set(node_references(node)):
            reading.add(node.name)
    theirs = [node for node in captured.nodes if node.kind == "block" or node.home]
    own = {node.name for node in theirs if reading & set(node_references(node))}
    if not own:
        rule = "is read by no block and no operator of one's own, and torch's operators do the same work whatever values they get"
        fix = "leave out what is not there inside such an operator (gpp/models/networks/pictured.py has an example), or set null"
        raise InvalidConfig("uneven.amount", amount, rule, fix)
    work = {name: (op, max(op.forward_flops + op.backward_flops, 1.0)) for op in captured.graph.ops for name in op.nodes}
    return tuple(
        _share({work[name][0].name: (work[name][1], bool(own & set(work[name][0].nodes))) for name in op.nodes if name in work})
        for op in graph.ops
    )


def _share(parts: Mapping[str, tuple[float, bool]]) -> float:
    """The share of the work of the parts that vary."""
    total = sum(work for work, _ in parts.values())
    return sum(work for work, varies in parts.values() if varies) / total if total else 0.0


def evened(amounts: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    """The order of a mini-batch's samples in which its parts have amounts as even as can be found: a permutation.

    Longest first, each to the part with least that has room; then samples of the parts with most and least change places while
    that brings the two closer. Ties go to the first, so every process finds the same.

    Args:
        amounts: [samples].
        bounds: where the parts begin and end, ascending, from 0 to the number of samples.

    >>> evened(np.array([8.0, 7.0, 1.0, 0.0]), (0, 2, 4)).tolist()
    [0, 3, 1, 2]
    """
    sizes = np.diff(bounds)
    parts, sums = [list[int]() for _ in sizes], np.zeros(len(sizes))
    least = [(0.0, part) for part in range(len(sizes))]  # a heap of the parts with room: mean amount over all places, and number
    for sample in np.argsort(-amounts, kind="stable").tolist():
        _, part = least[0]
        parts[part].append(sample)
        sums[part] += amounts[sample]
        if len(parts[part]) < sizes[part]:
            heapreplace(least, (float(sums[part] / sizes[part]), part))
        else:
            heappop(least)
    for _ in range(len(amounts)):
        full, lean = int(np.argmax(sums / sizes)), int(np.argmin(sums / sizes))
        gap = sums[full] / sizes[full] - sums[lean] / sizes[lean]
        moved = amounts[parts[full]][:, None] - amounts[parts[lean]][None, :]
        left = np.abs(gap - moved * (1 / sizes[full] + 1 / sizes[lean]))
        i, j = divmod(int(np.argmin(left)), len(parts[lean]))
        if left[i, j] >= gap * (1 - 1e-9):
            break
        sums[full], sums[lean] = sums[full] - moved[i, j], sums[lean] + moved[i, j]
        parts[full][i], parts[lean][j] = parts[lean][j], parts[full][i]
    return np.concatenate([np.sort(np.array(part, dtype=np.int64)) for part in parts])
