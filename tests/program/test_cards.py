"""The order of messages for cards, the proof that it cannot hang, and the communicators: properties of many random programs.

`tests.checks.cards` compares the proof with a model of cards.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise

import pytest

from gpp import GPipe, NoFlush, OneFOneB, Stash
from gpp.cost.regime import Regime
from gpp.errors import MalformedProgram
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.plan.build import make_plan
from gpp.program.cards import check_cards
from gpp.program.communicators import Communicator, communicators, first_messages
from gpp.program.global_order import check_any_length, in_global_order
from gpp.program.kinds import Action
from gpp.program.program import Program, check_program, teams
from gpp.program.steady_state import of_length, window
from gpp.runtime.job import _checked
from gpp.runtime.transport.channels import channels_of
from gpp.schedules.forward_only import ForwardOnly
from gpp.simulate.simulator import Costs
from tests.checks.cards import PATHS, check_many
from tests.oracle.cards import outcome
from tests.support.card_programs import AHEAD, Case, case, perturbed, stretch
from tests.support.graphs import chain, problem, with_weights
from tests.support.problems import random_problem
from tests.support.programs import lower

SEEDS = range(40)


@cache
def found(seed: int) -> tuple[Case, Program]:
    one = case(seed)
    return one, one.ordered()


@cache
def streams() -> list[int]:
    """The first seeds whose pipelines do not drain."""
    return list(islice((seed for seed in range(200) if case(seed).program.minibatches > 1), 3))


def others(actions: tuple[Action, ...]) -> list[Action]:
    """All but receives."""
    return [action for action in actions if action.kind not in ("RF", "RB")]


def hangs(one: Case, program: Program) -> bool:
    try:
        check_cards(replace(program, minibatches=1), one.plan, one.groups)
    except MalformedProgram:
        return True
    return False


def test_only_receives_move_and_nothing_can_hang() -> None:
    for seed in SEEDS:
        one, ordered = found(seed)
        check_program(replace(ordered), one.groups)
        check_cards(ordered, one.plan, one.groups)
        for device, before in one.program.actions.items():
            after = ordered.actions[device]
            assert others(after) == others(before), seed
            assert Counter(after) == Counter(before)
        assert one.ordered(ordered).actions == ordered.actions  # the order does not hang on where receives stood


def runs(one: Case, program: Program, path: str) -> bool:
    """Whether a program runs on the model of cards."""
    made = communicators(one.groups, program, replicas=teams(one.plan))
    return outcome([program], made, **PATHS[path]) == "runs"


def test_the_order_of_gloo_hangs_on_cards() -> None:
    """Most programs as gloo has them, where a card runs one operation at a time: by the model, and by the proof."""
    messages = [one for one, _ in map(found, SEEDS) if any(a.peer_stage >= 0 for own in one.program.actions.values() for a in own)]
    assert sum(not runs(one, one.program, "strictest") for one in messages[:12]) > 6
    assert sum(hangs(one, one.program) for one in messages) > len(messages) / 2


def test_what_is_proved_runs_on_all_paths() -> None:
    checked = 0
    for seed in SEEDS[::2]:  # `tests.checks.cards` draws more
        one, ordered = found(seed)
        moved = perturbed(one, ordered, random.Random(seed))
        for program in filter(None, (one.program, moved)):
            if not hangs(one, program):
                checked += 1
                assert all(runs(one, program, path) for path in PATHS if path.startswith("overlapped, ")), seed
    assert checked > 6


def test_steps_and_evaluations_follow_each_other() -> None:
    """Written out one after the other, they are as safe as alone."""
    for seed in range(20):
        one, ordered = found(seed)
        actions = {device: own * 3 for device, own in ordered.actions.items()}
        check_cards(replace(ordered, actions=actions, minibatches=1), one.plan, one.groups)


def test_a_stretch_of_any_length_has_the_order() -> None:
    for seed in streams():
        one, ordered = found(seed)
        known = ordered.minibatches
        for count in (1, 2, 3, known - 1, known + 1, known + 3):
            part = stretch(ordered, one.plan, count)
            check_program(part, one.groups)
            check_cards(part, one.plan, one.groups)
        whole = lower(one.plan, one.problem.graph, NoFlush(), minibatches=known + 3)
        longer = one.ordered(whole)
        assert {device: tuple(of_length(ordered, one.plan, device, known + 3)) for device in ordered.actions} == longer.actions


def test_a_shorter_stretch_leaves_sums_where_they_are() -> None:
    """Receives may stand between a sum and the update that it belongs to."""
    prob = problem(with_weights(chain(2)), 3, 4)
    plan = make_plan(replace(prob, regime=Regime(weights=Stash(accumulation=None))), "test", [(1, 2), (2, 1)], 2)
    program = lower(plan, prob.graph, NoFlush(), minibatches=window(plan, AHEAD))
    own = list(program.actions[0])
    for update in [i for i, a in enumerate(own) if a.kind == "U"]:
        receive = next((i for i in range(update, len(own)) if own[i].kind == "RB"), None)
        if receive is not None:
            own.insert(update, own.pop(receive))
    assert any((a.kind, b.kind) == ("R", "RB") for a, b in pairwise(own))
    changed = replace(program, actions={**program.actions, 0: tuple(own)})
    for count in (1, 2, 3):
        sums = 0
        expected = []
        for a in own:
            sums += a.kind == "R"
            if sums <= count if a.kind == "R" else a.microbatch < count * (1 if a.kind == "U" else 2):
                expected.append(a)
        assert list(of_length(changed, plan, 0, count)) == expected


def test_whatever_passes_take_the_program_repeats_itself() -> None:
    """Also where one stage is a million times slower than another, and receives are far ahead."""
    for seed in streams():
        one, rng = case(seed), random.Random(seed)
        seconds = [took * 10 ** rng.uniform(-3, 3) for took in Costs.of(one.program, one.plan, one.problem).seconds]
        ordered = in_global_order(one.program, one.plan, seconds)
        check_program(replace(ordered), one.groups)
        check_cards(ordered, one.plan, one.groups)


def test_a_longer_stretch_is_proved_not_tried() -> None:
    """A receive that is issued one mini-batch too early, in every mini-batch, is found from the program of a few."""
    prob = problem(chain(3), 3, 2)
    plan = make_plan(prob, "test", [(1 << op, 1) for op in range(3)], 1)
    program = lower(plan, prob.graph, NoFlush(), minibatches=window(plan, AHEAD))
    costs = Costs.of(program, plan, prob)
    ordered = in_global_order(program, plan, costs.seconds)
    check_any_length(ordered, plan)
    check_cards(ordered, plan)
    with pytest.raises(MalformedProgram, match="cards"):
        check_cards(program, plan)
    with pytest.raises(MalformedProgram, match="mini-batch"):
        check_any_length(program, plan)
    swapped = dict(ordered.actions)
    own = list(swapped[1])
    at = next(i for i, a in enumerate(own) if a.kind == "RB")
    own[at - 1], own[at] = own[at], own[at - 1]
    with pytest.raises(MalformedProgram):
        check_any_length(replace(ordered, actions={**swapped, 1: tuple(own)}), plan)


def test_a_circle_is_named() -> None:
    prob = problem(chain(2), 2, 4)
    plan = make_plan(prob, "test", [(1, 1), (2, 1)], 1)
    program = lower(plan, prob.graph, OneFOneB())
    # s0.RB0 stands before s0.F0, and behind it on the card waits all that makes what it waits for.
    with pytest.raises(MalformedProgram, match=r"one queue a card: .*s0\.F0@d0 stands behind .*s0\.RB0|s0\.SF0>s1\.d1"):
        check_cards(program, plan)


def test_hosts_that_wait_for_their_sends() -> None:
    """A circle of three hosts through a pass that waits for a message: the hosts of devices 0, 2 and 3 wait for their sends.

    Device 0's send waits for its pass, which waits for a message of device 2, whose host waits for its send to device 3, whose
    host waits for its send to device 0, which that host takes only behind its wait.
    """
    text = """samples 2 minibatches 1
