"""The operands of a micro-batch that a helper receives, and the weight gradients that it makes of them for another's stage.

The stage's own device hands on what `split_backward/late.py` has queued: for each operator of `FORMULAS` the gradient of its
output and the data that it has read. Both ends know from the captured nodes, before anything is sent, which tensors these are,
and of which sizes; a helper needs no weights, only their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpp.capture.codec import bound_arguments, decode, dtype_of, operator_of
from gpp.capture.cut import Cut
from gpp.errors import UnsupportedPlan
from gpp.graph.captured import Node, evaluate, node_references, references
from gpp.mechanisms.helpers.stage import columns, helpers_of
from gpp.mechanisms.split_backward.late import Gradients, convolution_gradients, embedding_gradients, linear_gradients, several
from gpp.mechanisms.split_backward.operators import halves
from gpp.mechanisms.split_backward.worker import slow_nodes
from gpp.plan.plan import Plan
from gpp.runtime.job import Job
from gpp.runtime.task import EngineTask

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The operands of one operator for one number of samples.

    Args:
        node: its name in the captured model.
        params: full names of the trained weights that it reads.
        forms: of the tensors that the gradients are made of; the first is the gradient of the output.
        make: (those tensors, empty tensors of the sizes of `params`) -> the gradients of `params`.
    """

    node: str
    params: tuple[str, ...]
    forms: tuple[Form, ...]
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], Gradients]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The operator of a stage that makes all gradients of its inputs, as one product with its weight: linear.

    Args:
        node, data, weight: names of it, of the tensor from another stage that it reads, and of the weight.
        columns: of the weight, [M, columns].
    """

    node: str
    data: str
    weight: str
    columns: int

    def forms(self, node_of: Mapping[str, Node], samples: int) -> tuple[Form, Form]:
        """Of the gradient of the output by rows, [N, M], and of the gradients of the inputs."""
        (*batch, wide), dtype = _form(node_of[self.node], samples)
        return ((math.prod(batch), wide), dtype), _form(node_of[self.data], samples)


def head_of_stage(plan: Plan, s: int, task: EngineTask) -> Head:
    """The operator of a stage whose product several devices make, by columns.

    Raises:
        UnsupportedPlan: there is none.
    """
    stage, graph = plan.stages[s], task.graph
    assert task.captured, "a job has a captured model"

    def refuse(why: str) -> NoReturn:
        raise UnsupportedPlan(
            f"stage {s}: input_share={[list(pair) for pair in helpers_of(stage).input_share]} divides gradients of "
            f"inputs that are not one product of a linear layer: {why}. Fix: plan with strategy.planner.divide=false, or leave "
            "it out of the plan; mode=plan predicts a given plan as it is"
        )

    whole = frozenset(graph.nodes_of({*stage.ops} & {*task.whole_ops}))
    cut, node_of = Cut(task.captured, graph.nodes_of(stage.ops), torch.device("meta"), {}), task.captured.node_of
    received = [name for name in cut.receives if node_of[name].requires_grad]
    if len(received) != 1:
        refuse(f"it has {len(received)} inputs with gradients")
    (data,) = received
    readers = [name for name in cut.calls if data in node_references(node_of[name])]
    if len(readers) != 1 or node_of[readers[0]].target != "aten.linear.default":
        refuse(f"{data} is read by {', '.join(node_of[name].target for name in readers)}")
    (name,) = readers
    given = bound_arguments(operator_of(node_of[name].target), node_of[name].args, node_of[name].kwargs)
    (weight,), read = references(given["weight"]), list(references(given["input"]))
    if read != [data] or name not in halves(node_of, cut.calls, cut.outputs, whole=whole, elsewhere=True).split:
        refuse(f"the gradients of {name} are not made in two halves")
    if node_of[data].batch_dim != 0 or len(node_of[data].shape or ()) < 2:
        refuse(f"the samples of {data} are not its first dimension")
    return Head(node=name, data=data, weight=weight, columns=int((node_of[weight].shape or (0, 0))[1]))


def operands_of_stage(job: Job, s: int) -> tuple[Operands, ...]:
    """The operands that a stage's own device sends its helper of a micro-batch, as both of them know them."""
    cut, node_of = Cut(job.captured, job.graph.nodes_of(job.plan.stages[s].ops), torch.device("meta"), {}), job.captured.node_of
    names = halves(node_of, cut.calls, cut.outputs, whole=slow_nodes(job, s), elsewhere=True).split
    return tuple(_operands(node_of[name], node_of, job.plan.stages[s].microbatch_size) for name in names)


