"""Streams of requests: the simulator beside a clock that ticks, the emulated devices beside the simulator, and the bill."""

import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from gpp import SGD, Cluster, Even, GraphPipe, Link, Plan, Sequential, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.cost.stage import StageCost
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidPlan
from gpp.graph.captured import Captured
from gpp.graph.coarsen.groups import summed
from gpp.graph.forward_only import forward_only
from gpp.graph.op_graph import Input, Op, OpGraph, Param, Tensor
from gpp.mechanisms.helpers.stage import Helpers
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.serving.course import Arrivals, Requests, requests_of
from gpp.mechanisms.serving.emulated import EmulatedServer
from gpp.mechanisms.serving.planning import Stream, scored, serve
from gpp.mechanisms.serving.stream import check_served, places, stream_of
from gpp.plan.build import make_plan
from gpp.program.program import Program, reduce_groups
from gpp.runtime.job import Job, assemble
from gpp.schedules.forward_only import ForwardOnly
from tests.oracle import requests
from tests.support import inprocess
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.graphs import DEVICE, two_towers
from tests.support.problems import Rate
from tests.support.problems import cluster as one_cluster

STRATEGY = Strategy(name="even", planner=Even(), schedule=ForwardOnly())


def random_stream(seed: int) -> tuple[Problem, Plan, list[tuple[int, int]]]:
    """A graph of stages on a device each, all times whole seconds; (source, destination) of each edge."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    edges = sorted({(rng.randrange(j), j) for j in range(1, count) for _ in range(2)})
    consumers: dict[int, list[int]] = {}
    for a, b in edges:
        consumers.setdefault(a, []).append(b)
    graph = OpGraph(
        name="test",
        ops=tuple(Op(name=f"op{i}", forward_flops=float(rng.randint(1, 6))) for i in range(count)),
        tensors=tuple(
            Tensor(name=f"t{a}", producer=a, consumers=tuple(bs), bytes_per_sample=float(rng.randint(1, 5)))
            for a, bs in consumers.items()
        ),
    )
    link = Link(latency_s=float(rng.randint(0, 3)), bandwidth_bytes_per_s=1.0)
    devices: Cluster = replace(one_cluster(count, link=link), devices=(DEVICE,) * count)
    requests_, per_request = rng.randint(3, 8), rng.choice([1, 1, 2, 3])
    rate = rng.choice([None, 0.1, 0.25])
    problem = Problem(
        graph=forward_only(graph),
        cluster=devices,
        cost=Constant(),
        minibatch_size=per_request,
        regime=Regime(course=Requests(buffers=rng.randint(1, 3), arrivals=Arrivals(requests=requests_, rate=rate))),
    )
    return problem, plan_of(problem), edges


def plan_of(problem: Problem) -> Plan:
    """A stage and a device for each operator, one sample at a time."""
    return make_plan(problem, "each", [(1 << i, 1) for i in range(problem.graph.num_ops)], 1)


def program_of(problem: Problem, plan: Plan) -> Program:
    return STRATEGY.lower(plan, problem)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_begins_and_ends_as_by_a_clock_that_ticks(seed: int) -> None:
    problem, plan, edges = random_stream(seed)
    stream = Stream(program_of(problem, plan), plan, problem)
    came = requests_of(problem.regime.course).arrivals.times_s()
    found = [stream.request(at) for at in came]
    bytes_of = {t.producer: round(t.bytes_per_sample) for t in problem.graph.tensors}
    latency = round(problem.cluster.link(0, 1).latency_s)
    expected = requests.ends(
        [round(op.forward_flops) for op in problem.graph.ops],
        [requests.Edge(a, b, bytes_of[a], latency) for a, b in edges],
        requests_of(problem.regime.course).buffers,
        [round(at) for at in came],
        problem.minibatch_size,
    )
    assert found == expected


@pytest.mark.parametrize("writes", [True, False])
def test_whoever_makes_an_answer_writes_it(writes: bool) -> None:
    """Two operators of 2 and 1 seconds a sample, which make answers of 6 and 3 bytes; a byte takes half a second to write."""
    ops = (Op(name="a", forward_flops=2.0, answer_bytes=6.0), Op(name="b", forward_flops=1.0, answer_bytes=3.0))
    tensor = Tensor(name="t", producer=0, consumers=(1,), bytes_per_sample=1.0)
    fine = OpGraph(name="two", ops=ops, tensors=(tensor,))
    whole = OpGraph(name="one", ops=(summed("a+b", "op", fine, (0, 1)),), tensors=())
    for graph, expected in ((fine, ([10.0, 5.0] if writes else [4.0, 2.0])), (whole, [15.0 if writes else 6.0])):
        regime = Regime(course=Requests(buffers=2, arrivals=Arrivals(requests=4), answers=writes))
        problem = Problem(
            graph=forward_only(graph),
            cluster=replace(one_cluster(graph.num_ops), devices=(DEVICE,) * graph.num_ops),
            cost=Constant(),
            minibatch_size=2,
            regime=regime,
            overheads=Overheads(answer_s_per_byte=0.5),
        )
        plan = make_plan(problem, "each", [(1 << i, 1) for i in range(graph.num_ops)], 2)
        assert [bill.forward_s for bill in plan.bills(problem)] == expected


@pytest.mark.parametrize("seed", range(12))
def test_every_stage_is_in_the_picture_of_a_stream_at_its_pace(seed: int) -> None:
    """A stage at the end may be many requests behind the first one."""
    problem, plan, _ = random_stream(seed)
    asked = replace(requests_of(problem.regime.course), arrivals=Arrivals(requests=3))
    problem = replace(problem, regime=replace(problem.regime, course=asked))
    found = serve(program_of(problem, plan), plan, problem)
    passes = Counter(event.stage for event in found.events if event.kind == "F")
    assert passes == dict.fromkeys(range(len(plan.stages)), found.steps * problem.minibatch_size)


def test_a_full_buffer_stalls_its_sender() -> None:
    """A fast stage before a slow one: with n buffers on either side it has begun 2 n further passes when the slow one begins."""
    for buffers in (1, 2, 4):
        graph = OpGraph(
            name="two",
            ops=(Op(name="a", forward_flops=1.0), Op(name="b", forward_flops=100.0)),
            tensors=(Tensor(name="t", producer=0, consumers=(1,), bytes_per_sample=1.0),),
        )
        link = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
        problem = Problem(
            graph=forward_only(graph),
            cluster=replace(one_cluster(2, link=link), devices=(DEVICE,) * 2),
            cost=Constant(),
            minibatch_size=1,
            regime=Regime(course=Requests(buffers=buffers)),
        )
        plan = plan_of(problem)
        stream = Stream(program_of(problem, plan), plan, problem)
        begins: list[list[float]] = []
        for _ in range(20):
            stream.request(0.0)
            begins.append(stream.begins)
        ahead = [sum(first <= begin for first, _ in begins) - 1 - r for r, (_, begin) in enumerate(begins[:8])]
        assert max(ahead) == 2 * buffers
        assert scored(program_of(problem, plan), plan, problem, "throughput").metrics.iteration_s == pytest.approx(100.0)


def emulated(problem: Problem, plan: Plan) -> list[tuple[float, float]]:
    """By the virtual clock of emulated devices, in threads: when each request was begun, or came, and when it was over."""
    arrivals, buffers = requests_of(problem.regime.course).arrivals, requests_of(problem.regime.course).buffers
    assert buffers is not None
    job: Job = assemble(
        Captured(name="none", nodes=(), inputs=(), results={}, graph=problem.graph),
        problem,
        plan,
        STRATEGY,
        optimizer=SGD(lr=0.1, momentum=0.9),
        data=Synthetic(num_samples=1),
        model=None,
        steps=arrivals.requests,
        dtype="float32",
        seed=0,
        train_samples=0,
        device_kind="cpu",
    )
    assert job.program == program_of(problem, plan)
    network = FakeNetwork(reduce_groups(plan, problem.graph), plan.num_devices)
    barrier, said = threading.Barrier(plan.num_devices), list[list[float]]()

    def agree(values: list[float]) -> list[float]:
        said.append(values)
        barrier.wait(20)
        found = [max(column) for column in zip(*said[-plan.num_devices :], strict=True)]
        barrier.wait(20)
        return found

    def one(device: int) -> list[tuple[float, float]]:
        server = EmulatedServer(job, device_id=device, transport=FakeTransport(network, device), agree=agree)
        return [record["virtual"] for record in server.stream(arrivals.requests, 0.0)]

    of_devices = inprocess.in_threads([lambda d=d: one(d) for d in plan.devices])
    each = list(zip(*of_devices, strict=True))
    return [(min(begin for begin, _ in own), max(end for _, end in own)) for own in each]


@pytest.mark.parametrize("seed", range(4))
def test_the_virtual_clock_of_emulated_devices_is_the_simulators(seed: int) -> None:
    problem, plan, _ = random_stream(seed)
    arrivals, stream = requests_of(problem.regime.course).arrivals, Stream(program_of(problem, plan), plan, problem)
    for at, (begin, end) in zip(arrivals.times_s(), emulated(problem, plan), strict=True):
        begun, over = stream.request(at)
        assert begin == pytest.approx(at if arrivals.rate else begun, rel=1e-12)
        assert end == pytest.approx(over, rel=1e-12)


def test_two_unequal_towers_on_unequal_devices_answer_sooner_than_any_chain() -> None:
    """The heavier tower is on a fast device, the lighter one on a device of half the speed, and they run side by side."""
    towers = two_towers(4)
    heavy = [1e9] * 4 + [2e9] * 4 + [1e8]
    ops = tuple(replace(op, forward_flops=flops) for op, flops in zip(towers.ops, heavy, strict=True))
    tensors = tuple(replace(t, bytes_per_sample=4e4) for t in towers.tensors)
    own = one_cluster(3, link=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9))
    slow, *fast = own.devices
    problem = Problem(
        graph=forward_only(replace(towers, ops=ops, tensors=tensors)),
        cluster=replace(own, devices=(replace(slow, speed_factor=0.5), *fast)),
        cost=Rate(fixed_s=1e-5),
        minibatch_size=1,
        regime=Regime(course=Requests(buffers=2, arrivals=Arrivals(requests=60, rate=50.0, spacing="poisson"))),
    )
    mean_s = []
    for planner in (GraphPipe(), Sequential()):
        strategy = Strategy(name="towers", planner=planner, schedule=ForwardOnly(), objective="latency")
        plan = strategy.plan(problem)
        predicted = strategy.predict(plan, problem).metrics.serving
        assert predicted is not None and predicted.mean_s == strategy.predict(plan, problem, record=False).metrics.iteration_s
        latencies = [end - came for came, end in emulated(problem, plan)]
        assert sum(latencies) / len(latencies) == pytest.approx(predicted.mean_s, rel=1e-9)
        mean_s.append(predicted.mean_s)
    assert mean_s[0] < 0.8 * mean_s[1]


def test_the_bill_of_a_chain_is_pipeedges() -> None:
    """[l > 1] n_in D_in + n_out D_out + D_in + D_out beside the weights, of a graph that says nothing of what is inside."""
    sizes = [7.0, 5.0, 11.0, 3.0]  # what enters layer i; the last one answers
    graph = forward_only(
        OpGraph(
            name="chain",
            ops=tuple(Op(name=f"l{i}", params=(f"w{i}",), inputs=("x",) if i == 0 else ()) for i in range(4)),
            tensors=tuple(Tensor(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=sizes[i + 1]) for i in range(3)),
            params=tuple(Param(name=f"w{i}", num_bytes=100 + i) for i in range(4)),
            inputs=(Input(name="x", bytes_per_sample=sizes[0]),),
        )
    )
    assert graph.differentiated == 0 and all(not p.trainable for p in graph.params)
    for buffers in (1, 2):
        problem = Problem(
            graph=graph,
            cluster=one_cluster(2),
            cost=Constant(),
            minibatch_size=8,
            regime=Regime(course=Requests(buffers=buffers)),
        )
        for first, last in [(0, 0), (0, 1), (1, 1), (1, 2), (0, 2)]:
            mask = sum(1 << i for i in range(first, last + 1))
            held = problem.amounts(mask).held(8, 1)
            weights = sum(100 + i for i in range(first, last + 1))
            d_in, d_out = 8 * sizes[first], 8 * sizes[last + 1]
            assert held.peak(5) == weights + (first > 0) * buffers * d_in + buffers * d_out + d_in + d_out


def test_a_stream_repeats_one_request_with_receives_ahead() -> None:
    problem, plan, _ = random_stream(3)
    program = program_of(problem, plan)
    counts = dict.fromkeys(range(len(plan.stages)), problem.minibatch_size)
    for actions in program.actions.values():
        whole = [a for own in stream_of(actions, 2, counts, problem.minibatch_size, 5) for a in own]
        assert len(whole) == 5 * len(actions) and len(set(whole)) == len(whole)
        passes = [a.microbatch for a in whole if a.kind == "F"]
        assert passes == list(range(5 * problem.minibatch_size))
        for place, action in enumerate(whole):
            if action.kind == "RF":
                later = [a for a in whole[place:] if a.kind == "F"]
                assert action.microbatch - later[0].microbatch <= 2
        # What a worker tells of its place: a receive posted ahead is part of the way to the next pass.
        for own in stream_of(actions, 2, counts, problem.minibatch_size, 5):
            *found, end = places(actions, own, counts)
            assert found == sorted(found) and end == len(actions)
            for action, place in zip(own, found, strict=True):
                if action.kind != "RF":
                    there = actions[place]
                    assert (there.kind, there.peer_device) == (action.kind, action.peer_device)
                    assert there.microbatch == action.microbatch % problem.minibatch_size


def test_plans_that_no_stream_runs_through_are_refused() -> None:
    problem, plan, _ = random_stream(0)
    check_served(plan)
    first, *others = plan.stages
    with pytest.raises(InvalidPlan, match="recomputes operators"):
        check_served(replace(plan, stages=(marked(first, recompute=first.ops), *others)))
    with pytest.raises(InvalidPlan, match=r"devices \[1\] help with its backward.*Fix: leave weight_device"):
        check_served(replace(plan, stages=(first.having(Helpers(weight_device=1)), *others)))
    with pytest.raises(InvalidPlan, match="must be the same in all stages"):
        check_served(replace(plan, stages=(replace(first, microbatch_size=2), *others)))
    assert StageCost.of(problem, first).backward_s == 0.0
