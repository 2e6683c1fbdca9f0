"""What a device holds in an order of passes, and sends under way: the least that lets a program run to its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpp.cost.amounts import StageBytes
from gpp.cost.together import together
from gpp.plan.build import make_plan
from gpp.program.held import order_peak
from gpp.program.program import Program, Task, check_program
from gpp.program.sends import enough_sends
from gpp.runtime.worker.messages import most_sends
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support.graphs import graph, problem
from tests.support.programs import lower


def _walked(order: list[Task], memories: dict[int, StageBytes]) -> float:
    """The most bytes over an order: what stays, a micro-batch from its forward to the end of its backward, what the stage that
    computes takes, and the messages that may wait for the others."""
    stays = sum(memory.static + memory.versions for memory in memories.values())
    held: set[tuple[int, int]] = set()
    most = 0.0
    for stage, kind, microbatch in order:
        if kind == "F":
            held.add((stage, microbatch))
        others = sum(memory.waiting for s, memory in memories.items() if s != stage)
        most = max(most, stays + sum(memories[s].microbatch for s, _ in held) + memories[stage].transient + others)
        if kind == "B":
            held.remove((stage, microbatch))
    return most


@pytest.mark.parametrize("seed", range(20))
def test_one_stage_computes_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    memories = {}
    for s in range(rng.randint(1, 4)):
        waiting = rng.randint(0, 9)
        sizes = {"static": rng.randint(0, 50), "versions": rng.randint(0, 9), "microbatch": rng.randint(0, 20)}
        memories[s] = StageBytes(**sizes, transient=waiting + rng.randint(0, 80), waiting=waiting)
    todo = {s: ["F", "F", "B", "F", "B", "B"] for s in memories}
    order, done = list[Task](), {(s, kind): 0 for s in memories for kind in "FB"}
    while todo:
        s = rng.choice(sorted(todo))
        kind = todo[s].pop(0)
        order.append(Task(s, kind, done[s, kind]))
        done[s, kind] += 1
        if not todo[s]:
            del todo[s]
    assert order_peak(order, memories) == _walked(order, memories)
    needs = [(memory.peak(2), memory.passing) for memory in memories.values()]
    assert order_peak(order, memories) <= together(needs) <= sum(need for need, _ in needs)


def two_towers(count: int) -> Program:
    """Device 0 runs all of stage 0 and then all of stage 1; stage 2 on device 1 reads both, a sample of each at a time."""
    sends = [f"s{s}.F{m}@d0 s{s}.SF{m}>s2.d1[{m}:{m + 1}]@d0" for s in (0, 1) for m in range(count)]
    reads = [f"s2.RF{m}<s0.d0[{m}:{m + 1}]@d1 s2.RF{m}<s1.d0[{m}:{m + 1}]@d1 s2.F{m}@d1" for m in range(count)]
    return Program.from_text(f"samples {count} minibatches 1\n{' '.join(sends)}\n{' '.join(reads)}\n")


@pytest.mark.parametrize(("count", "enough"), [(16, 16), (20, 32), (80, 128)])
def test_all_of_a_stage_before_the_first_pass_of_another_needs_room(count: int, enough: int) -> None:
    program = two_towers(count)
    check_program(program)
    assert enough_sends(program.waits, {0: 16, 1: 16}) == {0: enough, 1: enough}
    assert enough_sends(program.waits, {0: None, 1: 16}) == {0: None, 1: 16}


def test_two_frozen_towers_on_a_device_take_turns() -> None:
    """No backward holds the device back: all messages of the first tower would lie in memory before the second begins."""
    joined = graph(3, [(0, 2), (1, 2)])
    still = (replace(op, backward_flops=0.0, saved_bytes=0.0) for op in joined.ops[:2])
    tensors = tuple(replace(tensor, differentiable=False) for tensor in joined.tensors)
    frozen = replace(joined, ops=(*still, joined.ops[2]), tensors=tensors)
    plan = make_plan(problem(frozen, 2, 24), "test", [(1, 1), (2, 1), (4, 1)], 1, ordered=True, placement=[(0,), (0,), (1,)])
    program = lower(plan, frozen, OneFOneB())
    limits = {device: most_sends(own, plan) for device, own in program.actions.items()}
    passes = [(action.stage, action.microbatch) for action in program.actions[0] if action.kind == "F"]
    assert passes == [(s, m) for m in range(24) for s in (0, 1)]
    assert limits == {0: 4, 1: None} == enough_sends(program.waits, limits)
