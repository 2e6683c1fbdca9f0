"""The bytes that helpers hold for a stage of another device."""

from __future__ import annotations

from collections.abc import Iterable

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.problem import Problem
from gpp.cost.stage import AbstractBill
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.helpers.stage import Helpers
from gpp.stage import Stage


class Bill(AbstractBill):
    """Helpers hold bytes of their own. The seconds of a backward stay in the stage's bill: each device has its part of them."""

    def beside(self, problem: Problem, stage: Stage, value: Helpers) -> Iterable[tuple[int, float]]:
        """Bytes that the helpers of a stage hold.

        Gradients of weights take their sum, and for two micro-batches, of which one comes and one is in use, what they are made of.
        Gradients of inputs take, for as many, those of the outputs, their own part, and their part of the weights, which comes with
        them: a helper keeps no versions.
        """
        samples, trained = RESIDENT_COPIES * stage.microbatch_size, problem.trainable_bytes(stage.ops)
        if value.weight_device is not None:
            yield value.weight_device, trained + samples * late_bytes(stage, problem.graph)
        of_inputs, of_outputs = gradient_bytes(stage, problem.graph)
        for device, share in value.input_share:
            yield device, share * trained * RESIDENT_COPIES + samples * (of_outputs + share * of_inputs)


def late_bytes(stage: Stage, graph: OpGraph) -> float:
    """Bytes that the gradients of a stage's weights are made of, for each sample."""
    return sum(graph.ops[op].late_bytes for op in stage.ops)


def gradient_bytes(stage: Stage, graph: OpGraph) -> tuple[float, float]:
    """Bytes of the gradients of a stage's inputs and of its outputs, for each sample."""
    own, inputs, outputs = mask_of(stage.ops), 0.0, 0.0
    for tensor in graph.tensors:
        made, read = own >> tensor.producer & 1, mask_of(tensor.consumers)
        if tensor.differentiable:
            inputs += tensor.bytes_per_sample * bool(read & own and not made)
            outputs += tensor.bytes_per_sample * bool(made and read & ~own)
    return inputs, outputs


BILL = Bill()
