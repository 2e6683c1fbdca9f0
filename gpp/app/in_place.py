"""A plan for this machine: what it takes is timed in place, by the workers that will run it, before it is chosen.

plan by operators that were timed alone → rehearse → correct the operators → plan again, until the plan does not change.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpp.cluster import LOOPBACK, Cluster
from gpp.cost.models.in_place import StageTimes
from gpp.cost.models.profiled import GraphProfile, Profiled, cpu_setting
from gpp.cost.overheads import NOTHING
from gpp.cost.problem import Problem
from gpp.errors import WorkerFailed
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.job import Job, WritesItself
from gpp.runtime.rehearsal.machine import MachineCosts, known, machine_path, measure
from gpp.runtime.rehearsal.rehearse import UNTIMED, Rehearsals, message_factor, short, stage_times
from gpp.runtime.worker.parent import worker_environment
from gpp.serialization import check_sealable, seal
from gpp.strategy import Strategy

SPAN_S = 0.6
"""Seconds that the steps of a rehearsal take together, as predicted."""

FEWEST, MOST = 8, 60
"""Steps of a rehearsal."""

LEAST_RATE = FEWEST / SPAN_S
"""Mini-batches per second of a rehearsal: with more time between them it would take too long."""


def profiled(
    cost: Profiled, captured: Captured, graph: OpGraph, cluster: Cluster, optimizer: AbstractOptimizer, largest: int
) -> Profiled:
    """The cost model with the times of the graph's operators: from disk, or measured now.

    Args:
        largest: samples of the largest micro-batch that one device will have.
    """
    device, beside = cluster.devices[0].kind, cost.num_companions(cluster)
    if device == "cpu":
        # The common case needs no torch.
        found = cost.load(graph, cpu_setting(cost.num_threads, optimizer.kind, beside))
        if found and (found.sample_counts[-1] >= largest or captured.batch is not None):
            return cost.add(found)
    from gpp.capture.kept_profile import measured

    return measured(cost, captured, graph, largest=largest, device=device, optimizer=optimizer, num_companions=beside)


def renewed(
    problem: Problem, captured: Captured, engine: AbstractEngine, optimizer: AbstractOptimizer, warn: Callable[[str], None]
) -> Problem:
    """The problem with a profile that holds: the same, or with one that is taken again, which `warn` is told.

    The constants of the machine were measured at the same load, and are forgotten with the profile.
    """
    profile = _profile(problem, engine)
    if profile is None or not profile.spots:
        return problem
    from gpp.capture.kept_profile import measured

    cost, device = problem.cost, problem.cluster.devices[0]
    assert isinstance(cost, Profiled)
    said = list[str]()
    beside, largest = cost.num_companions(problem.cluster), profile.sample_counts[-1]
    found = measured(
        cost, captured, problem.graph, largest=largest, optimizer=optimizer, num_companions=beside, recheck=said.append
    )
    taken = found.profile_of(problem.graph, device)
    if not said or taken is None:
        return problem
    warn(said[0])
    _machine_path(cost, engine, problem.cluster).unlink(missing_ok=True)
    return replace(problem, cost=cost.add(replace(taken, setting=profile.setting)))


def early(cost: object, cluster: Cluster, engine: AbstractEngine) -> Rehearsals | None:
    """Rehearsals whose process starts now, where this machine has not been measured; None elsewhere."""
    kind = cluster.devices[0].kind
    if not (engine.rehearses and isinstance(cost, Profiled) and cost.rehearsals and kind == "cpu"):
        return None
    if known(path := _machine_path(cost, engine, cluster)) is not None:
        return None
    check_sealable(path, "cost.cache_dir")
    found = Rehearsals(worker_environment(cost.num_threads))
    found.start()
    return found


def here(problem: Problem, engine: AbstractEngine) -> Problem:
    """The problem as this machine poses it, where the engine's workers are processes of it.

    They share its cores if they are more. Their fixed costs are the machine's, if those have been measured.
    """
    cluster = _shared(problem.cluster, engine)
    if cluster is not problem.cluster:
        problem = replace(problem, cluster=cluster)
    profile = _profile(problem, engine)
    if profile is None:
        return problem
    problem, profile = _paced(problem, profile)
    costs = known(_machine_path(problem.cost, engine, cluster)) if cluster.devices[0].kind == "cpu" else None
    return problem if costs is None else _on(problem, costs, profile)


def settle(
    problem: Problem,
    plan: Plan,
    strategy: Strategy,
    engine: AbstractEngine,
    *,
    given: bool,
    started: Rehearsals | None,
    job_of: Callable[[Problem, Plan], Job],
    weights: Callable[[], Mapping[str, Any] | WritesItself],
    progress: Progress,
) -> tuple[Problem, Plan]:
    """The problem by times in place, and the plan for it; both as they are where nothing is to be measured.

    Args:
        plan: by what is known so far.
        given: whether the plan is the user's own, which stays.
        started: rehearsals that were started early; they stay open, unless they fail.
        job_of: the whole job of a plan.
        weights: initial weights; called once, if anything is rehearsed.
        progress: is told what is being timed, and if that fails; what was known before stays then.
    """
    profile = _profile(problem, engine)
    if profile is None:
        return problem, plan
    path = _machine_path(problem.cost, engine, problem.cluster)
    # What a host spends on actions of a card overlaps with the card's work.
    unmeasured = problem.cluster.devices[0].kind == "cpu" and known(path) is None
    if not unmeasured and not _to_time(profile, plan):
        return problem, plan
    found = _Settled(problem, profile, strategy, given, None if unmeasured else known(path))
    try:
        with ExitStack() as stack:
            rehearsals = started or stack.enter_context(Rehearsals(worker_environment(found.cost.num_threads)))
            if unmeasured:
                progress.say("timing messages and actions on this machine ...")
                setting = cpu_setting(found.cost.num_threads)
                crowded = problem.cluster.crowded(problem.cluster.num_devices)
                found.costs = measure(rehearsals, setting, shared_memory=_shared_memory(engine), crowded=crowded)
                seal(path, found.costs, "cost.cache_dir")
                found.problem = _on(problem, found.costs, profile)
                plan = found.again(plan)
            return found.rehearsed(plan, rehearsals, job_of, weights, progress.say)
    except WorkerFailed as error:
        if started is not None:
            started.close()
        progress.warn(f"the plan could not be timed in place, so what was known before predicts it: {error}")
        return found.problem, plan


class _Settled:
    """The problem by what has been timed in place so far."""

    def __init__(
        self, problem: Problem, profile: GraphProfile, strategy: Strategy, given: bool, costs: MachineCosts | None
    ) -> None:
        assert isinstance(problem.cost, Profiled)
        self.costs = costs
        self.problem, self.profile, self.strategy, self.given, self.cost = problem, profile, strategy, given, problem.cost

    def again(self, plan: Plan) -> Plan:
        """The plan for the problem as it is now."""
        return plan if self.given else self.strategy.plan(self.problem)

    def seconds(self, plan: Plan) -> float:
        return self.strategy.predict(plan, self.problem, record=False).metrics.iteration_s

    def rehearsed(
        self,
        plan: Plan,
        rehearsals: Rehearsals,
        job_of: Callable[[Problem, Plan], Job],
        weights: Callable[[], Mapping[str, Any] | WritesItself],
        say: Callable[[str], None],
    ) -> tuple[Problem, Plan]:
        """Rehearse plans until the one that follows has been, or there have been enough; the best of them."""
        initial, tried = None, list[Plan]()
        while len(tried) < self.cost.rehearsals and _to_time(self.profile, plan):
            say(f"timing the stages of plan {len(tried) + 1} in place ...")
            initial = initial or weights()
            rate = self.profile.setting.rate
            predicted_s = max(self.seconds(plan), 1.0 / rate if rate else 0.0)
            steps = max(FEWEST, min(MOST, math.ceil(SPAN_S / max(predicted_s, 1e-6))))
            # Operators are timed: what a memory policy adds to a pass would be taken for theirs.
            job = short(job_of(self.problem.with_endless_memory, plan.keeping), steps, rate)
            times = rehearsals.run(job, initial, predicted_s=predicted_s)
            found = stage_times(job, times, self.profile.pass_s)
            self.profile = self.profile.timed(_at_full_amount(self.problem, found, steps))
            if self.costs is not None:
                alone = _on(self.problem, self.costs, replace(self.profile, messages=1.0))
                factor = message_factor(times, sum(end.seconds for end in plan.handled(alone) if end.sends))
                self.profile = replace(self.profile, messages=factor or self.profile.messages)
                self.problem = _on(self.problem, self.costs, self.profile)
            self.problem = replace(self.problem, cost=self.cost.add(self.profile))
            tried.append(plan)
            plan = self.again(plan)
        if tried:
            self.cost.store(self.problem.graph, self.profile)
        # Of those that were timed one may be better than the plan that followed from it.
        timed = [own for own in [plan, *tried] if _timed(self.profile, own)]
        return self.problem, min(timed, key=self.seconds, default=plan)


def _at_full_amount(problem: Problem, stages: Iterable[StageTimes], steps: int) -> list[StageTimes]:
    """Stages timed in place as they would be on full samples, where the samples of the rehearsal's steps made less work."""
    varying = problem.varying
    if varying is None:
        return list(stages)
    seen = [float(amounts.mean()) for amounts in varying.batches[UNTIMED:steps]] or [varying.amount]
    full, own = (replace(problem, varying=varying.at(amount)) for amount in (1.0, statistics.median(seen)))
    out = list[StageTimes]()
    for stage in stages:
        index, (whole, part) = list(stage.ops), (one.op_times(stage.samples, 0) for one in (full, own))
        forward, backward = (
            float(a[index].sum() / b[index].sum()) if b[index].sum() else 1.0
            for a, b in ((whole.forward_s, part.forward_s), (whole.backward_s, part.backward_s))
        )
        out.append(replace(stage, forward_s=stage.forward_s * forward, backward_s=stage.backward_s * backward))
    return out


