"""The bits of the values in a stage's messages to the stages that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gpp.errors import InvalidPlan
from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.sizes import LEAST_BITS, MOST_BITS, coded
from gpp.settings import Natural
from gpp.stage import AbstractStageValue, EdgeTensors, Stage

EARLIER = ("edge_bits", "edge_clip", "edge_auto")
"""Fields that earlier files have in the plan itself: the bits of all its edges, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeBits(AbstractStageValue):
    """The form of a stage's messages forwards.

    Args:
        bits: of a floating-point value, for every stage that reads them: (reader, bits); 0: values travel as they are.
        clip: whether values are clipped before.
        auto: whether the sender changes the bits with the speed of its links.
    """

    name: ClassVar[str] = "quantised_edges"
    codes: ClassVar[bool] = True
    bits: tuple[tuple[Natural, Natural], ...]
    clip: Annotated[bool, Field(exclude_if=lambda clip: not clip)] = False
    auto: Annotated[bool, Field(exclude_if=lambda auto: not auto)] = False

    def to(self, reader: int) -> int:
        """The bits of a value in the messages to a stage."""
        return dict(self.bits)[reader]

    def announces(self, tensors: Sequence[Tensor]) -> bool:
        """Whether messages with these tensors say how many bits a later one has, because that may change."""
        return self.auto and any(map(coded, tensors))

    def within(self, ops: tuple[int, ...]) -> None:
        """Nothing: other operators have other messages."""
        return None

    @classmethod
    def upgraded(cls, content: dict[str, Any]) -> dict[str, Any]:
        bits, edges = content.get("edge_bits", []), content.get("edges", [])
        pairs = isinstance(edges, list) and all(isinstance(edge, list) and len(edge) == 2 for edge in edges)
        if content.keys().isdisjoint(EARLIER) or not isinstance(bits, list) or not pairs or len(bits) != len(edges):
            return content
        more = {name: content[f"edge_{name}"] for name in ("clip", "auto") if f"edge_{name}" in content}
        out = []
        for s, stage in enumerate(content["stages"]):
            own = [[edge[1], number] for edge, number in zip(edges, bits, strict=True) if edge[0] == s]
            if own and isinstance(stage, dict) and isinstance(values := stage.get("mechanisms", {}), dict):
                stage = {**stage, "mechanisms": {**values, cls.name: {"bits": own, **more}}}
            out.append(stage)
        return {**{key: value for key, value in content.items() if key not in EARLIER}, "stages": out}

    @classmethod
    def check_plan(cls, stages: tuple[Stage, ...], edges: EdgeTensors, num_devices: int, *, trains: bool) -> None:
        for s, stage in enumerate(stages):
            if (value := stage[cls]) is not None:
                value._check_edges(s, {t: tensors for (a, t), tensors in edges.items() if a == s}, trains=trains)

    def _check_edges(self, s: int, tensors: Mapping[int, Sequence[Tensor]], *, trains: bool) -> None:
        """Prove that the edges of stage number s can have so many bits.

        Args:
            tensors: reader -> the tensors that it is sent.

        Raises:
            InvalidPlan: not one number for each edge; out of range; nothing on the edge can be quantised; or the graph is trained.
        """
        if [reader for reader, _ in self.bits] != [*tensors]:
            rule = f"must have one number for each of the stages {[*tensors]} that read its messages"
            raise InvalidPlan(f"stage {s}: quantised_edges.bits={[*map(list, self.bits)]} {rule}. Fix: plan again")
        for t, number in self.bits:
            if number and not LEAST_BITS <= number <= MOST_BITS:
                raise InvalidPlan(
                    f"edge {s}->{t} has {number} bits, which must be 0 or {LEAST_BITS} to {MOST_BITS}. Fix: plan again"
                )
            if number and not any(map(coded, tensors[t])):
                raise InvalidPlan(f"edge {s}->{t} has {number} bits, but only integers go over it. Fix: give it 0 bits")
            if number and trains:
                raise InvalidPlan(
                    f"edge {s}->{t} has {number} bits, which are for inference; a gradient cannot pass a quantised message. "
                    "Fix: set mode=inference"
                )


Value = EdgeBits
