"""Random operator graphs in a model's place: something to plan, nothing to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.graph.random_graphs import equal_chain, equal_towers, random_dag, random_series_parallel
from gpp.models.base import AbstractModel, TensorSpec
from gpp.settings import Count, NotNegative, Seed, settings

if TYPE_CHECKING:
    from torch import nn


@final
@settings("model")
class RandomGraph(AbstractModel):
    """A graph of `gpp.graph.random_graphs`; the same settings give the same graph everywhere.

    Args:
        kind: `series_parallel`, `dag` (mostly not series-parallel), `towers` (equal branches joined by one operator) or `chain`
            (equal operators in a row).
        num_ops: number of operators.
        graph_seed: seed of the first two kinds.
        skew: spread of the operators' amounts, in powers of ten.
        num_branches: number of branches of `towers`.
    """

    name: str = "random"
    loss: str = "mse"
    kind: Literal["series_parallel", "dag", "towers", "chain"] = "series_parallel"
    num_ops: Count = 64
    graph_seed: Seed = 0
    skew: NotNegative = 1.0
    num_branches: Count = 4

    def captured(self) -> Captured:
        """The graph, with no computation behind it."""
        if self.kind == "towers":
            graph = equal_towers(self.num_ops, self.num_branches)
        elif self.kind == "chain":
            graph = equal_chain(self.num_ops)
        else:
            make = random_dag if self.kind == "dag" else random_series_parallel
            graph = make(self.num_ops, self.graph_seed, skew=self.skew)
        return Captured(name=graph.name, nodes=(), inputs=(), results={}, graph=graph)

    def build(self) -> nn.Module:
        raise InvalidConfig("model", self.name, "is a graph without a network: it can be planned, not trained", "set mode=plan")

    def inputs(self) -> dict[str, TensorSpec]:
        return {}

    def targets(self) -> dict[str, TensorSpec]:
        return {}

    def source(self) -> str:
        return ""
