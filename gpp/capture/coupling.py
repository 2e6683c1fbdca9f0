"""A check whether a loss is a mean over the samples of a batch, by computing the loss.

If it is one, its value on a batch is the mean of its values on the two halves, whatever the samples. A contrastive loss
is different: cutting its batch changes the samples that each sample is compared with. A sum over samples is different,
too: its values on the halves add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from gpp.capture.codec import bound_arguments, dtype_of, operator_of
from gpp.capture.stage import StageModule, build_stage
from gpp.graph.captured import Captured, evaluate, is_loss, loss_nodes

MOST_BYTES = 64 << 20
"""The most bytes of the loss's inputs: above it (logits over a large vocabulary) the check costs too much."""

_BATCH = 4
_MEAN = 1
"""ATen's number of a mean among the reductions of a loss."""
_TOLERANCE = 1e-6


class Cut(NamedTuple):
    """What becomes of a loss if its batch is cut.

    Args:
        coupled: whether it differs from the mean over the parts; None where that is unknown.
        summed: whether it, or a term of it, is the sum over the parts.
    """

    coupled: bool | None = None
    summed: bool = False


def cut_loss(captured: Captured) -> Cut:
    """The loss of random outputs, beside the losses of their halves.

    Nothing is known where the loss draws random numbers, does not run on made-up values, reads more than `MOST_BYTES`,
    or was captured at one batch size. Where the network computes the loss itself, only the operator that makes it is
    looked at, which shows a sum.
    """
    known = _whole_and_parts(captured, _BATCH, _BATCH // 2, {})
    if known is None or not all(math.isfinite(number) for pair in known.values() for number in pair):
        return Cut()
    means = [_near(value, total / 2) for value, total in known.values()]
    summed = any(not mean and _near(*pair) for mean, pair in zip(means, known.values(), strict=True))
    return Cut(not all(means) if captured.loss_ops else summed or None, summed)


def uneven(captured: Captured, rows: Mapping[str, torch.Tensor]) -> bool:
    """Whether a loss that is a mean over samples with made-up targets is none with a run's own: the targets of some count for more.

    So it is where labels are left out, or masked, and one sample has more of them than another.

    Args:
        rows: the run's own samples by name, inputs and targets (`target:NAME`) as `Samples.fetch` gives them.
    """
    size = min((len(tensor) for tensor in rows.values()), default=0)
    if captured.coupled or size < 2:
        return False
    known = _whole_and_parts(captured, size, 1, rows) if captured.loss_ops else None
    if known is not None:
        return any(math.isfinite(whole) and not _near(whole, total / size) for whole, total in known.values())
    label = ignored_label(captured)
    integers = [tensor for tensor in rows.values() if tensor.dim() > 1 and not tensor.is_floating_point()]
    left_out = [(tensor.flatten(1) == label).sum(1) for tensor in integers if label is not None]
    return any(bool((count != count[0]).any()) for count in left_out)


def _whole_and_parts(
    captured: Captured, size: int, part: int, rows: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]] | None:
    """The loss terms of a batch of random outputs by name, each with the sum over the batch's parts; None where they are unknown.

    Args:
        size, part: samples of the batch, and of a part.
        rows: inputs and targets that are not to be random.
    """
    ends = set(loss_nodes(captured.results))
    alone = [op for op in captured.graph.ops if op.name in captured.loss_ops]
    nodes = [node for op in alone or (op for op in captured.graph.ops if ends & set(op.nodes)) for node in op.nodes]
    if not nodes or captured.batch is not None:
        return None
    try:
        module = build_stage(captured, nodes, device="cpu", dtype_of_floats=torch.float64)
        values = None if module.has_random else _values(captured, module, size, rows)
        if values is None:
            return None
        with torch.no_grad():
            whole = _losses(module, values, 0, size)
            parts = [_losses(module, values, lo, lo + part) for lo in range(0, size, part)]
    except (RuntimeError, IndexError, ValueError):
        return None
    return {name: (value, sum(each[name] for each in parts)) for name, value in whole.items()}


def ignored_label(captured: Captured) -> int | None:
    """The label that a cross-entropy of the model leaves out of its mean; None where there is no such loss.

    Where samples have unequally many of them, the mean of a batch is not the mean of the means of its parts.
    """
    for node in captured.nodes:
        if node.kind == "call" and any(name in node.target for name in ("cross_entropy_loss", "nll_loss")):
            given = bound_arguments(operator_of(node.target), list(node.args), dict(node.kwargs))
            if given.get("reduction") == _MEAN and isinstance(given.get("ignore_index"), int):
                return given["ignore_index"]
    return None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * (1 + abs(a))


def _values(
    captured: Captured, module: StageModule, size: int, rows: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, int]] | None:
    """Tensors of `size` samples for the loss with their batch dimensions, or None if they are too large; fills its parameters.

    Args:
        rows: those that are not made up, by name.
    """
    random = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.0, generator=random)
    of_input = {node.target: node.name for node in captured.nodes if node.kind == "input"}
    shapes = {}
    for name in (*module.inputs, *module.receives):
        node = captured.node_of[of_input.get(name, name)]
        shapes[name] = [int(evaluate(extent, size)) for extent in node.shape or ()], dtype_of(node.dtype or "float32"), node
    if sum(8 * math.prod(shape) for shape, _, _ in shapes.values()) > MOST_BYTES:
        return None
    out = {}
    for name, (shape, dtype, node) in shapes.items():
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


def _losses(module: StageModule, values: dict[str, tuple[torch.Tensor, int]], lo: int, hi: int) -> dict[str, float]:
    rows = {name: tensor.narrow(dim, lo, hi - lo) for name, (tensor, dim) in values.items()}
    return {name: float(value) for name, value in module(hi - lo, rows).items() if is_loss(name)}
