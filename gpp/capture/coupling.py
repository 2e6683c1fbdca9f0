"""A check whether a loss is a mean over the samples of a batch, by computing the loss.

If it is one, its value on a batch is the mean of its values on the two halves, whatever the samples. A contrastive loss
is different: cutting its batch changes the samples that each sample is compared with. A sum over samples is different,
too: its values on the halves add up.
"""

from __future__ import annotations

import math
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
    ends = set(loss_nodes(captured.results))
    alone = [op for op in captured.graph.ops if op.name in captured.loss_ops]
    nodes = [node for op in alone or (op for op in captured.graph.ops if ends & set(op.nodes)) for node in op.nodes]
    if not nodes or captured.batch is not None:
        return Cut()
    try:
        module = build_stage(captured, nodes, device="cpu", dtype_of_floats=torch.float64)
        values = None if module.has_random else _values(captured, module)
        if values is None:
            return Cut()
        with torch.no_grad():
            whole = _losses(module, values, 0, _BATCH)
            halves = [_losses(module, values, lo, lo + _BATCH // 2) for lo in (0, _BATCH // 2)]
    except (RuntimeError, IndexError, ValueError):
        return Cut()
    known = {name: (value, sum(half[name] for half in halves)) for name, value in whole.items()}
    if not all(math.isfinite(number) for pair in known.values() for number in pair):
        return Cut()
    means = [_near(value, total / 2) for value, total in known.values()]
    summed = any(not mean and _near(*pair) for mean, pair in zip(means, known.values(), strict=True))
    return Cut(not all(means) if alone else summed or None, summed)


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


def _values(captured: Captured, module: StageModule) -> dict[str, tuple[torch.Tensor, int]] | None:
    """Made-up tensors for the loss with their batch dimensions, or None if they are too large; fills its parameters."""
    random = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.0, generator=random)
    of_input = {node.target: node.name for node in captured.nodes if node.kind == "input"}
    shapes = {}
    for name in (*module.inputs, *module.receives):
        node = captured.node_of[of_input.get(name, name)]
        shapes[name] = [int(evaluate(extent, _BATCH)) for extent in node.shape or ()], dtype_of(node.dtype or "float32"), node
    if sum(8 * math.prod(shape) for shape, _, _ in shapes.values()) > MOST_BYTES:
        return None
    out = {}
    for name, (shape, dtype, node) in shapes.items():
        if dtype.is_floating_point:
            # Between 0 and 1, so that a target may be a probability.
            tensor = torch.rand(shape, generator=random, dtype=torch.float64, device="cpu")
        else:
            tensor = torch.randint(2, shape, generator=random, device="cpu").to(dtype)
        out[name] = tensor, node.batch_dim or 0
    return out


def _losses(module: StageModule, values: dict[str, tuple[torch.Tensor, int]], lo: int, hi: int) -> dict[str, float]:
    rows = {name: tensor.narrow(dim, lo, hi - lo) for name, (tensor, dim) in values.items()}
    return {name: float(value) for name, value in module(hi - lo, rows).items() if is_loss(name)}
