"""Marks of least added seconds: against all markings on small stages, and what a user may ask."""

import random
from dataclasses import replace

import numpy as np
import pytest

from gpp.cost.problem import Problem
from gpp.cost.stage import stage_bytes
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.choices import Choices, Marking
from gpp.mechanisms.marks.fit import _ALIKE, fit
from gpp.mechanisms.marks.prices import Prices
from gpp.mechanisms.marks.search import capuchin
from gpp.mechanisms.marks.stage import marked
from gpp.stage import Stage
from tests.checks.memory import Case, main, random_case, random_graph, verdict
from tests.support.graphs import chain as chain_of
from tests.support.graphs import problem


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "graph"])
def test_no_marking_fits_in_fewer_seconds(chain: bool) -> None:
    for seed in range(40):
        said = verdict(random_case(random.Random(f"suite-{chain}-{seed}"), 6, chain=chain))
        assert said.startswith("equal"), (seed, said)


def test_the_search_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "3", "--ops", "4"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [["chain", "3", "3"], ["graph", "3", "3"]]


def long_case(seed: int, *, chain: bool) -> tuple[Case, Choices]:
    """A stage of 24 operators on one device, which is too many for all markings."""
    rng = random.Random(seed)
    small = random_case(rng, 4, chain=chain)
    problem = replace(small.problem, graph=random_graph(rng, 24, chain=chain), minibatch_size=8)
    stage = Stage(ops=tuple(range(24)), devices=(0,), microbatch_size=2, in_flight=8)
    case = replace(small, problem=problem, stage=stage, held=4, ways=("recompute", "offload"))
    return case, Choices(problem, stage, 4, case.ways, None)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "graph"])
def test_long_stages_fit_and_are_no_slower_than_the_greedy(chain: bool) -> None:
    for seed in range(2):
        case, choices = long_case(seed, chain=chain)
        keep, all_again = choices.judge(Marking()).peak, choices.judge(Marking(case.stage.ops)).peak
        for share in (0.2, 0.6):
            limit = all_again + (keep - all_again) * share
            found = fit(case.problem, case.stage, case.held, limit)
            assert found is not None
            assert stage_bytes(case.problem, found.marking.on(case.stage)).peak(case.held) <= limit * (1 + 1e-9)
            greedy = capuchin(choices, limit)
            assert greedy is None or found.added_s <= greedy.added_s * (1 + 1e-9)
            published = fit(case.problem, case.stage, case.held, limit, selection="capuchin")
            assert published == greedy


def test_a_stage_that_fits_is_left_alone() -> None:
    case, choices = long_case(0, chain=True)
    keep = choices.judge(Marking()).peak
    assert fit(case.problem, case.stage, 4, keep) == (0.0, keep, Marking())
    assert fit(case.problem, marked(case.stage, recompute=(0,)), 4, keep) == (0.0, keep, Marking())
    assert fit(case.problem, case.stage, 4, 1.0) is None
    assert fit(case.problem, case.stage, 4, keep * 0.9, ways=()) is None


def test_copies_are_free_only_while_they_hide() -> None:
    """Copies over a fast link hide; with two micro-batches in flight copies save nothing."""
    case, _ = long_case(1, chain=True)
    device = replace(case.problem.cluster.devices[0], host_latency_s=0.0, host_memory_bytes=None)

    def linked(bandwidth: float | None) -> Problem:
        devices = (replace(device, host_bandwidth_bytes_per_s=bandwidth),) * 2
        return replace(case.problem, cluster=replace(case.problem.cluster, devices=devices))

    limit = Choices(linked(1.0), case.stage, 4, (), None).keeping.peak(4) * 0.8
    slow, fast = (fit(linked(bandwidth), case.stage, 4, limit) for bandwidth in (1e-3, 1e9))
    assert slow is not None and fast is not None
    assert fast.added_s == 0 < slow.added_s and fast.marking.offload and not fast.marking.recompute
    assert not Choices(linked(1.0), case.stage, 2, ("offload",), None).offloads
    assert fit(linked(None), case.stage, 4, limit, ways=("offload",)) is None


