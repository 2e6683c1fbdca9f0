"""What a quantised message takes: bytes by hand, clipping by the numbers of its authors and by minimising the error itself."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpp import Device, Even, OneFOneB, Plan, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, InvalidPlan
from gpp.graph.forward_only import forward_only
from gpp.graph.op_graph import Tensor
from gpp.links import Link
from gpp.mechanisms.quantised_edges.settings import QuantisedEdges
from gpp.mechanisms.quantised_edges.sizes import LEAST_BITS, clip_factor, most_bits, sent_bytes, useful_bits
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.plan.build import make_plan
from tests.support.graphs import chain, problem


@pytest.mark.parametrize(
    ("values", "bits", "dtype", "num_bytes"),
    [
        (10, 8, "float32", 8 + 3 * 4),  # four values a word
        (10, 6, "float32", 8 + 2 * 4),  # five a word, two bits of which say nothing
        (10, 3, "float32", 8 + 4),
        (33, 2, "float32", 8 + 3 * 4),
        (7, 16, "float32", 8 + 4 * 4),
        (7, 9, "float32", 8 + 3 * 4),
        (7, 16, "float64", 16 + 4 * 4),  # the least value and the step are as exact as the values
        (7, 16, "bfloat16", 8 + 4 * 4),
    ],
)
def test_bytes_of_a_message(values: int, bits: int, dtype: str, num_bytes: int) -> None:
    size = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
    tensor = Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=values * size)
    assert sent_bytes(tensor, bits, dtype) == num_bytes
    assert sent_bytes(tensor, 0, dtype) == values * size
    assert sent_bytes(replace(tensor, values="other"), bits, dtype) == values * size


def test_clipping_is_that_of_its_authors() -> None:
    # Banner et al. 2019, section 2: 2.83, 3.89 and 5.03 scales of a Laplace distribution at 2, 3 and 4 bits.
    assert [clip_factor(bits) for bits in (2, 3, 4)] == pytest.approx([2.83, 3.89, 5.03], abs=0.01)


@pytest.mark.parametrize("bits", range(2, 18))
def test_clipping_loses_least(bits: int) -> None:
    def lost(alpha: float) -> float:
        """Mean squared error of Laplace values of scale 1: tails beyond alpha, and 2^bits even steps within."""
        return 2 * math.exp(-alpha) + alpha**2 / (3 * 4**bits)

    low, high = 0.0, 60.0
    for _ in range(200):  # the error falls to its one minimum, and rises behind it
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if lost(a) < lost(b) else (a, high)
    assert clip_factor(bits) == pytest.approx(low, rel=1e-4)


def test_auto_takes_the_most_bits_that_have_room() -> None:
    tensor = Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=4000)

    def num_bytes(bits: int) -> float:
        return sent_bytes(tensor, bits, "float32")

    fewer = [bits for bits in range(2, 17) if not any(num_bytes(more) <= num_bytes(bits) for more in range(bits + 1, 17))]
    assert sorted(useful_bits()) == fewer
    for room in (*range(0, 4200, 7), *(num_bytes(bits) for bits in range(2, 17))):
        every = [bits for bits in range(2, 17) if num_bytes(bits) <= room]
        expected = 0 if room >= 4000 else max(every, default=LEAST_BITS)
        assert num_bytes(most_bits(num_bytes, room)) == num_bytes(expected)


@dataclass(frozen=True, kw_only=True)
class Moved(Constant):
    """Operators as in a table; a byte of traffic takes a microsecond, and a kernel a tenth of a second."""

    def move_s(self, num_bytes: float, device: Device) -> float:
        return num_bytes * 1e-6 / device.speed_factor

    def launch_s(self, device: Device) -> float:
        return 0.1 / device.speed_factor


def line(rate: float, **more: Any) -> Problem:
    """Two operators of a second a sample, 1000 floats between them; the second device takes twice as long."""
    of = chain(2)
    of = forward_only(replace(of, tensors=tuple(replace(t, bytes_per_sample=4000.0) for t in of.tensors)))
    made = problem(of, 2, 4, microbatch_size=2, **more)
    devices = (made.cluster.devices[0], replace(made.cluster.devices[1], speed_factor=0.5))
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=rate)
    return replace(made, cost=Moved(), cluster=replace(made.cluster, devices=devices, intra_node=link, inter_node=link))


def two_stages(of: Problem, edges: QuantisedEdges) -> Plan:
    """One operator on each device, its edge as the strategy has it."""
    plain = make_plan(of, "test", [(1, 1), (2, 1)], 2)
    return edges.chosen(plain, of)


def bits_of(plan: Plan) -> int:
    """The bits of the one edge."""
    value = plan.stages[0][EdgeBits]
    assert value is not None
    return value.to(1)


def with_bits(plan: Plan, *bits: tuple[int, int]) -> Plan:
    """The plan whose first stage has other bits."""
    return replace(plan, stages=(plan.stages[0].having(EdgeBits(bits=bits)), plan.stages[1]))


def test_the_codec_is_in_the_bill_and_fewer_bytes_on_the_wire() -> None:
    of = line(1e3)
    plain, coded = two_stages(of, QuantisedEdges()), two_stages(of, QuantisedEdges(bits=8))
    (first, second), (alone, other) = coded.bills(of), plain.bills(of)
    # By hand, for 2 samples of 1000 values: encoding reads and writes 36 bytes a value, and 20 for three of four that go into a
    # word, beside the words; 18 kernels. Decoding 40 bytes, and 15 kernels.
    assert first.forward_s - alone.forward_s == pytest.approx(2000 * 36e-6 + 1500 * 20e-6 + 500 * 8e-6 + 1.8)
    assert second.forward_s - other.forward_s == pytest.approx(2 * (2000 * 40e-6 + 1.5))
    assert (alone.forward_s, other.forward_s) == (2.0, 4.0)
    strategy = Strategy(name="even", planner=Even(), schedule=OneFOneB())
    sent = [strategy.predict(plan, of).metrics.communication_bytes for plan in (plain, coded)]
    assert sent == [4 * 4000, 4 * (8 + 1000)]


@pytest.mark.parametrize("rate", [150.0, 400.0, 700.0, 1e3, 1.7e3, 3e3, 9e3])
@pytest.mark.parametrize("target", [None, 0.25, 1.0])
def test_auto_keeps_the_target_rate_where_any_bits_do(rate: float, target: float | None) -> None:
    of = line(rate)
    plan = two_stages(of, QuantisedEdges(bits="auto", target_rate=target))
    sample_s = 1 / target if target else 2.0  # of the slower device
    every = {bits: sent_bytes(of.graph.tensors[0], bits, "float32") / rate for bits in (0, *range(2, 17))}
    keeps = [bits or 32 for bits, seconds in every.items() if seconds <= sample_s]
    bits = bits_of(plan)
    assert every[bits] <= sample_s or not keeps
    # As many as any that keep it, or with as few bytes.
    assert (bits or 32) == max(keeps, default=2) or every[bits] == every[max(keeps)]


def test_bits_are_refused_where_they_cannot_be() -> None:
    of = line(1e3)
    strategy = Strategy(name="even", planner=Even(), schedule=OneFOneB(), edges=QuantisedEdges(bits=4))
    with pytest.raises(InvalidConfig, match=r"strategy.edges.bits=4: is for mode=inference.*Fix: "):
        strategy.plan(replace(of, graph=chain(2)))
    for bits in (1, 17, True, 4.0, "many"):
        with pytest.raises(InvalidConfig, match=r"strategy.edges.bits=.*Fix: "):
            QuantisedEdges(bits=bits)  # type: ignore[arg-type]  # which is what is tested
    plan = two_stages(of, QuantisedEdges(bits=4))
    whole = replace(of.graph, tensors=tuple(replace(t, values="other") for t in of.graph.tensors))
    for wrong, graph, words in (
        (plan, chain(2), "for inference"),
        (plan, whole, "only integers"),
        (with_bits(plan, (1, 40)), of.graph, "must be 0 or 2 to 16"),
        (with_bits(plan, (1, 4), (2, 4)), of.graph, "one number for each"),
        (with_bits(plan), of.graph, "one number for each"),
    ):
        with pytest.raises(InvalidPlan, match=f"{words}.*Fix: "):
            wrong.check_stages(graph, 2)
    assert two_stages(replace(of, graph=whole), QuantisedEdges(bits=4)).stages[0][EdgeBits] == EdgeBits(bits=((1, 0),))
