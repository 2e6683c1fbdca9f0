"""What settings and plans cannot be combined with in a job."""

from __future__ import annotations

from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan


def check_clipping(optimizer: AbstractOptimizer, plan: Plan, graph: OpGraph) -> None:
    """Refuse to clip a parameter by stage if several stages share it.

    Raises:
        InvalidConfig: names the parameter and the stages.
    """
    if optimizer.clip_norm is not None and optimizer.clip_scope == "stage" and (shared := plan.shared_weights(graph)):
        name, stages = shared[0]
        rule = f"{name} is shared by stages {' and '.join(map(str, stages))}, whose norms differ"
        raise InvalidConfig("optimizer.clip_scope", "stage", rule, "set optimizer.clip_scope=model")
