import os
from dataclasses import replace

import pytest

from gpp.cluster import Cluster, Device, Link, local, machine_memory_bytes, mixed, uniform
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.profiled import Profiled
from gpp.errors import InvalidConfig
from gpp.serialization import from_json, to_json
from tests.support.conf import CONF, option

DEVICE = Device(
    kind="cuda",
    memory_bytes=16e9,
    peak_flop_per_s={"float32": 10e12, "float16": 100e12},
    efficiency=0.5,
    memory_bandwidth_bytes_per_s=900e9,
)
FAST, SLOW = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10), Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)


def two_by_two():
    return uniform(name="c", num_nodes=2, devices_per_node=2, device=DEVICE, intra_node=FAST, inter_node=SLOW)


def test_rates():
    assert DEVICE.flop_per_s("float16") == 50e12
    assert DEVICE.flop_per_s("bfloat16") == 5e12  # not in the table: the slowest
    assert replace(DEVICE, speed_factor=0.1).flop_per_s("float32") == pytest.approx(0.5e12)


def test_links():
    cluster = two_by_two()
    assert cluster.nodes == (0, 0, 1, 1)
    assert cluster.link(0, 1) == cluster.link(3, 2) == FAST
    assert cluster.link(1, 2) == SLOW
    assert FAST.transfer_s(1e10) == pytest.approx(1.000001)


@pytest.mark.parametrize(
    ("devices", "slowest"), [((0, 1), FAST), ((2, 3), FAST), ((0, 2), SLOW), ((0, 1, 2), SLOW), ((0, 1, 2, 3), SLOW)]
)
def test_ring_allreduce_in_closed_form(devices, slowest):
    n, size = len(devices), 8e6
    expected = 2 * (n - 1) * slowest.latency_s + 2 * (n - 1) / n * size / slowest.bandwidth_bytes_per_s
    assert two_by_two().allreduce_s(size, devices) == pytest.approx(expected)


def test_allreduce_of_nothing_or_with_nobody_is_free():
    assert two_by_two().allreduce_s(1e6, (3,)) == 0.0
    assert two_by_two().allreduce_s(0.0, (0, 1)) == 0.0


def test_more_devices_never_reduce_faster():
    cluster = uniform(name="c", num_nodes=1, devices_per_node=16, device=DEVICE, intra_node=FAST)
    times = [cluster.allreduce_s(1e6, tuple(range(n))) for n in range(1, 17)]
    assert times == sorted(times)


def test_memory_override_and_homogeneity():
    cluster = uniform(name="c", num_nodes=1, devices_per_node=3, device=DEVICE, intra_node=FAST, memory_bytes=1e9)
    assert {d.memory_bytes for d in cluster.devices} == {1e9}
    assert cluster.homogeneous
    assert not replace(cluster, devices=(*cluster.devices[:2], DEVICE)).homogeneous


def test_local_shares_the_machines_memory():
    share = machine_memory_bytes() / 4
    device = replace(DEVICE, kind="cpu", memory_bytes=machine_memory_bytes())
    assert local(name="l", num_devices=4, device=device, link=FAST).devices[0].memory_bytes == share
    assert local(name="l", num_devices=4, device=replace(device, memory_bytes=1.0), link=FAST).devices[0].memory_bytes == 1.0
    assert local(name="l", num_devices=4, device=device, link=FAST, memory_bytes=1e12).devices[0].memory_bytes == 1e12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(DEVICE, memory_bytes=0), r"memory_bytes=0: must be a positive number"),
        (lambda: replace(DEVICE, speed_factor=float("nan")), "speed_factor=nan"),
        (lambda: replace(DEVICE, kind="tpu"), "must be cpu or cuda"),
        (lambda: replace(DEVICE, peak_flop_per_s={}), r"peak_flop_per_s=\{\}: .* at least 1 entry"),
        (lambda: Link(latency_s=-1, bandwidth_bytes_per_s=1), r"cluster\.link\.latency_s=-1"),
        (lambda: Link(latency_s=0, bandwidth_bytes_per_s=0), r"cluster\.link\.bandwidth_bytes_per_s=0"),
        (lambda: replace(two_by_two(), nodes=(0,)), "one node index"),
        (lambda: uniform(name="c", num_nodes=0, devices_per_node=1, device=DEVICE, intra_node=FAST), "num_nodes=0"),
        (lambda: local(name="c", num_devices=0, device=DEVICE, link=FAST), "num_devices=0"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(InvalidConfig, match=message):
        make()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], r"cluster\.nodes=\[\]: must be a list of .* at least 1 item"),
        ([{"device": DEVICE}], r"cluster\.nodes\[0\]=.*: must be a mapping with device and count"),
        ([{"device": DEVICE, "count": 2}, {"device": DEVICE, "count": 0}], r"cluster\.nodes\[1\]\.count=0"),
        ([{"device": "V100", "count": 2}], r"cluster\.nodes\[0\]\.device=V100"),
    ],
)
def test_mixed_nodes_are_checked(nodes, message):
    with pytest.raises(InvalidConfig, match=message):
        mixed(name="m", nodes=nodes, intra_node=FAST)


def test_mixed_nodes():
    slow = replace(DEVICE, speed_factor=0.5)
    cluster = mixed(
        name="m", nodes=[{"device": DEVICE, "count": 1}, {"device": slow, "count": 2}], intra_node=FAST, inter_node=SLOW
    )
    assert cluster.nodes == (0, 1, 1) and cluster.devices == (DEVICE, slow, slow) and not cluster.homogeneous
    assert cluster.link(0, 1) == SLOW and cluster.link(1, 2) == FAST


def test_reads_back_equal():
    assert from_json(Cluster, to_json(two_by_two())) == two_by_two()


@pytest.mark.parametrize(
    ("name", "num_devices", "num_nodes"),
    [
        ("local", None, 1),
        ("local_4", 4, 1),
        ("summit_1x4", 4, 1),
        ("summit_2x4", 8, 2),
        ("summit_4x4", 16, 4),
        ("summit_8x4", 32, 8),
        ("dgx_h100", 8, 1),
        ("dgx_a100", 8, 1),
        ("p40_8", 8, 1),
        ("mixed_2x4", 8, 2),
    ],
)
def test_every_option_is_a_cluster(name, num_devices, num_nodes):
    cluster = option("cluster", name)
    cores = max(2, min(4, len(os.sched_getaffinity(0))))
    assert (cluster.name, cluster.num_devices, len(set(cluster.nodes))) == (name, num_devices or cores, num_nodes)
    assert from_json(Cluster, to_json(cluster)) == cluster
    assert {d.memory_bytes for d in option("cluster", name, "cluster.memory_bytes=1e9").devices} == {1e9}


def test_options_say_what_they_are_and_none_is_forgotten():
    files = sorted(path for path in (CONF / "cluster").glob("*.yaml") if path.stem != "base")
    assert len(files) == 12
    for path in (*files, *(CONF / "cost").glob("*.yaml")):
        assert path.read_text().startswith("# "), path


def test_number_of_devices_on_the_command_line():
    assert option("cluster", "local", "cluster.num_devices=2").num_devices == 2


def test_cost_options(tmp_path):
    assert option("cost", "analytical") == Analytical()
    cost = option("cost", "profiled", f"cost.cache_dir={tmp_path}")
    assert cost == Profiled(cache_dir=str(tmp_path), fallback=Analytical())
