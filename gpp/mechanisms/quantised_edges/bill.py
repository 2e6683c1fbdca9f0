"""The bytes of quantised messages, and the seconds of encoding and decoding them."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cost.problem import Problem
from gpp.cost.stage import AbstractBill
from gpp.graph.op_graph import OpGraph, Tensor
from gpp.mechanisms.quantised_edges.sizes import ANNOUNCE_BYTES, CodecWork, decoding, encoding, sent_bytes
from gpp.mechanisms.quantised_edges.stage import EdgeBits


class EdgeBill(AbstractBill):
    """Messages have fewer bytes, and both of their devices work on them."""

    def message_bytes(self, graph: OpGraph, value: EdgeBits, reader: int, tensors: Sequence[Tensor]) -> tuple[float, float]:
        bits = value.to(reader)
        sizes = sum(sent_bytes(tensor, bits, graph.dtype) for tensor in tensors)
        return sizes, float(ANNOUNCE_BYTES) if value.announces(tensors) else 0.0

    def coding_s(
        self, problem: Problem, value: EdgeBits, reader: int, tensors: Sequence[Tensor], samples: int, ends: tuple[int, int]
    ) -> tuple[float, float]:
        if not (bits := value.to(reader)):
            return 0.0, 0.0
        dtype, (src, dst) = problem.graph.dtype, ends
        there = encoding(tensors, dtype, samples, bits, clip=value.clip)
        return _seconds(problem, there, src), _seconds(problem, decoding(tensors, dtype, samples, bits), dst)


def _seconds(problem: Problem, work: CodecWork, device: int) -> float:
    """Seconds of memory traffic and kernels on device number `device`, as of an operator without FLOPs."""
    own = problem.cluster.devices[device]
    return problem.cost.move_s(work.moved, own) + work.kernels * problem.cost.launch_s(own)


BILL = EdgeBill()
