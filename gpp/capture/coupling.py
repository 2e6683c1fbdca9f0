"""A check whether a loss is a mean over the samples of a batch, by computing the loss.

If it is one, its value on a batch is the mean of its values on the two halves, whatever the samples; where it is a mean over items
(`gpp.capture.items`), both are told of the batch's. A contrastive loss is different: cutting its batch changes the samples that
each sample is compared with. A sum over samples is different, too: its values on the halves add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import torch

from gpp.capture.codec import bound_arguments, dtype_of, operator_of, sizes_of
from gpp.capture.counts import near
from gpp.capture.stage import StageModule, build_stage
from gpp.errors import GppError
from gpp.graph.captured import Captured, Node, is_loss, loss_nodes

MOST_BYTES = 1 << 20
"""The most bytes of the loss's inputs at their own sizes: larger ones (logits over a vocabulary) are made smaller."""

_LARGE, _FIRST, _STEP = 16, 5, 5
"""Sizes above the first number are made smaller: the smallest of them to the second, and each to at most the third above the one
before, so that neighbours (a text, and what follows its first token) stay neighbours."""

_BATCH, _TRIALS = 4, 4
_MEAN = 1
"""ATen's number of a mean among the reductions of a loss."""


class BatchCut(NamedTuple):
    """What becomes of a loss if its batch is cut.

    Args:
        coupled: whether it differs from the mean over the parts; None where that is unknown.
        summed: whether it, or a term of it, is the sum over the parts.
    """

    coupled: bool | None = None
    summed: bool = False


