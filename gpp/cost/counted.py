"""Operators whose FLOPs nobody knows have no time by FLOPs: they are measured, or the plan is refused."""

from __future__ import annotations

from gpp.cluster import Cluster
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph


def check_counted(captured: Captured, graph: OpGraph, cluster: Cluster, cost: AbstractCostModel) -> None:
    """Refuse a cost model that would count an operator of unknown work as none.

    Args:
        graph: the operators as planners see them, for which `cost` has been measured where it measures.

    Raises:
        InvalidConfig: names the first such operator, the user's line, its share of the bytes and the ways out.
    """
    if not captured.uncounted:
        return
    measured = isinstance(cost, Profiled) and all(cost.profile_of(graph, device) for device in cluster.devices)
    if measured or not isinstance(cost, Analytical | Profiled):
        return
    first, rest = captured.uncounted[0], len({one.operator for one in captured.uncounted}) - 1
    rule = (
        f"counts FLOPs, and none are known of {first.operator} at {first.where}, which moves {first.share:.1%} of the model's bytes"
        + (f"; nor of {rest} more operators" if rest else "")
    )
    fix = "set cost=profiled, which measures it on a device at hand, or give torch its formula (flop_counter.register_flop_formula)"
    raise InvalidConfig("cost", cost.name, rule, fix)
