"""A strategy: who cuts, the order in which micro-batches run, their version of the weights, and what of a micro-batch is kept.

The planner is handed `predict`, so it scores candidates with the schedule that will run, made to fit as the memory policy has it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from itertools import chain
from typing import final

from gpp import mechanism
from gpp.cost.holding import EVERYTHING
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible, InvalidConfig, MalformedProgram
from gpp.memory import AbstractMemory, Keep, fits_whole
from gpp.plan.choice import SPLIT, AbstractChoice, sharing
from gpp.plan.copies import best_copies
from gpp.plan.loss_stage import with_loss_apart
from gpp.plan.plan import Plan
from gpp.planners.base import PLANNED_AHEAD, AbstractPlanner, Fits, JudgedCandidates, PlainPrediction, Predict, continuous, made_by
from gpp.planners.bounds.best_size import of_best_size
from gpp.planners.chains.single import Single
from gpp.planners.common.infeasible import explain_marked
from gpp.program.added import prove
from gpp.program.cards import check_cards
from gpp.program.global_order import in_global_order, sums_early
from gpp.program.held import order_peak
from gpp.program.lower import POSTED_AHEAD, lower
from gpp.program.program import Program, ReduceGroup, Task, check_program, reduce_groups
from gpp.program.steady_state import check_stream, window
from gpp.replan import Replan
from gpp.schedules.base import ORDERS, AbstractSchedule
from gpp.schedules.flow import Work
from gpp.schedules.forward_only import ForwardOnly
from gpp.schedules.refused import check_count, check_schedule
from gpp.settings import settings
from gpp.simulate.added import Objective, own_prediction, planning
from gpp.simulate.recurrence import can_score, score
from gpp.simulate.simulator import Costs, simulate
from gpp.simulate.spread import judged_by_tail, with_spread
from gpp.timeline import ENDLESS, Timeline
from gpp.weights.base import AbstractWeights
from gpp.weights.flush import Flush

FRESHER = 1e-3
"""Share of a step that one stage less of depth is worth, where the pipeline does not drain: gradients are fresher by an update."""

MARGIN = 1e-3
"""Share of its time by which a plan may be longer than one with endless memory and no search go on."""

CLOSE = 0.02
"""Share by which the seconds that a memory policy adds to a candidate may be above a bound: the chosen plan's are exact."""


