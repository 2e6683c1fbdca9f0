import itertools
import operator
import os
import random
from dataclasses import replace

import networkx as nx
import pytest

from gpp import Analytical, Profiled
from gpp.cluster import Cluster, Device, Link, PairLink, local, machine_memory_bytes, mixed, uniform
from gpp.errors import InvalidConfig
from gpp.serialization import from_json, to_json
from tests.support.conf import CONF, option
from tests.support.long import thinned

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


def noded(counts, cards, *, inside=FAST, across=SLOW):
    """Nodes of so many devices each, with so many network cards."""
    nodes = tuple(node for node, count in enumerate(counts) for _ in range(count))
    return Cluster(name="c", devices=(DEVICE,) * len(nodes), nodes=nodes, intra_node=inside, inter_node=across, network_cards=cards)


@pytest.mark.parametrize(
    ("counts", "cards", "devices", "used"),
    [
        ((4, 4), 1, range(8), 1),
        ((4, 4), 4, range(8), 4),
        ((4, 4), 4, (4, 0, 5, 1), 2),  # as many as they are in a node, however they are listed
        ((4, 4), 4, (0, 4), 1),  # a device drives one
        ((4, 4), 8, range(8), 4),
        ((4, 4), 2, range(8), 2),
        ((4, 4), 2, (0, 1, 4, 5), 1),  # the other two of the node have the other card
        ((4, 4), 2, (0, 4), 1),
        ((4, 4), 4, (0, 1, 2, 3, 4), 1),  # the node with the fewest decides
        ((4, 2), 4, range(6), 2),
        ((2, 2, 2), 2, range(6), 2),
    ],
)
def test_an_allreduce_over_nodes_uses_its_part_of_their_network_cards(counts, cards, devices, used):
    devices, size = tuple(devices), 8e6
    n, ways = len(devices), 2 * (len(devices) - 1)
    cluster = noded(counts, cards)
    assert cluster.allreduce_s(size, devices) == pytest.approx(ways * (SLOW.latency_s + size / n / (used * 1e9)))
    shared = replace(cluster, collective_latency_s=1e-4, collective_efficiency=0.5)
    assert shared.allreduce_s(size, devices) == pytest.approx(ways * (1e-4 + 2 * size / n / (used * 1e9)))
    # All rings share the links inside a node, and a message goes over one card.
    narrow = noded(counts, cards, inside=Link(latency_s=0.0, bandwidth_bytes_per_s=1.5e9))
    over_s, inside_s = SLOW.latency_s + size / n / (used * 1e9), size / n / 1.5e9
    assert narrow.allreduce_s(size, devices) == pytest.approx(ways * max(over_s, inside_s))
    assert cluster.link(0, counts[0]) == SLOW
    assert cluster.allreduce_s(size, (0, 1)) == noded(counts, 1).allreduce_s(size, (0, 1))


@pytest.mark.parametrize("seed", range(12))
def test_no_allreduce_is_faster_than_the_widest(seed):
    """Over every set of devices, in two orders; some links are those of pairs."""
    rng = random.Random(f"cards {seed}")
    counts = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))]
    cluster = noded(counts, rng.randint(1, 4), inside=rng.choice([FAST, SLOW]), across=rng.choice([FAST, SLOW]))
    if seed % 2:
        pairs = rng.sample(list(itertools.combinations(range(sum(counts)), 2)), 1)
        cluster = replace(cluster, links=tuple(PairLink(between=pair, link=rng.choice([WIDE, NARROW])) for pair in pairs))
    cluster = replace(cluster, collective_latency_s=0.0)
    for count in range(2, cluster.num_devices + 1):
        least_s = 2 * (count - 1) / count / cluster.wiring.widest(count)
        for devices in itertools.combinations(range(cluster.num_devices), count):
            for order in (devices, tuple(rng.sample(devices, count))):
                assert cluster.allreduce_s(1.0, order) >= least_s * (1 - 1e-9)


def own(*, links=(), rates=(None, 4e9, 2e9, None), names=("a", "a", "b", "b")):
    """Two nodes of two devices with rates and links of their own."""
    base = two_by_two()
    devices = (replace(d, name=n, bandwidth_bytes_per_s=r) for d, n, r in zip(base.devices, names, rates, strict=True))
    return replace(base, devices=tuple(devices), links=links)


