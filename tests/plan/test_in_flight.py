"""Samples in flight: what every stage holds follows from its successors alone, and suffices for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpp.cost.holding import DEPTH, EVERYTHING
from gpp.plan.in_flight import in_flight_samples, required_in_flight
from tests.support.generated import Shapes, shapes

TOTALS = st.none() | st.integers(1, 200)


@given(shapes())
def test_a_stage_holds_whole_turns_and_no_less_than_its_successors(found: Shapes):
    held = in_flight_samples(found.stages, found.edges, None, DEPTH)
    for s, (b, k, turns) in enumerate(found.stages):
        assert held[s] % (turns * b) == 0 and held[s] >= turns * k * b
    for a, c in found.edges:
        b, k, turns = found.stages[a]
        assert held[a] > held[c]
        # The largest of what the successors ask for, and each asks alone.
        assert held[a] >= required_in_flight(b, k, (held[c], *found.stages[c][:2]), turns)
    for s in {*range(len(held))} - {a for a, _ in found.edges}:
        b, k, turns = found.stages[s]
        assert held[s] == turns * k * b


@given(shapes())
def test_equal_micro_batches_hold_one_for_each_stage_to_the_sink(found: Shapes):
    """The 1F1B of a DAG: the longest way to a sink."""
    size, count = found.stages[0][0], len(found.stages)
    held = in_flight_samples([(size, 1, 1)] * count, found.edges, None, DEPTH)
    depth = [1] * count
    for a, c in sorted(found.edges, reverse=True):
        depth[a] = max(depth[a], depth[c] + 1)
    assert held == [size * d for d in depth]


@given(shapes(), TOTALS)
def test_no_stage_holds_more_than_there_is(found: Shapes, total: int | None):
    free = in_flight_samples(found.stages, found.edges, None, DEPTH)
    held = in_flight_samples(found.stages, found.edges, total, DEPTH)
    whole = in_flight_samples(found.stages, found.edges, total, EVERYTHING)
    for s, (b, _, _) in enumerate(found.stages):
        most = free[s] if total is None else -(-total // b) * b
        assert held[s] <= whole[s] and held[s] <= free[s]
        assert total is None or whole[s] == most
        assert held[s] % b == 0


@given(shapes(), st.data())
def test_another_dependency_never_takes_samples_away(found: Shapes, data: st.DataObject):
    count = len(found.stages)
    a = data.draw(st.integers(0, count - 1))
    more = [(a, c) for c in range(a + 1, count) if data.draw(st.booleans())]
    before, after = (in_flight_samples(found.stages, edges, None, DEPTH) for edges in (found.edges, [*found.edges, *more]))
    assert all(x <= y for x, y in zip(before, after, strict=True))
