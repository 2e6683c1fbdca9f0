"""Changes of a model's meaning when its mini-batch is cut into micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured, Node, loss_nodes
from gpp.plan.plan import Plan


class CutWords(NamedTuple):
    """What a user writes against a change of the loss, where the plan was asked for.

    Args:
        scope: for a loss on whole mini-batches.
        size: for micro-batches of so many samples, which stand in place of `{}`.
        items: for the number that a loss is a mean over; empty where there is no such thing.
        compare: with what the loss can be compared.
        field: the setting that `scope` sets, and `plain` what takes that back.
    """

    scope: str
    size: str
    items: str
    compare: str
    field: str
    plain: str


ON_COMMAND_LINE = CutWords(
    scope="loss.scope=minibatch",
    size="microbatch_size={}",
    items="items= of gpp.parallelize or gpp.capture_model, a function that counts those labels, or ",
    compare="engine=single",
    field="loss.scope",
    plain="set loss.scope=microbatch",
)
ANOTHER_ENGINE = ON_COMMAND_LINE._replace(scope="engine=distributed loss.scope=minibatch", items="")
"""For an engine that runs the user's own module, which has no such stage."""
OF_A_LOOP = CutWords(
    scope="loss=gpp.Loss(function=..., scope='minibatch')",
    size="strategy=gpp.Planning(microbatch_size={})",
    items="loss=gpp.Loss(function=..., items=...), a function that counts those labels, or ",
    compare="a step of the plain model",
    field="loss.scope",
    plain="say scope='microbatch', or leave it out",
)
"""For `gpp.parallelize`."""
IN_STEPS = CutWords(
    scope="gpp.problem(..., loss_scope='minibatch')",
    size="gpp.problem(..., microbatch_size={})",
    items="gpp.capture_model(..., items=...), a function that counts those labels, or ",
    compare="a step of the plain model",
    field="loss_scope",
    plain="say loss_scope='microbatch', or leave it out",
)
"""For `gpp.capture_model`, `gpp.problem` and `gpp.train`."""


def check_whole_loss(captured: Captured, minibatch_size: int, words: CutWords = ON_COMMAND_LINE) -> None:
    """Refuse a loss on whole mini-batches for a model without a loss that can be set apart.

    Raises:
        InvalidConfig: the model names no operators of a loss, or runs at another batch size only.
    """
    if not captured.loss_ops or captured.batch not in (None, minibatch_size):
        rule = (
            f"needs the operators of a loss function, which {captured.name} does not name"
            if captured.batch is None
            else f"needs a model that runs at any batch size; {captured.name} runs at {captured.batch} only"
        )
        raise InvalidConfig(words.field, "minibatch", rule, words.plain)


def cut_warnings(
    captured: Captured, plan: Plan, *, whole_loss: bool, words: CutWords = ON_COMMAND_LINE, uneven: bool = False
) -> list[str]:
    """Results that differ from those on whole mini-batches, as warnings for the user.

    Args:
        whole_loss: the loss has a stage of its own for whole mini-batches.
        words: `ANOTHER_ENGINE` where the engine has no such stage.
        uneven: whether some samples of the run's own data count for more in the loss of a batch than others.
    """
    out = []
    buffers = sorted({name for node in captured.nodes for name in node.mutates})
    trained = [node.target for node in captured.nodes if node.requires_grad and node.kind == "param" and node.target in buffers]
    smallest = min(stage.unit // len(stage.replicas) for stage in plan.stages)
    if smallest == plan.minibatch_size:
        return out
    scope, cut = words.scope, words == ANOTHER_ENGINE or not whole_loss
    if uneven and cut:
        out.append(
            "the loss is a mean over labels of which some samples have more than others (labels that it leaves out, or masks): the "
            f"mean over micro-batches of {smallest} samples or more, and its gradient, is not that of the whole mini-batch. "
            f"Fix: {words.items}{scope}"
        )
    if captured.coupled is None and loss_nodes(captured.results) and cut:
        why = f"it was captured at {captured.batch} samples only" if captured.batch else "it does not run on made-up values"
        out.append(
            f"whether the loss is a mean over the samples of a batch is unknown ({why}): if it is none, a device that sees "
            f"{smallest} samples or more at once has another loss than the whole mini-batch. Fix: compare with {words.compare}"
            + (f", or {scope}" if captured.loss_ops and captured.batch is None else "")
        )
    if captured.coupled and cut:
        if captured.summed:
            out.append(
                "the loss is a sum over the samples of a batch, and must be a mean: a device sees only a part of it at once, "
                f"{smallest} samples or more, and the mean over batches is smaller than the sum over the whole mini-batch, as are "
                "its gradients. Fix: reduce by the mean" + (f", or {scope}" if captured.loss_ops else "")
            )
        else:
            out.append(
                "the loss compares the samples of a batch with each other, and a device sees only a part of the batch at once, "
                f"{smallest} samples or more: the loss is not that of the whole mini-batch. Fix: {scope}"
            )
    part = f"a device sees only a part of it at once, {smallest} samples or more. Fix: "
    part += words.size.format(plan.minibatch_size)
    if captured.mixes:
        out.append(
            "the loss of samples together is not the mean of their losses: the network computes a sample by the others of its "
            f"batch (a mean over them, or how many there are), and {part}, or constants in their place"
        )
    if scaled := [node for node in captured.nodes if _by_frequency(node)]:
        where = scaled[0].module or "an embedding"
        out.append(f"{where} scales gradients by how often a batch reads a row (scale_grad_by_freq), and {part}")
    if buffers:
        out.append(
            f"{len(buffers)} buffers ({buffers[0]}, ...) are updated by every micro-batch of {smallest} samples or more: "
            "batch statistics differ from those of the whole mini-batch"
        )
    if trained and any(len(stage.replicas) > 1 for stage in plan.stages):
        out.append(
            f"{trained[0]} is trained, and changed by each forward, too: where that follows from samples, as with max_norm, the "
            "replicas of its stage have different weights from then on. Fix: plan without replicas"
        )
    return out


def _by_frequency(node: Node) -> bool:
    """Whether a node is an embedding, or a bag of them, whose fourth argument is set: `scale_grad_by_freq`."""
    return node.target.startswith(("aten.embedding.", "aten._embedding_bag")) and len(node.args) > 3 and node.args[3] is True