WIDE, NARROW = Link(latency_s=1e-7, bandwidth_bytes_per_s=1e11), Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)


def test_the_slower_end_decides():
    rate = {pair: own().link(*pair).bandwidth_bytes_per_s for pair in itertools.combinations(range(4), 2)}
    assert rate == {(0, 1): 4e9, (0, 2): 1e9, (0, 3): 1e9, (1, 2): 1e9, (1, 3): 1e9, (2, 3): 2e9}
    assert own().link(3, 2) == Link(latency_s=FAST.latency_s, bandwidth_bytes_per_s=2e9)


def test_a_pair_of_devices_goes_before_its_types_and_these_before_rates():
    cluster = own(links=(PairLink(between=(3, 0), link=WIDE), PairLink(between=("b", "a"), link=NARROW)))
    links = {pair: cluster.link(*pair) for pair in itertools.permutations(range(4), 2)}
    assert links[0, 3] == links[3, 0] == WIDE
    assert {links[pair] for pair in ((0, 2), (1, 2), (1, 3), (3, 1))} == {NARROW}
    assert links[0, 1].bandwidth_bytes_per_s == 4e9 and links[2, 3].bandwidth_bytes_per_s == 2e9
    assert from_json(Cluster, to_json(cluster)) == cluster


def test_equal_rates_are_links_by_node():
    cluster = own(rates=(5e9,) * 4, names=(None,) * 4)
    assert cluster.homogeneous and cluster.link(0, 1).bandwidth_bytes_per_s == 5e9 and cluster.link(0, 2) == SLOW
    assert not own(rates=(5e9, 5e9, 5e9, None), names=(None,) * 4).homogeneous


@pytest.mark.parametrize("seed", range(20))
def test_what_is_asked_of_groups_follows_from_pairs(seed):
    """Against lists of all pairs, on clusters of every kind."""
    rng = random.Random(f"wiring {seed}")
    rates = tuple(rng.choice([None, 4e9, 2e9]) for _ in range(4)) if seed % 4 else (None,) * 4
    pairs = rng.sample(list(itertools.combinations(range(4), 2)), rng.randint(0, 3) if seed % 4 > 1 else 0)
    names = rng.sample([("a", "a"), ("a", "b"), ("b", "b")], rng.randint(0, 2) if seed % 4 > 2 else 0)
    cluster = own(
        rates=rates, links=tuple(PairLink(between=pair, link=rng.choice([WIDE, NARROW, FAST])) for pair in (*pairs, *names))
    )
    wiring, every = cluster.wiring, list(itertools.permutations(range(4), 2))
    links = {pair: cluster.link(*pair) for pair in every}
    assert set(wiring.every) == set(links.values()) and len(set(wiring.every)) == len(wiring.every)
    assert wiring.best.latency_s == min(link.latency_s for link in links.values())
    assert wiring.best.bandwidth_bytes_per_s == max(link.bandwidth_bytes_per_s for link in links.values())
    for some, others in (((0,), (2, 3)), ((0, 1), (0, 1)), ((1, 2), (0, 3)), ((0, 2), (2, 3))):
        assert set(wiring.between(some, others)) == {links[a, b] for a in some for b in others if a != b}
    for a, b in every if wiring.by_node is None else ():
        same = cluster.nodes[a] == cluster.nodes[b] and all(links[a, c] == links[b, c] for c in range(4) if c not in (a, b))
        assert (wiring.places[a] == wiring.places[b]) == same
    for count in (2, 3, 4):
        slowest = [
            min(links[pair].bandwidth_bytes_per_s for pair in zip(ring, (*ring[1:], ring[0]), strict=True))
            for ring in itertools.permutations(range(4), count)
        ]
        assert max(slowest) <= wiring.widest(count) <= max(link.bandwidth_bytes_per_s for link in links.values())
        if count == 2:
            assert max(slowest) == wiring.widest(count)
        for fast, enough in ((operator.gt, False), (operator.ge, True)):
            joined = nx.Graph([pair for pair, link in links.items() if fast(link.bandwidth_bytes_per_s, wiring.widest(count))])
            assert wiring.by_node or (max(map(len, nx.connected_components(joined)), default=1) >= count) == enough
    even = cluster.evened()
    assert even.wiring.by_node is not None and (even == cluster or cluster.wiring.by_node is None)
    inside = [links[0, 1].bandwidth_bytes_per_s, links[2, 3].bandwidth_bytes_per_s]
    assert even.link(0, 1).bandwidth_bytes_per_s == pytest.approx(2 / sum(1 / rate for rate in inside))


