"""Seconds of every stretch of a linear order as a stage, made to fit in memory where it stands.

A stage of operators i .. j at position p from the sink (1 is the sink) holds p micro-batches, as far as the schedule has it, and
the versions of the weights of that position. If it lacks memory, the memory policy marks its operators. Its seconds are those of a
forward and a backward of a micro-batch, and what the marks add. Messages are not in them: they overlap, as DawnPiper has it.

On devices that are not all alike, and under weight policies whose versions depend on the whole depth, the number of stages is
given: the stage at position p then has device `depth` - p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.mechanisms.marks.fit import ROUGH
from gpp.memory import AbstractMemory, Question
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.stage import Stage
from gpp.weights.base import PipelinePosition

LARGE = 64
"""Operators of a graph beyond which the search takes the first marks with which a stage fits; the plan has the best ones."""


class Stretch(NamedTuple):
    """Operators first .. last - 1 of the order, at a position from the sink."""

    first: int
    last: int
    position: int


def one_minibatch(problem: Problem) -> Problem:
    """The problem of a single mini-batch: planners are asked for many at once where a pipeline does not drain."""
    if problem.regime.minibatches == 1:
        return problem
    regime = replace(problem.regime, minibatches=1, assumed_copies=1)
    return replace(problem, minibatch_size=problem.minibatch_size // problem.regime.minibatches, regime=regime)


def depths(problem: Problem) -> tuple[int | None, ...]:
    """The numbers of stages that must be searched one by one; (None,) where a stage's bill follows from its position alone."""
    most, weights = min(problem.cluster.num_devices, problem.graph.num_ops), problem.regime.weights
    if problem.cluster.homogeneous and weights.follows_position(most):
        return (None,)
    return tuple(range(most, 0, -1))


@final
class FittedStages:
    """The stages of one order at one micro-batch size.

    Args:
        problem: of one mini-batch (`one_minibatch`).
        depth: the number of stages; None for any (`depths`).
        first: whether any marks do with which a stage fits.
    """

    def __init__(
        self,
        problem: Problem,
        order: Sequence[int],
        microbatch_size: int,
        memory: AbstractMemory,
        depth: int | None,
        first: bool = False,
    ) -> None:
        self.problem, self.order, self.b, self.memory, self.depth = problem, tuple(order), microbatch_size, memory, depth
        self.n = len(self.order)
        self.most = min(problem.cluster.num_devices, self.n) if depth is None else depth
        self.asked = 0
        """Stretches for which a bill was made."""
        self._known: dict[Stretch, float] = {}
        index = list(self.order)
        kinds = {problem.type_of_device[self._device(p)] for p in range(1, self.most + 1)}
        self._prefix_s: dict[int, np.ndarray] = {}
        for device in sorted(kinds):
            times = problem.op_times(microbatch_size, device)
            self._prefix_s[device] = np.concatenate([[0.0], np.cumsum((times.forward_s + times.backward_s)[index])])
        backwards = [problem.graph.differentiated >> op & 1 for op in index]
        self._backwards = np.concatenate([[0], np.cumsum(backwards)])
        self.within = float("inf") if first else ROUGH if self.n > LARGE else 0.0

    def _device(self, position: int) -> int:
        return 0 if self.depth is None else self.depth - position

    def prefix_s(self, position: int) -> np.ndarray:
        """[n + 1] seconds of a forward and a backward of the operators before each, on the device at a position."""
        return self._prefix_s[self.problem.type_of_device[self._device(position)]]

    @property
    def fastest_s(self) -> np.ndarray:
        """[n + 1] as `prefix_s`, the least of all positions."""
        return np.min(list(self._prefix_s.values()), axis=0)

    def kept_s(self, stretch: Stretch) -> float:
        """Seconds with everything kept."""
        i, j, position = stretch
        prefix, fixed = self.prefix_s(position), self.problem.overheads
        returns = self._backwards[j] > self._backwards[i]
        return float(prefix[j] - prefix[i]) + fixed.forward_s + (fixed.backward_s if returns else 0.0)

    def held(self, position: int) -> int:
        """Micro-batches in flight at a position."""
        flushes = self.problem.regime.weights.flushes
        return int(self.problem.regime.held(position, self.problem.accumulation(self.b) if flushes else position))

    def stage(self, stretch: Stretch) -> Stage:
        """The stage without marks."""
        i, j, position = stretch
        ops = tuple(sorted(self.order[i:j]))
        return Stage(ops=ops, devices=(self._device(position),), microbatch_size=self.b, in_flight=self.held(position) * self.b)

    def seconds(self, stretch: Stretch) -> float:
        """Seconds of a forward and a backward of a micro-batch, made to fit; infinite if that cannot be."""
        found = self._known.get(stretch)
        if found is None:
            self.asked += 1
            found = self._known[stretch] = self.kept_s(stretch) + self._added_s(stretch)
        return found

    def known(self, stretch: Stretch) -> bool:
        """Whether the seconds of a stretch have been found already."""
        return stretch in self._known

    def question(self, stretch: Stretch) -> Question:
        """What a memory policy is asked of a stretch."""
        problem, stage, held = self.problem, self.stage(stretch), self.held(stretch.position)
        room = problem.cluster.devices[stage.devices[0]].memory_bytes
        position = PipelinePosition(
            warmup=held - 1, depth=self.depth or stretch.position, accumulation=max(problem.accumulation(self.b), 1)
        )
        depth = None if problem.regime.weights.flushes else self.depth
        return Question(problem, stage, held, room, depth, position, self.within)

    def _added_s(self, stretch: Stretch) -> float:
        asked = self.question(stretch)
        if StageCost.of(asked.problem, asked.stage, asked.depth).memory.peak(asked.held) <= asked.limit_bytes:
            return 0.0
        if not self.memory.ways:
            return float("inf")
        found = self.memory.fit(asked)
        return float("inf") if found is None else found.added_s

    def plan(self, planner: str, stretches: Sequence[Stretch], within: float = 0.0) -> Plan | None:
        """The plan of a chain of stretches, in order, with its marks; None if it does not fit after all.

        Args:
            within: as in `gpp.mechanisms.marks.fit.fit`.
        """
        return fitted(self.unmarked_plan(planner, stretches), self.problem, self.memory, within)

    def unmarked_plan(self, planner: str, stretches: Sequence[Stretch]) -> Plan:
        """The plan of a chain of stretches, everything kept, whether it fits or not."""
        parts = [(sum(1 << op for op in self.order[one.first : one.last]), 1) for one in stretches]
        devices = [(s,) for s in range(len(parts))]
        return make_plan(self.problem, planner, parts, self.b, chain=True, ordered=True, placement=devices)


def fitted(plan: Plan, problem: Problem, memory: AbstractMemory, within: float = 0.0) -> Plan | None:
    """The plan with its stages made to fit; None if one cannot.

    Args:
        within: as in `gpp.mechanisms.marks.fit.fit`.
    """
    marked = memory.fitted(plan, problem, within)
    if marked is None:
        return None
    needs = marked.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(marked.stages)})
    return marked if all(need <= problem.cluster.devices[d].memory_bytes for d, need in needs.items()) else None
