"""The dynamic program of graphpipe against plain enumeration, and the sums and placements that it rests on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from gpp.cluster import Link
from gpp.graph.op_graph import bits, mask_of
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.graph.series_parallel import Order
from gpp.graph.sums import OpSums
from gpp.planners.common.linear_orders import depth_first_order
from gpp.planners.common.placement import Placer
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.partition_search import NONE, PartitionSearch
from gpp.planners.graphpipe.sp_structure import SPStructure
from gpp.planners.graphpipe.stage_tables import Lanes
from tests.support.problems import cluster, random_problem, towers


def deepest(costs, mask, b, r):
    """The longest pipeline from a stage on that fits the smallest device."""
    most, memory = costs.problem.minibatch_size // b, costs.held(mask, b // r)
    fits = max((m for m in range(1, most + 1) if memory.peak(m) <= costs.limit_bytes), default=0)
    return int(costs.problem.regime.holds.furthest(fits, most, 1 << 30))


@pytest.mark.parametrize("seed", range(30))
def test_fewest_devices_of_a_line(seed):
    """Every lane and depth of a line against all ways to cut it and all numbers of replicas."""
    rng = random.Random(seed)
    problem = random_problem(seed, max_ops=7, max_devices=4)
    costs = StageCosts(problem)
    line = depth_first_order(problem.graph)
    search = PartitionSearch(SPStructure(costs, None, line))
    total = costs.compute_s(problem.graph.all_mask, 1)
    lanes = [(b, total * b * rng.uniform(0.15, 1.2)) for b in costs.microbatch_sizes for _ in range(3)]
    solved = search.solve(Lanes(np.array([b for b, _ in lanes]), np.array([limit for _, limit in lanes])))
    n = len(line)
    for lane, (b, limit_s) in enumerate(lanes):
        seconds = {r: search.tables.stage_s(search.structure.root, b, r) for r in costs.replicas[b]}
        for h in range(1, search.max_depth + 1):
            best = NONE
            for size in range(min(h, n)):
                for cuts in itertools.combinations(range(1, n), size):
                    ends = (0, *cuts, n)
                    fewest = 0
                    for s, (i, j) in enumerate(itertools.pairwise(ends)):
                        depth = len(ends) - 1 - s
                        fits = (
                            r
                            for r in costs.replicas[b]
                            if seconds[r][i, j] <= limit_s
                            and deepest(costs, mask_of(line[i:j]), b, r) >= min(depth, search.max_depth)
                        )
                        fewest += next(fits, NONE)
                    best = min(best, fewest)
            found = int(solved.devices[0][lane, h])
            assert min(found, NONE) == min(best, NONE), (b, limit_s, h)
            if found < NONE:
                parts, _ = solved.parts(lane, h)
                assert sum(r for _, r in parts) == found and len(parts) <= h
                assert sorted(op for mask, _ in parts for op in bits(mask)) == list(range(n))


def test_equal_branches_side_by_side_and_packed():
    graph = towers(4, 3)
    problem = replace(random_problem(0, max_ops=4, max_devices=4), graph=graph, cluster=cluster(16), minibatch_size=16)
    costs = StageCosts(problem)
    search = PartitionSearch(SPStructure(costs, Order.of(graph)))
    tower, join = costs.compute_s(mask_of(range(3)), 1), costs.compute_s(1 << 12, 1)
    limits = np.array([tower * 1.001, 2 * tower * 1.001, tower / 3 * 1.001])
    solved = search.solve(Lanes(np.ones(3, int), limits))
    assert join < limits.min()
    # A device for each tower and one for the join; two towers to a device; three to a tower.
    assert solved.devices[0][:, -1].tolist() == [5, 3, 13]
    assert int(solved.devices[0][2, 3]) == NONE and int(solved.devices[0][2, 4]) == 13  # a tower of three, then the join
    parts, _ = solved.parts(1, 2)
    assert sorted(mask.bit_count() for mask, _ in parts) == [1, 6, 6]


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_what_a_walk_over_the_graph_finds(seed):
    rng = random.Random(seed)
    graph = (random_dag if seed % 2 else random_series_parallel)(rng.randint(1, 40), seed)
    sums = OpSums(graph)
    for _ in range(20):
        mask = rng.getrandbits(graph.num_ops) or 1
        found = sums.of(mask)
        names = {name for op in bits(mask) for name in graph.ops[op].params}
        params = [graph.param_of[name] for name in names]
        into = [t for t in graph.tensors if not mask >> t.producer & 1 and mask_of(t.consumers) & mask]
        out = [t for t in graph.tensors if mask >> t.producer & 1 and mask_of(t.consumers) & ~mask]
        assert found.trainable == sum(p.num_bytes for p in params if p.trainable)
        assert found.frozen == sum(p.num_bytes for p in params if not p.trainable)
        assert found.saved == pytest.approx(sum(graph.ops[op].saved_bytes for op in bits(mask)))
        assert found.incoming == pytest.approx(sum(t.bytes_per_sample for t in into))
        assert found.outgoing == pytest.approx(sum(t.bytes_per_sample for t in out))


@pytest.mark.parametrize("seed", range(20))
def test_replicas_stay_inside_a_node_where_they_fit(seed):
    rng = random.Random(seed)
    fast, slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e10), Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    nodes = cluster(16, link=fast, inter=slow, num_nodes=4)
    counts: list[int] = []
    while sum(counts) < 12:
        counts.append(rng.choice([1, 1, 2, 4, 4]))
    placed = Placer(nodes).equal(tuple(counts[:-1]))
    assert [len(devices) for devices in placed] == counts[:-1]
    assert len({d for devices in placed for d in devices}) == sum(counts[:-1])
    for devices in placed:
        assert len({nodes.nodes[d] for d in devices}) == 1
