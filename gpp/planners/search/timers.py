"""The compiled timing of plans, where it says what the simulator would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gpp.graph.op_graph import bits, mask_of
from gpp.planners.search.numbers import MOST_DEVICES, PlanArrays, Posed, ProblemNumbers
from gpp.planners.search.shape import StageShapes
from gpp.planners.search.step import StepTimer


@final
class Timers:
    """Times plans of one problem.

    Args:
        most_stages: of a plan.
        plain: whether predictions are of the plans themselves (`gpp.planners.base.PlainPrediction`).
    """

    def __init__(self, posed: Posed, most_stages: int, *, plain: bool) -> None:
        problem = posed.problem
        self.posed, self.most_stages = posed, most_stages
        alone = problem.updates is None and not any(problem.graph.shared_by)
        self.exact = plain and problem.cluster.num_devices <= MOST_DEVICES and alone
        """Whether every plan of equal micro-batches takes what is said here."""
        self._of: dict[int, tuple[ProblemNumbers, PlanArrays, StepTimer]] = {}

    def of(self, microbatch_size: int) -> tuple[ProblemNumbers, PlanArrays, StepTimer]:
        """ProblemNumbers, arrays and timer of a micro-batch size."""
        found = self._of.get(microbatch_size)
        if found is None:
            facts = ProblemNumbers(self.posed, microbatch_size, self.most_stages)
            room = PlanArrays(facts)
            found = self._of[microbatch_size] = facts, room, StepTimer(facts, room, StageShapes(facts, room))
        return found

    def step_s(self, parts: Sequence[tuple[int, int]], placement: Sequence[tuple[int, ...]], b: int, chain: bool) -> float | None:
        """Seconds of a step; None where only the simulator can say.

        Args:
            parts: operators and number of devices of each stage, in stage order; placement: these devices.
            chain: whether each stage also waits for the one before it.
        """
        if not self.exact or len(parts) > self.most_stages:
            return None
        facts, room, timer = self.of(b)
        if sum(count for _, count in parts) > facts.most_units:
            return None
        for s, ((mask, _), devices) in enumerate(zip(parts, placement, strict=True)):
            room.devices[s] = mask_of(devices)
            for op in bits(mask):
                room.stage_of[op] = s
        found = timer.step_s(len(parts), float("inf"), chain)
        return found if found < float("inf") else None
