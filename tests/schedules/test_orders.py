"""Orders that need more than a rule for each stage: list schedules, folded plans, and what constraint programming proves of
them."""

import itertools
import random
from dataclasses import replace

import pytest

from gpp import DualPipeV, Even, GraphPipe, Link, OneFOneB, OptimalOrder, Plan, Strategy, VHalf, VMin, ZeroBubbleV
from gpp.analysis.explain.order import order_gap
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.split_backward.schedules.zero_bubble_auto import ZeroBubbleAuto, rules
from gpp.plan.build import make_plan
from gpp.planners.chains.sequential import Sequential
from gpp.program.held import order_peak
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.exact import bound_s, prove, value_of
from gpp.schedules.flow import Flow, Work
from gpp.schedules.folded import folded, interleaved_groups, v_pairs
from gpp.schedules.greedy import greedy
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from tests.oracle.orders import Pipeline, earliest, least
from tests.support.graphs import chain, graph, problem, two_towers, with_weights
from tests.support.long import thinned

SHAPES = [((0, 1),), ((0, 1), (1, 2)), ((0, 2), (1, 2)), ((0, 1), (0, 2))]


def split(of: OpGraph, seconds: list[tuple[float, float, float]], held: list[tuple[float, float]]) -> OpGraph:
    """Operators with forwards, both halves of a backward, and bytes in full and late; nothing else takes memory."""
    ops = [
        replace(op, forward_flops=f, backward_flops=i + w, weight_flops=w, saved_bytes=full, late_bytes=late)
        for op, (f, i, w), (full, late) in zip(with_weights(of).ops, seconds, held, strict=True)
    ]
    params = (replace(param, num_bytes=0) for param in with_weights(of).params)
    tensors = (replace(tensor, bytes_per_sample=0.0) for tensor in of.tensors)
    return replace(of, ops=tuple(ops), params=tuple(params), tensors=tuple(tensors))


def equal(of: OpGraph) -> OpGraph:
    """Passes of a second each that hold a byte in full and late."""
    return split(of, [(1.0, 1.0, 1.0)] * of.num_ops, [(1.0, 1.0)] * of.num_ops)


def posed(pipeline: Pipeline) -> tuple[Problem, Plan]:
    """The oracle's pipeline as a problem and a plan."""
    of = split(graph(len(pipeline.seconds), list(pipeline.edges)), list(pipeline.seconds), list(pipeline.held))
    made = problem(of, of.num_ops, pipeline.micro, microbatch_size=1, memory_bytes=pipeline.room)
    link = Link(latency_s=pipeline.message_s, bandwidth_bytes_per_s=1e30)
    made = replace(made, cluster=replace(made.cluster, intra_node=link))
    return made, make_plan(made, "test", [(1 << op, 1) for op in range(of.num_ops)], 1)


def flow_of(schedule: AbstractSchedule, made: Problem, plan: Plan) -> Flow:
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    work = strategy.work(plan, made, plan.minibatch_size)
    return schedule.flow(replace(work, bills=plan.bills(strategy.posed(made))))


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_what_is_proven_is_the_best_of_all_orders(seed: int) -> None:
    """Period and end, against every order of tiny pipelines; closed forms and list schedules lie on the right side of them."""
    rng = random.Random(seed)
    edges = SHAPES[seed % len(SHAPES)]
    count = 1 + max(itertools.chain(*edges))
    full = rng.choice([1.0, 2.0])
    pipeline = Pipeline(
        edges=edges,
        micro=3 if count == 2 else 2,
        seconds=tuple((rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)) for _ in range(count)),
        message_s=rng.choice([0.0, 0.5]),
        held=((full, rng.choice([0.5, 1.0]) * full),) * count,
        room=rng.choice([1.0, 1.5, 2.0, 9.0]) * full,
    )
    made, plan = posed(pipeline)
    flow = flow_of(ZeroBubbleAuto(cap=None), made, plan)
    orders = [found for rule in rules(flow.distance) if (found := greedy(flow, rule)) is not None]
    for aim, best in zip(("period", "end"), least(pipeline), strict=True):
        values = [value_of(flow, order, aim) for order in orders]
        found = prove(flow, orders[values.index(min(values))], aim, 10.0)
        assert found.closed and found.bound_s == pytest.approx(best)
        assert value_of(flow, found.by_lane, aim) == pytest.approx(best)
        assert bound_s(flow, aim) <= best * (1 + 1e-9) and min(values) >= best * (1 - 1e-9)
        for by_lane in (*orders, found.by_lane):
            assert max(flow.peaks(by_lane)) <= pipeline.room * (1 + 1e-9)