def test_a_ring_goes_over_its_own_links():
    cluster = own(rates=(None,) * 4, links=(PairLink(between=(0, 1), link=NARROW),))
    # 0-1-2-3: the narrow link is one of the ring; 1-2-3: it is not.
    assert cluster.allreduce_s(8e6, (0, 1, 2, 3)) == pytest.approx(6 * (1e-3 + 2.0))
    assert cluster.allreduce_s(9e6, (1, 2, 3)) == pytest.approx(4 * (1e-5 + 3e-3))


def test_copies_have_the_links_of_their_originals():
    links = (PairLink(between=(0, 1), link=WIDE), PairLink(between=(1, 2), link=NARROW), PairLink(between=("b", "b"), link=WIDE))
    doubled = own(links=links).with_copies(range(4), [2, 2, 3, 3])
    assert doubled.link(4, 5) == WIDE and doubled.link(5, 6) == doubled.link(1, 6) == NARROW and doubled.link(2, 7) == WIDE
    assert doubled.link(0, 5).bandwidth_bytes_per_s == SLOW.bandwidth_bytes_per_s  # another node, so not that of 0 and 1
    beside = own(links=links).with_copies([0], [0])
    assert beside.link(4, 1) == WIDE and beside.link(0, 4) == FAST


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
        (
            lambda: own(links=(PairLink(between=(0, 4), link=FAST),)),
            r"links\[0\]\.between=\[0,4\]: devices have numbers from 0 to 3",
        ),
        (lambda: own(links=(PairLink(between=(1, 1), link=FAST),)), "no link to itself"),
        (lambda: own(links=(PairLink(between=("a", "c"), link=FAST),)), "no device has the name c; the names of devices are: a, b"),
        (lambda: own(links=(PairLink(between=(0, 1), link=FAST), PairLink(between=(1, 0), link=SLOW))), "there twice"),
        (lambda: PairLink(between=(0, "a"), link=FAST), "two integers of at least 0 or two texts"),
        (lambda: replace(DEVICE, bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s=0.0: must be a positive number"),
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


@pytest.mark.parametrize(
    ("name", "num_devices", "num_nodes"),
    thinned(
        [
            ("local", None, 1),
            ("local_4", 4, 1),
            ("summit_1x4", 4, 1),
            ("mixed_2x4", 8, 2),
            ("summit_2x4", 8, 2),
            ("summit_4x4", 16, 4),
            ("summit_8x4", 32, 8),
            ("dgx_h100", 8, 1),
            ("dgx_a100", 8, 1),
            ("p40_8", 8, 1),
        ],
        3,
    ),
)
def test_every_option_is_a_cluster(name, num_devices, num_nodes):
    cluster = option("cluster", name)
    cores = max(2, min(4, len(os.sched_getaffinity(0))))
    assert (cluster.name, cluster.num_devices, len(set(cluster.nodes))) == (name, num_devices or cores, num_nodes)
    assert from_json(Cluster, to_json(cluster)) == cluster
    assert {d.memory_bytes for d in option("cluster", name, "cluster.memory_bytes=1e9").devices} == {1e9}


def test_options_say_what_they_are_and_none_is_forgotten():
    files = sorted(path for path in (CONF / "cluster").glob("*.yaml") if path.stem != "base")
    assert len(files) == 20
    for path in (*files, *(CONF / "cost").glob("*.yaml")):
        assert path.read_text().startswith("# "), path


def test_cost_options(tmp_path):
    assert option("cost", "analytical") == Analytical()
    cost = option("cost", "profiled", f"cost.cache_dir={tmp_path}")
    assert cost == Profiled(cache_dir=str(tmp_path), fallback=Analytical(), rehearsals=0)