def check_divided(plan: Plan, task: EngineTask) -> None:
    """Refuse to divide input gradients that are no product with columns of one weight.

    Raises:
        UnsupportedPlan: names stage, field, value, rule and fix.
    """
    for s, stage in enumerate(plan.stages):
        if not (shares := helpers_of(stage).input_share):
            continue
        head, own = head_of_stage(plan, s, task), helpers_of(stage).own_input_share
        if any(hi == lo for device, lo, hi in columns(stage, head.columns) if device not in stage.devices or own):
            raise UnsupportedPlan(
                f"stage {s}: input_share={[list(pair) for pair in shares]} gives a device less than one of the {head.columns} "
                f"columns of {head.weight}. Fix: give it more, or leave it out"
            )


def _form(of: Node, samples: int) -> Form:
    return tuple(int(evaluate(size, samples)) for size in of.shape or ()), dtype_of(of.dtype or "float32")


def _operands(node: Node, node_of: Mapping[str, Node], samples: int) -> Operands:
    target = operator_of(node.target)
    given = bound_arguments(target, node.args, node.kwargs)

    def trained(key: str) -> list[str]:
        return [name for name in references(given.get(key)) if node_of[name].requires_grad]

    def argument(key: str) -> Any:
        value = given.get(key)
        return decode(value, ref=lambda name: name, number=lambda tree: evaluate(tree, samples), device=torch.device("cpu"))

    needs = bool(trained("weight")), bool(trained("bias"))
    params = tuple(node_of[name].target for key in ("weight", "bias") for name in trained(key))
    (out, dtype), (data,) = _form(node, samples), references(given["indices" if "indices" in given else "input"])
    kind = node.target.split(".")[1]
    if kind == "linear":
        (*batch, wide), of_rows = out, _form(node_of[data], samples)
        rows = math.prod(batch)
        forms = [((rows, wide), dtype), ((rows, of_rows[0][-1]), of_rows[1])][: 2 if needs[0] else 1]
        make = partial(_linear, needs_bias=needs[1])
    elif kind == "embedding":
        (weight,) = references(given["weight"])
        options = [argument(key) for key in ("padding_idx", "scale_grad_by_freq", "sparse")]
        forms = [(out, dtype), _form(node_of[data], samples)]
        make = partial(_embedding, rows=int((node_of[weight].shape or (0,))[0]), options=options)
    else:
        each = [several(argument(key), len(out) - 2) for key in ("stride", "padding", "dilation")]
        forms = [(out, dtype), _form(node_of[data], samples)]
        make = partial(_convolution, needs=needs, several=each, groups=argument("groups"))
    return Operands(node=node.name, params=params, forms=tuple(forms), make=make)


def _linear(tensors: Sequence[Tensor], params: Sequence[Tensor], *, needs_bias: bool) -> Gradients:
    # Weights of captured models lie by rows, so autograd takes their transposes for ones that lie by columns.
    return linear_gradients(tensors[0], tensors[1] if len(tensors) > 1 else None, needs_bias, by_columns=True)


def _embedding(tensors: Sequence[Tensor], params: Sequence[Tensor], *, rows: int, options: list[Any]) -> Gradients:
    return embedding_gradients(tensors[0], (True, False), tensors[1], rows, *options)[:1]


def _convolution(
    tensors: Sequence[Tensor], params: Sequence[Tensor], *, needs: tuple[bool, bool], several: list[list[int]], groups: int
) -> Gradients:
    gradient, data = tensors
    made = convolution_gradients(gradient, needs, data, params[0], several, [0] * len(several[0]), groups)
    return [found for found in made if found is not None]
