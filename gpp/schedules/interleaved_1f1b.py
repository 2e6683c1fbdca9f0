"""Interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC '21), on a DAG of stages.

A device runs k stages, D / k apart in a pipeline of depth D, so a micro-batch passes it k times, and what fills and drains the
pipeline is passes 1 / k as long: 1F1B's time for it over k. Micro-batches go in groups of D / k: all of a group pass a device's
first stage, then all of them its second one. More is held in exchange, and k times as many messages go.

On a chain the published order runs. Elsewhere devices do not all lie k times in one line, and there a list schedule, which holds as
much, may be better: both are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, final

from pydantic import Field

from gpp.cluster import Cluster
from gpp.cost.holding import Holding
from gpp.errors import MalformedProgram
from gpp.plan.plan import Plan
from gpp.program.kinds import KINDS
from gpp.program.program import Task
from gpp.schedules.base import RankedSchedule
from gpp.schedules.exact import value_of
from gpp.schedules.flow import Bytes, Flow, Work
from gpp.schedules.folded import check_folded, folded, unfolded
from gpp.schedules.greedy import Rule, greedy
from gpp.settings import settings


@final
@settings("strategy.schedule")
class Interleaved1F1B(RankedSchedule):
    """One forward, one backward, of k stages on each device.

    Args:
        k: stages of a device, at least 2.
    """

    holds: ClassVar[Holding] = Holding()

    k: Annotated[int, Field(ge=2)] = 2

    @property
    def per_device(self) -> int:
        return self.k

    def unfolded(self, cluster: Cluster) -> Cluster:
        return unfolded(cluster, self.k, back=False)

    def arranged(self, plan: Plan, seconds: Sequence[float], num_devices: int) -> Plan:
        return folded(plan, seconds, self.k, num_devices, back=False)

    def ranked(self, work: Work) -> list[dict[int, list[Task]]]:
        """The published order, if it can run, and a list schedule; as `RankedSchedule.ranked`."""
        check_folded(work.plan, self.k)
        flow = self.flow(work)
        turn = -(-work.plan.depth // self.k)
        found = sorted(_candidates(flow, turn), key=lambda by_lane: value_of(flow, by_lane, "period"))
        return [flow.orders(by_lane) for by_lane in found]


def _candidates(flow: Flow, turn: int) -> Iterator[list[list[int]]]:
    """Orders that run to their end.

    Args:
        turn: stages of the pipeline that a micro-batch passes before it comes to a device again.
    """
    count = len(flow.tasks)
    ahead = [_ahead(flow, lane, turn) for lane in range(len(flow.lanes))]
    published = [_published(flow, lane, turn, ahead[lane]) for lane in range(len(flow.lanes))]
    if flow.path(published) is not None:
        yield published
    # A micro-batch is a byte, and there is room for what the published order holds; more where lanes come to wait for each other.
    counted = replace(flow, held=tuple(Bytes(1.0, 1.0) for _ in flow.held))
    for more in range(count):
        found = greedy(counted.with_room([held + 1.0 + more for held in ahead]), Rule())
        if found is not None:
            yield found
            return
    raise MalformedProgram("the stages' orders wait for each other, whatever they hold")


def _ahead(flow: Flow, lane: int, turn: int) -> int:
    """Forwards of a lane before its first backward: one for each stage of the turn on the way to the sink and back, and a group for
    each further stage of the lane."""
    nearest = flow.distance[flow.stages[lane][0]]
    return 2 * (nearest - 1) + (len(flow.stages[lane]) - 1) * turn


def _published(flow: Flow, lane: int, turn: int, ahead: int) -> list[int]:
    """The order of Narayanan et al.: groups of micro-batches, forwards from the farthest stage and backwards from the nearest."""
    rank = {s: place for place, s in enumerate(flow.stages[lane])}

    def place(i: int) -> tuple[int, int, int]:
        s, kind, m = flow.tasks[i]
        return m // turn, -rank[s] if KINDS[kind].holds else rank[s], m

    own = [i for queue in flow.queues[lane].values() for i in queue]
    forwards = sorted((i for i in own if KINDS[flow.tasks[i].kind].holds), key=place)
    backwards = sorted((i for i in own if not KINDS[flow.tasks[i].kind].holds), key=place)
    out = forwards[:ahead]
    rest = forwards[ahead:]
    for i, backward in enumerate(backwards):
        out += rest[i : i + 1]
        out.append(backward)
    return out + rest[len(backwards) :]
