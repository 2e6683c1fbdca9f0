"""Operator times that agree with stages timed in place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpp.cost.models.in_place import StageTimes, corrected, update_s_per_byte
from gpp.cost.models.profiled import Profile, Setting


def stage(ops: tuple[int, ...], samples: int, forward: float, backward: float) -> StageTimes:
    return StageTimes(ops=ops, samples=samples, forward_s=forward, backward_s=backward)


def profile(num_ops: int, counts: tuple[int, ...], rng: random.Random) -> Profile:
    rows = tuple(tuple(rng.uniform(1, 5) * n for n in counts) for _ in range(num_ops))
    setting = Setting(device_kind="cpu", device_name="x", torch_version="2")
    return Profile(
        graph_fingerprint="f", setting=setting, sample_counts=counts, forward_s=rows, backward_s=rows, update_s_per_byte=7.0
    )


def test_the_stages_of_a_plan_take_what_was_measured() -> None:
    made = profile(5, (1, 4), random.Random(0))
    timed = made.timed([stage((0, 1), 4, 10.0, 30.0), stage((2, 3, 4), 4, 40.0, 50.0)])
    times, before = timed.at(4), made.at(4)
    assert times.forward_s[:2].sum() == pytest.approx(10) and times.forward_s[2:].sum() == pytest.approx(40)
    assert times.backward_s[:2].sum() == pytest.approx(30) and times.backward_s[2:].sum() == pytest.approx(50)
    # Inside a stage operators keep their proportions, and other sizes follow the nearest that was measured.
    assert times.forward_s[0] / times.forward_s[1] == pytest.approx(before.forward_s[0] / before.forward_s[1])
    factor = times.forward_s / before.forward_s
    assert timed.at(1).forward_s == pytest.approx(made.at(1).forward_s * factor)


def test_a_size_between_two_columns_gets_one_of_its_own() -> None:
    made = profile(3, (1, 8), random.Random(1))
    timed = made.timed([stage((0, 1, 2), 3, 6.0, 6.0)])
    assert timed.at(3).forward_s.sum() == pytest.approx(6) and timed.at(3).backward_s.sum() == pytest.approx(6)
    assert timed.knows((0, 1, 2), 3) and not timed.knows((0, 1, 2), 1)


@pytest.mark.parametrize("seed", range(6))
def test_several_plans_give_the_nearest_times_in_relative_entropy(seed: int) -> None:
    """By the conditions of an optimum (Kuhn and Tucker): all sums are met, and the logarithm of the factors is a sum over rows."""
    rng = random.Random(seed)
    alone = np.array([rng.uniform(1, 3) for _ in range(6)])
    true = alone * np.array([rng.uniform(0.6, 1.6) for _ in range(6)])
    cuts = [((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3, 4, 5))]
    stages = [stage(ops, 2, float(true[list(ops)].sum()), 1.0) for plan in cuts for ops in plan]
    found, _ = corrected(alone[:, None], alone[:, None], (2,), stages)
    rows = np.array([[float(op in s.ops) for op in range(6)] for s in stages])
    assert rows @ found[:, 0] == pytest.approx([s.forward_s for s in stages], rel=1e-4)
    logs = np.log(found[:, 0] / alone)
    weights = np.linalg.lstsq(rows.T, logs, rcond=None)[0]
    assert rows.T @ weights == pytest.approx(logs, abs=1e-4)


def test_a_later_time_of_a_stage_replaces_the_older_one() -> None:
    made = profile(2, (1,), random.Random(2)).timed([stage((0,), 1, 1.0, 1.0), stage((1,), 1, 5.0, 5.0)])
    again = made.timed([stage((0,), 1, 2.0, 3.0)])
    assert len(again.in_place) == 2 and again.at(1).forward_s.tolist() == pytest.approx([2.0, 5.0])


def test_updates_are_those_in_place() -> None:
    made = profile(2, (1,), random.Random(3))
    assert made.update_per_byte() == 7.0
    own = StageTimes(ops=(0,), samples=1, forward_s=1.0, backward_s=1.0, update_s=6.0, trainable_bytes=2.0)
    other = StageTimes(ops=(1,), samples=1, forward_s=1.0, backward_s=1.0, update_s=2.0, trainable_bytes=2.0)
    assert made.timed([own, other]).update_per_byte() == 2.0
    assert update_s_per_byte([]) is None
