from dataclasses import replace

import networkx as nx
import pytest

from gpp.graph.op_graph import bits
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.graph.series_parallel import (
    Leaf,
    Order,
    Parallel,
    Series,
    branches,
    critical_path,
    series_parallel_order,
    signature,
)
from tests.support.graphs import graph
from tests.support.operations import calls
from tests.support.series_parallel import decompose


def relation(tree):
    """Pairs (before, after) that a tree stands for."""
    if isinstance(tree, Leaf):
        return set()
    out = set().union(*(relation(child) for child in tree.children))
    if isinstance(tree, Series):
        for i, first in enumerate(tree.children):
            for second in tree.children[i + 1 :]:
                out |= {(a, b) for a in bits(first.mask) for b in bits(second.mask)}
    return out


def reachability(of, added=()):
    g = nx.DiGraph([(a, b) for a in range(of.num_ops) for b in bits(of.successors[a])] + [tuple(d) for d in added])
    return set(nx.transitive_closure_dag(g).edges)


N_GRAPH = [(0, 2), (1, 2), (1, 3)]


def test_known_trees():
    assert decompose(graph(1, [])) == Leaf(0)
    chain = decompose(graph(3, [(0, 1), (1, 2)]))
    assert isinstance(chain, Series) and [c.mask for c in chain.children] == [1, 2, 4]
    diamond = decompose(graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)]))
    assert isinstance(diamond, Series) and diamond.children[1] == Parallel((Leaf(1), Leaf(2)), 0b110)
    assert decompose(graph(4, N_GRAPH)) is None


def test_skip_edges_vanish_and_several_inputs_need_no_source():
    assert decompose(graph(4, [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)])) == decompose(graph(4, [(0, 1), (1, 2), (2, 3)]))
    tree = decompose(graph(3, [(0, 2), (1, 2)]))
    assert isinstance(tree, Series) and isinstance(tree.children[0], Parallel)


@pytest.mark.parametrize("seed", range(40))
def test_tree_says_what_the_graph_says(seed):
    of = random_series_parallel(2 + seed, seed)
    assert relation(decompose(of)) == reachability(of)


@pytest.mark.parametrize("seed", range(40))
def test_any_graph_becomes_series_parallel_by_added_dependencies_only(seed):
    of = random_dag(3 + seed, seed)
    weights = [op.forward_flops for op in of.ops]
    tree, added, order = series_parallel_order(of, weights)
    assert relation(tree) == reachability(of, added) >= reachability(of)
    assert {(a, b) for a in range(of.num_ops) for b in bits(order.descendants[a])} == relation(tree)
    assert (not added) == (decompose(of) is not None)
    assert critical_path(order, of.all_mask, weights) >= critical_path(Order.of(of), of.all_mask, weights) * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_ends_and_heaviest_path_are_those_of_all_pairs(seed):
    of = random_dag(14, seed)
    weights = [float((7 * op + seed) % 5) for op in range(14)]
    _, added, order = series_parallel_order(of, weights)
    pairs = nx.DiGraph(reachability(of, added))
    for mask in (of.all_mask, order.ancestors[13] | 1 << 13, order.descendants[0] | 1):
        inside = pairs.subgraph(bits(mask))
        assert order.sinks(mask) == sorted(op for op in inside if not inside.out_degree(op))
        assert order.sources(mask) == sorted(op for op in inside if not inside.in_degree(op))
        ends = {}
        for op in nx.topological_sort(inside):
            ends[op] = weights[op] + max((ends[before] for before in inside.predecessors(op)), default=0.0)
        assert critical_path(order, mask, weights) == max(ends.values())


def test_barrier_is_local_and_mindful_of_time():
    # An N beside a long chain, after a common operator: only the N is touched.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 8), (4, 8), (0, 5), (5, 6), (6, 7), (7, 8)]
    tree, added, _ = series_parallel_order(graph(9, edges), [1.0] * 9)
    assert {op for d in added for op in d} <= {1, 2, 3, 4}
    assert len(added) == 1 and tree.mask == (1 << 9) - 1
    # One dependency makes the N series-parallel: 0 before 3, or 1 before 0. The one that is off the long path is taken.
    assert series_parallel_order(graph(4, N_GRAPH), [5.0, 1.0, 1.0, 1.0])[1] == ((0, 3),)
    assert series_parallel_order(graph(4, N_GRAPH), [5.0, 1.0, 1.0, 9.0])[1] == ((1, 0),)


def test_work_grows_with_the_operators():
    graphs = [random_series_parallel(count, 0) for count in (500, 1000)]
    assert all(decompose(of) is not None for of in graphs)
    made = [calls(lambda of=of: decompose(of)) for of in graphs]
    # 42 an operator as this is written.
    assert made[1] < 100 * 1000 and made[1] < 2.5 * made[0]


def test_branches():
    of = graph(7, [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5), (5, 6)])
    assert branches(of) == (None, 0, 0, 1, 1, None, None)
    assert branches(graph(3, [(0, 1), (1, 2)])) == (None, None, None)
    assert branches(graph(3, [(0, 2), (1, 2)])) == (0, 1, None)
    assert branches(graph(2, [])) == (0, 1)
    assert len(branches(graph(4, N_GRAPH))) == 4


def test_signature_ignores_names_only():
    of = graph(6, [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)])
    assert signature(of, 0b000110) == signature(of, 0b011000)
    slower = replace(of, ops=(*of.ops[:3], replace(of.ops[3], forward_flops=2.0), *of.ops[4:]))
    assert signature(slower, 0b000110) != signature(slower, 0b011000)
    assert signature(of, 0b000110, labels=[0, 1, 2, 9, 2, 0]) != signature(of, 0b011000, labels=[0, 1, 2, 9, 2, 0])
