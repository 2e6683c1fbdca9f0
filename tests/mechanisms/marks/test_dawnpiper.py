"""DawnPiper's chains and vPipe's moves on small problems; `python -m tests.checks.memory --planners dawnpiper` compares many."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpp import Auto, DawnPiper, GraphPipe, NoFlush, OneFOneB, Recompute, Split1F1B, Stash, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidFile
from gpp.mechanisms.marks.stage import marks_of
from gpp.mechanisms.marks.vpipe import VPipe, residual_blocks
from gpp.planners.base import AbstractPlanner
from gpp.planners.common.linear_orders import depth_first_order
from tests.checks.memory import SEARCHES, judged_chains, random_chain_problem
from tests.support.graphs import graph, problem
from tests.support.long import thinned


def residual_chain(blocks: int, memory_bytes: float = 1e9, minibatch_size: int = 8) -> Problem:
    """Blocks of three operators, the last of which reads what went past the other two; micro-batches of one sample."""
    edges = [(0, 1)]
    for block in range(blocks):
        first = 1 + 3 * block
        edges += [(first, first + 1), (first + 1, first + 2), (first - 1, first + 2)]
        edges += [(first + 2, first + 3)] if block < blocks - 1 else []
    operators = graph(1 + 3 * blocks, edges, saved=3.0)
    return problem(operators, 4, minibatch_size, memory_bytes=memory_bytes, microbatch_size=1)


@pytest.mark.parametrize("number", thinned(range(8)))
def test_equal_to_every_cut_and_every_way(number: int) -> None:
    rng = random.Random(f"suite-{number}")
    found = judged_chains(
        random_chain_problem(rng), rng.choice([("recompute",), ("recompute", "offload")]), stashes=number % 2 == 0
    )
    assert all(found[search][0] in ("equal", "nothing fits") for search in SEARCHES), found


def strategy(planner: AbstractPlanner, *, drains: bool = True) -> Strategy:
    if drains:
        return Strategy(name="test", planner=planner, schedule=OneFOneB())
    return Strategy(name="test", planner=planner, schedule=NoFlush(), weights=Stash(accumulation=1))


@pytest.mark.parametrize(
    "of",
    [
        Strategy(name="test", planner=DawnPiper(), schedule=OneFOneB()),
        Strategy(name="test", planner=VPipe(), schedule=OneFOneB()),
        pytest.param(Strategy(name="test", planner=GraphPipe(), schedule=OneFOneB(), memory=Auto()), marks=pytest.mark.long),
    ],
    ids=["dawnpiper", "vpipe", "graphpipe_auto"],
)
def test_what_is_said_to_fit_does_and_little_less_does_not(of: Strategy) -> None:
    def fits(asked: Problem) -> bool:
        try:
            of.plan(asked)
        except Infeasible:
            return False
        return True

    def asked(memory_bytes: float, size: int) -> Problem:
        return replace(residual_chain(1, memory_bytes=memory_bytes, minibatch_size=24), microbatch_size=size)

    with pytest.raises(Infeasible, match=r"micro-batch 12\) takes .* for the stage of .* and a device has 20 B") as caught:
        of.plan(asked(20.0, 12))
    remedy = caught.value.remedy
    enough, size = (float(found) for found in re.findall(r"(?:memory_bytes|microbatch_size)=([\d.e+]+)", remedy))
    assert fits(asked(enough, 12)) and not fits(asked(enough * 0.97, 12))
    assert [b for b in (1, 2, 3, 4, 6, 8) if fits(asked(20.0, b))][-1] == size


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("planner", [DawnPiper(), DawnPiper(search="binary"), VPipe()])
def test_a_stage_that_lacks_memory_is_marked_and_one_that_does_not_is_left_alone(planner: DawnPiper | VPipe, drains: bool) -> None:
    of, size = strategy(planner, drains=drains), 8 if drains else 1
    free = of.plan(residual_chain(4, minibatch_size=size))
    assert len(free.stages) == 4
    assert not any(marks_of(stage).recompute or marks_of(stage).offload for stage in free.stages)
    short = residual_chain(4, memory_bytes=30.0, minibatch_size=size)
    assert any(marks_of(stage).recompute for stage in of.plan(short).stages)


def test_nothing_fits() -> None:
    for planner in (DawnPiper(), DawnPiper(search="binary"), VPipe()):
        with pytest.raises(Infeasible) as caught:
            strategy(planner).plan(residual_chain(2, memory_bytes=5.0))
        # What would fit takes a search, which nobody asks for here.
        assert "fits" in caught.value.short


def test_refused_beside_a_memory_policy_and_under_schedules_that_split() -> None:
    beside = Strategy(name="test", planner=DawnPiper(), schedule=OneFOneB(), memory=Auto())
    with pytest.raises(InvalidConfig, match=r"strategy\.memory=auto.*decides itself"):
        beside.plan(residual_chain(2))
    with pytest.raises(InvalidConfig, match=r"strategy\.planner=.*whole backwards"):
        Strategy(name="test", planner=VPipe(), schedule=Split1F1B()).plan(residual_chain(2))


def test_blocks_end_at_residual_sums() -> None:
    graph = residual_chain(3).graph
    assert residual_blocks(graph, depth_first_order(graph)) == [(0, 4), (4, 7), (7, 10)]


def test_a_tail_is_one_run_of_the_last_operators_and_takes_no_less_than_the_best_marks() -> None:
    short = residual_chain(4, memory_bytes=30.0)
    plan = strategy(VPipe(swap=False)).plan(short)
    tails = [marks_of(stage).recompute for stage in plan.stages]
    assert any(tails)
    assert all(tail == stage.ops[len(stage.ops) - len(tail) :] for tail, stage in zip(tails, plan.stages, strict=True))
    best = Recompute().fitted(replace(plan, stages=tuple(stage.keeping for stage in plan.stages)), short)
    assert best is not None
    seconds = [sum(bill.backward_s for bill in one.bills(short)) for one in (best, plan)]
    assert seconds[0] <= seconds[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"partition": [1, 2], "recompute_ratio": [0.5, 0.0]}, None),
        ({"partition": [1, 1], "recompute_ratio": [0, 0]}, r"partition=\[1,1\]: must sum up to the model's 3 blocks, here 2"),
        ({"partition": [1, 2], "recompute_ratio": [1.5, 0]}, r"recompute_ratio\[0\]=1.5: must be from 0 to 1"),
        ({"partition": [1, 2], "recompute_ratio": [0.5, -0.1]}, r"recompute_ratio\[1\]=-0.1: must be from 0 to 1"),
        ({"partition": [1, 2], "recompute_ratio": [1]}, r"recompute_ratio=\[1(\.0)?\]: must have one for each of 2 stages"),
        ({"partition": [0, 3], "recompute_ratio": [0, 0]}, r"partition\[0\]=0: must be at least 1"),
        ({"partition": [1, 1, 1, 0, 0], "recompute_ratio": [0] * 5}, r"must have 1 to 4 stages"),
    ],
)
def test_a_plan_file_of_vpipes(content: dict[str, list[float]], said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "vpipe.json"
    path.write_text(json.dumps(content))
    of = strategy(VPipe(path=str(path)))
    if said is not None:
        with pytest.raises(InvalidFile, match=said):
            of.plan(residual_chain(3))
        return
    plan = of.plan(residual_chain(3))
    assert [stage.ops for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7, 8, 9)]
    assert [marks_of(stage).recompute for stage in plan.stages] == [(2, 3), ()]