@pytest.mark.parametrize(("edges", "device_of"), [([(0, 1), (1, 2)], (0, 1, 0)), ([(0, 2), (1, 2)], (0, 0, 1))])
def test_what_is_proven_of_devices_with_several_stages_is_the_best(
    edges: list[tuple[int, int]], device_of: tuple[int, ...]
) -> None:
    """The end of a step of one micro-batch, against every order of the devices."""
    rng = random.Random(1)
    seconds = [(float(rng.randint(1, 4)), float(rng.randint(1, 4)), float(rng.randint(1, 3))) for _ in device_of]
    of = split(graph(3, edges), seconds, [(1.0, 1.0)] * 3)
    made = problem(of, 2, 1, microbatch_size=1)
    made = replace(made, cluster=replace(made.cluster, intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)))
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(3)], 1, placement=[(device,) for device in device_of])
    flow = flow_of(ZeroBubbleAuto(cap=None), made, plan)
    found = next(order for rule in rules(flow.distance) if (order := greedy(flow, rule)) is not None)
    proven, best = prove(flow, found, "end", 10.0), earliest(edges, seconds, device_of)
    assert proven.closed and proven.bound_s == pytest.approx(best)
    assert value_of(flow, proven.by_lane, "end") == pytest.approx(best)


@pytest.mark.parametrize(("cap", "beyond"), [(1.0, 7.0), (2.0, 0.0)])
def test_auto_reaches_the_published_bubbles_of_equal_passes(cap: float, beyond: float) -> None:
    """(D - 1)(F + I - W) in the memory of 1F1B, and nothing in twice as much; the program holds no more, by its order."""
    made = problem(equal(chain(8)), 8, 16, microbatch_size=1)
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(8)], 1)
    strategy = Strategy(name="test", planner=Even(), schedule=ZeroBubbleAuto(cap=cap))
    metrics = strategy.predict(plan, made).metrics
    assert metrics.iteration_s == pytest.approx(3 * 16 + beyond)
    assert max(metrics.peak_memory_bytes.values()) <= 8 * cap
    memories = {s: bill.memory for s, bill in enumerate(plan.bills(strategy.posed(made)))}
    for device, order in strategy.orders(plan, made, 16).items():
        assert order_peak(order, {device: memories[device]}) == metrics.peak_memory_bytes[device]


@pytest.mark.parametrize("towers", [False, True])
def test_the_end_of_a_step_is_proven(towers: bool) -> None:
    """Chains of 8 stages and four towers of two with a join, 16 micro-batches, in the memory of 1F1B: as late as H1 ends at the
    least."""
    edges = [(2 * t, 2 * t + 1) for t in range(4)] + [(2 * t + 1, 8) for t in range(4)]
    of = graph(9, edges) if towers else chain(8)
    made = problem(equal(of), of.num_ops, 16, microbatch_size=1)
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(of.num_ops)], 1)
    schedule = OptimalOrder(objective="end")
    flow = flow_of(schedule, made, plan)
    work = Work(plan=plan, graph=made.graph, num_samples=16, bills=plan.bills(made), cluster=made.cluster)
    by_lane = flow.by_lane(schedule.orders(work))
    assert value_of(flow, by_lane, "end") == bound_s(flow, "end") == (50.0 if towers else 55.0)


def test_a_gap_below_zero_is_seen() -> None:
    """A bound that is wrong would show: what is said to be faster than it has a negative gap."""
    made = problem(equal(chain(4)), 4, 8, microbatch_size=1)
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(4)], 1)
    strategy = Strategy(name="test", planner=Even(), schedule=ZeroBubbleAuto())
    found = order_gap(plan, made, strategy, strategy.predict(plan, made).metrics.iteration_s, 0.0)
    below = order_gap(plan, made, strategy, 20.0, 0.0)
    assert found is not None and below is not None
    assert found.gap >= -1e-9 and below.gap == pytest.approx(20.0 / found.bound_s - 1) and below.gap < 0


def test_planners_ask_the_draft_of_a_schedule_that_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each candidate took minutes; a plan's own order is searched when it is lowered."""
    asked: list[object] = []
    monkeypatch.setattr(
        "gpp.schedules.exact.prove", lambda flow, hint, aim, limit: asked.append(flow) or prove(flow, hint, aim, limit)
    )
    made = problem(equal(chain(4)), 2, 4, microbatch_size=1)
    strategy = Strategy(name="test", planner=GraphPipe(), schedule=OptimalOrder(limit=0.1))
    plan = strategy.plan(made)
    assert not asked
    strategy.lower(plan, made)
    assert len(asked) == 1


