"""A stage's forward and backward as two plain functions, for backwards that use other weights than their forwards.

The stage is traced once, forward and backward together, into one list of operators without autograd. Each value in it
follows from one of three sources, and that decides with which weights it is computed:

    activations   from samples or random numbers: computed once, in the forward, with the forward's weights
    weights       from parameters alone: computed in each of the two, with the weights of that pass
    gradients     from the gradients of the outputs: computed in the backward

So the backward is the derivative of the stage's function, at the activations that the forward left and at weights of
its own. No memory is overwritten, and a tensor that the model derives from a weight is computed again, which is what
makes this independent of `gpp.mechanisms.weight_versions.on_worker`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

_CONSTANT, _WEIGHT, _ACTIVATION, _GRADIENT = range(4)
"""Sources; what reads values of several follows the largest."""

Run = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Function of weights, buffers and inputs -> outputs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Explicit:
    """The two functions.

    Args:
        forward: weights, buffers (which it updates in place) and inputs -> outputs, and tensors for the backward.
        roots: outputs whose gradients the backward takes, by position.
        backward: weights, those tensors, and the gradients of `roots` -> the gradients of weights, then of inputs; None where there
            is none.
    """

    roots: tuple[int, ...]

    forward: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
    backward: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]


def explicit(
    run: Run, weights: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Sequence[Tensor], seeded: Callable[[int], bool]
) -> Explicit:
    """The functions of a stage, from one pass over examples of its tensors, which keep their values.

    Args:
        inputs: those with `requires_grad` get a gradient.
        seeded: whether the backward is given a gradient of an output, by position; of outputs that need one.
    """
    own = [tensor.detach().clone().requires_grad_() for tensor in weights]
    samples = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    scratch = [tensor.clone() for tensor in buffers]
    leaves = [*own, *(sample for sample in samples if sample.requires_grad)]
    with torch.random.fork_rng(devices=[]):
        made = run(own, scratch, samples)
        roots = tuple(i for i, output in enumerate(made) if output.requires_grad and seeded(i))
        seeds = [torch.zeros_like(made[i]) for i in roots]

        def both(own: Any, scratch: Any, samples: Any, seeds: Any) -> tuple[list[Tensor], list[Tensor | None]]:
            outputs = list(run(own, scratch, samples))
            leaves = [*own, *(sample for sample in samples if sample.requires_grad)]
            if not roots or not leaves:
                return outputs, [None] * len(leaves)
            return outputs, list(torch.autograd.grad([outputs[i] for i in roots], leaves, seeds, allow_unused=True))

        graph = make_fx(both)(own, scratch, samples, seeds)
    return _split(graph, [len(own), len(scratch), len(samples), len(seeds)], len(leaves), roots)


def _split(traced: fx.GraphModule, counts: list[int], num_leaves: int, roots: tuple[int, ...]) -> Explicit:
    places = [node for node in traced.graph.nodes if node.op == "placeholder"]
    groups = []
    for count in counts:
        groups.append(places[:count])
        places = places[count:]
    weights, buffers, inputs, seeds = groups
    source = _sources(traced.graph, dict.fromkeys(weights, _WEIGHT) | dict.fromkeys(seeds, _GRADIENT))
    (returned,) = (node for node in traced.graph.nodes if node.op == "output")
    results = list(returned.args[0])
    outputs, gradients = results[: len(results) - num_leaves], results[len(results) - num_leaves :]

    forward, backward = _Function(traced), _Function(traced)
    for name, group in (("weights", weights), ("buffers", buffers), ("inputs", inputs)):
        forward.argument(name, group)
    steps = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    again = {node for node in steps if source[node] in (_WEIGHT, _GRADIENT)}
    kept = [
        node
        for node in traced.graph.nodes
        if source[node] in (_CONSTANT, _ACTIVATION) and (node in gradients or any(user in again for user in node.users))
    ]
    for name, group in (("weights", weights), ("kept", kept), ("seeds", seeds)):
        backward.argument(name, group)
    for node in steps:
        if source[node] != _GRADIENT:
            forward.copy(node)
        if node in again:
            backward.copy(node)
    return Explicit(roots=roots, forward=forward.finish((outputs, kept)), backward=backward.finish(gradients))


def _sources(graph: fx.Graph, given: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Where the values of each node come from; nodes that share memory have one source, since some may write to it."""
    holder: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while node in holder:
            node = holder[node]
        return node

    for node in graph.nodes:
        for other in _aliased(node):
            if (a := root(node)) is not (b := root(other)):
                holder[a] = b
    found: dict[fx.Node, int] = {}
    changed = True
    while changed:
        changed = False
        for node in graph.nodes:
            of = root(node)
            own = given.get(node, _ACTIVATION if node.op == "placeholder" else _CONSTANT)
            if _random(node):
                own = _ACTIVATION
            value = max([own, found.get(of, _CONSTANT), *(found[root(before)] for before in node.all_input_nodes)])
            if found.get(of) != value:
                found[of], changed = value, True
    return {node: found[root(node)] for node in graph.nodes}


def _aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory a node returns or writes to."""
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, fx.Node)]
    return found


def _random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


class _Function:
    """Code made of some nodes of a traced graph."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced, self.graph = traced, fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}

    def argument(self, name: str, nodes: Sequence[fx.Node]) -> None:
        """Add an argument: the values of `nodes`, in order."""
        whole = self.graph.placeholder(name)
        for i, node in enumerate(nodes):
            self.values[node] = self.graph.call_function(operator.getitem, (whole, i))

    def copy(self, node: fx.Node) -> None:
        """Add a node of the traced graph."""
        self.values[node] = self.graph.node_copy(node, self.values.__getitem__)

    def finish(self, results: Any) -> Callable[..., Any]:
        """The function that returns the values of `results`, where None stands for itself."""
        self.graph.output(map_arg(results, self.values.__getitem__))
        return torch.no_grad()(fx.GraphModule(self.traced, self.graph))
