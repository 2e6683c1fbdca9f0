"""Split backwards in whatever order a search by modelled times likes best, under a cap in bytes.

Candidates are list schedules (`gpp.schedules.greedy`) by many rules, and the fixed orders of `split_1f1b`, `zero_bubble_h1` and
`zero_bubble_h2`, which are better than greedy choices where memory is tight. The few that look best are simulated, and the best of
these runs.

Source: the automatic schedules ZB-1p and ZB-2p of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Departures: any
graph of stages, and bytes in place of numbers of micro-batches; their search has a grid over other rules, and an integer
program behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.errors import Infeasible
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.schedules.split_1f1b import Split1F1B
from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1
from gpp.mechanisms.split_backward.schedules.zero_bubble_h2 import ZeroBubbleH2
from gpp.plan.plan import Plan
from gpp.program.program import Task
from gpp.schedules.base import SIMULATED, RankedSchedule
from gpp.schedules.exact import Aim, bound_s, value_of
from gpp.schedules.flow import HAIR, Flow, Work, flow_of
from gpp.schedules.greedy import Rule, greedy
from gpp.settings import Positive, settings
from gpp.stage import Stage

AHEAD = (2.0, 1.0, None, 1.5, 3.0)
"""Forwards ahead of a list schedule for each stage between its own and the sink; None: as many as fit."""

PATIENCE = (0.0, 0.3, 0.6, 1.0)
"""Shares of a pass of weight gradients for which a list schedule waits."""

FIXED = (Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2())
"""Schedules whose orders are candidates, each in a plan whose stages hold what it asks for."""


@final
@settings("strategy.schedule")
class ZeroBubbleAuto(RankedSchedule):
    """Split backwards, list scheduled under a cap.

    Args:
        cap: bytes that micro-batches may hold on a device, in units of what they hold under 1F1B on the device where they hold
            most: 1 is ZB-1p, 2 is ZB-2p. A device's memory is a limit beside it. None: its memory alone.
    """

    holds: ClassVar[Holding] = Holding(parts=HALVES)

    cap: Positive | None = 1.0

    def flow(self, work: Work) -> Flow:
        """As `AbstractSchedule.flow`; its room is no more than the cap.

        Raises:
            Infeasible: the cap is below one micro-batch.
        """
        flow = flow_of(work, self.holds.parts)
        return flow if self.cap is None else _capped(flow, work.plan, self.cap)

    def ranked(self, work: Work) -> list[dict[int, list[Task]]]:
        flow = self.flow(work)
        return [flow.orders(by_lane) for by_lane in candidates(flow, work, "period")[:SIMULATED]]


def _capped(flow: Flow, plan: Plan, cap: float) -> Flow:
    """The flow with no more room than the cap has; raises Infeasible if that is below one micro-batch."""
    one, unit = flow.ahead_bytes([1] * len(plan.stages)), max(flow.ahead_bytes([stage.ahead for stage in plan.stages]))
    if unit * cap < max(one) * (1 - HAIR):
        least = max(one) / unit
        rule = f"is {unit * cap:.3e} bytes on a device, less than the {max(one):.3e} of one micro-batch"
        raise Infeasible(f"strategy.schedule.cap={cap} {rule}", f"strategy.schedule.cap={least:.3g} or more")
    return flow.with_room([min(room, unit * cap) for room in flow.room])


def candidates(flow: Flow, work: Work, aim: Aim) -> list[list[list[int]]]:
    """Orders within the flow's room, the best first.

    Raises:
        Infeasible: none of them fits.
    """
    best: dict[tuple[tuple[int, ...], ...], float] = {}
    least = bound_s(flow, aim) * (1 + HAIR)
    for by_lane in _orders(flow, work):
        key = tuple(map(tuple, by_lane))
        if key not in best:
            best[key] = value_of(flow, by_lane, aim)
            if best[key] <= least:
                break
    if not best:
        raise Infeasible("no order of split backwards fits the devices' memory", "a larger strategy.schedule.cap, or 1f1b")
    return [[list(own) for own in key] for key in sorted(best, key=lambda key: best[key])]


def _orders(flow: Flow, work: Work) -> Iterator[list[list[int]]]:
    if not work.plan.shares_devices:
        for schedule in FIXED:
            by_lane = flow.by_lane(schedule.orders(replace(work, plan=_holding(work.plan, schedule.holds))))
            if all(peak <= room * (1 + HAIR) for peak, room in zip(flow.peaks(by_lane), flow.room, strict=True)):
                yield by_lane
    for rule in rules(flow.distance):
        by_lane = greedy(flow, rule)
        if by_lane is not None:
            yield by_lane


def _holding(plan: Plan, holds: Holding) -> Plan:
    """The plan with as many micro-batches in full at each stage as another schedule asks for, of which 1F1B asks for
    `in_flight`."""

    def samples(stage: Stage) -> int:
        each = stage.unit
        return each * holds.full(stage.ahead, max(-(-plan.minibatch_size // each), stage.ahead))

    return replace(plan, stages=tuple(replace(stage, in_flight=samples(stage)) for stage in plan.stages))


def rules(distance: Sequence[int]) -> Iterator[Rule]:
    """The rules of the list schedules, for stages of such distances to the sink: those that are mostly best first."""
    depth = max(distance)
    for ahead, patience, waits in itertools.product(AHEAD, PATIENCE, (False, True)):
        each = ahead or 1.0
        yield Rule(
            ahead=None if ahead is None else [int(1 + ahead * (h - 1)) for h in distance],
            late=[int(each * (depth - h)) for h in distance] if waits else None,
            patience=patience,
        )
