"""The strategy's `edges`: how many bits the messages of a plan get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractMessages
from gpp.errors import InvalidConfig, written
from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.sizes import LEAST_BITS, MOST_BITS, coded, most_bits, sent_bytes
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.plan.choice import AbstractChoice
from gpp.plan.plan import Plan
from gpp.routing import copies, messages
from gpp.settings import Count, Positive, settings


@final
@settings("strategy.edges")
class QuantisedEdges(AbstractChoice, AbstractMessages):
    """The form of messages between stages, while serving.

    Args:
        bits: of a floating-point value in a message; `auto`: the most with which the links keep up with `target_rate`; None: values
            travel as they are.
        clip: whether values far from a sample's mean are clipped first, so that the others keep finer levels.
        target_rate: samples per second that `auto` keeps; None: what the slowest stage can do.
        window: messages over which `auto` measures a link, and for which its choice holds.
    """

    package: ClassVar[str] = "gpp.mechanisms.quantised_edges"

    bits: Annotated[int, Field(ge=LEAST_BITS, le=MOST_BITS)] | Literal["auto"] | None = None
    clip: bool = False
    target_rate: Positive | None = None
    window: Count = 8

    def __post_init__(self) -> None:
        if self.clip and self.bits is None:
            rule = "is about values that are rounded, and strategy.edges.bits=null leaves them as they are"
            raise InvalidConfig("strategy.edges.clip", True, rule, "set strategy.edges.bits=8, or leave it out")
        if self.target_rate is not None and self.bits != "auto":
            rule = f"is a rate that bits are chosen for, and strategy.edges.bits={written(self.bits)} is a choice"
            raise InvalidConfig(
                "strategy.edges.target_rate", self.target_rate, rule, "set strategy.edges.bits=auto, or leave it out"
            )

    @property
    def messages(self) -> AbstractMessages | None:
        return None if self == PLAIN else self

    def sent_bytes(self, tensor: Tensor, dtype: str) -> float:
        return sent_bytes(tensor, self._assumed((tensor,)), dtype)

    def check(self, *, trains: bool) -> None:
        """Refuse quantised messages where gradients are made."""
        if self.bits is not None and trains:
            rule = "is for mode=inference: no gradient passes a message whose values were rounded"
            raise InvalidConfig("strategy.edges.bits", self.bits, rule, "set mode=inference, or strategy.edges.bits=null")

    def chosen(self, plan: Plan, problem: Problem) -> Plan:
        """The plan with the bits of its edges.

        With `auto`, each edge has the most bits with which all its channels keep up with the target rate; without one, with the
        slowest stage.
        """
        if self.bits is None:
            return plain(plan)
        tensors = plan.edge_tensors(problem.graph)
        bits = {edge: self._assumed(own) for edge, own in tensors.items()}
        if self.bits == "auto":
            pace = sample_s(self, plan, problem)
            for edge in (edge for edge, number in bits.items() if number):
                bits[edge] = _most_bits(plan, problem, edge, tensors[edge], pace)
        stages = list(plan.stages)
        for s, readers in enumerate(plan.successors):
            if readers:
                own = tuple((t, bits[s, t]) for t in readers)
                stages[s] = stages[s].having(EdgeBits(bits=own, clip=self.clip, auto=self.bits == "auto"))
        return replace(plan, stages=tuple(stages))

    def _assumed(self, tensors: Sequence[Tensor]) -> int:
        """Bits of an edge with these tensors, as planners assume them; 0: they travel as they are.

        `auto` is assumed at its least: it goes down as far as it must, so no link with fewer bits could be faster.
        """
        if self.bits is None or not any(map(coded, tensors)):
            return 0
        return LEAST_BITS if self.bits == "auto" else self.bits


PLAIN = QuantisedEdges()


def plain(plan: Plan) -> Plan:
    """The plan whose values travel as they are."""
    return replace(plan, stages=tuple(stage.without(EdgeBits) for stage in plan.stages)) if plan.codes else plan


def sample_s(edges: QuantisedEdges, plan: Plan, problem: Problem) -> float:
    """Seconds in which links are to carry a sample: by the target rate, else those of the slowest stage, its replicas together."""
    if edges.target_rate:
        return 1.0 / edges.target_rate
    return max(bill.forward_s / stage.unit for bill, stage in zip(plain(plan).bills(problem), plan.stages, strict=True))


def carried(plan: Plan, edge: tuple[int, int]) -> dict[tuple[int, int], float]:
    """Sender and receiver -> the share of all samples that goes from one to the other, for every channel of an edge."""
    s, t = edge
    first_of = [{replica[0]: replica for replica in plan.stages[end].replicas} for end in edge]
    out: dict[tuple[int, int], float] = defaultdict(float)
    for route in messages(plan.stages[s].pieces(plan.minibatch_size), plan.stages[t].pieces(plan.minibatch_size)):
        for src, dst in copies(first_of[0][route.src_device], first_of[1][route.dst_device]):
            if src != dst:
                out[src, dst] += (route.hi - route.lo) / plan.minibatch_size
    return out


def _most_bits(plan: Plan, problem: Problem, edge: tuple[int, int], tensors: Sequence[Tensor], pace: float) -> int:
    """The most bits with which every channel of an edge keeps up with a sample each `pace` seconds."""
    channels = carried(plan, edge).items()
    rates = (problem.cluster.link(src, dst).bandwidth_bytes_per_s / share for (src, dst), share in channels)
    room = min(rates, default=float("inf")) * pace
    return most_bits(lambda bits: sum(sent_bytes(tensor, bits, problem.graph.dtype) for tensor in tensors), room)
