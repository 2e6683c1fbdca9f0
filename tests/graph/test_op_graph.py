"""Operator graphs, and random ones."""

import subprocess
import sys

import pytest

from gpp.errors import InvalidConfig, InvalidGraph
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, bits, mask_of
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.serialization import from_json, to_json
from tests.support.series_parallel import decompose


def edge(a, b, name=None):
    return Tensor(name=name or f"t{a}_{b}", producer=a, consumers=(b,), bytes_per_sample=4.0)


def graph(num_ops, edges, params=(), reads=None):
    ops = tuple(Op(name=f"op{i}", forward_flops=i + 1.0, params=(reads or {}).get(i, ())) for i in range(num_ops))
    return OpGraph(name="g", ops=ops, tensors=tuple(edge(a, b) for a, b in edges), params=tuple(params))


DIAMOND = graph(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])


def test_masks():
    assert list(bits(0b10110)) == [1, 2, 4]
    assert mask_of((4, 1, 2)) == 0b10110
    assert mask_of(bits(0b1011)) == 0b1011


def test_reachability_of_the_diamond():
    assert DIAMOND.descendants[0] == 0b11110
    assert DIAMOND.ancestors[3] == 0b00111
    assert DIAMOND.successors[0] == 0b00110
    assert DIAMOND.predecessors[3] == 0b00110


@pytest.mark.parametrize("seed", range(5))
def test_convexity_is_what_the_paths_say(seed):
    g = random_dag(12, seed)
    for mask in range(1, 1 << 12, 37):
        outside_between = any(g.ancestors[x] & mask and g.descendants[x] & mask for x in range(12) if not mask >> x & 1)
        assert g.is_convex(mask) is not outside_between


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: graph(2, [(1, 0)]), "topological order"),
        (lambda: graph(2, [(0, 2)]), "does not exist"),
        (lambda: graph(2, [(0, 0)]), "topological order"),
        (lambda: graph(1, [], reads={0: ("w",)}), "unknown parameters: w"),
        (lambda: OpGraph(name="g", ops=(Op(name="a"), Op(name="a")), tensors=()), "repeated: a"),
    ],
)
def test_bad_graphs_are_refused(bad, message):
    with pytest.raises(InvalidGraph, match=message):
        bad()


@pytest.mark.parametrize("seed", range(3))
def test_reads_back_equal_with_the_same_fingerprint(seed):
    g = random_series_parallel(20, seed)
    again = from_json(OpGraph, to_json(g))
    assert again == g
    assert again.fingerprint == g.fingerprint


def test_fingerprint_sees_every_amount():
    assert graph(2, [(0, 1)]).fingerprint != graph(2, []).fingerprint


def test_amounts_as_arrays():
    params = (Param(name="w", num_bytes=8), Param(name="frozen", num_bytes=4, trainable=False))
    g = graph(3, [(0, 1)], params=params, reads={0: ("w", "frozen"), 1: ("frozen",), 2: ("w",)})
    assert g.amounts.forward_flops.tolist() == [1.0, 2.0, 3.0]
    assert g.amounts.param_bytes.tolist() == [12.0, 4.0, 8.0]
    assert g.amounts.trains.tolist() == [True, False, True]


@pytest.mark.parametrize("make", [random_series_parallel, random_dag])
@pytest.mark.parametrize("num_ops", [1, 2, 7, 40])
def test_size_and_determinism(make, num_ops):
    for seed in range(5):
        graph = make(num_ops, seed)
        assert graph.num_ops == num_ops
        assert graph == make(num_ops, seed)
    assert num_ops < 7 or make(num_ops, 0) != make(num_ops, 1)


def test_series_parallel_by_construction():
    assert all(decompose(random_series_parallel(n, seed)) for n in (1, 5, 20, 60) for seed in range(10))


def test_dags_are_connected_and_mostly_not_series_parallel():
    graphs = [random_dag(20, seed) for seed in range(20)]
    for graph in graphs:
        assert all(graph.predecessors[op] | graph.successors[op] for op in range(20))
    assert sum(decompose(graph) is None for graph in graphs) > 10


def test_skew_zero_makes_equal_amounts():
    graph = random_dag(10, 3, skew=0.0)
    assert len({op.forward_flops for op in graph.ops}) == 1


def test_same_graph_under_another_hash_seed():
    code = "from gpp.graph.random_graphs import *; print(random_series_parallel(30, 1).fingerprint, random_dag(30, 1).fingerprint)"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=True
        ).stdout
        for seed in (0, 1)
    }
    assert outputs == {f"{random_series_parallel(30, 1).fingerprint} {random_dag(30, 1).fingerprint}\n"}


def test_bad_settings_are_refused():
    with pytest.raises(InvalidConfig, match="num_ops"):
        random_dag(0, 0)
    with pytest.raises(InvalidConfig, match="skew"):
        random_series_parallel(3, 0, skew=-1.0)