s0.RF0<s2.d2[0:1]@d0 s0.F0@d0 s0.SF0>s1.d1[0:1]@d0 s0.SF0>s1.d1[1:2]@d0 s0.RF1<s3.d3[0:1]@d0 s0.F1@d0
s1.RF0<s0.d0[0:1]@d1 s1.RF0<s0.d0[1:2]@d1 s1.RF0<s3.d3[1:2]@d1 s1.F0@d1
s2.F0@d2 s2.SF0>s3.d3[0:1]@d2 s2.SF0>s0.d0[0:1]@d2
s3.F0@d3 s3.SF0>s0.d0[0:1]@d3 s3.SF0>s1.d1[1:2]@d3 s3.RF1<s2.d2[0:1]@d3 s3.F1@d3
"""
    program = Program.from_text(text)
    check_program(program)
    plan, made = make_plan(problem(chain(1), 1, 1), "test", [(1, 1)], 1), communicators((), program)
    for pending, runs in ((0, False), (1, True), (None, True)):
        assert (outcome([program], made, pending=pending) == "runs") == runs
    with pytest.raises(MalformedProgram, match=r"s0\.F0@d0 stands behind s"):
        check_cards(program, plan)


def test_receives_behind_passes() -> None:
    """Device 1's host waits for a send that is received behind a pass, which needs what the host sends after its wait."""
    text = """samples 2 minibatches 1
s0.RF0<s2.d2[0:1]@d0 s0.F0@d0 s0.RF1<s1.d1[1:2]@d0 s0.F1@d0
s1.F0@d1 s1.SF0>s0.d0[1:2]@d1 s1.SF0>s2.d2[0:1]@d1
s2.RF0<s1.d1[0:1]@d2 s2.F0@d2 s2.SF0>s0.d0[0:1]@d2
"""
    program = Program.from_text(text)
    check_program(program)
    plan, made = make_plan(problem(chain(1), 1, 1), "test", [(1, 1)], 1), communicators((), program)
    assert outcome([program], made, pending=0) == "runs"
    assert outcome([program], made, pending=0, receives_wait=True) == "deadlock"
    with pytest.raises(MalformedProgram, match=r"s0\.RF1<s1\.d1\[1:2\]@d0 stands behind s0\.F0@d0"):
        check_cards(program, plan)


