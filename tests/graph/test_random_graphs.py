import subprocess
import sys

import pytest

from gpp.errors import InvalidConfig
from gpp.graph.random_graphs import random_dag, random_series_parallel
from tests.support.series_parallel import decompose


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