def _to_time(profile: GraphProfile, plan: Plan) -> bool:
    """Whether a plan is to be rehearsed: not one whose devices run in periods, a pass of whose stages is made on several."""
    return not plan.periodic and not _timed(profile, plan)


def _profile(problem: Problem, engine: AbstractEngine) -> GraphProfile | None:
    """The measured times that may be corrected; None where plans cannot be timed in place."""
    cost, cluster = problem.cost, problem.cluster
    if not (engine.rehearses and isinstance(cost, Profiled) and cost.rehearsals):
        return None
    # A link that the user describes is not this machine's.
    links = set(cluster.wiring.every) or {cluster.intra_node}
    described = cluster.devices[0].kind == "cpu" and links != {LOOPBACK} and problem.overheads == NOTHING
    return None if described else cost.profile_of(problem.graph, cluster.devices[0])


def _paced(problem: Problem, profile: GraphProfile) -> tuple[Problem, GraphProfile]:
    """The problem with stages timed at the rate at which mini-batches come: a pass that follows an idle time takes longer than one
    of a worker that is never idle, whose caches are warm."""
    course, cost = problem.regime.course, problem.cost
    if course is None or (rate := course.rate) is None or not isinstance(cost, Profiled):
        return problem, profile
    setting = replace(profile.setting, rate=max(rate, LEAST_RATE))
    found = cost.load(problem.graph, setting)
    if found is None or found.sample_counts != profile.sample_counts:
        found = replace(profile, setting=setting, in_place=())
    return replace(problem, cost=cost.add(found)), found


