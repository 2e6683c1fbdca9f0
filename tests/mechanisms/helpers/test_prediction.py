"""The steady state of plans with helpers, against a run of every task of many micro-batches."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from gpp import LayerPipe, Link, NoFlush, Plan, Stash, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.helpers.stage import helpers_of
from tests.oracle.passes import ends_of
from tests.support.graphs import chain, cluster, with_weights

MICROBATCHES = 90


def layers(seconds: list[tuple[float, float, float]]) -> OpGraph:
    """A chain of layers of so many seconds forward, for their inputs' gradients and for their weights', a sample."""
    graph = with_weights(chain(len(seconds)))
    return replace(
        graph,
        ops=tuple(
            replace(op, forward_flops=f, backward_flops=i + w, weight_flops=w, late_bytes=2.0)
            for op, (f, i, w) in zip(graph.ops, seconds, strict=True)
        ),
    )


def strategy(intra: str = "neighbour", accumulation: int = 1) -> Strategy:
    return Strategy(
        name="layerpipe",
        planner=LayerPipe(intra=intra),  # pyright: ignore[reportArgumentType]
        schedule=NoFlush(),
        weights=Stash(accumulation=accumulation),
    )


def random_seconds(rng: random.Random) -> list[tuple[float, float, float]]:
    def one() -> float:
        return rng.choice([0.5, 1.0, 2.0, rng.uniform(0.2, 3.0)])

    return [(one(), one() if layer else 0.0, one()) for layer in range(rng.randint(2, 7))]


def period_of(plan: Plan, seconds: list[tuple[float, float, float]]) -> float:
    """Seconds a micro-batch of a run in which every device has its tasks by (period, kind, stage), each as soon as it can.

    A forward of micro-batch j waits for the update of the micro-batch that is `in_flight` before it: that is the delay's promise.
    """
    stages = range(len(plan.stages))
    device = [stage.devices[0] for stage in plan.stages]
    took = [[sum(seconds[op][half] for op in stage.ops) for half in range(3)] for stage in plan.stages]
    back = dict.fromkeys(stages, 0)  # periods from the stage's forward to its own part of I
    for s in reversed(stages):
        for t in plan.successors[s]:
            ways = [2 * (device[s] != device[t])]
            ways += [(device[s] != device[t]) + 1 + (helper != device[s]) for helper, _ in helpers_of(plan.stages[t]).input_share]
            back[s] = max(back[s], back[t] + max(ways))
    first = {s: sum(device[i] != device[i + 1] for i in range(s)) for s in stages}
    tasks = defaultdict(list)
    for s, stage in enumerate(plan.stages):
        shares = helpers_of(stage).input_share
        parts = [(device[s], 1.0 - sum(share for _, share in shares), 0), *((d, x, 1) for d, x in shares)]
        for m in range(MICROBATCHES):
            tasks[device[s]].append((m + first[s], 0, s, m, ("F", s, m), took[s][0]))
            for number, (where, share, lag) in enumerate(parts):
                at = m + first[s] + back[s] + lag
                tasks[where].append((at, 1, -s, m, ("I", s, m, number), share * took[s][1]))
            (helper,) = stage.adding or (device[s],)
            at = m + first[s] + back[s] + (helper != device[s])
            tasks[helper].append((at, 2, -s, m, ("W", s, m), took[s][2]))
    seconds_of = {key: lasts for own in tasks.values() for *_, key, lasts in own}

    def needs(key: tuple) -> list[tuple[tuple, float]]:
        kind, s, m = key[:3]
        before = [("F", t, m) for t in plan.predecessors[s]] if kind == "F" else [("F", s, m)]
        if kind == "F" and m >= plan.stages[s].in_flight:
            before.append(("W", s, m - plan.stages[s].in_flight))
        for t in plan.successors[s] if kind != "F" else ():
            before += [("I", t, m, number) for number in range(1 + len(helpers_of(plan.stages[t]).input_share))]
        return [(each, 0.0) for each in before]

    end = ends_of([[key for *_, key, _ in sorted(own)] for own in tasks.values()], needs, seconds_of.__getitem__)
    assert end, "tasks wait for each other"
    # The middle, where the pipeline is full; the slowest stage, since others may still get ahead of it.
    low, high = MICROBATCHES // 3, 2 * MICROBATCHES // 3
    return max((end["W", s, high] - end["W", s, low]) / (high - low) for s in stages)


@pytest.mark.parametrize("intra", ["neighbour", "anywhere"])
def test_a_run_of_all_tasks_at_the_stated_delays_takes_the_predicted_period(intra: str) -> None:
    rng, seen = random.Random(7), 0
    for _ in range(40):
        seconds = random_seconds(rng)
        problem = Problem(graph=layers(seconds), cluster=cluster(rng.randint(2, 6)), cost=Constant(), minibatch_size=1)
        of = strategy(intra)
        plan = of.plan(problem)
        if plan.periodic:
            seen += 1
            assert period_of(plan, seconds) == pytest.approx(of.predict(plan, problem).metrics.iteration_s, rel=1e-6), plan
    assert seen > 15


def test_messages_count_where_they_take_longer_than_the_work() -> None:
    seconds = [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)]
    problem = Problem(graph=layers(seconds), cluster=cluster(2), cost=Constant(), minibatch_size=1)
    of = strategy()
    plan = of.plan(problem)
    slow = replace(problem, cluster=replace(problem.cluster, intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=0.1)))
    assert plan.periodic and of.predict(plan, problem).metrics.iteration_s == pytest.approx(4.0)
    predicted = of.predict(plan, slow).metrics
    # A byte takes ten seconds; a link carries one tensor of one byte and what a helper gets at least.
    assert predicted.iteration_s >= 20.0 and predicted.communication_bytes > 2


def test_sums_with_helpers_and_updates_come_once_a_minibatch() -> None:
    seconds = [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)]
    whole = Problem(graph=layers(seconds), cluster=cluster(2), cost=Constant(), minibatch_size=4, microbatch_size=4)
    cut = replace(whole, microbatch_size=1)
    found = [(of := strategy(accumulation=4 // b)).predict(of.plan(p), p) for p, b in ((whole, 4), (cut, 1))]
    assert found[0].metrics.iteration_s == pytest.approx(found[1].metrics.iteration_s) == pytest.approx(16.0)
    kinds = [event.kind for event in found[1].events]
    assert kinds.count("F") == 4 * len({event.stage for event in found[1].events if event.kind == "F"})
    assert max(event.end_s for event in found[1].events) <= found[1].metrics.iteration_s * (1 + 1e-9)