def test_a_file_in_another_order_is_refused_for_cards(tmp_path) -> None:
    one, ordered = next(pair for pair in map(found, SEEDS) if hangs(pair[0], pair[0].program))
    path = tmp_path / "program.txt"
    path.write_text(ordered.to_text())
    assert _checked(path, one.groups, one.plan) == ordered
    path.write_text(one.program.to_text())
    assert _checked(path, one.groups) == one.program
    with pytest.raises(MalformedProgram, match=r"program\.txt: .*on cards"):
        _checked(path, one.groups, one.plan)


def test_no_buffer_waits_for_a_faster_stage() -> None:
    """An evaluation's first stage could run far ahead of a slow last one: its messages are made just in time."""
    prob = problem(chain(3), 3, 64)
    plan = make_plan(prob, "test", [(1 << op, 1) for op in range(3)], 1)
    program = lower(plan, prob.graph, ForwardOnly(), 64)
    label_of, costs = program.waits.label_of, Costs.of(program, plan, prob)
    slow = {label_of[program.waits.first[2] + i] for i, a in enumerate(program.actions[2]) if a.kind == "F"}
    seconds = [20.0 * took if label in slow else took for label, took in enumerate(costs.seconds)]
    ordered = in_global_order(program, plan, seconds)
    held = most = 0
    for action in ordered.actions[2]:
        held += (action.kind == "RF") - (action.kind == "F")
        most = max(most, held)
    assert most <= 3


def meetings(made: tuple[Communicator, ...], devices: list[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The first messages of hosts that walk their lists by themselves: both must have come. Yields what has happened."""
    lists = {d: [(c.name, pair) for c, pair in first_messages(made) if d in pair] for d in devices}
    while True:
        heads = Counter(own[0] for own in lists.values() if own)
        ready = sorted(what for what, count in heads.items() if count == 2)
        if not ready:
            assert not any(lists.values())
            return
        for own in lists.values():
            if own and own[0] == ready[-1]:
                own.pop(0)
        yield ready[-1]


def test_pairs_of_devices_share_communicators_that_are_not_theirs() -> None:
    for seed in SEEDS:
        one, ordered = found(seed)
        made = communicators(one.groups, ordered)
        assert made == communicators(one.groups, one.program)
        pairs = [pair for c in made for pair in c.pairs]
        wanted = {(d, a.peer_device) for d, own in ordered.actions.items() for a in own if a.kind in ("SF", "SB")}
        assert sorted(pairs) == sorted(pair for pair in wanted if pair[0] != pair[1])
        for c in made:
            ends = [device for pair in c.pairs for device in pair]
            assert len(ends) == len(set(ends))
            assert set(ends) <= set(c.devices) and list(c.devices) == sorted(set(c.devices))
            assert all(one.groups[group].devices == c.devices for group in c.groups if group >= 0)
        assert len({c.name for c in made}) == len(made)
        most = max(Counter(device for pair in pairs for device in pair).values(), default=0)
        assert sum(bool(c.pairs) for c in made) <= max(2 * most - 1, 0)
        norm = any(a.kind == "N" for own in ordered.actions.values() for a in own)
        assert len(made) <= len(pairs) + len(one.groups) + norm
        assert len(list(meetings(made, sorted(ordered.actions)))) == len(pairs)


@pytest.mark.parametrize("replicas", ["split", "round_robin"])
def test_communicators_are_far_fewer_than_channels(replicas: str) -> None:
    prob = replace(random_problem(7, max_ops=16, max_devices=16), minibatch_size=64)
    ops = prob.graph.num_ops
    wide = replace(prob, cluster=problem(chain(2), 4 * ops, 64).cluster)
    plan = make_plan(wide, "test", [(1 << op, 1 + op % 4) for op in range(ops)], 12 if replicas == "split" else 1, k=1)
    if replicas == "round_robin":
        plan = make_plan(wide, "test", [(1 << op, (1, 2, 4)[op % 3]) for op in range(ops)], 1, sharing=IN_TURN)
    program = lower(plan, wide.graph, GPipe())
    made = communicators((), program)
    assert 3 * len(made) < len(channels_of(plan))


def test_sample() -> None:
    """Of `python -m tests.checks.cards`: proof and model say the same."""
    wrong, counts = check_many(5, start=1)  # small programs
    assert not wrong, "\n".join(wrong)
    for path in ("strictest", "one communicator", "overlapped, one send under way"):
        ran = Counter()
        for name, number in counts.items():
            if f", {path}: " in name:
                ran[name.endswith(": runs")] += number
        assert min(ran[True], ran[False]) > (0 if path.startswith("overlapped") else 1), (path, ran)
