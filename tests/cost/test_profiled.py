import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gpp import Analytical, Device
from gpp.cost.load import Load, others
from gpp.cost.models.profiled import GraphProfile, Profiled, Setting, Spot, cpu_setting, sample_counts
from gpp.errors import InvalidConfig
from gpp.serialization import from_json, to_json
from tests.support.graphs import chain

GRAPH = chain(2)
DEVICE = Device(kind="cpu", memory_bytes=1e9, peak_flop_per_s={"float32": 1e9}, memory_bandwidth_bytes_per_s=1e6)
SETTING = Setting(device_kind="cpu", device_name="some core", torch_version="2.13.0")
PROFILE = GraphProfile(
    graph_fingerprint=GRAPH.fingerprint,
    setting=SETTING,
    sample_counts=(1, 2, 8),
    forward_s=((1.0, 1.5, 4.5), (2.0, 2.0, 2.0)),
    backward_s=((2.0, 3.0, 9.0), (0.0, 0.0, 0.0)),
    update_s_per_byte=0.5,
)


def cost(tmp_path, **more):
    return Profiled(cache_dir=str(tmp_path), profiles=(PROFILE,), **more)


@pytest.mark.parametrize(("samples", "seconds"), [(1, 1.0), (2, 1.5), (5, 3.0), (8, 4.5), (16, 9.0), (24, 13.5)])
def test_linear_between_and_proportional_beyond(tmp_path, samples, seconds):
    times = cost(tmp_path).op_times(GRAPH, samples, DEVICE)
    assert times.forward_s[0] == pytest.approx(seconds)
    assert times.backward_s[0] == pytest.approx(2 * seconds)
    assert times.backward_s[1] == 0.0


def test_below_the_smallest_count_nothing_is_gained():
    late = replace(PROFILE, sample_counts=(4, 8, 16))
    assert late.at(1).forward_s.tolist() == [1.0, 2.0]
    assert late.at(4).forward_s.tolist() == [1.0, 2.0]


def test_speed_factor_scales(tmp_path):
    slow = replace(DEVICE, speed_factor=0.5)
    assert cost(tmp_path).op_times(GRAPH, 2, slow).forward_s[0] == pytest.approx(3.0)
    assert cost(tmp_path).update_s(4.0, slow) == pytest.approx(4.0)


def test_other_graphs_and_devices_fall_back_or_are_refused(tmp_path):
    gpu = replace(DEVICE, kind="cuda")
    for graph, device in ((chain(3), DEVICE), (GRAPH, gpu)):
        with pytest.raises(InvalidConfig, match="has no measurement"):
            cost(tmp_path).op_times(graph, 1, device)
        expected = Analytical().op_times(graph, 1, device)
        found = cost(tmp_path, fallback=Analytical()).op_times(graph, 1, device)
        assert found.forward_s.tolist() == expected.forward_s.tolist()
    assert cost(tmp_path, fallback=Analytical()).update_s(8.0, gpu) == Analytical().update_s(8.0, gpu)


def test_reads_back_equal(tmp_path):
    assert from_json(GraphProfile, to_json(PROFILE)) == PROFILE
    assert from_json(Profiled, to_json(cost(tmp_path, fallback=Analytical()))) == cost(tmp_path, fallback=Analytical())


def test_cache_by_content(tmp_path):
    empty = Profiled(cache_dir=str(tmp_path / "deep" / "er"))
    assert empty.load(GRAPH, SETTING) is None
    path = empty.store(GRAPH, PROFILE)
    assert [path] == list(path.parent.iterdir())  # no temporary file stays
    assert empty.load(GRAPH, SETTING) == PROFILE
    assert empty.load(chain(3), SETTING) is None
    for field, value in (("torch_version", "2.14"), ("device_name", "other"), ("num_threads", 2), ("optimizer", "Adam")):
        assert empty.load(GRAPH, replace(SETTING, **{field: value})) is None
    path.write_text(path.read_text()[:100])
    assert empty.load(GRAPH, SETTING) is None


def test_adding_replaces_the_older_one(tmp_path):
    newer = replace(PROFILE, update_s_per_byte=1.0)
    assert cost(tmp_path).add(newer).profiles == (newer,)
    other = replace(PROFILE, graph_fingerprint="other")
    assert cost(tmp_path).add(other).profiles == (PROFILE, other)


@pytest.mark.parametrize(
    "change", [{"sample_counts": ()}, {"sample_counts": (2, 1, 8)}, {"sample_counts": (1, 2)}, {"backward_s": ((1.0, 1.0, 1.0),)}]
)
def test_broken_tables_are_refused(change):
    with pytest.raises(InvalidConfig, match="profile"):
        replace(PROFILE, **change)


@pytest.mark.parametrize(("largest", "counts"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_sample_counts(largest, counts):
    assert sample_counts(largest) == counts


def test_this_machine_is_named_without_torch():
    script = (
        "import sys, json; from gpp.cost.models.profiled import cpu_setting; from gpp.serialization import to_json;"
        "print(to_json(cpu_setting())); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["device_name"] and found["torch_version"]
    assert found["device_name"] == cpu_setting().device_name


@pytest.mark.parametrize(
    ("then", "now", "factors", "outdated"),
    [
        (0.9, 0.9, (1.16, 0.86), False),  # noise, as checks of the same operators have it on a busy machine
        (0.45, 0.02, (0.69, 0.7), True),  # taken while the machine was busy: 414 ms were predicted where 285 are measured
        (0.45, 0.02, (0.69, 0.9), False),  # one operator alone may have been disturbed
        (0.45, 0.43, (0.69, 0.7), False),  # as busy as then: it would come out the same
        (0.0, 0.5, (1.4, 1.5), False),  # others slow the check down, not the machine
        (0.0, 0.01, (1.4, 1.5), True),  # a slower machine
        (0.0, 0.01, (0.7, 0.6), True),  # a faster one
    ],
)
def test_a_profile_is_taken_again_where_that_helps(then, now, factors, outdated):
    spots = (Spot(op=0, samples=8, seconds=2e-3), Spot(op=1, samples=8, seconds=1e-3))
    profile = replace(PROFILE, others=then, spots=spots)
    assert profile.outdated([factor * spot.seconds for factor, spot in zip(factors, spots, strict=True)], now) == outdated
    assert from_json(GraphProfile, to_json(profile)) == profile


def test_a_profile_without_spots_holds():
    assert not replace(PROFILE, others=0.9).outdated([], 0.0)


def test_the_load_of_a_machine_leaves_out_ones_own_work():
    load, end = Load(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    own, whole = 0.2, 0.2 * (os.cpu_count() or 1)
    assert 0.0 <= load.share() <= 1.0
    assert others(own + 0.1, own, whole) == pytest.approx(0.1 / whole) and others(own, own + 0.1, whole) == 0.0
