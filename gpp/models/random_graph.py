"""Random operator graphs in a model's place: something to plan, nothing to train."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, final

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.graph.op_graph import Op
from gpp.graph.random_graphs import equal_chain, equal_towers, random_dag, random_series_parallel
from gpp.models.base import AbstractPlanned
from gpp.settings import Count, NotNegative, Seed, Share, settings


@final
@settings("model")
class RandomGraph(AbstractPlanned):
    """A graph of `gpp.graph.random_graphs`; the same settings give the same graph everywhere.

    Args:
        kind: `series_parallel`, `dag` (mostly not series-parallel), `towers` (equal branches joined by one operator) or `chain`
            (equal operators in a row).
        num_ops: number of operators.
        graph_seed: seed of the first two kinds.
        skew: spread of the operators' amounts, in powers of ten.
        num_branches: number of branches of `towers`.
        weight_share: share of a backward that can be left for later, where weights are trained.
        late_share: share of what is saved that is held until then.
    """

    name: str = "random"
    loss: str = "mse"
    kind: Literal["series_parallel", "dag", "towers", "chain"] = "series_parallel"
    num_ops: Count = 64
    graph_seed: Seed = 0
    skew: NotNegative = 1.0
    num_branches: Count = 4
    weight_share: Share = 0.0
    late_share: Share = 0.5

    def captured(self) -> Captured:
        if self.kind == "towers":
            graph = equal_towers(self.num_ops, self.num_branches)
        elif self.kind == "chain":
            graph = equal_chain(self.num_ops)
        else:
            make = random_dag if self.kind == "dag" else random_series_parallel
            graph = make(self.num_ops, self.graph_seed, skew=self.skew)
        if self.weight_share:
            graph = replace(graph, ops=tuple(self._split(op) if graph.trained_by[i] else op for i, op in enumerate(graph.ops)))
        return Captured(name=graph.name, nodes=(), inputs=(), results={}, graph=graph)

    def _split(self, op: Op) -> Op:
        return replace(op, weight_flops=self.weight_share * op.backward_flops, late_bytes=self.late_share * op.saved_bytes)

    def untrained(self) -> InvalidConfig:
        fix = "set mode=plan cost=analytical, or engine=emulate cost=analytical"
        return InvalidConfig("model", self.name, "is a graph without a network: it can be planned, not trained", fix)

    def refuse(self, *, computes: bool, measures: bool) -> None:
        """Refuse a run that needs a network.

        Args:
            computes: whether workers are to compute.
            measures: whether operators are to be timed.

        Raises:
            InvalidConfig: names the setting.
        """
        if computes:
            raise self.untrained()
        if measures:
            rule = f"times the operators of a network, and model={self.name} is a graph without one"
            raise InvalidConfig("cost", "profiled", rule, "set cost=analytical")

    def source(self) -> str:
        return ""
