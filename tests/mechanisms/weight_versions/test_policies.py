"""The version table: which weights each pass uses, how many copies that takes, how far predictions look."""

import pytest

from gpp import DoubleBuffer, Flush, Naive, PipeMare, PipeOptim, SpecTrain, Stash, VerticalSync
from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.costs import Extrapolation
from gpp.weights.base import PipelinePosition, WeightWork

POLICIES: list[AbstractVersionPolicy] = [
    Naive(), Stash(), VerticalSync(), DoubleBuffer(), SpecTrain(), SpecTrain(form=2), PipeOptim(), PipeOptim(offset=1), PipeMare()
]  # fmt: skip


def places(depth: int, accumulation: int = 1) -> list[PipelinePosition]:
    """The stages of a chain, from the source to the sink."""
    return [PipelinePosition(warmup=depth - 1 - k, depth=depth, accumulation=accumulation) for k in range(depth)]


def order(place: PipelinePosition, num_microbatches: int) -> list[tuple[str, int]]:
    """F(0 .. W-1), then F(i + W), B(i), an update after every mini-batch: written down once more, on its own."""
    out = [("F", i) for i in range(min(place.warmup, num_microbatches))]
    for i in range(num_microbatches):
        out += [("F", i + place.warmup)] if i + place.warmup < num_microbatches else []
        out += [("B", i)] + ([("U", i // place.accumulation)] if (i + 1) % place.accumulation == 0 else [])
    return out


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_versions_are_those_that_the_order_leaves(depth: int, accumulation: int) -> None:
    """Walk a stage's order and count updates: that is what the table must say, for what is available then."""
    for place in places(depth, accumulation):
        updates, used = 0, {}
        for kind, i in order(place, 6 * accumulation + depth):
            if kind == "U":
                updates += 1
            elif kind == "F":
                used[i] = updates
                assert Naive().forward_version(place, i) == Stash().forward_version(place, i) == updates
                assert PipeOptim().forward_version(place, i) == SpecTrain().forward_version(place, i) == updates
                # Older ones can be kept, newer ones are not there.
                assert 0 <= VerticalSync().forward_version(place, i) <= updates
                if accumulation >= depth:
                    assert max(i // accumulation - 1, 0) == DoubleBuffer().forward_version(place, i) <= updates
            else:
                assert Naive().backward_version(place, i) == PipeOptim().backward_version(place, i) == updates
                assert Stash().backward_version(place, i) == used[i]
                # The prediction aims at the version that the backward finds.
                assert used[i] + PipeOptim().horizon(place, i) == updates


@pytest.mark.parametrize("depth", [3, 4, 6, 8])
def test_the_published_table(depth: int) -> None:
    for k, place in enumerate(places(depth)):
        w = depth - 1 - k
        for i in range(3 * depth):
            assert Stash().forward_version(place, i) == max(0, i - w)
            assert VerticalSync().forward_version(place, i) == VerticalSync().backward_version(place, i) == max(0, i - (depth - 1))
            assert Naive().backward_version(place, i) == i
        assert [p.copies(place) for p in (Naive(), Flush(), Stash(), VerticalSync(), DoubleBuffer())] == [1, 1, depth - k, depth, 2]
        assert [p.staleness(place) for p in (Flush(), Naive(), Stash(), VerticalSync())] == [0, w, w, depth - 1]
        assert PipeOptim().copies(place) == (2 if w else 1)
        assert PipeOptim(offset=1).copies(place) == 2
        assert PipeOptim(horizon_from="constant").horizon(place, 0) == w
        assert PipeOptim(horizon_from="constant", offset=1).horizon(place, 0) == w + 1 == depth - k


def test_the_horizons_of_spectrain() -> None:
    late = 40  # the pipeline is full
    assert [(SpecTrain().horizon(p, late), SpecTrain().backward_horizon(p)) for p in places(4)] == [(3, 0), (2, 0), (2, 1), (1, 1)]
    assert [(SpecTrain(form=2).horizon(p, late), SpecTrain(form=2).backward_horizon(p)) for p in places(4)] == [
        (3, 0), (2, 0), (1, 0), (0, 0)
    ]  # fmt: skip
    for place in places(8):
        assert SpecTrain().horizon(place, late) - SpecTrain().backward_horizon(place) == place.warmup


def test_horizons_are_short_while_the_pipeline_fills() -> None:
    place = PipelinePosition(warmup=3, depth=4)
    assert [PipeOptim().horizon(place, i) for i in range(6)] == [0, 1, 2, 3, 3, 3]
    # After a drain, which left 100 updates behind, likewise.
    assert [PipeOptim().horizon(place, 100 + i, start=100) for i in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [PipeOptim(horizon_from="constant").horizon(place, i) for i in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}{getattr(p, 'form', '')}{getattr(p, 'offset', '')}")
def test_no_stage_needs_more_copies_than_said_of_all(policy: AbstractVersionPolicy) -> None:
    for depth in (1, 2, 5):
        found = [policy.copies(place) for place in places(depth, policy.accumulation or 8)]
        assert max(found) <= policy.most_copies(depth)


def test_two_buffers_need_as_many_micro_batches_as_stages() -> None:
    DoubleBuffer().check(PipelinePosition(warmup=3, depth=4, accumulation=4))
    with pytest.raises(InvalidConfig, match="at least 4 micro-batches in a mini-batch"):
        DoubleBuffer().check(PipelinePosition(warmup=3, depth=4, accumulation=3))
    for policy in (Stash(), PipeOptim(), SpecTrain(), VerticalSync(), Naive()):
        policy.check(PipelinePosition(warmup=3, depth=4))


PREDICTION = Extrapolation(once=WeightWork(3.0, 2), each=WeightWork(0.7, 0.3), update=WeightWork(0.2, 5))


def walked(policy: AbstractVersionPolicy, position: PipelinePosition) -> tuple[int, int, list[WeightWork]]:
    """Copies, staleness and work (of forwards, backwards, updates of one mini-batch) of a stage that runs its order, with memory
    handled as the runtime does. What a backward will need again and an update overwrites has memory of its own, one for all that
    use the same; else there is one prediction, made where a pass needs one that is not there; nothing outlives an update."""
    m, cost = position.accumulation, PREDICTION
    total = (2 * position.depth + 2 * position.warmup + 12) * m
    measured = range(total // m // 2 * m, (total // m // 2 + 1) * m)
    own = policy.backward == "same"
    updates, copies, staleness = 0, 1, 0
    done: dict[str, WeightWork] = {
        "F": WeightWork(),
        "B": WeightWork(),
        "U": cost.update if policy.predictor or policy.backward_horizon(position) else WeightWork(),
    }
    used: dict[int, int] = {}
    lasting: dict[int, tuple[int, int]] = {}
    prediction: int | None = None
    for kind, i in order(position, total):
        counted = (i if kind != "U" else i * m) in measured
        if kind == "F":
            used[i] = policy.forward_version(position, i)
            assert used[i] <= updates
        if kind == "U":
            updates, prediction = updates + 1, None
            if policy.predictor is None and own and i * m + m + position.warmup < total:
                needed = {*used.values(), *range(policy.forward_version(position, (i + 1) * m + position.warmup), updates), updates}
                # The version before is still needed, so the update is made on a copy of it.
                done["U"] += WeightWork(2.0, 1) * (counted and updates - 1 in needed)
                copies = max(copies, len(needed))
            continue
        ahead = policy.horizon(position, i) if kind == "F" else policy.backward_horizon(position)
        if policy.predictor is not None and own and kind == "F" and i // m > updates:
            made = (updates, ahead) not in lasting.values()
            lasting[i] = updates, ahead
            done["F"] += cost.of(ahead) * (counted and made)
            copies = max(copies, 1 + len(set(lasting.values())))
        elif not own and ahead:
            done[kind] += cost.of(max(ahead, 0)) * (counted and prediction != ahead)
            copies, prediction = 2, ahead
        if kind == "B":
            lasting.pop(i, None)
            staleness = max(staleness, updates - used.pop(i))
    return copies, staleness, [done["F"] * (1 / m), done["B"] * (1 / m), done["U"]]


@pytest.mark.parametrize("accumulation", [1, 2, 3, 8])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}{getattr(p, 'form', '')}{getattr(p, 'offset', '')}")
def test_copies_staleness_and_traffic_are_those_of_a_walk_along_the_order(policy: AbstractVersionPolicy, accumulation: int) -> None:
    for depth in (1, 2, 3, 5, 8):
        if accumulation < policy.least_accumulation(depth):
            continue
        for position in places(depth, accumulation):
            copies, staleness, moved = walked(policy, position)
            assert (policy.copies(position), policy.staleness(position)) == (copies, staleness)
            for charged, work in zip(policy.moved(position, PREDICTION), moved, strict=True):
                assert (charged.moved, charged.launches) == pytest.approx((work.moved, work.launches))