def cut_loss(captured: Captured) -> BatchCut:
    """The loss of random outputs, beside the losses of their halves.

    Nothing is known where the loss does not run on made-up values, or was captured at one batch size. Where the network computes
    the loss itself, only the operator that makes it is looked at, and it tells where all that it reads has one row a sample.
    """
    known = _whole_and_parts(captured, _BATCH, _BATCH // 2, {}, trials=_TRIALS)
    if known is None or not all(math.isfinite(number) for pair in known for number in pair):
        return BatchCut()
    means = [near(value, total / 2) for value, total in known]
    summed = any(not mean and near(*pair) for mean, pair in zip(means, known, strict=True))
    if captured.loss_ops or summed or not all(means):
        return BatchCut(not all(means) if captured.loss_ops else summed or None, summed)
    return BatchCut(False if _read_by_samples(captured) else None)


def uneven(captured: Captured, rows: Mapping[str, torch.Tensor], *, weighs: bool = True) -> bool:
    """Whether a loss that is a mean over samples with made-up targets is none with a run's own: the targets of some count for more.

    So it is where labels are left out, or masked, and one sample has more of them than another.

    Args:
        rows: the run's own samples by name, inputs and targets (`target:NAME`) as `Samples.fetch` gives them.
        weighs: whether the parts of a batch count by their shares of the items that are known (`Captured.items`).
    """
    size = min((len(tensor) for tensor in rows.values()), default=0)
    if captured.coupled or size < 2:
        return False
    known = _whole_and_parts(captured, size, 1, rows, weighs=weighs) if captured.loss_ops else None
    if known is not None:
        return any(math.isfinite(whole) and not near(whole, total / size) for whole, total in known)
    label = ignored_label(captured, weighs=weighs)
    integers = [tensor for tensor in rows.values() if tensor.dim() > 1 and not tensor.is_floating_point()]
    left_out = [(tensor.flatten(1) == label).sum(1) for tensor in integers if label is not None]
    return any(bool((count != count[0]).any()) for count in left_out)


def _loss_nodes(captured: Captured) -> list[str]:
    """The nodes of the loss function's operators; of those that make the loss, where the network computes it."""
    ends = set(loss_nodes(captured.results))
    alone = [op for op in captured.graph.ops if op.name in captured.loss_ops]
    return [node for op in alone or (op for op in captured.graph.ops if ends & set(op.nodes)) for node in op.nodes]


def _read_by_samples(captured: Captured) -> bool:
    """Whether every tensor that the loss's operators read has one dimension of samples."""
    own = set(_loss_nodes(captured))
    consumers = {i for i, op in enumerate(captured.graph.ops) if own & set(op.nodes)}
    return all(
        captured.node_of[tensor.name].batch_dim is not None
        for tensor in captured.graph.tensors
        if consumers & set(tensor.consumers)
    )


def _whole_and_parts(
    captured: Captured, size: int, part: int, rows: Mapping[str, torch.Tensor], *, weighs: bool = True, trials: int = 1
) -> list[tuple[float, float]] | None:
    """The loss terms of batches of random outputs, each with the sum over the batch's parts; None where they are unknown.

    Args:
        size, part: samples of the batch, and of a part.
        rows: inputs and targets that are not to be random.
        weighs: whether the parts are told of the batch's items.
        trials: batches, for what shows by chance alone (a mask that follows from outputs).
    """
    nodes = _loss_nodes(captured)
    if not nodes or captured.batch is not None:
        return None
    try:
        module = _module(captured, nodes)
        shapes = _shapes(module, size)
        if sum(8 * math.prod(shape) for shape, _ in shapes.values()) > MOST_BYTES:
            sizes = _small(shapes, module)
            captured = replace(captured, nodes=tuple(_smaller(node, sizes) for node in captured.nodes))
            rows = {name: _cut_to(tensor, captured.rows[name], size) for name, tensor in rows.items() if name in captured.rows}
            module = _module(captured, nodes)
            shapes = _shapes(module, size)
        out = []
        for trial in range(trials):
            values = _values(module, shapes, size, rows, trial)
            with torch.no_grad():
                whole = _losses(module, values, 0, size, weighs=weighs)
                parts = [_losses(module, values, lo, lo + part, weighs=weighs) for lo in range(0, size, part)]
            out += [(value, sum(each[name] for each in parts)) for name, value in whole.items()]
    except (GppError, RuntimeError, IndexError, ValueError, TypeError):
        return None
    return out


def ignored_label(captured: Captured, *, weighs: bool = True) -> int | None:
    """The label that a cross-entropy of the model leaves out of its mean; None where there is no such loss.

    Where samples have unequally many of them, the mean of a batch is not the mean of the means of its parts.

    Args:
        weighs: whether parts count by their shares of the items that are known, so that such a loss is none of these.
    """
    if weighs and any(item.kind == "share" for item in captured.items):
        return None
    for node in captured.nodes:
        if node.kind == "call" and any(name in node.target for name in ("cross_entropy_loss", "nll_loss")):
            given = bound_arguments(operator_of(node.target), list(node.args), dict(node.kwargs))
            by_labels = given.get("reduction") == _MEAN or (captured.items and not weighs)
            if by_labels and isinstance(given.get("ignore_index"), int):
                return given["ignore_index"]
    return None


def _module(captured: Captured, nodes: Iterable[str]) -> StageModule:
    """The loss alone, in float64; one that draws random numbers as in evaluation, without them."""
    module = build_stage(captured, nodes, device="cpu", dtype_of_floats=torch.float64)
    return module.eval_module() if module.has_random else module


def _shapes(module: StageModule, size: int) -> dict[str, tuple[list[int], Node]]:
    """The tensors that the loss reads, by name, for so many samples."""
    return {name: (sizes_of(node, size), node) for name, node in module.entering().items()}


def _small(shapes: Mapping[str, tuple[list[int], Node]], module: StageModule) -> dict[int, int]:
    """Large sizes of what the loss reads, their products and their neighbours, each with the one that stands in for it.

    Sizes that differ stay different, in the same order, so that the loss does with the small tensors what it does with its own.
    """
    held = [list(tensor.shape) for tensor in (*module.parameters(), *module.buffers())]
    fixed = [[e for e in node.shape or () if isinstance(e, int)] for _, node in shapes.values()]
    large = sorted({extent for shape in (*fixed, *held) for extent in shape if extent > _LARGE})
    small = dict(zip(large[:1], [_FIRST], strict=True))
    for before, extent in pairwise(large):
        small[extent] = small[before] + min(extent - before, _STEP)
    out: dict[int, int] = {}
    for count in (3, 2):
        for factors in combinations_with_replacement(large, count):
            out[math.prod(factors)] = math.prod(small[factor] for factor in factors)
    for extent, stand_in in small.items():
        out |= {extent + by: stand_in + by for by in (-2, 2, -1, 1)}
    return out | small


def _smaller(node: Node, sizes: Mapping[int, int]) -> Node:
    """A node with smaller sizes in its shape and in the numbers that it is called with."""

    def small(value: Any) -> Any:
        if isinstance(value, dict):
            return value if "ref" in value else {key: small(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(small(item) for item in value)
        return sizes.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    kwargs = {name: small(value) for name, value in node.kwargs.items()}
    return replace(node, args=small(node.args), kwargs=kwargs, shape=small(node.shape) if node.shape else node.shape)


def _cut_to(tensor: torch.Tensor, node: Node, size: int) -> torch.Tensor:
    """The first elements of a run's own rows, as many as a smaller node has. Integers stay below the smallest stand-in."""
    cut = tensor[tuple(map(slice, sizes_of(node, size)))]
    return cut if cut.is_floating_point() or cut.dtype == torch.bool else cut.clamp(max=_FIRST - 1)


def _values(
    module: StageModule, shapes: Mapping[str, tuple[list[int], Node]], size: int, rows: Mapping[str, torch.Tensor], seed: int
) -> dict[str, tuple[torch.Tensor, int]]:
    """Name -> a tensor of `size` samples for the loss, and the dimension of its samples. The loss's parameters are filled.

    Args:
        rows: [batch, ...] tensors that are not made up, by name.
    """
    random = torch.Generator("cpu").manual_seed(seed)
    held = [*module.parameters(), *module.buffers(), *(module.counts.module.buffers() if module.counts else ())]
    known: dict[tuple[int, ...], torch.Tensor] = {}
    with torch.no_grad():
        for tensor in held:
            if tensor.is_floating_point():
                # Weights of classes, in the loss and in what it is divided by, are the same.
                shape = tuple(tensor.shape)
                tensor.copy_(known.setdefault(shape, torch.empty_like(tensor).uniform_(0.5, 1.0, generator=random)))
    out = {}
    for name, (shape, node) in shapes.items():
        dtype = dtype_of(node.dtype or "float32")
        if name in rows:
            given = rows[name][:size]
            tensor = given.to(torch.float64) if given.is_floating_point() else given
        elif dtype.is_floating_point:
            # Between 0 and 1, so that a target may be a probability.
            tensor = torch.rand(shape, generator=random, dtype=torch.float64, device="cpu")
        else:
            tensor = torch.randint(2, shape, generator=random, device="cpu").to(dtype)
        out[name] = tensor, node.batch_dim or 0
    return out


def _losses(
    module: StageModule, values: dict[str, tuple[torch.Tensor, int]], lo: int, hi: int, *, weighs: bool
) -> dict[str, float]:
    rows = {name: tensor.narrow(dim, lo, hi - lo) for name, (tensor, dim) in values.items()}
    if module.counts and weighs:
        rows |= module.counts.columns({name: values[name][0] for name in module.counts.reads})(lo, hi)
    return {name: float(value) for name, value in module(hi - lo, rows).items() if is_loss(name)}
