"""Sends under way: the least that lets a program run to its end, of limits that are doubled."""

from __future__ import annotations

import pytest

from gpp.program.program import Program, check_program
from gpp.program.sends import enough_sends


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
