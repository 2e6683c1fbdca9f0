"""What sets of operators take while they run: against a walk through a forward and a backward, storage by storage."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpp.graph.op_graph import Op, OpGraph, Tensor, bits, mask_of
from gpp.graph.sums import OpSums
from gpp.graph.transients import TransientLine, Transients, grouped
from tests.checks.memory import random_graph


def walked(graph: OpGraph, own: list[int], samples: int) -> float:
    """Most bytes at a time in a forward and a backward of some operators, less what they save and the boundary's gradients."""
    there: dict[int, float] = {}
    waiting: set[str] = set()
    most = 0.0

    def work(op: int) -> None:
        nonlocal most
        # Its gradient lies with the boundary's: once is enough.
        twice = sum(
            t.bytes_per_sample
            for t in graph.tensors
            if t.producer == op and t.differentiable and not t.saved and set(t.consumers) - set(own)
        )
        beyond = (graph.ops[op].transient_bytes - twice) * samples + graph.ops[op].fixed_bytes
        # A sum of gradients that waits, and the sum of it and the operator's own gradient.
        beyond += sum(graph.param_of[name].num_bytes * (1 + (name in graph.ops[op].params)) for name in waiting)
        most = max(most, sum(there.values()) + beyond - whole)

    whole = sum(graph.ops[op].saved_bytes for op in own) * samples
    for op in own:
        there[op] = graph.ops[op].saved_bytes * samples
        work(op)
    for op in reversed(own):
        work(op)
        del there[op]
        summed = {name for name in graph.ops[op].params if graph.param_of[name].trainable} | waiting
        waiting = {name for other in own if other < op for name in graph.ops[other].params if name in summed}
    return most


@pytest.mark.parametrize("seed", range(40))
def test_a_line_is_exact_for_one_sample_of_a_chain_and_never_below(seed: int) -> None:
    rng = random.Random(seed)
    chain = seed % 2 == 0
    graph = random_graph(rng, rng.randint(1, 9), chain=chain)
    members = np.array([[rng.random() < 0.6 for _ in graph.ops] for _ in range(8)])
    found = Transients(graph).of(members)
    for row, slope, first, fixed in zip(members, found.slope, found.first, found.fixed, strict=True):
        own = np.flatnonzero(row).tolist()
        assert first == walked(graph, own, 1) if chain else first >= walked(graph, own, 1)
        for samples in (2, 5, 1000):
            assert slope * samples + fixed >= walked(graph, own, samples)


@pytest.mark.parametrize("seed", range(30))
def test_intervals_of_any_order_and_groups_say_what_sets_say(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 9), chain=False)
    n, table, order = graph.num_ops, Transients(graph), []
    while len(order) < n:
        ready = [i for i in range(n) if i not in order and set(bits(graph.predecessors[i])) <= set(order)]
        order.append(rng.choice(ready))
    found = table.of_intervals(order)
    for i in range(n + 1):
        for j in range(i, n + 1):
            one = table.of(np.array([[op in order[i:j] for op in range(n)]]))
            assert (found.slope[i, j], found.first[i, j]) == (one.slope[0], one.first[0])
            sums = OpSums(graph).of(mask_of(order[i:j]))
            inside = one.within(sums.incoming_back, sums.outgoing_back)
            assert (sums.transient, sums.fixed) == (inside.slope[0], inside.fixed[0])
    # Nothing leaves the whole graph: as a group it is what it is as a stage.
    whole = table.of(np.ones((1, n), bool))
    assert grouped(graph, range(n)) == (whole.slope[0], whole.first[0])


def test_a_branch_frees_nothing_for_another() -> None:
    ops = tuple(Op(name=name, saved_bytes=10.0, transient_bytes=4.0) for name in ("root", "a", "b"))
    fork = Tensor(name="t", producer=0, consumers=(1, 2), bytes_per_sample=1.0)
    assert Transients(OpGraph(name="g", ops=ops, tensors=(fork,))).of(np.ones((1, 3), bool)).slope[0] == 4.0
    assert Transients(OpGraph(name="g", ops=ops, tensors=(fork,))).of(np.array([[True, False, False]])).slope[0] == 4.0


def test_gradients_at_the_boundary() -> None:
    """What goes out is there all the time, what came in only at the end, when all else is gone."""
    line = TransientLine(10.0, 14.0)
    assert line.within(3.0, 5.0) == (15.0, 19.0)
    assert line.within(30.0, 5.0) == (35.0, 35.0)
