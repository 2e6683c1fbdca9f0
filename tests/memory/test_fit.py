"""Marks of least added seconds: against all markings on small stages, and what a user may ask."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from gpp.cost.stage import stage_bytes
from gpp.errors import InvalidConfig
from gpp.memory.capuchin import capuchin
from gpp.memory.choices import Choices, Marking
from gpp.memory.fit import Fit, fit
from gpp.memory.prices import Prices
from gpp.plan.stage import Stage
from tests.check_memory import Case, main, random_case, random_graph, verdict


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
    return case, Choices(problem, stage, 4, case.ways, None, None)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "graph"])
def test_long_stages_fit_and_are_no_slower_than_the_greedy(chain: bool) -> None:
    for seed in range(2):
        case, choices = long_case(seed, chain=chain)
        keep, all_again = choices.judge(Marking()).peak, choices.judge(Marking(case.stage.ops)).peak
        for share in (0.2, 0.6):
            limit = all_again + (keep - all_again) * share
            found = fit(case.problem, case.stage, case.held, limit)
            assert found is not None
            assert stage_bytes(case.problem, found.on(case.stage)).peak(case.held) <= limit * (1 + 1e-9)
            greedy = capuchin(choices, limit)
            assert greedy is None or found.added_s <= greedy.added_s * (1 + 1e-9)
            published = fit(case.problem, case.stage, case.held, limit, selection="capuchin")
            assert published == (None if greedy is None else Fit.of(greedy))


def test_a_stage_that_fits_is_left_alone() -> None:
    case, choices = long_case(0, chain=True)
    keep = choices.judge(Marking()).peak
    assert fit(case.problem, case.stage, 4, keep) == Fit((), (), 0.0)
    assert fit(case.problem, replace(case.stage, recompute=(0,)), 4, keep) == Fit((), (), 0.0)
    assert fit(case.problem, case.stage, 4, 1.0) is None
    assert fit(case.problem, case.stage, 4, keep * 0.9, ways=()) is None


def test_copies_are_free_only_while_they_hide() -> None:
    """A longer period hides more; with two micro-batches in flight copies save nothing."""
    case, _ = long_case(1, chain=True)
    device = replace(case.problem.cluster.devices[0], host_bandwidth_bytes_per_s=1.0, host_memory_bytes=None)
    problem = replace(case.problem, cluster=replace(case.problem.cluster, devices=(device,) * 2))
    limit = Choices(problem, case.stage, 4, (), None, None).keeping.peak(4) * 0.8
    short, endless = (fit(problem, case.stage, 4, limit, period_s=period) for period in (1.0, 1e9))
    assert short is not None and endless is not None
    assert endless.added_s == 0 < short.added_s and endless.offload and not endless.recompute
    assert not Choices(problem, case.stage, 2, ("offload",), None, None).offloads
    unlinked = replace(problem, cluster=replace(problem.cluster, devices=(replace(device, host_bandwidth_bytes_per_s=None),) * 2))
    assert fit(unlinked, case.stage, 4, limit, ways=("offload",)) is None
    with pytest.raises(InvalidConfig, match="must be of recompute, offload"):
        fit(problem, case.stage, 4, limit, ways=("swap",))


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
        case.problem.bills.clear()
        without = fit(case.problem, case.stage, 4, limit)
        assert found is not None and without is not None
        assert found.added_s == pytest.approx(without.added_s, rel=1e-12)


def peak_of(case: Case, stage: Stage, recompute: tuple[int, ...]) -> float:
    return stage_bytes(case.problem, replace(stage, recompute=recompute)).peak(4)
