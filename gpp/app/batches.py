"""Mini-batches as a user's loop has them, by the names that workers know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpp.data.base import TARGET
from gpp.errors import InvalidConfig
from gpp.graph.captured import LOSS, loss_nodes
from gpp.runtime.job import Job

if TYPE_CHECKING:
    from torch import Tensor

    Inputs: TypeAlias = Any
    Targets: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None
    Count: TypeAlias = Callable[..., Any]

FIX_IGNORED = "say gpp.Loss(items=...), a function of (inputs, targets) that counts the labels of the loss"


def named_targets(targets: Targets) -> dict[str, Tensor]:
    """Targets by name: a single one is `target`, several by position are `0`, `1`, ...; none is none."""
    from torch import Tensor

    if targets is None:
        return {}
    if isinstance(targets, Tensor):
        return {"target": targets}
    named = targets if isinstance(targets, Mapping) else {str(i): target for i, target in enumerate(targets)}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            rule = f"{name!r} must be a tensor, batch first"
            raise InvalidConfig("targets", type(value).__name__, rule, "convert it, as in torch.as_tensor(...), or leave it out")
    return dict(named)


def check_dense(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not dense: they cannot be cut into micro-batches.

    Raises:
        InvalidConfig: names the first.
    """
    import torch

    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            what = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise InvalidConfig(name.removeprefix(TARGET), what, "must be a dense tensor, batch first", "say tensor.to_dense()")


def examples_size(examples: Mapping[str, Tensor]) -> int:
    """Samples of the examples.

    Raises:
        InvalidConfig: not all have as many.
    """
    check_dense(examples)
    sizes = {name: len(tensor) if tensor.dim() else 0 for name, tensor in examples.items()}
    if len(set(sizes.values())) != 1:
        raise InvalidConfig("example_inputs", sizes, "must all have as many samples", "give one mini-batch, batch first")
    return next(iter(sizes.values()))


def loss_of(loss: Callable[..., Any] | None, compares: bool, field: str = "loss") -> Callable[..., Any]:
    """The loss, or a metric, as capture asks for it, (outputs, targets) -> loss.

    Args:
        loss: None for that of the model's own outputs.
        compares: whether there are targets.

    Raises:
        InvalidConfig: it takes other arguments.
    """
    from gpp.models.losses import called_as

    if loss is not None:
        _check_takes(loss, ("outputs", "targets") if compares else ("outputs",), field)
        return loss if compares else called_as(loss, lambda outputs, targets: loss(outputs))

    def own(outputs: Any, targets: Any) -> Any:
        found = outputs.get(LOSS) if isinstance(outputs, Mapping) else getattr(outputs, LOSS, None)
        if found is None:
            fix = "say loss=..., or give the model the labels that it makes its loss of"
            raise InvalidConfig("loss", None, "the model's outputs have none", fix)
        return found

    return own


def _check_takes(function: Callable[..., Any], given: tuple[str, ...], field: str) -> None:
    """Refuse a function that cannot be called with `given`; a signature that nobody can read is left to the call."""
    called = getattr(function, "forward", function)  # a module's own signature takes anything
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name, words = getattr(function, "__name__", type(function).__name__), ", ".join(given)
        rule = f"takes {signature} and is called with ({words}), where outputs are all that the model returns: {error}"
        fix = f"say lambda {words}: {name}(*outputs)" if len(given) == 1 else f"write a function of ({words})"
        raise InvalidConfig(field, name, rule, fix) from error


def items_of(items: Count | Mapping[str, Count] | None, compares: bool) -> dict[str, Callable[..., Any]]:
    """`items=` as capture asks for it: by name of a loss term, or under an empty one for all, (inputs, targets) -> number.

    Args:
        compares: whether there are targets.
    """
    if items is None:
        return {}

    def called(count: Count) -> Callable[..., Any]:
        return count if compares else lambda inputs, targets: count(inputs)

    return {name: called(count) for name, count in (items.items() if isinstance(items, Mapping) else [("", items)])}


def same_constants(examples: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
    """Refuse a batch whose booleans, numbers, words and None are not those of the examples, which the capture has in it.

    Raises:
        InvalidConfig: names the first.
    """
    for name in [*examples, *(name for name in batch if name not in examples)]:
        if name not in examples or name not in batch or examples[name] != batch[name]:
            rule = f"must be {examples.get(name, 'left out')!r}, as in the examples: it is a constant of the captured model"
            fix = "give a tensor, batch first, for what differs from batch to batch"
            raise InvalidConfig(f"batch.{name}", batch.get(name, "left out"), rule, fix)


def rows_of(job: Job, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a mini-batch by the names that workers know; what no stage reads is left out.

    Raises:
        InvalidConfig: a tensor is missing.
    """
    known = list(job.captured.rows)
    given = {**inputs, **{TARGET + name: tensor for name, tensor in targets.items()}}
    for name in known:
        if name not in given:
            what = sorted([*inputs, *targets])
            raise InvalidConfig("batch", what, f"lacks {name.removeprefix(TARGET)!r}", "give what the examples have")
    return {name: given[name] for name in known}


def check_ignored(job: Job, rows: Mapping[str, Tensor], ignored: int | None) -> None:
    """Refuse labels with which the mean over labels is not the mean over what devices have at once: some ignore more of them.

    Args:
        ignored: the label that the model's loss leaves out; None where it leaves out none.

    Raises:
        InvalidConfig: names the tensor.
    """
    if ignored is None:
        return
    made = set(loss_nodes(job.captured.results))
    for stage in job.plan.stages:
        if made.isdisjoint(job.graph.nodes_of(stage.ops)):
            continue
        parts = [(piece.lo, piece.hi) for piece in stage.pieces(job.plan.minibatch_size)]
        for name, tensor in rows.items():
            if tensor.is_floating_point() or not (left_out := tensor == ignored).any():
                continue
            shares = {float(left_out[lo:hi].double().mean()) for lo, hi in parts if hi > lo}
            if max(shares) - min(shares) > 1e-12:
                counts, most = [int(left_out[lo:hi].sum()) for lo, hi in parts], max(hi - lo for lo, hi in parts)
                rule = (
                    f"micro-batches of {most} samples have {min(counts)} to {max(counts)} labels that the loss ignores, so that "
                    "the mean over labels is not the mean over micro-batches"
                )
                raise InvalidConfig(name.removeprefix(TARGET), ignored, rule, FIX_IGNORED)
