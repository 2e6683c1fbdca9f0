"""Operator times that agree with stages timed in place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpp.cost.models.in_place import StageTimes, corrected, update_s_per_byte
from gpp.cost.models.profiled import GraphProfile, Setting


def stage(ops: tuple[int, ...], samples: int, forward: float, backward: float) -> StageTimes:
    return StageTimes(ops=ops, samples=samples, forward_s=forward, backward_s=backward)


def profile(num_ops: int, counts: tuple[int, ...], rng: random.Random) -> GraphProfile:
    rows = tuple(tuple(rng.uniform(1, 5) * n for n in counts) for _ in range(num_ops))
    setting = Setting(device_kind="cpu", device_name="x", torch_version="2")
    return GraphProfile(
        graph_fingerprint="f", setting=setting, sample_counts=counts, forward_s=rows, backward_s=rows, update_s_per_byte=7.0
    )


def test_the_stages_of_a_plan_take_what_was_measured() -> None:
    made = profile(5, (1, 4), random.Random(0))
    timed = made.timed([stage((0, 1), 4, 10.0, 30.0), stage((2, 3, 4), 4, 40.0, 50.0)])
    times, before = timed.at(4), made.at(4)
    assert times.forward_s[:2].sum() == pytest.approx(10, rel=0.01) and times.forward_s[2:].sum() == pytest.approx(40, rel=0.01)
    assert times.backward_s[:2].sum() == pytest.approx(30, rel=0.01) and times.backward_s[2:].sum() == pytest.approx(50, rel=0.01)
    # Other sizes follow the nearest that was measured.
    factor = times.forward_s / before.forward_s
    assert timed.at(1).forward_s == pytest.approx(made.at(1).forward_s * factor)


def test_a_size_between_two_columns_gets_one_of_its_own() -> None:
    made = profile(3, (1, 8), random.Random(1))
    timed = made.timed([stage((0, 1, 2), 3, 6.0, 6.0)])
    assert timed.at(3).forward_s.sum() == pytest.approx(6, rel=0.01) and timed.at(3).backward_s.sum() == pytest.approx(6, rel=0.01)
    assert timed.knows((0, 1, 2), 3) and not timed.knows((0, 1, 2), 1)


def test_plans_that_were_not_timed_are_predicted_better() -> None:
    """Operators that take another time in a stage, timed in two plans with noise: the stages of other plans come out nearer."""
    errors = [0.0, 0.0]
    for seed in range(12):
        rng = random.Random(seed)
        alone = np.array([rng.uniform(0.2, 3) for _ in range(24)])
        true = alone * np.array([rng.uniform(0.7, 1.1) if op < 12 else rng.uniform(1.0, 1.6) for op in range(24)])
        cuts = [rng.randint(6, 11), rng.randint(13, 18)]
        stages = [
            stage(ops, 2, float(true[list(ops)].sum()) * rng.gauss(1, 0.01), 1.0)
            for cut in cuts
            for ops in (tuple(range(cut)), tuple(range(cut, 24)))
        ]
        found, _ = corrected(alone[:, None], alone[:, None], (2,), stages)
        for s in stages:
            assert found[list(s.ops), 0].sum() == pytest.approx(s.forward_s, rel=0.04)
        for times, which in ((alone * true.sum() / alone.sum(), 0), (found[:, 0], 1)):
            errors[which] += sum(abs(times[:cut].sum() / true[:cut].sum() - 1) for cut in range(2, 23))
    assert errors[1] < errors[0] / 2


def test_noise_of_two_large_times_is_not_put_on_a_small_operator_between_them() -> None:
    alone = np.array([10.0, 0.03, 10.0])
    stages = [stage((0, 1), 1, 10.2, 1.0), stage((2,), 1, 10.0, 1.0), stage((0,), 1, 9.8, 1.0), stage((1, 2), 1, 10.1, 1.0)]
    found, _ = corrected(alone[:, None], alone[:, None], (1,), stages)
    assert 0.02 < found[1, 0] < 0.04


def test_a_later_time_of_a_stage_replaces_the_older_one() -> None:
    made = profile(2, (1,), random.Random(2)).timed([stage((0,), 1, 1.0, 1.0), stage((1,), 1, 5.0, 5.0)])
    again = made.timed([stage((0,), 1, 2.0, 3.0)])
    assert len(again.in_place) == 2 and again.at(1).forward_s.tolist() == pytest.approx([2.0, 5.0], rel=0.01)


def test_updates_are_those_in_place() -> None:
    made = profile(2, (1,), random.Random(3))
    assert made.update_per_byte() == 7.0
    own = StageTimes(ops=(0,), samples=1, forward_s=1.0, backward_s=1.0, update_s=6.0, trainable_bytes=2.0)
    other = StageTimes(ops=(1,), samples=1, forward_s=1.0, backward_s=1.0, update_s=2.0, trainable_bytes=2.0)
    assert made.timed([own, other]).update_per_byte() == 2.0
    assert update_s_per_byte([]) is None
