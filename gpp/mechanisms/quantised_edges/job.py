"""The pace that the workers' senders keep, where their bits follow the links."""

from __future__ import annotations

from collections.abc import Mapping

from gpp.cost.problem import Problem
from gpp.mechanisms.quantised_edges.settings import PLAIN, QuantisedEdges, sample_s
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.plan.plan import Plan
from gpp.runtime.job import AbstractJobPart


class EdgeJobPart(AbstractJobPart):
    """Workers combine quantised messages with everything that serves."""

    def kept(self, plan: Plan, problem: Problem) -> Mapping[str, int | float]:
        if not any((value := stage[EdgeBits]) and value.auto for stage in plan.stages):
            return {}
        asked = problem.regime.edges
        edges = asked if isinstance(asked, QuantisedEdges) else PLAIN
        return {"sample_s": sample_s(edges, plan, problem), "window": edges.window}


JOB = EdgeJobPart()
