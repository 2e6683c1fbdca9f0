"""LayerPipe's line against exhaustive search, and the table of VGG-16."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from gpp import Distributed, OneFOneB, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.mechanisms.helpers.layerpipe import Layer, LayerPipe, Placed, dealt, layers_of, loads
from gpp.mechanisms.helpers.stage import Helpers, helpers_of
from gpp.runtime.task import EngineTask
from tests.mechanisms.helpers.test_prediction import layers, random_seconds, strategy
from tests.support import inprocess
from tests.support.graphs import chain, cluster, diamond, with_weights


def vgg16() -> list[float]:
    """Multiplications of a forward of VGG-16's 16 layers, by the published table of its layers."""
    out, height, before = list[float](), 224, 3
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            out.append(float(height * height * 9 * before * channels))
            before = channels
        height //= 2
    return [*out, 512 * 7 * 7 * 4096.0, 4096 * 4096.0, 4096 * 1000.0]


def least_of_line(line: list[tuple[float, float, float]], num_processors: int) -> float:
    """The least time of the slowest processor, over every place of every F and W.

    With those in place each I may lie on the processors between its neighbours in the line. Then a time does if and only if every
    run of processors has room for what lies in it alone (Hall's condition for intervals).
    """
    best = float("inf")
    for places in combinations_with_replacement(range(num_processors), 2 * len(line)):
        fixed = [0.0] * num_processors
        for place, seconds in zip(places, [s for f, _, w in line for s in (f, w)], strict=True):
            fixed[place] += seconds
        between = [(0 if n == 0 else places[2 * n - 1], places[2 * n], i) for n, (_, i, _) in enumerate(line)]
        best = min(
            best,
            max(
                (sum(fixed[a : b + 1]) + sum(i for low, high, i in between if a <= low and high <= b)) / (b + 1 - a)
                for a in range(num_processors)
                for b in range(a, num_processors)
            ),
        )
    return best


def cut_of_whole_layers(seconds: list[float], num_processors: int) -> float:
    """PipeDream without replicas: the least time of the slowest of so many intervals of whole layers."""
    best = [[float("inf")] * (num_processors + 1) for _ in range(len(seconds) + 1)]
    best[0] = [0.0] * (num_processors + 1)
    for end in range(1, len(seconds) + 1):
        for p in range(1, num_processors + 1):
            best[end][p] = min(max(best[start][p - 1], sum(seconds[start:end])) for start in range(end))
    return best[-1][-1]


def test_the_line_is_exact() -> None:
    rng = random.Random(3)
    for _ in range(60):
        line = [(f, i if n or rng.random() < 0.3 else 0.0, w) for n, (f, i, w) in enumerate(random_seconds(rng)[:3])]
        count = rng.randint(1, 5)
        placed = dealt([Layer(*layer) for layer in line], count, "neighbour")
        busy = loads([Layer(*layer) for layer in line], placed, count)
        assert max(busy) == pytest.approx(least_of_line(line, count), rel=1e-9), (line, count)
        assert sum(busy) == pytest.approx(sum(map(sum, line)))
        assert list(in_order(placed)) == sorted(in_order(placed))


def in_order(placed: list[Placed]) -> Iterator[int]:
    """Processors along the line."""
    for where in placed:
        yield from (processor for processor, _ in where.inputs)
        yield from (where.forward, where.weight)


def test_anywhere_is_longest_first() -> None:
    rng = random.Random(5)
    for count in (2, 3):
        for _ in range(3):
            line = [Layer(*layer) for layer in random_seconds(rng)[:3]]
            tasks = [seconds for layer in line for seconds in layer if seconds]
            least = min(
                max(sum(s for s, p in zip(tasks, places, strict=True) if p == q) for q in range(count))
                for places in product(range(count), repeat=len(tasks))
            )
            found = max(loads(line, dealt(line, count, "anywhere"), count))
            assert least * (1 - 1e-9) <= found <= least * (4 / 3 - 1 / (3 * count)) + 1e-9
    # Graham's example of two processors: 3, 3, 2, 2, 2 take 7, where 6 would do.
    line = [Layer(3.0, 0.0, 3.0), Layer(2.0, 2.0, 2.0)]
    assert max(loads(line, dealt(line, 2, "anywhere"), 2)) == 7.0


def test_the_table_of_vgg16() -> None:
    forward = vgg16()
    whole = [(3 if layer else 2) * seconds for layer, seconds in enumerate(forward)]
    line = [Layer(s, s if layer else 0.0, s) for layer, s in enumerate(forward)]
    times: dict[str, list[float]] = {"neighbour": [], "anywhere": [], "ceiling": []}
    for count in range(2, 12):
        cut = cut_of_whole_layers(whole, count)
        for intra in ("neighbour", "anywhere"):
            times[intra].append(cut / max(loads(line, dealt(line, count, intra), count)))
        times["ceiling"].append(cut / (sum(whole) / count))
    shown = {name: (round(sum(own) / 10, 2), round(max(own), 2)) for name, own in times.items()}
    assert shown == {"neighbour": (1.19, 1.5), "anywhere": (1.24, 1.6), "ceiling": (1.27, 1.62)}