def test_bounds_leave_no_better_choice_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of a chain without bounds finds nothing better."""
    told = []
    for seed in range(12):
        case, _ = long_case(seed, chain=True)
        stage = replace(case.stage, ops=tuple(range(6, 18)))
        keep, all_again = (peak_of(case, stage, ops) for ops in ((), stage.ops))
        told.append((replace(case, stage=stage), all_again + (keep - all_again) * 0.4))
    bounded = [fit(case.problem, case.stage, 4, limit) for case, limit in told]
    monkeypatch.setattr(Prices, "beyond", lambda prices, i, num_bytes, moved, parted: np.zeros(len(num_bytes)))
    for (case, limit), found in zip(told, bounded, strict=True):
        case.problem._remembered.clear()
        without = fit(case.problem, case.stage, 4, limit)
        assert found is not None and without is not None
        assert found.added_s == pytest.approx(without.added_s, rel=1e-12)


def peak_of(case: Case, stage: Stage, recompute: tuple[int, ...]) -> float:
    return stage_bytes(case.problem, marked(stage, recompute=recompute)).peak(4)


def twice(graph: OpGraph) -> OpGraph:
    """The graph, and the same operators and tensors once more behind them, under other names and with weights of their own."""
    n = graph.num_ops
    ops = tuple(replace(op, name=f"{op.name}'", params=tuple(f"{name}'" for name in op.params)) for op in graph.ops)
    tensors = tuple(
        replace(t, name=f"{t.name}'", producer=t.producer + n, consumers=tuple(c + n for c in t.consumers)) for t in graph.tensors
    )
    params = tuple(replace(param, name=f"{param.name}'") for param in graph.params)
    parts = (*graph.ops, *ops), (*graph.tensors, *tensors), (*graph.params, *params)
    return OpGraph(name="twice", ops=parts[0], tensors=parts[1], params=parts[2])


def varied(rng: random.Random, graph: OpGraph, n: int) -> OpGraph:
    """The graph with one thing of its last `n` operators, or of a tensor between them, changed; some sums stay as they were."""
    i, j = rng.sample(range(graph.num_ops - n, graph.num_ops), 2)
    what = rng.choice(
        ["forward_flops", "backward_flops", "saved_bytes", "transient_bytes", "fixed_bytes", "tensor", "flags", "move"]
    )
    if what == "move":
        less, own = sum(t.bytes_per_sample for t in graph.tensors if t.saved and t.producer == j), list(graph.ops)
        moved = own[j].saved_bytes - less
        own[i], own[j] = replace(own[i], saved_bytes=own[i].saved_bytes + moved), replace(own[j], saved_bytes=less)
        return replace(graph, ops=tuple(own))
    if what not in ("tensor", "flags"):
        op = replace(graph.ops[i], **{what: getattr(graph.ops[i], what) + rng.choice([1.0, 30.0])})
        return replace(graph, ops=(*graph.ops[:i], op, *graph.ops[i + 1 :]))
    at = rng.choice([t for t, tensor in enumerate(graph.tensors) if tensor.producer >= graph.num_ops - n])
    old = graph.tensors[at]
    new = replace(old, bytes_per_sample=old.bytes_per_sample * 0.5) if what == "tensor" else replace(old, saved=not old.saved)
    return replace(graph, tensors=(*graph.tensors[:at], new, *graph.tensors[at + 1 :]))


def test_equal_stretches_share_an_answer_and_no_others_do() -> None:
    differ = 0
    for seed in range(16):
        rng = random.Random(seed)
        case = random_case(rng, 4, chain=seed % 2 == 0)
        n, ops, graph = case.problem.graph.num_ops, case.stage.ops, twice(case.problem.graph)
        later = replace(case.stage, ops=tuple(op + n for op in ops))
        problem = replace(case.problem, graph=graph)
        first, second = (fit(problem, stage, case.held, case.limit, ways=case.ways) for stage in (case.stage, later))
        assert first == fit(case.problem, case.stage, case.held, case.limit, ways=case.ways)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert second == first._replace(marking=Marking(*(tuple(op + n for op in named) for named in first.marking)))
        assert len(_ALIKE.of(problem)) == 1, "one search for both"
        for _ in range(6):
            other = replace(problem, graph=varied(rng, graph, n))
            fresh = replace(other)
            fit(other, case.stage, case.held, case.limit, ways=case.ways)
            found = fit(other, later, case.held, case.limit, ways=case.ways)
            assert found == fit(fresh, later, case.held, case.limit, ways=case.ways)
            differ += found != second
    assert differ > 10


def test_stretches_of_equal_sums_are_told_apart() -> None:
    """What the second operator of one stretch saves, the third of the other one does."""
    saved = (1.0, 20.0, 3.0, 2.0), (1.0, 3.0, 20.0, 2.0)
    line = twice(chain_of(4))
    ops = tuple(
        replace(op, saved_bytes=size, transient_bytes=500.0 * (i % 4 == 3))
        for i, (op, size) in enumerate(zip(line.ops, saved[0] + saved[1], strict=True))
    )
    given = problem(replace(line, ops=ops), 1, 8, microbatch_size=1)
    stages = [Stage(ops=tuple(range(i, i + 4)), devices=(0,), microbatch_size=1, in_flight=4) for i in (0, 4)]
    keeping = [Choices(given, stage, 4, ("recompute",), None).keeping for stage in stages]
    assert keeping[0] == keeping[1]
    found = [fit(given, stage, 4, keeping[0].peak(4) - 50, ways=("recompute",)) for stage in stages]
    assert found[0] and found[0].marking.recompute == (1,) and found[1] and found[1].marking.recompute == (6,)
