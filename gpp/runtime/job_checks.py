"""What settings, weights and plans cannot be combined with in a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured, Derived, node_references
from gpp.graph.op_graph import OpGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.weights.base import AbstractWeights


def check_weights(weights: AbstractWeights, settings: Mapping[str, Any]) -> None:
    """Refuse settings that a weight policy cannot be combined with at run time.

    Raises:
        InvalidConfig: names the setting.
    """
    if settings.get("checkpoint_every") and not settings.get("checkpoint_drain") and not weights.repeats:
        rule = f"strategy.weights={weights.name} keeps no weights by which micro-batches in flight could be repeated"
        raise InvalidConfig("checkpoint.drain", False, rule, "set checkpoint.drain=true")
    if settings.get("autocast") and weights.backward != "same":
        rule = f"backwards would use the cast copies of the forward's weights, and strategy.weights={weights.name} wants others"
        raise InvalidConfig("engine.autocast", settings["autocast"], rule, "set engine.autocast=null, or strategy/weights=stash")
    if settings.get("compile") and not weights.flushes:
        rule = f"a compiled stage is bound to its parameters, and strategy.weights={weights.name} exchanges them"
        raise InvalidConfig("engine.compile", settings["compile"], rule, "set engine.compile=null, or strategy/weights=flush")


def check_derived(captured: Captured, plan: Plan, graph: OpGraph, weights: AbstractWeights, kind: str) -> None:
    """Refuse a tensor computed from parameters that a backward would find as the forward left it.

    Args:
        kind: of the devices.

    Raises:
        InvalidConfig: names the stage, the operator and the parameter.
    """
    for s, stage in enumerate(plan.stages):
        if weights.changes(plan.position(s)):
            own = _closure(captured, [node for op in stage.ops for node in graph.ops[op].nodes])
            for derived in (*captured.derived, *(_packed(captured) if kind == "cuda" else ())):
                if derived.node in own:
                    target, params = captured.node_of[derived.node].target, ", ".join(derived.params)
                    rule = (
                        f"its backwards use other weights than the forwards did, and {target} of stage {s} ({derived.where}) keeps "
                        f"a tensor that the forward has computed from {params}"
                    )
                    fix = "let the operator read the parameter itself, or set strategy/weights=stash, or engine=reference"
                    raise InvalidConfig("strategy.weights", weights.name, rule, fix)


def _closure(captured: Captured, nodes: Iterable[str]) -> set[str]:
    """A stage's nodes, with those that belong to no operator and that it computes for itself."""
    seen: set[str] = set()
    todo = list(nodes)
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            node = captured.node_of[name]
            todo += [name for name in (*node_references(node), *node.after) if captured.node_of[name].free]
    return seen


def _packed(captured: Captured) -> Iterator[Derived]:
    """Recurrent layers, whose weights cuDNN packs into memory of its own and keeps in this form."""
    for node in captured.nodes:
        if node.kind == "call" and any(part in node.target for part in ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")):
            own = [captured.node_of[name] for name in node_references(node)]
            yield Derived(
                node=node.name, params=tuple(n.target for n in own if n.kind == "param" and n.requires_grad), where=node.module
            )


def check_clipping(optimizer: AbstractOptimizer, plan: Plan, graph: OpGraph) -> None:
    """Refuse to clip a parameter by stage if several stages share it.

    Raises:
        InvalidConfig: names the parameter and the stages.
    """
    if optimizer.clip_norm is not None and optimizer.clip_scope == "stage" and (shared := plan.shared_weights(graph)):
        name, stages = shared[0]
        rule = f"{name} is shared by stages {' and '.join(map(str, stages))}, whose norms differ"
        raise InvalidConfig("optimizer.clip_scope", "stage", rule, "set optimizer.clip_scope=model")