@pytest.mark.parametrize(("depth", "k", "count"), [(4, 2, 8), (4, 2, 12), (2, 4, 6), (4, 3, 8)])
def test_interleaving_fills_and_drains_k_times_as_fast(depth: int, k: int, count: int) -> None:
    """(D - 1)(F + B) / k where the devices are a multiple of the micro-batches, by the published placement."""
    made = problem(chain(depth * k), depth, count, microbatch_size=1)
    strategy = Strategy(name="test", planner=Even(), schedule=Interleaved1F1B(k=k))
    plan = strategy.plan(made)
    assert [stage.devices for stage in plan.stages] == [(s % depth,) for s in range(depth * k)]
    metrics = strategy.predict(plan, made).metrics
    # With passes of 3 s a stage of k operators would take 3 k.
    assert metrics.iteration_s == pytest.approx(3 * k * count + 3 * k * (depth - 1) / k)


@pytest.mark.parametrize(
    ("schedule", "share", "bubble"),
    [(ZeroBubbleV(), 1.0, 0.0), (DualPipeV(), 1.0, 1 / 6), (VHalf(), 1 / 2, 0.65), (VMin(), 1 / 3, 0.7)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("depth", [3, 4])
def test_v_schedules_hold_their_share(schedule: AbstractSchedule, share: float, bubble: float, depth: int) -> None:
    """Of the 2 D halves of a stage that 1F1B holds, up to three more; and their part of 1F1B's bubble, 6 (D - 1)."""
    made = problem(equal(chain(2 * depth)), depth, 2 * depth, microbatch_size=1)
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    plan = strategy.plan(made)
    assert [stage.devices for stage in plan.stages] == [(min(s, 2 * depth - 1 - s),) for s in range(2 * depth)]
    metrics = strategy.predict(plan, made).metrics
    extra = {ZeroBubbleV: 0.0, DualPipeV: 1.0}.get(type(schedule), 3.0)
    assert max(metrics.peak_memory_bytes.values()) <= 2 * depth * share + extra
    assert metrics.iteration_s - 12 * depth <= bubble * 6 * (depth - 1) + 1e-9
    strategy.lower(plan, made)  # checked


def test_stages_are_put_together_by_the_cheapest_matching() -> None:
    """Against all matchings, for distances as they come in graphs: every one from 1 to the depth."""
    rng = random.Random(0)
    for _ in range(60):
        depth = rng.randint(2, 6)
        distance = [*range(1, depth + 1), *(rng.randint(1, depth) for _ in range(rng.choice([0, 2]) + depth % 2))]
        every, seconds = list(matchings(tuple(range(len(distance))))), [rng.random() for _ in distance]

        def bent(pairs: list[tuple[int, ...]], h: list[int] = distance, d: int = depth) -> float:
            return sum(abs(h[a] + h[b] - d - 1) for a, b in pairs)

        def apart(pairs: list[tuple[int, ...]], h: list[int] = distance, d: int = depth) -> float:
            return sum(abs(abs(h[a] - h[b]) - d / 2) for a, b in pairs)

        assert bent(v_pairs(distance, seconds)) == min(map(bent, every))
        assert apart(interleaved_groups(distance, seconds, 2)) == min(map(apart, every))


def matchings(left: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """All ways to pair up."""
    if not left:
        return [[]]
    out = []
    for i in range(1, len(left)):
        out += [[(left[0], left[i]), *rest] for rest in matchings(left[1:i] + left[i + 1 :])]
    return out


def test_orders_on_a_graph_run() -> None:
    """Two towers, whose stages do not all pair up: every schedule has an order that runs, in the memory that it says."""
    of = equal(two_towers(3))
    of = replace(of, ops=(*of.ops, replace(of.ops[-1], name="head", params=())), tensors=of.tensors)
    joined = replace(of.tensors[-1], name="last", producer=6, consumers=(7,))
    made = problem(replace(of, tensors=(*of.tensors, joined)), 4, 8, microbatch_size=1)
    for schedule in (Interleaved1F1B(), ZeroBubbleV(), VHalf(), VMin()):
        strategy = Strategy(name="test", planner=Even(), schedule=schedule)
        plan = strategy.plan(made)
        strategy.lower(plan, made)
        assert len(plan.stages) == 2 * plan.num_devices


def test_a_candidate_without_an_order_does_not_end_the_search() -> None:
    """Most candidates have no order within the cap: the search goes on to those that have one."""
    made = problem(equal(chain(6)), 2, 8, memory_bytes=8.0)
    strategy = Strategy(name="test", planner=Sequential(), schedule=ZeroBubbleAuto(cap=0.5))
    plan = strategy.plan(made)
    strategy.check(plan, made)
    assert [stage.microbatch_size for stage in plan.stages] == [1, 1]


def test_refusals() -> None:
    made = problem(equal(chain(8)), 8, 16, microbatch_size=1)
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(8)], 1)

    def refused(schedule: AbstractSchedule) -> Strategy:
        return Strategy(name="test", planner=Even(), schedule=schedule)

    with pytest.raises(Infeasible, match=r"strategy.schedule.cap=0.1 .*one micro-batch.* that fits: strategy.schedule.cap=0.125"):
        refused(ZeroBubbleAuto(cap=0.1)).predict(plan, made)
    with pytest.raises(InvalidConfig, match=r"max_tasks=300: the step has 384 passes"):
        refused(OptimalOrder(max_tasks=300)).predict(plan, made)
    with pytest.raises(InvalidConfig, match=r"strategy.schedule.k=1: .*at least 2. Fix: set strategy.schedule.k=2"):
        Interleaved1F1B(k=1)
    with pytest.raises(Infeasible, match=r"3 stages are no multiple of the 2"):
        folded(make_plan(problem(chain(3), 3, 8), "test", [(1, 1), (2, 1), (4, 1)], 1), [1.0] * 3, 2, 2, back=True)
    for schedule in (ZeroBubbleV(), Interleaved1F1B()):
        with pytest.raises(InvalidPlan, match=r"device 0 runs stages \[0\], and the schedule needs 2"):
            refused(schedule).predict(plan, made)
    few = problem(equal(chain(8)), 4, 4, microbatch_size=1)
    why = r"schedule=dualpipe_v needs two micro-batches for each of the V's 4 devices, and a mini-batch of 4 has 4"
    with pytest.raises(Infeasible, match=why):
        refused(DualPipeV()).plan(few)
    v = replace(ZeroBubbleV().arranged(refused(ZeroBubbleV()).plan(few), [1.0] * 8, 4), minibatch_size=16)
    sixteen = replace(few, minibatch_size=16)
    with pytest.raises(InvalidPlan, match=r"a mini-batch of 4 has 4.*Fix: .*zero_bubble_v"):
        refused(DualPipeV()).predict(replace(v, minibatch_size=4), few)
    apart = tuple(replace(stage, devices=devices) for stage, devices in zip(v.stages, [(0,), (1,), (2,), (3,)] * 2, strict=True))
    with pytest.raises(InvalidPlan, match=r"pair up to a V of 8, and \[0, 4\] of device 0 do not"):
        refused(DualPipeV()).predict(replace(v, stages=apart), sixteen)


def test_dualpipe_takes_the_micro_batches_that_it_needs() -> None:
    """Where the planner chooses their size, sizes with too few of them are no candidates."""
    made = problem(equal(chain(4)), 2, 16)
    plan = Strategy(name="test", planner=Even(), schedule=DualPipeV()).plan(made)
    assert 16 // plan.stages[0].microbatch_size >= 4


@pytest.mark.parametrize(
    ("schedule", "devices", "message"),
    [
        (Interleaved1F1B(k=9), 2, r"schedule=interleaved_1f1b: a device would run 9 stages, and there are 8 operators"),
        (Interleaved1F1B(k=3), 3, r"num_devices=3: .*makes 3 stages for each device, and 8 operators are enough for 2"),
        (ZeroBubbleV(), 5, r"num_devices=5: .*makes 2 stages for each device.* Fix: set cluster.num_devices=4"),
    ],
)
def test_more_stages_than_operators_are_refused(schedule: AbstractSchedule, devices: int, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Strategy(name="test", planner=Even(), schedule=schedule).plan(problem(equal(chain(8)), devices, 16))


def test_a_frozen_stage_has_forwards_only() -> None:
    """Nothing is differentiated before the first trained operator, and what has no weights is not split."""
    of = equal(chain(4))
    params = (replace(of.params[0], trainable=False), *of.params[1:])
    frozen = replace(of.ops[0], backward_flops=0.0, weight_flops=0.0)
    ops = (frozen, of.ops[1], replace(of.ops[2], params=()), of.ops[3])
    first = replace(of.tensors[0], differentiable=False)
    of = replace(of, params=params, ops=ops, tensors=(first, *of.tensors[1:]))
    made = problem(of, 4, 4, microbatch_size=1)
    plan = make_plan(made, "test", [(1 << op, 1) for op in range(4)], 1)
    kinds = [
        {task.kind for task in order}
        for order in Strategy(name="test", planner=Even(), schedule=ZeroBubbleAuto()).orders(plan, made, 4).values()
    ]
    assert kinds == [{"F"}, {"F", "I", "W"}, {"F", "B"}, {"F", "I", "W"}]
    whole = Strategy(name="test", planner=Even(), schedule=OneFOneB()).predict(plan, made).metrics.iteration_s
    assert Strategy(name="test", planner=Even(), schedule=ZeroBubbleAuto()).predict(plan, made).metrics.iteration_s <= whole
