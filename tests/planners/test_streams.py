"""Planners of pipelines that do not drain: every planner with every weight policy."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gpp import DoubleBuffer, Even, Link, Naive, PipeDream, PipeOptim, Piper, Plan, SpecTrain, Stash, VerticalSync
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner
from gpp.planners.chains.pipedream_2bw import PipeDream2BW
from gpp.planners.chains.sequential import Sequential
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.schedules.no_flush import NoFlush
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from gpp.strategy import JudgedCandidates, Strategy
from gpp.weights.base import AbstractWeights
from gpp.weights.flush import Flush
from tests.support.bills import peak_bytes
from tests.support.graphs import chain, diamond, two_towers, with_weights
from tests.support.long import thinned
from tests.support.problems import Rate, cluster, random_problem, towers
from tests.support.programs import lower

PLANNERS = (
    Even(),
    Sequential(),
    GraphPipe(colocate="never"),
    PipeDream(),
    Piper(),
    PipeDream2BW(),
)
POLICIES = (
    Stash(),
    DoubleBuffer(),
    *(
        pytest.param(weights, marks=pytest.mark.long)
        for weights in (
            Stash(accumulation=4),
            PipeOptim(offset=1, accumulation=1),
            Naive(),
            Stash(accumulation=1),
            VerticalSync(),
            SpecTrain(),
            SpecTrain(form=2),
            PipeOptim(),
        )
    ),
)
SAME = 1 + 1e-9


def strategy(planner: AbstractPlanner, weights: AbstractWeights) -> Strategy:
    schedule = OneFOneB() if weights.flushes else NoFlush()
    return Strategy(name="test", planner=planner, schedule=schedule, weights=weights)


def problems() -> dict[str, Problem]:
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=200.0)
    small = {"chain": chain(6), "diamond": diamond(), "two_towers": two_towers(3), "towers": towers(3, 2, fork=True)}
    out = {
        name: Problem(graph=with_weights(of, 100), cluster=cluster(4, 5e3, link), cost=Constant(fixed_s=0.1), minibatch_size=16)
        for name, of in small.items()
    }
    return out | {f"random {seed}": random_problem(seed, max_ops=10, max_devices=5) for seed in (1, 4, 9, 12)}


PROBLEMS = problems()


def planned(planner: AbstractPlanner, weights: AbstractWeights, problem: Problem) -> Plan | None:
    """None where nothing fits, or the policy wants more micro-batches than there are."""
    try:
        return strategy(planner, weights).plan(problem)
    except Infeasible:
        return None
    except InvalidConfig as error:
        assert error.field in ("micro-batches in a mini-batch", "cluster.num_devices", "strategy.weights.accumulation")
        return None


def work_s(plan: Plan, problem: Problem) -> float:
    """Device seconds of a mini-batch's passes."""
    b = plan.stages[0].microbatch_size
    once = sum(sum(problem.stage_times(stage.ops, b, stage.devices)) * len(stage.devices) for stage in plan.stages)
    return plan.minibatch_size // b * once


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("weights", POLICIES, ids=repr)
def test_plans_are_valid_fit_and_take_what_is_predicted(planner: AbstractPlanner, weights: AbstractWeights) -> None:
    of, found = strategy(planner, weights), 0
    for name, problem in PROBLEMS.items():
        plan = planned(planner, weights, problem)
        if plan is None:
            continue
        found += 1
        of.check(plan, problem)
        assert plan.minibatch_size == problem.minibatch_size
        held = plan.device_memory(of.posed(problem), {s: stage.in_flight for s, stage in enumerate(plan.stages)})
        assert all(need <= problem.cluster.devices[d].memory_bytes for d, need in held.items()), name
        for s, stage in enumerate(plan.stages):
            # What one version takes, and the versions that the policy holds at this position beyond the first.
            warmup, b = stage.in_flight // stage.microbatch_size - 1, stage.microbatch_size
            assert warmup + 1 == plan.distance_to_sink[s]
            one = peak_bytes(problem, stage.ops, b, len(stage.devices), stage.in_flight)
            more = (weights.copies(plan.position(s)) - 1) * problem.trainable_bytes(stage.ops)
            assert held[stage.devices[0]] == pytest.approx(one + more)
        quick, exact = (of.predict(plan, problem, record=record).metrics for record in (False, True))
        # Where a mini-batch is several micro-batches, an update comes at once in one and is spread over them in the other: it may
        # hide in a stage's idle time or not, so what it takes bounds the difference, up to what is left of filling the pipeline.
        single = plan.position(0).accumulation == 1
        tolerance = 1e-9 * exact.iteration_s if single else 2e-3 * exact.iteration_s + most_update_s(plan, problem)
        assert abs(quick.iteration_s - exact.iteration_s) <= tolerance, (name, quick.iteration_s, exact.iteration_s)
        assert (quick.weight_versions, quick.staleness) == (exact.weight_versions, exact.staleness)
        assert quick.peak_memory_bytes == exact.peak_memory_bytes and quick.max_in_flight_samples == exact.max_in_flight_samples
        for seconds in (quick.iteration_s, exact.iteration_s):
            assert seconds * SAME >= work_s(plan, problem) / problem.cluster.num_devices, name
    assert found >= 2


