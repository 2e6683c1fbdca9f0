"""A strategy: who cuts, and in which order the micro-batches run.

The planner is handed `predict`, so it scores its candidates with the very schedule that will run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import final

from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph
from gpp.loss_scope import with_loss_apart
from gpp.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.program import Program, check_program, reduce_groups
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.forward_only import ForwardOnly
from gpp.schedules.passes import lower
from gpp.scoring import can_score, score
from gpp.simulator import simulate
from gpp.timeline import Timeline


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A bundle of choices that a user names in one word and an expert swaps one by one."""

    name: str
    planner: AbstractPlanner
    schedule: AbstractSchedule

    def plan(self, problem: Problem) -> Plan:
        """The planner's plan, validated, with the time that the search took.

        Raises:
            Infeasible: nothing fits.
        """
        problem = self._problem(problem)
        start = time.perf_counter()
        # A planner cuts as if the loss were any operator; its candidates are judged with the loss apart.
        asked = replace(problem, minibatch_ops=0) if problem.minibatch_ops else problem
        plan = self.planner.plan(asked, lambda candidate: self.predict(candidate, problem, record=False))
        plan = replace(with_loss_apart(plan, problem), search_s=time.perf_counter() - start)
        plan.validate(problem)
        return plan

    def predict(self, plan: Plan, problem: Problem, *, record: bool = True) -> Timeline:
        """The simulated timeline of one training step of `plan` under this strategy's schedule.

        Args:
            record: False for the metrics alone, as a planner wants them.
        """
        plan = with_loss_apart(plan, problem)
        if not record:
            warmups = [
                self.schedule.warmup(plan, s, -(-plan.minibatch_size // stage.microbatch_size))
                for s, stage in enumerate(plan.stages)
            ]
            if can_score(plan, warmups):
                return score(plan, self._problem(problem), [w for w in warmups if w is not None])
        program = lower(plan, problem.graph, self.schedule, global_norm=problem.global_norm)
        return simulate(program, plan, self._problem(problem), record=record)

    def lower(self, plan: Plan, graph: OpGraph, *, global_norm: bool = False) -> Program:
        """The checked program of one training step; `global_norm` as in `gpp.schedules.passes.lower`."""
        program = lower(plan, graph, self.schedule, global_norm=global_norm)
        check_program(program, reduce_groups(plan, graph))
        return program

    def lower_evaluation(self, plan: Plan, graph: OpGraph, num_samples: int) -> Program:
        """The checked program of one evaluation over `num_samples` samples."""
        program = lower(plan, graph, ForwardOnly(), num_samples)
        check_program(program)
        return program

    def _problem(self, problem: Problem) -> Problem:
        # Before a loss on the whole mini-batch every schedule keeps all of it.
        in_flight = "all" if problem.minibatch_ops else self.schedule.in_flight
        return problem if problem.in_flight == in_flight else replace(problem, in_flight=in_flight)
