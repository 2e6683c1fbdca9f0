"""What users of other pipelines report of messages on cards: each report is a pattern of a program here.

* PiPPy#969, #1000: a skip connection, and receives from several peers in one batch.
* pytorch#172668: both ranks send before they receive; receives put off to the pass that needs them.
* pytorch PR#186173, Megatron-LM#1450: the order across batches on one communicator, where both neighbours are one rank.
* pytorch#175225, #188833: a receive that waits stands in front of sends and receives that could go.
* pytorch#109401: two ranks that take turns in sending.
"""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from gpp import GPipe, Link, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.errors import MalformedProgram
from gpp.plan.build import make_plan
from gpp.program.cards import check_cards
from gpp.program.communicators import Communicator, communicators
from gpp.program.global_order import in_global_order
from gpp.program.kinds import Action
from gpp.program.program import Program, check_program
from gpp.schedules.base import AbstractSchedule
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from tests.oracle.card_times import end_s
from tests.oracle.cards import outcome
from tests.support.graphs import chain, graph, problem
from tests.support.problems import Rate, cluster
from tests.support.programs import lower

SCHEDULES = [OneFOneB(), GPipe()]


def ordered(program: Program, plan: Plan, prob: Problem) -> Program:
    costs = Costs.of(program, plan, prob)
    return in_global_order(program, plan, costs.seconds)


def lowered(prob: Problem, schedule: AbstractSchedule, placement: list[tuple[int, ...]] | None = None) -> tuple[Plan, Program]:
    parts = [(1 << op, 1) for op in range(prob.graph.num_ops)]
    plan = make_plan(prob, "test", parts, 1, ordered=True, placement=placement)
    return plan, lower(plan, prob.graph, schedule)


def put_off(program: Program) -> Program:
    """Every receive just before the pass that needs it."""
    actions: dict[int, tuple[Action, ...]] = {}
    for device, own in program.actions.items():
        waiting: dict[tuple[str, int, int], list[Action]] = defaultdict(list)
        out: list[Action] = []
        for a in own:
            if a.kind in ("RF", "RB"):
                waiting[a.kind[1], a.stage, a.microbatch].append(a)
            else:
                out += [*waiting.pop((a.kind, a.stage, a.microbatch), []), a]
        actions[device] = tuple(out)
    return replace(program, actions=actions)


def one_for_all(program: Program) -> tuple[Communicator, ...]:
    """All messages on one communicator, as in torch's eager mode."""
    made = communicators((), program)
    everyone = tuple(sorted(program.actions))
    return (Communicator("all", everyone, tuple(pair for c in made for pair in c.pairs)), *(c for c in made if c.groups))


def runs(program: Program, plan: Plan) -> bool:
    """What the proof says, and the model of cards that do one operation at a time."""
    try:
        check_cards(program, plan)
        proved = True
    except MalformedProgram:
        proved = False
    assert proved == overlaps(program, one_queue=True)
    return proved


def overlaps(program: Program, made: tuple[Communicator, ...] | None = None, **rules) -> bool:
    """Whether a program runs on the model of cards, with a queue for each communicator unless the rules say otherwise."""
    return outcome([program], communicators((), program) if made is None else made, **rules) == "runs"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skip_connections_over_several_peers(schedule: AbstractSchedule) -> None:
    """The last rank receives from all before it. In one batch they wait for the one whose sender waits for another rank."""
    prob = problem(graph(4, [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)]), 4, 6)
    plan, program = lowered(prob, schedule)
    assert not overlaps(program, one_for_all(program))
    good = ordered(program, plan, prob)
    assert runs(good, plan) and overlaps(good, pending=0) and overlaps(good, one_for_all(good))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_that_hold_stages_in_turn(schedule: AbstractSchedule) -> None:
    """Stages 0 and 2 on one rank, 1 and 3 on the other: with receives put off, each sends what the other does not take yet."""
    prob = problem(chain(4), 2, 6)
    plan, program = lowered(prob, schedule, [(0,), (1,), (0,), (1,)])
    late = put_off(program)
    check_program(late)
    assert not runs(late, plan)
    assert not overlaps(late, one_for_all(late))
    good = ordered(program, plan, prob)
    assert runs(good, plan) and overlaps(good, pending=0) and overlaps(good, one_for_all(good))


def test_neighbours_that_are_one_rank() -> None:
    """A rank's messages of several edges meet those of another in the order of issue alone: without tags they must agree."""
    prob = problem(chain(6), 2, 6)
    plan, program = lowered(prob, OneFOneB(), [(0,), (1,)] * 3)
    assert not overlaps(program)
    assert overlaps(ordered(program, plan, prob))


def test_ranks_that_take_turns_in_sending() -> None:
    """Forwards one way, backwards the other way, on the communicator that both directions share in torch's lazy mode."""
    prob = problem(chain(2), 2, 8)
    plan, program = lowered(prob, OneFOneB())
    shared = (Communicator("lazy", (0, 1), ((0, 1), (1, 0))),)
    assert not overlaps(program, shared)
    good = ordered(program, plan, prob)
    assert overlaps(good, shared)
    # Put off: rank 0 sends its next output before it takes a gradient, rank 1 that gradient before it takes the output.
    assert not overlaps(put_off(program), shared)
    assert not runs(put_off(program), plan)


def test_no_message_stands_in_line_behind_another_pairs() -> None:
    """On the runtime's path a step takes what the simulator says, in which messages of two pairs never wait for each other.

    With all messages on one communicator, or one operation at a time, it takes longer: there a receive whose sender is late holds
    up what could go.
    """
    slower = 0
    for seed in range(12):
        overlapped, shared, alone = times(random.Random(seed))
        assert overlapped <= shared * (1 + 1e-9) and shared <= alone * (1 + 1e-9) and overlapped < alone
        slower += shared > overlapped * (1 + 1e-9)
    assert slower > 3


def times(rng: random.Random) -> tuple[float, float, float]:
    """Seconds of a step: on the runtime's path, with one communicator, one operation at a time."""
    count = rng.randint(3, 6)
    edges = [(a, b) for b in range(1, count) for a in rng.sample(range(b), k=min(b, rng.randint(1, 3)))]
    prob = Problem(
        graph=graph(count, edges),
        cluster=cluster(count, link=Link(latency_s=0.0, bandwidth_bytes_per_s=rng.choice([2.0, 10.0]))),
        cost=Rate(flop_per_s=1.0, fixed_s=rng.random()),
        minibatch_size=8,
    )
    plan, program = lowered(prob, rng.choice(SCHEDULES))
    good = ordered(program, plan, prob)
    costs, waits = Costs.of(good, plan, prob), good.waits
    label_of = waits.label_of
    expected = max(LongestPath.of(waits, costs.seconds, costs.late).times().end_s)

    def took_s(device: int, position: int) -> float:
        return costs.seconds[label_of[waits.first[device] + position]]

    on = {pair: c.name for c in communicators((), good) for pair in c.pairs}
    found = end_s(good, lambda a, b: on[a, b], took_s)
    assert found == pytest.approx(expected, rel=1e-9) and found is not None
    shared = end_s(good, lambda a, b: "all", took_s)
    alone = end_s(good, lambda a, b: "all", took_s, one_queue=True)
    assert shared is not None and alone is not None
    assert (end_s(program, lambda a, b: "all", took_s, one_queue=True) is not None) == runs(program, plan)
    return found, shared, alone