def most_update_s(plan: Plan, problem: Problem) -> float:
    """The longest sum and update of a stage."""
    out = 0.0
    for stage in plan.stages:
        trainable = problem.trainable_bytes(stage.ops)
        update = problem.cost.update_s(trainable, problem.cluster.devices[stage.devices[0]])
        out = max(out, update + problem.cluster.allreduce_s(trainable, stage.devices))
    return out


@pytest.mark.parametrize("seed", thinned(range(20), 6))
@pytest.mark.parametrize("weights", [Stash(), DoubleBuffer()], ids=lambda w: w.name)
def test_a_candidates_bound_holds_without_drains(weights: AbstractWeights, seed: int) -> None:
    """What the searches leave out by it could not have won: nothing fills or drains in a steady step."""
    problem = random_problem(seed, max_ops=10, max_devices=6)
    of = strategy(Even(), weights)
    rng = random.Random(seed)
    for asked in of._questions(of.posed(problem))[:1]:
        assessor = Assessor(StageCosts(asked))
        n, most = problem.graph.num_ops, min(problem.graph.num_ops, problem.cluster.num_devices)
        for b in asked.microbatch_sizes():
            cuts = [0, *sorted(rng.sample(range(1, n), rng.randint(1, most) - 1)), n]
            parts = [(((1 << j) - 1) ^ ((1 << i) - 1), 1) for i, j in pairwise(cuts)]
            candidate = assessor.assess(parts, b, chain=True)
            if isinstance(candidate, Candidate):
                plan = make_plan(asked, "x", candidate.parts, b, chain=True, ordered=True, placement=candidate.placement)
                seconds = of._judge(plan, problem, asked, JudgedCandidates()).metrics.iteration_s
                # Few versions of the weights are assumed first, so what fits here may lack memory, and then its step is infinite.
                assert seconds == float("inf") or 0.3 * seconds < candidate.bound_s <= seconds * SAME


def heavy(memory_bytes: float) -> Problem:
    """Eight blocks, whose weights are what takes memory: 100 bytes each, and as many for its gradients."""
    return Problem(
        graph=with_weights(chain(8, saved=0.0), 100), cluster=cluster(4, memory_bytes), cost=Constant(), minibatch_size=16
    )


def blocks_of(plan: Plan) -> list[int]:
    return [len(stage.ops) for stage in plan.stages]


def test_versions_of_the_weights_change_what_fits() -> None:
    """Two blocks on each of four devices: the first keeps four versions under stashing, 1000 bytes, and two under 2BW."""
    problem = heavy(900.0)
    chains, shapes = Sequential(replication=False), PipeDream2BW(replication=False)
    flush = strategy(chains, Flush()).plan(problem)
    assert blocks_of(flush) == [2, 2, 2, 2]
    for planner in (chains, shapes):
        plan = strategy(planner, DoubleBuffer()).plan(problem)
        assert blocks_of(plan) == [2, 2, 2, 2]
    stashed = replace(
        flush, stages=tuple(replace(s, microbatch_size=16, in_flight=16 * (4 - i)) for i, s in enumerate(flush.stages))
    )
    with pytest.raises(Infeasible, match="stage 0 needs"):
        strategy(chains, Stash(accumulation=1)).check(stashed, problem)
    # It knows each stage's place in the pipeline, and so its versions: the first device gets one block.
    plan = strategy(shapes, Stash(accumulation=1)).plan(problem)
    assert blocks_of(plan)[0] == 1 and plan.depth == 4
    held = strategy(shapes, Stash(accumulation=1)).predict(plan, problem).metrics
    assert list(held.weight_versions.values()) == [4, 3, 2, 1] and max(held.peak_memory_bytes.values()) <= 900
    # The others assume the most versions everywhere, if fewer do not do.
    with pytest.raises(Infeasible, match="lacks"):
        strategy(chains, Stash(accumulation=1)).plan(problem)
    assert strategy(chains, Stash(accumulation=1)).plan(heavy(1100.0)).depth == 4


