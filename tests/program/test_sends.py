"""Sends under way: the least that lets a program run to its end, of limits that are doubled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp.plan.build import make_plan
from gpp.program.program import Program, check_program
from gpp.program.sends import enough_sends
from gpp.runtime.worker.messages import most_sends
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support.graphs import graph, problem
from tests.support.programs import lower


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
