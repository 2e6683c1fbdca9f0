from dataclasses import replace

import pytest

from gpp.cluster import Cluster, Link
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.graph.random_graphs import random_dag
from tests.support.bills import peak_bytes
from tests.support.graphs import DEVICE, chain, problem


def shared():
    """op0 -> op1 -> op2, where op0 and op2 share a weight and op1 has a frozen one; t0 is kept, t1 is not, i2 is an index."""
    ops = (
        Op(name="op0", saved_bytes=10, params=("tied",)),
        Op(name="op1", saved_bytes=20, params=("frozen",)),
        Op(name="op2", saved_bytes=30, params=("tied", "own")),
    )
    tensors = (
        Tensor(name="t0", producer=0, consumers=(1, 2), bytes_per_sample=4, saved=True),
        Tensor(name="t1", producer=1, consumers=(2,), bytes_per_sample=6, saved=False),
        Tensor(name="i1", producer=1, consumers=(2,), bytes_per_sample=8, saved=True, differentiable=False),
    )
    params = (
        Param(name="tied", num_bytes=100),
        Param(name="frozen", num_bytes=1000, trainable=False),
        Param(name="own", num_bytes=7),
    )
    return OpGraph(name="g", ops=ops, tensors=tensors, params=params)


def test_parameters_count_once_in_a_stage_and_once_in_every_stage_that_reads_them():
    of = problem(shared(), 2, 8)
    read = {mask: of.sums(mask)[:2] for mask in (0b111, 0b001, 0b100, 0b010)}
    assert read == {0b111: (107.0, 1000.0), 0b001: (100.0, 0.0), 0b100: (107.0, 0.0), 0b010: (0.0, 1000.0)}


def test_memory_of_the_whole_graph():
    of = problem(shared(), 1, 8, optimizer_state_factor=2.0)
    static = 107 * (1 + 1 + 2) + 1000  # weight, gradient, two moments; frozen weights alone
    assert peak_bytes(of, (0, 1, 2), 2, 1, 6) == static + 60 * 6


def test_memory_at_the_boundary():
    of = problem(shared(), 2, 8)
    # First stage: t0 is in its saved bytes, gradient of t0 comes back.
    assert peak_bytes(of, (0,), 2, 1, 4) == 2 * 100 + 10 * 4 + 4 * 2
    # Middle: receives t0; sends t1, which nobody saved, and the index i1, which has no gradient.
    assert peak_bytes(of, (1,), 2, 1, 4) == 1000 + (20 + 4 + 6) * 4 + (4 + 6) * 2
    assert peak_bytes(of, (2,), 2, 1, 2) == 2 * 107 + (30 + 4 + 6 + 8) * 2 + (4 + 6) * 2


def test_replicas_share_the_samples():
    of = problem(shared(), 4, 8)
    one, two = peak_bytes(of, (0, 1, 2), 4, 1, 8), peak_bytes(of, (0, 1, 2), 4, 2, 8)
    assert one - two == 60 * 4
    assert peak_bytes(of, (0, 1, 2), 4, 3, 8) == two  # the larger share of 4 samples over 3 replicas is 2


@pytest.mark.parametrize("seed", range(5))
def test_memory_grows_with_what_is_in_flight_and_with_the_cut(seed):
    of = problem(random_dag(16, seed), 2, 8)
    whole = tuple(range(16))
    assert peak_bytes(of, whole, 2, 1, 4) < peak_bytes(of, whole, 2, 1, 8)
    halves = peak_bytes(of, whole[:8], 2, 1, 4) + peak_bytes(of, whole[8:], 2, 1, 4)
    assert halves >= peak_bytes(of, whole, 2, 1, 4)


def test_crossing_tensors():
    of = problem(shared(), 2, 8)
    assert [t.name for t in of.crossing(0b001, 0b110)] == ["t0"]
    assert [t.name for t in of.crossing(0b011, 0b100)] == ["t0", "t1", "i1"]
    assert of.crossing(0b100, 0b011) == ()


@pytest.mark.parametrize(
    ("minibatch", "imposed", "sizes"), [(8, None, (1, 2, 4, 8)), (12, None, (1, 2, 3, 4, 6, 12)), (7, None, (1, 7)), (12, 3, (3,))]
)
def test_microbatch_sizes(minibatch, imposed, sizes):
    assert problem(chain(2), 2, minibatch, microbatch_size=imposed).microbatch_sizes() == sizes


@pytest.mark.parametrize(
    ("minibatch", "imposed", "message"),
    [
        (0, None, "minibatch_size=0"),
        (8, 3, r"must divide minibatch_size=8. Fix: set microbatch_size=(2|4)"),
        (8, 16, "microbatch_size=8"),
        (8, 0, "microbatch_size=1"),
    ],
)
def test_bad_batches(minibatch, imposed, message):
    with pytest.raises(InvalidConfig, match=message):
        problem(chain(2), 2, minibatch, microbatch_size=imposed)


def test_times_are_those_of_the_largest_share_on_the_slowest_device():
    of = problem(chain(3), 2, 8, fixed_s=0.5)
    assert of.stage_times((0, 1), 4, (0,)) == (9.0, 17.0)
    assert of.stage_times((0, 1), 4, (0, 1)) == (5.0, 9.0)
    assert of.total_s(4) == 39.0


def test_unequal_devices():
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)
    devices = (DEVICE, replace(DEVICE, speed_factor=0.25))
    cluster = Cluster(name="c", devices=devices, nodes=(0, 0), intra_node=link, inter_node=link)
    uneven = Problem(graph=chain(3), cluster=cluster, cost=Constant(), minibatch_size=8)
    assert uneven.stage_times((0,), 4, (0,)) == (4.0, 8.0)
    assert uneven.stage_times((0,), 4, (1,)) == (16.0, 32.0)
    assert uneven.stage_times((0,), 4, (0, 1)) == (8.0, 16.0)
    assert uneven.total_s(1) == 9.0