@pytest.mark.parametrize("planner", PLANNERS[1:], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("weights", thinned([DoubleBuffer(), Stash(), SpecTrain(form=2)], 3), ids=lambda w: w.name)
def test_what_lacks_is_named_with_what_would_fit(planner: AbstractPlanner, weights: AbstractWeights) -> None:
    of, problem = strategy(planner, weights), heavy(200.0)
    with pytest.raises(Infeasible) as caught:
        of.plan(problem)
    enough = float(caught.value.remedy.split("memory_bytes=")[1].split(")")[0])
    of.plan(heavy(enough * 1.001))


def test_an_imposed_size_that_does_not_fit_is_replaced_by_one_that_divides_the_mini_batch() -> None:
    """9 samples on 3 devices: planners see mini-batches of 108, which 2 divides; 3 do not fit."""
    problem = Problem(graph=chain(6, saved=100.0), cluster=cluster(3, 1400.0), cost=Constant(), minibatch_size=9, microbatch_size=9)
    with pytest.raises(Infeasible) as caught:
        strategy(Even(), DoubleBuffer()).plan(problem)
    size = int(caught.value.remedy.split("microbatch_size=")[1])
    assert size == 1 and strategy(Even(), DoubleBuffer()).plan(replace(problem, microbatch_size=size))


def test_replicas_pay_for_every_update() -> None:
    """One micro-batch a mini-batch: an all-reduce over a slow link comes with each, so the pipeline is deep instead."""
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=50.0)
    problem = Problem(graph=with_weights(chain(8), 1000), cluster=cluster(4, link=slow), cost=Constant(), minibatch_size=4)
    for planner in PLANNERS:
        plan = strategy(planner, Stash()).plan(problem)
        assert all(len(stage.devices) == 1 for stage in plan.stages) and plan.depth == 4, type(planner).__name__


def test_over_nodes_updates_count_every_time_too() -> None:
    """PipeDream's recursion over nodes, with an all-reduce between them that takes as long as a mini-batch."""
    fast, slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e6), Link(latency_s=0.0, bandwidth_bytes_per_s=100.0)
    problem = Problem(
        graph=with_weights(chain(8), 1000), cluster=cluster(4, 1e15, fast, slow, 2), cost=Constant(), minibatch_size=4
    )
    plan = strategy(PipeDream(), Stash()).plan(problem)
    nodes = problem.cluster.nodes
    assert all(len({nodes[d] for d in stage.devices}) == 1 for stage in plan.stages)


@pytest.mark.parametrize("seed", [2, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (3, 8))])
@pytest.mark.parametrize("weights", [Naive(), Stash()], ids=lambda w: w.name)
def test_the_steady_pace_is_that_of_a_long_pass(weights: AbstractWeights, seed: int) -> None:
    """Uneven stages: a sink that is faster than what feeds it runs ahead for many mini-batches before its pace shows it."""
    problem = replace(random_problem(seed, max_ops=9, max_devices=5), cost=Rate(flop_per_s=2e11))
    of = strategy(Even(), weights)
    plan = planned(Even(), weights, problem)
    if plan is None:
        return
    program = of._program(plan, problem)
    paced = long_pass_s(of, plan, problem, 20 * program.minibatches)
    assert of.predict(plan, problem).metrics.iteration_s == pytest.approx(paced, rel=2e-3)


def long_pass_s(of: Strategy, plan: Plan, problem: Problem, minibatches: int) -> float:
    """Seconds of a mini-batch in the second half of a pass, less its drain, which is the same for both."""
    ends = []
    for count in (minibatches, 2 * minibatches):
        program = lower(plan, problem.graph, of.schedule, minibatches=count)
        costs = Costs.of(program, plan, of.posed(problem))
        ends.append(max(LongestPath.of(program.waits, costs.seconds, costs.late).times().free_s[: plan.num_devices]))
    return (ends[1] - ends[0]) / minibatches


def test_the_accumulation_is_the_planners_choice_by_prediction() -> None:
    given = Problem(graph=chain(8), cluster=cluster(4), cost=Constant(), minibatch_size=16)
    took = {}
    for count in (None, 1, 2, 16):
        of_count = strategy(Sequential(replication=False), Stash(accumulation=count))
        plan = of_count.plan(given)
        took[count] = of_count.predict(plan, given, record=False).metrics.iteration_s
        if count is not None:
            assert {stage.microbatch_size for stage in plan.stages} == {16 // count}
    # One micro-batch of everything goes through the pipeline while all other devices wait for the next mini-batch's.
    assert took[None] <= min(took[1], took[2], took[16]) * SAME
    dear = replace(given, cost=Constant(fixed_s=0.5))
    chosen = strategy(Sequential(replication=False), Stash()).plan(dear)
    assert chosen.stages[0].microbatch_size > 1
