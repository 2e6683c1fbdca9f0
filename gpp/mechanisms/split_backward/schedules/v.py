"""The common part of V schedules: two stages on each device, and backwards that are split.

The pipeline goes down the devices and comes back up, so a device holds a micro-batch of its first stage long and one of its second
stage shortly, and the sum is the same everywhere. Every schedule has a published order, of a device by its place in the line. It is
for passes that all take as long, and for plans in which h(s) + h(t) = D + 1 on each device. Elsewhere it may be slower than a list
schedule in the same memory, or not run at all; so a few of both are simulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from gpp.cluster import Cluster
from gpp.cost.holding import Holding
from gpp.errors import Infeasible, InvalidPlan
from gpp.mechanisms.split_backward.kinds import HALVES, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.mechanisms.split_backward.schedules.zero_bubble_auto import rules
from gpp.plan.plan import Plan
from gpp.program.kinds import FORWARD, KINDS, PASS
from gpp.program.program import Task
from gpp.schedules.base import RankedSchedule
from gpp.schedules.exact import value_of
from gpp.schedules.flow import HAIR, Flow, Work
from gpp.schedules.folded import V, check_folded, folded, unfolded
from gpp.schedules.greedy import greedy

AHEAD, BACK, LATE = PASS[FORWARD], INPUT_GRADIENTS, WEIGHT_GRADIENTS


class VDevice(NamedTuple):
    """A device of a V.

    Args:
        far, near: its stages, that nearer to the sink last.
        rank: stages of the V's second half behind the near one: 0 on the device that has a sink.
        line: devices of the V.
        passes: micro-batches.
    """

    far: int
    near: int
    rank: int
    line: int
    passes: int


class AbstractV(RankedSchedule, ABC):
    """Two stages a device, in a V."""

    holds: ClassVar[Holding] = Holding(parts=HALVES)
    share: ClassVar[float]
    """Bytes of micro-batches that a list schedule may hold, of those that 1F1B holds on its first device with stages twice as
    long; 0: there are none beside the published order."""

    @abstractmethod
    def published(self, place: VDevice) -> list[Task] | None:
        """The published order of a device; None if there is none for so few micro-batches."""

    @property
    def per_device(self) -> int:
        return V

    def unfolded(self, cluster: Cluster) -> Cluster:
        return unfolded(cluster, V, back=True)

    def arranged(self, plan: Plan, seconds: Sequence[float], num_devices: int) -> Plan:
        found = folded(plan, seconds, V, num_devices, back=True)
        if why := self._why_unpublished(found):
            raise Infeasible(*why)
        held = {s: count for order in (self._published(found) or {}).values() for s, count in _held(order).items()}
        stages = (
            replace(stage, in_flight=held.get(s, stage.ahead) * stage.microbatch_size) for s, stage in enumerate(found.stages)
        )
        return replace(found, stages=tuple(stages))

    def ranked(self, work: Work) -> list[dict[int, list[Task]]]:
        plan = work.plan
        check_folded(plan, V)
        flow = self.flow(work)
        found = sorted(self._candidates(flow, plan), key=lambda by_lane: value_of(flow, by_lane, "period"))
        if not found:
            if why := self._why_unpublished(plan):
                raise InvalidPlan("{}. Fix: {}".format(*why))
            rule = f"no order of strategy.schedule={self.name} fits the devices' memory"
            raise Infeasible(rule, "a smaller microbatch_size, or strategy/schedule=zero_bubble_auto")
        return [flow.orders(by_lane) for by_lane in found]

    def _why_unpublished(self, plan: Plan) -> tuple[str, str] | None:
        """Why a plan cannot have the published order, if the schedule has no other one, and a fix; else None."""
        if self.share:
            return None
        name, other = f"strategy.schedule={self.name}", "strategy/schedule=zero_bubble_v"
        sizes, count, line = {stage.microbatch_size for stage in plan.stages}, plan.minibatch_size, -(-plan.depth // V)
        if len(sizes) > 1:
            return f"micro-batches have {len(sizes)} sizes, and {name} is for one", f"one microbatch_size for all, or {other}"
        for device, stages in plan.stages_of_device.items():
            far, near = sorted((plan.distance_to_sink[s] for s in stages), reverse=True)
            if far + near != plan.depth + 1:
                rule = f"{name} needs stages that pair up to a V of {plan.depth}, and {list(stages)} of device {device} do not"
                return rule, other
        found = -(-count // max(sizes))
        if found < 2 * line:
            rule = f"{name} needs two micro-batches for each of the V's {line} devices, and a mini-batch of {count} has {found}"
            most = max(count // (2 * line), 1)
            return rule, f"microbatch_size={most} or less that divides it, a larger minibatch_size, or {other}"
        return None

    def _candidates(self, flow: Flow, plan: Plan) -> Iterator[list[list[int]]]:
        unit = max(flow.ahead_bytes([-(-plan.depth // V)] * len(plan.stages)))
        cap = self.share * unit
        published = self._published(plan)
        if published is not None:
            by_lane = flow.by_lane(published)
            peaks = flow.peaks(by_lane)
            cap = max(cap, *peaks)
            fits = all(peak <= room * (1 + HAIR) for peak, room in zip(peaks, flow.room, strict=True))
            if fits and flow.path(by_lane) is not None:
                yield by_lane
        capped = flow.with_room([min(room, cap) for room in flow.room])
        for rule in rules(flow.distance) if self.share else ():
            by_lane = greedy(capped, rule)
            if by_lane is not None:
                yield by_lane

    def _published(self, plan: Plan) -> dict[int, list[Task]] | None:
        """The published order of every device, where micro-batches are of one size."""
        sizes = {stage.microbatch_size for stage in plan.stages}
        if len(sizes) > 1:
            return None
        line, count = -(-plan.depth // V), -(-plan.minibatch_size // sizes.pop())
        out = {}
        for device, stages in plan.stages_of_device.items():
            near, far = sorted(stages, key=lambda s: (plan.distance_to_sink[s], -s))
            order = self.published(VDevice(far, near, plan.distance_to_sink[near] - 1, line, count))
            if order is None:
                return None
            out[device] = order
        return out


def _held(order: Sequence[Task]) -> dict[int, int]:
    """The most micro-batches that each stage of a device holds in full."""
    now, most = dict[int, int](), dict[int, int]()
    for s, kind, _ in order:
        now[s] = now.get(s, 0) + KINDS[kind].holds - KINDS[kind].returns
        most[s] = max(most.get(s, 0), now[s])
    return most


class Writer:
    """Writes a device's order by kinds and stages; micro-batches are counted."""

    def __init__(self, place: VDevice) -> None:
        self.place = place
        self.out: list[Task] = []
        self.next: dict[tuple[int, str], int] = {}
        self.waiting: list[Task] = []
        """Second halves that are put off, in order."""

    def add(self, kind: str, stage: int) -> None:
        """Add the next pass of a kind, if one is left."""
        m = self.next.get((stage, kind), 0)
        if m < self.place.passes:
            self.next[stage, kind] = m + 1
            self.out.append(Task(stage, kind, m))

    def left(self, kind: str, stage: int) -> int:
        return self.place.passes - self.next.get((stage, kind), 0)

    def backward(self, stage: int, *, later: bool = False) -> None:
        """Add both halves of a backward, or the first one and put the second off."""
        self.add(BACK, stage)
        if later:
            self.waiting.append(Task(stage, LATE, self.next[stage, BACK] - 1))
        else:
            self.add(LATE, stage)

    def put_off(self) -> None:
        """Add the second half that has waited longest."""
        self.add(LATE, self.waiting.pop(0).stage)
