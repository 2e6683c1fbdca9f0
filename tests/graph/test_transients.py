"""What sets of operators take while they run: against a walk through forward and backward, step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpp.graph.op_graph import Op, OpGraph
from gpp.graph.transients import Transients, grouped


def random_ops(rng: random.Random) -> tuple[Op, ...]:
    def amount(most: int) -> float:
        return float(rng.choice([0, rng.randint(0, most)]))

    return tuple(
        Op(name=f"op{i}", saved_bytes=amount(20), transient_bytes=amount(40), fixed_bytes=amount(80))
        for i in range(rng.randint(1, 9))
    )


def walked(ops: tuple[Op, ...], own: list[int], samples: int) -> float:
    """Most bytes at a time in a forward and a backward of some operators, less what they save."""
    held, most = 0.0, 0.0
    for op in own:
        held += ops[op].saved_bytes * samples
        most = max(most, held + ops[op].transient_bytes * samples + ops[op].fixed_bytes)
    whole = held
    for op in reversed(own):
        most = max(most, held + ops[op].transient_bytes * samples + ops[op].fixed_bytes)
        held -= ops[op].saved_bytes * samples
    assert held == 0
    return max(most - whole, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_a_line_is_exact_for_one_sample_and_an_upper_bound_for_more(seed: int) -> None:
    rng = random.Random(seed)
    ops = random_ops(rng)
    members = np.array([[rng.random() < 0.6 for _ in ops] for _ in range(8)])
    found = Transients(OpGraph(name="g", ops=ops, tensors=())).of(members)
    for row, slope, first, fixed in zip(members, found.slope, found.first, found.fixed, strict=True):
        own = np.flatnonzero(row).tolist()
        assert first == walked(ops, own, 1)
        for samples in (2, 5, 1000):
            assert slope * samples + fixed >= walked(ops, own, samples)
        # No looser than need be: without what is fixed it is exact everywhere.
        bare = tuple(Op(name=op.name, saved_bytes=op.saved_bytes, transient_bytes=op.transient_bytes) for op in ops)
        assert slope * 7 == walked(bare, own, 7)


@pytest.mark.parametrize("seed", range(20))
def test_intervals_of_any_order_and_groups_say_what_sets_say(seed: int) -> None:
    rng = random.Random(seed)
    ops = random_ops(rng)
    n, table = len(ops), Transients(OpGraph(name="g", ops=ops, tensors=()))
    order = rng.sample(range(n), n)
    found = table.of_intervals(order)
    for i in range(n + 1):
        for j in range(i, n + 1):
            one = table.of(np.array([[op in order[i:j] for op in range(n)]]))
            assert (found.slope[i, j], found.first[i, j]) == (one.slope[0], one.first[0])
    cut = rng.randint(0, n)
    pair = [
        Op(name=f"g{g}", saved_bytes=sum(op.saved_bytes for op in part), transient_bytes=line.slope, fixed_bytes=line.fixed)
        for g, part in enumerate((ops[:cut], ops[cut:]))
        for line in [grouped(part)]
    ]
    # Whole groups in order compose to what their operators are together.
    assert grouped(pair) == pytest.approx(grouped(ops))


def test_gradients_at_the_boundary() -> None:
    """What goes out is there all the time, what came in only at the end, when all else is gone."""
    line = grouped([Op(name="a", transient_bytes=10.0, fixed_bytes=4.0)])
    assert line.within(3.0, 5.0) == (15.0, 19.0)
    assert line.within(30.0, 5.0) == (35.0, 35.0)
