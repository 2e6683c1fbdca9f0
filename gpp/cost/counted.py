"""Operators whose time does not follow from their FLOPs: unknown ones are measured or refused, attention with a mask is named."""

from __future__ import annotations

from gpp.cluster import Cluster
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph

ATTENTION = "aten.scaled_dot_product_attention.default"


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


def masked_warnings(captured: Captured, cluster: Cluster, cost: AbstractCostModel) -> tuple[str, ...]:
    """What to know of attention on cards whose mask follows from the inputs, as that of padded texts does.

    Flash attention takes no mask, so a card runs another kernel, which reads the mask and skips nothing. A cost model that counts
    FLOPs has one time for both. Capture has already replaced masks that are causal by their sizes (`gpp.capture.causal`).
    """
    if not isinstance(cost, Analytical) or all(device.kind == "cpu" for device in cluster.devices):
        return ()
    masks = [
        (node, mask)
        for node in captured.nodes
        if node.target == ATTENTION
        for mask in (*node.args[3:4], node.kwargs.get("attn_mask"))
    ]
    found = [node for node, mask in masks if isinstance(mask, dict) and "ref" in mask]
    if not found:
        return ()
    rest = f" and in {len(found) - 1} more places" if len(found) > 1 else ""
    return (
        f"attention in {found[0].module or found[0].name}{rest} has a mask that is not known to be causal, and a card runs no "
        f"flash attention with a mask: cost={cost.name} has the time of flash attention for it. is_causal=True where that is "
        "meant, or cost=profiled",
    )
