"""What a strategy does about memory: the fourth part beside planner, schedule and weights.

A policy decides for each stage of a candidate how it spares memory, once it is known how many micro-batches are in flight there.
Planners do not know of it: they search the policy's views of the problem, and what they propose is made to fit before it is judged.
How a stage may spare memory is a mechanism's to say (`gpp.mechanism`), and so are all policies but `Keep`.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple, final

from gpp.cost.amounts import StageBytes
from gpp.cost.holding import DEPTH
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.plan.plan import Plan
from gpp.settings import settings
from gpp.stage import Stage
from gpp.weights.base import PipelinePosition


class Question(NamedTuple):
    """A stage that is to fit.

    Args:
        held: micro-batches in flight on a device.
        limit_bytes: memory of the device for this stage.
        depth: of the pipeline, where the versions of the weights depend on it.
        position: of the stage in it.
        within: share by which the seconds that the answer adds may be above the least, for which it is found sooner. From 1e6 on
            large stages are solved sooner; infinite for the first answer.
    """

    problem: Problem
    stage: Stage
    held: int
    limit_bytes: float
    depth: int | None
    position: PipelinePosition
    within: float


class Spared(NamedTuple):
    """A stage that fits.

    Args:
        added_s: seconds for each micro-batch beyond those of the stage as it was.
    """

    stage: Stage
    added_s: float


class AbstractMemory(ABC):
    """How the stages of a plan are made to fit. Settings are the fields of the dataclass."""

    name: ClassVar[str]
    ways: ClassVar[Collection[str]] = ()
    """The ways in which operators may spare memory; empty for a policy under which plans are as planners make them."""
    holds_fewer: ClassVar[bool] = False
    """Whether a stage that lacks memory may also hold fewer micro-batches than 1F1B asks for, which is paid in bubbles."""

    @abstractmethod
    def fit(self, asked: Question) -> Spared | None:
        """The stage, so that it fits; None if it does not, however its operators run."""

    def views(self, problem: Problem, *, same: bool) -> Iterator[Problem]:
        """The problem as planners search it in addition, where memory has a price that they need not know of.

        Args:
            same: whether backwards use the weights that their forwards used.
        """
        yield from ()

    def fitted(self, plan: Plan, problem: Problem, within: float = 0.0) -> Plan | None:
        """The plan with every stage made to fit; None if one cannot. Stages that fit stay as they are.

        Args:
            within: as in `Question`.
        """
        if not self.ways:
            return plan
        peaks = [_peak(plan, problem, s, bill.memory) for s, bill in enumerate(plan.bills(problem))]
        limits = _limits(plan, problem, peaks)
        stages: list[Stage] = []
        for s, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
            found = self._fitted(plan, problem, s, peak, limit, within)
            if found is None:
                return None
            stages.append(found)
        return plan if all(map(operator.is_, stages, plan.stages)) else replace(plan, stages=tuple(stages))

    def fastest(self, plan: Plan, problem: Problem, seconds: Callable[[Plan, Problem], float], within: float = 0.0) -> Plan | None:
        """As `fitted`; where stages lack memory, the fastest of that and of plans in which they hold fewer micro-batches.

        Args:
            seconds: the predicted time of a step.
        """
        found = self.fitted(plan, problem, within)
        if found is plan or not self.holds_fewer:
            return found
        choices = [found, *(self.fitted(fewer, problem, within) for fewer in _holding_fewer(plan, problem))]
        return min((choice for choice in choices if choice is not None), key=lambda choice: seconds(choice, problem), default=None)

    def _fitted(self, plan: Plan, problem: Problem, s: int, peak: float, limit: float, within: float) -> Stage | None:
        stage = plan.stages[s]
        if peak <= limit:
            return stage
        if stage.devices_per_replica > 1 or not plan.runs_backward(s, problem.graph):
            return None
        depth = None if problem.regime.weights.flushes else plan.position(s).depth
        late, position = plan.late(s, problem.regime.holds), plan.position(s)
        # What is held late is held in any case. It may be more than what is held in full, if little of that is left.
        for beside in (late, late + 1) if problem.regime.holds.parts else (0,):
            room = limit - beside * StageCost.of(problem, stage, depth).late_bytes
            found = self.fit(Question(problem, stage, held(stage), room, depth, position, within))
            if found is None:
                return None
            if not beside or _peak(plan, problem, s, StageCost.of(problem, found.stage, depth).memory) <= limit:
                return found.stage
        return None


@final
@settings("strategy.memory")
class Keep(AbstractMemory):
    """Every operator keeps what it makes; plans are as planners make them."""

    name: ClassVar[str] = "keep"

    def fit(self, asked: Question) -> Spared | None:
        return None


def held(stage: Stage) -> int:
    """Micro-batches, whole or in part, that a device of a stage may hold at a time."""
    return -(-stage.in_flight // stage.unit)


def _holding_fewer(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """The plan with one, two, ... micro-batches less in flight at each stage that lacks memory, as long as that spares any.

    A stage cannot run further ahead than those that feed it: these would wait for its backward, and it for their forwards. So
    what follows a stage holds no more than it does. None for plans whose stages count in other units (micro-batches of several
    sizes, k above 1, replicas with micro-batches of their own), or share devices.
    """
    alike = len({stage.microbatch_size for stage in plan.stages}) == 1 and not plan.shares_devices
    plain = all(stage.k == 1 and stage.stride == 1 for stage in plan.stages)
    if not (alike and plain) or problem.regime.holds != DEPTH or not problem.regime.weights.flushes or problem.minibatch_ops:
        return
    peaks = [_peak(plan, problem, s, bill.memory) for s, bill in enumerate(plan.bills(problem))]
    lacking = {s for s, (peak, limit) in enumerate(zip(peaks, _limits(plan, problem, peaks), strict=True)) if peak > limit}
    for less in range(1, max((held(plan.stages[s]) for s in lacking), default=1)):
        yield _with_fewer(plan, dict.fromkeys(lacking, less))


def _with_fewer(plan: Plan, less: Mapping[int, int]) -> Plan:
    """The plan with so many micro-batches less in flight at some stages, but one at least."""
    stages: list[Stage] = []
    for s, stage in enumerate(plan.stages):
        own = max(stage.in_flight - less.get(s, 0) * stage.microbatch_size, stage.microbatch_size)
        fewest = min((stages[before].in_flight for before in plan.predecessors[s]), default=own)
        stages.append(replace(stage, in_flight=min(own, fewest)))
    return replace(plan, stages=tuple(stages))


def _peak(plan: Plan, problem: Problem, s: int, memory: StageBytes) -> float:
    """The most bytes that a stage holds on a device, if its bytes are these."""
    holds = problem.regime.holds
    return max(memory.peak(*state) for state in holds.states(held(plan.stages[s]), plan.late(s, holds)))


def fits_whole(problem: Problem) -> bool:
    """Whether a mini-batch of the whole model fits any device, so that memory is no matter in a pipeline that drains."""
    if not problem.regime.weights.flushes:
        return False
    everything = problem.amounts(problem.graph.all_mask).held(problem.minibatch_size, 1)
    return everything.peak(1) <= problem.memory_limit_bytes


def _limits(plan: Plan, problem: Problem, peaks: list[float]) -> list[float]:
    """The memory of a device for each stage: where a device holds several, each gets what it has at least, and its share of the
    rest, in proportion to what it would take beyond that."""
    devices, bills = problem.cluster.devices, plan.bills(problem)
    fixed = [bill.static_bytes + bill.version_bytes for bill in bills]
    out = [math.inf] * len(plan.stages)
    for device, stages in plan.stages_of_device.items():
        room = devices[device].memory_bytes - sum(fixed[s] for s in stages)
        wanted = sum(peaks[s] - fixed[s] for s in stages)
        for s in stages:
            share = (peaks[s] - fixed[s]) / wanted if wanted > 0 else 1.0
            # Rounding must not make a stage that fits one that does not.
            own = devices[device].memory_bytes if len(stages) == 1 else max(fixed[s] + room * share, peaks[s] * (wanted <= room))
            out[s] = min(out[s], own)
    return out
