"""The best order of all passes, proven or with a proven distance from it, by constraint programming (`gpp.schedules.exact`).

The solver starts from the best order of `zero_bubble_auto`, or from that of 1F1B where backwards stay whole. Sums of gradients
and the queues of links are not in its model, so the simulated step may be longer than what it minimised, never shorter than
what it proved.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.errors import InvalidConfig
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.schedules.zero_bubble_auto import ZeroBubbleAuto, candidates
from gpp.program.program import Task
from gpp.schedules.base import RankedSchedule
from gpp.schedules.exact import MOST_TASKS, Aim, proven
from gpp.schedules.flow import Flow, Work
from gpp.settings import Count, Positive, settings


@final
@settings("strategy.schedule")
class OptimalOrder(RankedSchedule):
    """Split backwards in the best order.

    Args:
        objective: what is least: the period of a training that repeats the step, or the time until the step's end.
        cap: as `ZeroBubbleAuto` has it.
        limit: deterministic seconds of search; a core needs about as many real ones.
        max_tasks: steps with more passes are refused.
    """

    holds: ClassVar[Holding] = Holding(parts=HALVES)

    objective: Aim = "period"
    cap: Positive | None = 1.0
    limit: Positive = 5.0
    max_tasks: Count = MOST_TASKS

    @property
    def draft(self) -> ZeroBubbleAuto:
        """List scheduling: a search for each of a planner's candidates would take minutes."""
        return ZeroBubbleAuto(cap=self.cap)

    def flow(self, work: Work) -> Flow:
        return self.draft.flow(work)

    def ranked(self, work: Work) -> list[dict[int, list[Task]]]:
        """The best order alone.

        Raises:
            InvalidConfig: too many passes, or OR-Tools is not installed.
        """
        flow = self.flow(work)
        if len(flow.tasks) > self.max_tasks:
            rule = f"the step has {len(flow.tasks)} passes, and the search takes no more than that"
            fix = "use strategy/schedule=zero_bubble_auto, or fewer micro-batches"
            raise InvalidConfig("strategy.schedule.max_tasks", self.max_tasks, rule, fix)
        hint = candidates(flow, work, self.objective)[0]
        return [flow.orders(proven(flow, tuple(map(tuple, hint)), self.objective, self.limit).by_lane)]