@final
@settings("strategy")
class Strategy:
    """A bundle of choices that a user names in one word and an expert swaps one by one.

    Args:
        replicas: what those of a stage do with its micro-batches: `split` all, or as the mechanism of that name shares them out.
            Planners cut as if they split; their candidates are judged, and the plan is made, with the mechanism.
        ceiling: whether it says how far others are from perfect; a comparison then never names it the best.
        objective, edges, replan: what planners minimise and how values travel where nothing trains; when a plan is replaced.
        mechanisms: what stages do beyond plain passes, in the order in which they are asked, `edges` last.
    """

    name: str
    planner: AbstractPlanner
    schedule: AbstractSchedule
    weights: AbstractWeights = field(default_factory=Flush)
    memory: AbstractMemory = field(default_factory=Keep)
    replicas: str = SPLIT
    ceiling: bool = False
    objective: Objective = "throughput"
    edges: AbstractChoice | None = None
    replan: Replan = field(default_factory=Replan)
    mechanisms: tuple[AbstractChoice, ...] = ()

    def __post_init__(self) -> None:
        mechanism.use(each.package for each in self.choices)
        sharing(self.replicas)
        if self.weights.flushes != self.schedule.drains:
            does = "drains before every update" if self.schedule.drains else "does not drain"
            needs = "a pipeline that drains" if self.weights.flushes else "one that does not"
            raise InvalidConfig(
                "strategy.schedule",
                self.schedule.name,
                f"{does}, and strategy.weights={self.weights.name} needs {needs}",
                f"set strategy/schedule={'1f1b' if self.weights.flushes else 'no_flush'}, or other weights",
            )
        if self.planner.keeps and self.memory.ways:
            who = f"is not for plans of strategy.planner={self.planner.name}, which keep all"
            raise InvalidConfig("strategy.memory", self.memory.name, who, "set strategy/memory=keep")

    def plan(self, problem: Problem, *, first: bool = False) -> Plan:
        """The planner's plan, validated, with the time that the search took.

        Args:
            first: whether any plan that fits will do, whatever its time: there is one where, and only where, there is a plan.

        Raises:
            Infeasible: nothing fits.
            InvalidConfig: the weight policy cannot hold in what is asked for.
        """
        if problem.copies:
            return best_copies(problem, partial(self.plan, first=first), self._step_s)
        if problem.varying and not (problem.varying.judged or first):
            return judged_by_tail(problem, self.plan, self.predict)
        self._check_problem(problem)
        check_count(self.schedule, problem, self.planner)
        own = problem.microbatch_size or (None if self.schedule.drains else self.weights.microbatch_size(problem.minibatch_size))
        sharing(self.replicas).check(problem, own)
        if self.drafted is not self:
            return self.drafted.plan(problem, first=first)
        start = time.perf_counter()
        problem, judged = self.posed(problem), JudgedCandidates(first=first)
        try:
            plan = self._sparing(problem, judged) if self.memory.ways else self._search(problem, problem, judged)
            plan = of_best_size(plan, problem, self.plan, self._step_s) if problem.minibatch_ops and not first else plan
        except Fits as found:
            plan = found.plan
            self.check(plan, problem)
        except Infeasible as error:
            if judged.refused or not (self.memory.ways or self.planner.marks):
                raise
            why, even = error.with_traceback(None), f"even with strategy.memory={self.memory.name}"
            said = f"{why.short}, {even}" if self.memory.ways else why.constraint
            raise explain_marked(problem, lambda asked: self.plan(asked, first=True), why, said) from None
        return replace(plan, search_s=time.perf_counter() - start)

    @property
    def choices(self) -> tuple[AbstractChoice, ...]:
        """The mechanisms that it has chosen, in the order in which they are asked."""
        return self.mechanisms if self.edges is None else (*self.mechanisms, self.edges)

    @property
    def sparing(self) -> AbstractMemory:
        """The policy by which stages are made to fit: the planner's own, or the strategy's."""
        return self.planner.fits_by or self.memory

    @property
    def drafted(self) -> Strategy:
        """The strategy with a schedule that is quick to ask, for many plans; itself where its own schedule is."""
        return self if self.schedule.draft is self.schedule else replace(self, schedule=self.schedule.draft)

    def _sparing(self, problem: Problem, judged: JudgedCandidates) -> Plan:
        """The best plan over the views in which memory has a price, the problem itself first.

        The search ends where the best plan is as fast as any candidate would be if memory were endless.

        Raises:
            Infeasible: nothing fits, however operators run.
        """
        found, why = list[tuple[float, Plan]](), None
        for view in chain([problem], self.memory.views(problem, same=self.weights.same)):
            try:
                plan = self._search(view, problem, judged)
                found.append((self._step_s(plan, problem), plan))
            except Infeasible as error:
                why = why or error
            close = view is not problem and found and min(seconds for seconds, _ in found) <= judged.ideal_s * (1 + MARGIN)
            if close or fits_whole(problem):
                break
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        assert why is not None  # the problem itself has been asked
        raise why

    def _search(self, view: Problem, problem: Problem, judged: JudgedCandidates) -> Plan:
        """The planner's plan for a view of the problem, validated.

        Raises:
            Infeasible: nothing fits.
        """
        questions, judged.refused = self._questions(view), []
        for asked in questions:
            try:
                plan = self._ask(self.planner, asked, problem, judged)
                if plan is not None:
                    return plan
            except Infeasible:
                if asked is questions[-1] and not judged.refused:
                    raise
        return self._within_limits(problem, questions[-1], judged)

    def _ask(self, planner: AbstractPlanner, asked: Problem, problem: Problem, judged: JudgedCandidates) -> Plan | None:
        """The planner's plan, checked; None if the engine cannot run it. What the engine said is added to `judged`.

        Raises:
            Infeasible: nothing fits, or nothing that the engine can run.
        """
        predict: Predict = partial(self._judge, problem=problem, asked=asked, judged=judged)
        if self._predicts_plain(problem) and not judged.first:
            predict = PlainPrediction(predict, lambda plan: judged.can_run(problem.refuses(plan)))
        plan = self.memory.fastest(self._as_run(made_by(planner, asked, predict), problem), problem, self._step_s)
        if plan is None:
            raise Infeasible("the planner's plan does not fit, however its operators run", "devices with more memory")
        if not judged.can_run(problem.refuses(plan)):
            return None
        self.check(plan, problem)
        return plan

    def _predicts_plain(self, problem: Problem) -> bool:
        """Whether a step of a planner's own plan is predicted (`PlainPrediction`); messages of training are plain already."""
        changed = self.replicas != SPLIT or self.memory.ways or self.mechanisms or problem.minibatch_ops
        crowded = problem.cluster.crowded(problem.cluster.num_devices)
        return self.schedule.alternates and problem.regime.trains and not (changed or crowded)

    def _within_limits(self, problem: Problem, asked: Problem, judged: JudgedCandidates) -> Plan:
        """The best plan that the engine can run where the planner's own is none: one micro-batch size after another, or one piece.

        Raises:
            Infeasible: there is none; says what the engine refused.
        """
        found: list[Plan] = []
        sizes = asked.microbatch_sizes() if asked.microbatch_size is None else ()
        for planner, b in [*((self.planner, b) for b in sizes), (Single(), asked.microbatch_size)]:
            if not found or planner is self.planner:
                with suppress(Infeasible):
                    found += filter(None, [self._ask(planner, replace(asked, microbatch_size=b), problem, judged)])
        if found:
            return min(found, key=lambda plan: self._step_s(plan, problem))
        why, _, fix = judged.refused[0].partition(" Fix: ")
        raise Infeasible(f"no plan of the planner's can run: {why.rstrip('.')}", fix or "another engine")

    def check(self, plan: Plan, problem: Problem) -> None:
        """Prove that `plan` can run under this strategy.

        Raises:
            InvalidPlan, Infeasible: as `Plan.validate`; or it is none for a pipeline that does not drain.
            InvalidConfig: the weight policy cannot hold in it.
        """
        self._check_problem(problem)
        if (own := planning(posed := self.posed(problem))) is not None:
            own.check(plan)
        plan.validate(posed, self._peaks(plan, posed) if self._says_peaks else None)
        if not self.schedule.drains:
            for stage in range(len(plan.stages)):
                self.schedule.warmup(plan, stage, sys.maxsize)
            check_stream(plan, problem.graph, self.weights)

    def predict(self, plan: Plan, problem: Problem, *, record: bool = True) -> Timeline:
        """The simulated timeline of one training step of `plan` under this strategy's schedule.

        Args:
            record: False for the metrics alone, by `simulate.recurrence` where it can; `iteration_s` of a course is the objective.
        """
        plan = with_loss_apart(plan, problem)
        if (course := planning(problem)) is not None:
            return course.predict(self._program(plan, problem), plan, problem, None if record else self.objective)
        if plan.mechanisms and (own := own_prediction(plan, self.posed(problem), record=record)) is not None:
            return own
        drains = self.schedule.drains
        if not record:
            # In a pipeline that does not drain there is always another micro-batch.
            counts = [-(-plan.minibatch_size // stage.microbatch_size) if drains else sys.maxsize for stage in plan.stages]
            warmups = [self.schedule.warmup(plan, s, count) for s, count in enumerate(counts)]
            if can_score(plan, warmups) and not problem.cluster.crowded(plan.num_devices):
                return score(plan, self.posed(problem), [w for w in warmups if w is not None], drains=drains)
        program, posed = self._program(plan, problem), self.posed(problem)
        found = simulate(program, plan, posed, record=record)
        return with_spread(found, program, plan, posed) if record and problem.varying else found

    def _step_s(self, plan: Plan, problem: Problem) -> float:
        return self.predict(plan, problem, record=False).metrics.iteration_s

    def lower(self, plan: Plan, problem: Problem, *, cards: bool = False) -> Program:
        """The checked program of one training step.

        For a pipeline that does not drain it is one of a few mini-batches: see `gpp.program.steady_state`.

        Args:
            cards: the receives stand in the order that cards need, which is proved (`gpp.program.cards`).
        """
        return self._checked(self._program(plan, problem), plan, problem, cards)

    def lower_evaluation(self, plan: Plan, problem: Problem, num_samples: int, *, cards: bool = False) -> Program:
        """The checked program of one evaluation over `num_samples` samples; `cards` as `lower` has it."""
        orders = ForwardOnly().orders(
            Work(plan=plan, graph=problem.graph, num_samples=num_samples, bills=self._bills(plan, problem))
        )
        return self._checked(lower(plan, problem.graph, orders, num_samples), plan, problem, cards)

    def _checked(self, program: Program, plan: Plan, problem: Problem, cards: bool) -> Program:
        groups = reduce_groups(plan, problem.graph)
        prove(plan, program)
        if not cards:
            check_program(program, groups)
            return program
        if groups and program.minibatches == 1:
            # A weight that two stages share may need the sends of a backward that its sum would stand before.
            with suppress(MalformedProgram):
                return self._for_cards(sums_early(program, plan, groups, problem.graph), plan, problem, groups)
        return self._for_cards(program, plan, problem, groups)

    def _for_cards(self, program: Program, plan: Plan, problem: Problem, groups: Sequence[ReduceGroup]) -> Program:
        """The program in the order that cards need; raises MalformedProgram if it cannot run to its end."""
        ordered = in_global_order(program, plan, Costs.of(program, plan, self.posed(problem)).seconds)
        check_program(ordered, groups)
        check_cards(ordered, plan, groups)
        return ordered

    def posed(self, problem: Problem) -> Problem:
        """The problem under this strategy's regime: samples in flight, versions of the weights."""
        # Before a loss on the whole mini-batch every schedule keeps all of it.
        holds, edges = EVERYTHING if problem.minibatch_ops else self.schedule.holds, self.edges and self.edges.messages
        regime = Regime(holds=holds, weights=self.weights) if problem.regime.trains else replace(problem.regime, edges=edges)
        return problem if problem.regime == regime else replace(problem, regime=regime)

    def _program(self, plan: Plan, problem: Problem) -> Program:
        minibatches = 1 if self.schedule.drains else window(plan, POSTED_AHEAD)
        samples = plan.minibatch_size * minibatches
        orders = self.orders(plan, problem, samples)
        return lower(plan, problem.graph, orders, samples, minibatches=minibatches, global_norm=problem.global_norm)

    def orders(self, plan: Plan, problem: Problem, samples: int) -> Mapping[int, Sequence[Task]]:
        """The passes of every device: of the schedule's choices, those with which a simulated step is shortest."""
        known, key = ORDERS.of(problem), (self.schedule, self.weights, plan.stages, plan.edges, samples)
        if key in known:
            return known[key]

        def step_s(orders: Mapping[int, Sequence[Task]]) -> float:
            program = lower(plan, problem.graph, orders, samples, global_norm=problem.global_norm)
            return simulate(program, plan, self.posed(problem), record=False).metrics.iteration_s

        choices = self.schedule.choices(self.work(plan, problem, samples))
        found = choices[0] if len(choices) == 1 else min(choices, key=step_s)
        return known.setdefault(key, found) if self.schedule.needs_bills else found  # it took long

    def work(self, plan: Plan, problem: Problem, samples: int) -> Work:
        """The work that the schedule is to put in order."""
        return Work(
            plan=plan,
            graph=problem.graph,
            num_samples=samples,
            bills=self._bills(plan, problem),
            limits={device: problem.cluster.devices[device].memory_bytes for device in plan.stages_of_device},
            cluster=problem.cluster,
        )

    @property
    def _says_peaks(self) -> bool:
        """Whether what devices hold is taken from the order of their passes: a planner knows less of it."""
        return bool(self.schedule.holds.parts) or self.schedule.needs_bills

    def _peaks(self, plan: Plan, posed: Problem) -> dict[int, float]:
        """Device -> the most bytes that it holds over its order."""
        bills, orders = plan.bills(posed), self.orders(plan, posed, plan.minibatch_size)
        return {
            device: order_peak(orders[device], {s: bills[s].memory for s in stages})
            for device, stages in plan.stages_of_device.items()
        }

    def _bills(self, plan: Plan, problem: Problem) -> tuple[StageCost, ...] | None:
        """The bills of the stages, where an order depends on them."""
        return plan.bills(self.posed(problem)) if plan.shares_devices or self.schedule.needs_bills else None

    def _questions(self, posed: Problem) -> list[Problem]:
        """The problems that planners are asked, one after the other until a plan fits.

        A planner cuts as if a loss on whole mini-batches were any operator; its candidates are judged with the loss apart.
        """
        if self.schedule.per_device > 1:
            posed = replace(posed, cluster=self.schedule.unfolded(posed.cluster), max_replicas=1)
        if (own := planning(posed)) is not None:
            return own.questions(posed, self.objective, PLANNED_AHEAD)
        if self.schedule.drains:
            return [replace(posed, minibatch_ops=0) if posed.minibatch_ops else posed]
        return continuous(posed, knows_versions=self.planner.knows_versions(posed))

    def _as_run(self, plan: Plan, problem: Problem) -> Plan:
        """A planner's plan with the run's mini-batch, its stages on the run's devices, and the loss apart where it must be.

        Raises:
            Infeasible: its stages cannot be put on the devices as the schedule has it.
        """
        if plan.minibatch_size != problem.minibatch_size or plan.graph_fingerprint != problem.graph.fingerprint:
            plan = replace(plan, minibatch_size=problem.minibatch_size, graph_fingerprint=problem.graph.fingerprint)
        if self.schedule.per_device > 1:
            passes = (problem.stage_times(stage.ops, stage.microbatch_size, (0,)) for stage in plan.stages)
            plan = self.schedule.arranged(plan, [sum(seconds) for seconds in passes], problem.cluster.num_devices)
        plan = with_loss_apart(sharing(self.replicas).chosen(plan, problem), problem)
        for each in self.choices:
            plan = each.chosen(plan, problem)
        return plan

    def _judge(self, candidate: Plan, problem: Problem, asked: Problem, judged: JudgedCandidates) -> Timeline:
        """A candidate's prediction, in the units of what the planner was asked; endless if it cannot run."""
        try:
            chosen = self._as_run(candidate, problem)
            if (plan := self.memory.fastest(chosen, problem, self._step_s, CLOSE)) is not chosen:
                judged.note(self.predict(chosen, problem, record=False))
            if plan is None or not judged.can_run(problem.refuses(plan)):
                return Timeline(source="predicted", metrics=ENDLESS)
            found, devices = self.predict(plan, problem, record=False), problem.cluster.devices
        except Infeasible as error:  # its stages cannot be put on the devices, or no order of theirs fits
            judged.refused.append(f"{error.constraint}. Fix: {error.remedy}")
            return Timeline(source="predicted", metrics=ENDLESS)
        lacks = any(need > devices[d].memory_bytes for d, need in found.metrics.peak_memory_bytes.items())
        if lacks and not judged.passes(partial(self.check, plan, problem)):
            return Timeline(source="predicted", metrics=ENDLESS)
        judged.fits(plan, found)
        if asked.regime.minibatches == 1:
            return found
        seconds = found.metrics.iteration_s * asked.regime.minibatches * (1.0 + FRESHER * candidate.depth * asked.regime.trains)
        return replace(found, metrics=replace(found.metrics, iteration_s=seconds))

    def _check_problem(self, problem: Problem) -> None:
        check_schedule(self.schedule, problem, self.planner, self.weights, self.memory)
        for each in self.choices:
            each.check(trains=problem.regime.trains)
