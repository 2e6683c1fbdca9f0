"""The rest of a model where nothing is trained: forwards, without gradients, targets or a loss.

A captured model is that of its training. `served` leaves out what belongs to the loss and the metrics; what these read are the
model's answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured, Node, closure, evaluate, node_references
from gpp.graph.forward_only import forward_only
from gpp.graph.op_graph import Op, OpGraph, dtype_bytes

ANSWER = "answer:"
"""Prefix of a result that is an answer of the model: [samples, ...]."""

_OF_LOSS = "loss"
"""Module of the nodes that make up the loss and the metrics (`gpp.graph.captured.Node`)."""


def served(captured: Captured) -> Captured:
    """The model alone, to be run in evaluation mode: without loss, metrics and targets; its results are its answers.

    Raises:
        InvalidConfig: nothing but the loss reads an input of the network, so it has no answers.
    """
    network = network_of(captured)
    answers = _answers(captured, network)
    if not answers:
        rule = "has a loss that reads no operator of the network, so there is nothing to answer with"
        raise InvalidConfig("model", captured.name, rule, "use a model whose network makes outputs")
    needed = _needed(captured, network)
    graph = _graph(captured.graph, network, {name: captured.node_of[name] for name in answers})
    return replace(
        captured,
        nodes=tuple(node for node in captured.nodes if node.name in needed),
        inputs=tuple(name for name in captured.inputs if not name.startswith("target:")),
        results={f"{ANSWER}{name}": name for name in answers},
        graph=graph,
        constants={name: data for name, data in captured.constants.items() if name in needed},
        loss_ops=(),
        coupled=None,
        summed=False,
        derived=(),
    )


def network_of(captured: Captured) -> set[str]:
    """Names of the nodes that belong neither to the loss nor to a metric."""
    return {node.name for node in captured.nodes if node.module != _OF_LOSS}


def _answers(captured: Captured, network: set[str]) -> tuple[str, ...]:
    """Nodes of the network that the loss or a metric reads, in the order in which they are made."""
    read = {name for node in captured.nodes if node.name not in network for name in node_references(node)}
    read.update(captured.results.values())
    made = (node for node in captured.nodes if node.kind in ("call", "block") and not node.free)
    return tuple(node.name for node in made if node.name in network and node.name in read)


def _needed(captured: Captured, network: set[str]) -> set[str]:
    """The network's operators and all that they read."""

    def before(name: str) -> tuple[str, ...]:
        node = captured.node_of[name]
        return (*node_references(node), *(earlier for earlier in node.after if earlier in network))

    return closure((name for op in captured.graph.ops for name in op.nodes if name in network), before)


def _graph(graph: OpGraph, network: set[str], answers: Mapping[str, Node]) -> OpGraph:
    """The operators of the network."""
    kept = [op for op in graph.ops if any(name in network for name in op.nodes)]
    position = {op.name: i for i, op in enumerate(kept)}
    at = {number: position[op.name] for number, op in enumerate(graph.ops) if op.name in position}
    tensors = [
        replace(tensor, producer=at[tensor.producer], consumers=tuple(at[c] for c in tensor.consumers if c in at))
        for tensor in graph.tensors
        if tensor.producer in at
    ]
    read = {name for op in kept for name in op.params}
    given = {name for op in kept for name in op.inputs}
    inputs = tuple(own for own in graph.inputs if own.name in given and not own.name.startswith("target:"))
    whole = replace(
        graph,
        ops=tuple(_answering(op, network, {own.name for own in inputs}, answers) for op in kept),
        tensors=tuple(tensor for tensor in tensors if tensor.consumers),
        params=tuple(param for param in graph.params if param.name in read),
        inputs=inputs,
    )
    return forward_only(whole)


def _answering(op: Op, network: set[str], inputs: set[str], answers: Mapping[str, Node]) -> Op:
    """The part of an operator that is the network's, without targets; it holds the answers that it makes."""
    made = [answers[name] for name in op.nodes if name in answers]
    own = sum(math.prod(evaluate(size, 1) for size in n.shape or ()) * dtype_bytes(n.dtype or "float64") for n in made)
    return replace(
        op,
        nodes=tuple(name for name in op.nodes if name in network),
        inputs=tuple(name for name in op.inputs if name in inputs),
        transient_bytes=op.transient_bytes + own,
        answer_bytes=own,
    )
