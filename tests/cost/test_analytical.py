import numpy as np
import pytest

from gpp import Analytical, Device
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import Op, OpGraph, Param
from gpp.serialization import from_json, to_json

DEVICE = Device(
    kind="cuda",
    memory_bytes=1e9,
    peak_flop_per_s={"float32": 1e9, "float16": 4e9},
    efficiency=0.5,
    memory_bandwidth_bytes_per_s=1e6,
    kernel_latency_s=1e-3,
)
GRAPH = OpGraph(
    name="g",
    tensors=(),
    params=(Param(name="w", num_bytes=4000), Param(name="table", num_bytes=10**6, gathered=True)),
    ops=(
        Op(name="product", forward_flops=1e8, backward_flops=2e8, traffic_bytes=100, saved_bytes=50, params=("w",)),
        Op(name="norm", forward_flops=10, backward_flops=20, traffic_bytes=5000, num_kernels=3, saved_bytes=2500),
        Op(name="view", num_kernels=0),
        Op(name="embedding", traffic_bytes=1000, params=("table",)),
    ),
)


def test_roofline_by_hand():
    times = Analytical().op_times(GRAPH, 2, DEVICE)
    assert times.forward_s.tolist() == pytest.approx(
        [
            2 * 1e8 / 0.5e9 + 1e-3,  # bound by arithmetic
            2 * 5000 / 1e6 + 3e-3,  # by traffic
            0.0,
            2 * 1000 / 1e6 + 1e-3,
        ]
    )  # reads rows, not the table
    assert times.backward_s.tolist() == pytest.approx(
        [2 * 2e8 / 0.5e9 + 2e-3, 2 * 2 * 5000 / 1e6 + 6e-3, 0.0, (2 * 2 * 1000 + 4 * 10**6) / 1e6 + 2e-3]
    )


def test_parameters_are_read_once_a_microbatch():
    op = Op(name="a", traffic_bytes=10, params=("w",))
    graph = OpGraph(name="g", ops=(op,), tensors=(), params=(Param(name="w", num_bytes=4000),))
    device = Device(kind="cpu", memory_bytes=1e9, peak_flop_per_s={"float32": 1e9}, memory_bandwidth_bytes_per_s=1e6)
    times = [float(Analytical().op_times(graph, n, device).forward_s[0]) for n in (1, 2, 100)]
    assert times == pytest.approx([4010e-6, 4020e-6, 5000e-6])


@pytest.mark.parametrize("samples", [1, 7, 64])
def test_larger_microbatches_are_never_less_efficient(samples):
    one, two = (Analytical().op_times(GRAPH, n, DEVICE) for n in (samples, 2 * samples))
    assert np.all(two.forward_s <= 2 * one.forward_s)
    assert np.all(two.backward_s <= 2 * one.backward_s)
    assert np.all(two.forward_s >= one.forward_s)


def test_dtype_and_speed_factor():
    half = OpGraph(name="g", ops=GRAPH.ops, tensors=(), params=GRAPH.params, dtype="float16")
    assert Analytical().op_times(half, 8, DEVICE).forward_s[0] == pytest.approx(8 * 1e8 / 2e9 + 1e-3)
    slow = Device(**{f: getattr(DEVICE, f) for f in DEVICE.__slots__ if f != "speed_factor"}, speed_factor=0.5)
    for a, b in zip(vars_of(Analytical().op_times(GRAPH, 4, DEVICE)), vars_of(Analytical().op_times(GRAPH, 4, slow)), strict=True):
        assert b == pytest.approx(2 * a)
    assert Analytical().update_s(1e3, slow) == 2 * Analytical().update_s(1e3, DEVICE)


def vars_of(times):
    return times.forward_s, times.backward_s


def test_update_moves_what_the_optimizer_moves():
    assert Analytical(update_traffic=3).update_s(1e6, DEVICE) == pytest.approx(3.0)


def test_is_a_plain_value():
    cost = Analytical(backward_traffic=3.0)
    assert from_json(Analytical, to_json(cost)) == cost
    with pytest.raises(InvalidConfig, match=r"cost\.backward_kernels=-1"):
        Analytical(backward_kernels=-1)