def _shared(cluster: Cluster, engine: AbstractEngine) -> Cluster:
    """The cluster, whose devices share this machine's cores where its workers are processes of it and more than those."""
    cores = len(os.sched_getaffinity(0))
    if cluster.devices[0].kind == "cpu" and engine.devices_here(cluster) > 0 and cluster.num_devices > cores:
        return replace(cluster, processors=cores)
    return cluster


def _machine_path(cost: object, engine: AbstractEngine, cluster: Cluster) -> Path:
    assert isinstance(cost, Profiled)
    crowded = _shared(cluster, engine).crowded(cluster.num_devices)
    return machine_path(cost.cache_dir, cpu_setting(cost.num_threads), shared_memory=_shared_memory(engine), crowded=crowded)


def _shared_memory(engine: AbstractEngine) -> bool:
    return bool(engine.worker_settings.get("shared_memory", True))


def _on(problem: Problem, costs: MachineCosts, profile: GraphProfile) -> Problem:
    """The problem with the constants of this machine in place of those that stand for all machines."""
    overheads = costs.overheads(profile.pass_s).with_messages(profile.messages)
    return replace(problem, cluster=costs.cluster(problem.cluster), overheads=overheads)


def _timed(profile: GraphProfile, plan: Plan) -> bool:
    """Whether a profile has times in place for all stages of a plan."""
    return all(stage.devices_per_replica > 1 or profile.knows(stage.ops, stage.samples) for stage in plan.stages)