def problem_of(seconds: list[tuple[float, float, float]], num_devices: int) -> Problem:
    return Problem(graph=layers(seconds), cluster=cluster(num_devices), cost=Constant(), minibatch_size=1)


def test_a_plan_does_what_the_line_says() -> None:
    seconds = [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)]
    plan = strategy().plan(problem_of(seconds, 2))
    # F1 W1 I2 F2 | W2 I3 F3 W3: the second device makes the weights' gradients of the layer on the border.
    assert [(stage.ops, stage.devices, stage[Helpers]) for stage in plan.stages] == [
        ((0,), (0,), None),
        ((1,), (0,), Helpers(weight_device=1)),
        ((2,), (1,), None),
    ]
    assert [stage.in_flight for stage in plan.stages] == [3, 4, 1]
    assert plan.objective is not None and plan.objective.value_s == pytest.approx(4.0)


def test_processors_may_outnumber_layers() -> None:
    seconds = [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0)]
    problem, of = problem_of(seconds, 8), strategy()
    plan = of.plan(problem)
    assert of.predict(plan, problem).metrics.iteration_s == pytest.approx(1.0) and plan.num_devices == 5
    # One device has the I of the second layer alone: neither layer's forward is there.
    assert helpers_of(plan.stages[1]).input_share == ((2, 1.0),) and plan.stages[1].devices == (3,)


def test_one_device_has_all_of_it() -> None:
    plan = strategy("anywhere").plan(problem_of([(1.0, 0.0, 1.0), (2.0, 1.0, 1.0)], 1))
    assert len(plan.stages) == 1 and not plan.periodic and plan.stages[0].in_flight == 1


def test_layers_end_where_weights_begin() -> None:
    graph = with_weights(chain(5))
    graph = replace(graph, ops=tuple(replace(op, params=op.params if n in (1, 3) else ()) for n, op in enumerate(graph.ops)))
    graph = replace(graph, params=tuple(param for param in graph.params if param.name in ("w1", "w3")))
    assert layers_of(graph) == [(0, 1, 2), (3, 4)]
    assert sorted(op for layer in layers_of(with_weights(diamond())) for op in layer) == [0, 1, 2, 3]


def test_branches_run_where_the_order_puts_them() -> None:
    graph = with_weights(diamond())
    graph = replace(graph, ops=tuple(replace(op, weight_flops=1.0) for op in graph.ops))
    for count in range(2, 9):
        problem, of = Problem(graph=graph, cluster=cluster(count), cost=Constant(), minibatch_size=1), strategy()
        plan = of.plan(problem)
        of.check(plan, problem)
        assert of.predict(plan, problem).metrics.iteration_s >= 12 / count - 1e-9


def test_a_pipeline_that_drains_is_refused() -> None:
    problem = problem_of([(1.0, 0.0, 1.0), (1.0, 1.0, 1.0)], 2)
    with pytest.raises(InvalidConfig, match=r"strategy\.planner=layerpipe: .* drains .* Fix: set strategy/schedule=no_flush"):
        Strategy(name="layerpipe", planner=LayerPipe(), schedule=OneFOneB()).plan(problem)


def test_without_memory_for_any_plan_the_memory_named_gives_one() -> None:
    problem = replace(problem_of([(1.0, 0.0, 1.0), (1.0, 1.0, 1.0)], 2), cluster=cluster(2, memory_bytes=1.0))
    with pytest.raises(Infeasible, match=r"stage 0 needs .* bytes on a device") as refused:
        strategy().plan(problem)
    named = float(refused.value.remedy.partition("memory_bytes=")[2].rstrip(")"))
    assert strategy().plan(replace(problem, cluster=cluster(2, memory_bytes=named)))


def test_what_workers_cannot_divide_stays_whole() -> None:
    """Of the layers of an MLP all are products but the loss; a transformer's begin with norms and sums."""
    for name, intra, divided in (("mlp", "anywhere", True), ("digits", "neighbour", False)):
        _, captured, _ = inprocess.captured_named(name)
        free = inprocess.problem_of(captured, 3, 8, max_ops=60)
        problem = replace(free, refuses=Distributed().limits(EngineTask.of_problem(captured, free, clips=False)))
        assert problem.refuses(strategy(intra).plan(free)) is not None
        plan, whole = (replace(strategy(), planner=LayerPipe(intra=intra, divide=divide)).plan(problem) for divide in (True, False))
        assert problem.refuses(plan) is None and any(stage.beside for stage in plan.stages)
        assert any(helpers_of(stage).input_share for stage in plan.stages) is divided
        assert plan.objective and whole.objective and plan.objective.value_s <= whole.objective.value_s * (1 + 1e-9)
