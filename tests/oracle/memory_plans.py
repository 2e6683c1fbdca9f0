"""The best plan over all cuts and all ways to treat the operators of every stage.

Cuts, replicas and chains are those of `tests.oracle.exhaustive`, searched as if memory were endless. Of each the stages are marked
in every way that fits; of the ways of one stage those go on that no other one beats in both the seconds and the bytes on the host,
and every combination is predicted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from gpp import Plan, Strategy
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible
from gpp.mechanisms.marks.stage import marked
from gpp.stage import Stage
from gpp.timeline import Timeline
from tests.oracle.exhaustive import Exhaustive


class MarkedPlans:
    """Every plan of one problem under a schedule.

    Args:
        ways: of `recompute` and `offload`.
    """

    def __init__(self, problem: Problem, strategy: Strategy, ways: tuple[str, ...]) -> None:
        self.problem, self.strategy = problem, strategy
        self.letters = "k" + "rb" * ("recompute" in ways) + "o" * ("offload" in ways)
        self._known: dict[Stage, list[Stage]] = {}

    def best_s(self) -> float | None:
        """Seconds of the best plan; None if none fits."""
        endless = self.problem.with_endless_memory
        found: list[float] = []

        def predict(plan: Plan) -> Timeline:
            timeline = self._marked(plan)
            found.append(timeline.metrics.iteration_s)
            return timeline

        try:
            Exhaustive(space="convex").plan(endless, predict)
        except Infeasible:
            return None
        return min(found, default=None)

    def _marked(self, plan: Plan) -> Timeline:
        """The prediction of a plan with the best marks.

        Raises:
            Infeasible: no marks fit.
        """
        told = [
            self.strategy.predict(replace(plan, stages=stages), self.problem, record=False)
            for stages in product(*(self._fitting(stage) for stage in plan.stages))
        ]
        if not told:
            raise Infeasible("no marks fit", "more memory")
        return min(told, key=lambda timeline: timeline.metrics.iteration_s)

    def _fitting(self, stage: Stage) -> list[Stage]:
        if stage not in self._known:
            devices = [self.problem.cluster.devices[d] for d in stage.devices]
            limit, host = (
                min(sizes) for sizes in zip(*((d.memory_bytes, d.host_memory_bytes or math.inf) for d in devices), strict=True)
            )
            linked = all(d.host_bandwidth_bytes_per_s for d in devices)
            found: dict[tuple[float, float], Stage] = {}
            for ways in product(self.letters if linked else self.letters.replace("o", ""), repeat=len(stage.ops)):
                again, moved, ends = (
                    tuple(op for op, way in zip(stage.ops, ways, strict=True) if way in letters) for letters in ("rb", "o", "b")
                )
                one = marked(stage, recompute=again, offload=moved, boundaries=ends)
                bill = StageCost.of(self.problem, one)
                if bill.memory.peak(stage.ahead) <= limit and bill.moved_bytes * stage.ahead <= host:
                    found.setdefault((bill.backward_s, bill.moved_bytes), one)
            self._known[stage] = [
                one
                for (seconds, moved), one in found.items()
                if not any(s <= seconds and m <= moved and (s, m) != (seconds, moved) for s, m in found)
            ]
        return self._known[stage]
