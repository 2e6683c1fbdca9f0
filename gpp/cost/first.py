"""The first backward of a mini-batch, which finds no gradients to add to: what a stage spares that then has everything in flight.

A bill counts a sum of gradients for every trained weight, and all micro-batches in flight beside them. Where a stage has all
micro-batches of a mini-batch in flight, both are never there together: the sums are let go of at the update, the first backward
makes them, and then one micro-batch is gone. `gpp.memory.fit` does not count on it: what it finds to fit, fits.
"""

from __future__ import annotations

import numpy as np

from gpp.cost.amounts import StageBytes
from gpp.cost.problem import Problem
from gpp.cost.variants import discarded
from gpp.graph.op_graph import mask_of
from gpp.plan.stage import Stage


def spared_bytes(problem: Problem, stage: Stage, memory: StageBytes) -> float:
    """Bytes by which the peak of a stage is below that of `memory`, on its device.

    None with several devices, whose sums of gradients stay between mini-batches, and none without a flush.
    """
    count = problem.accumulation(stage.microbatch_size)
    inside = mask_of(stage.ops)
    if (
        len(stage.devices) > 1
        or not problem.regime.weights.flushes
        or stage.ahead < count
        or not inside & problem.graph.differentiated
    ):
        return 0.0
    declared = {op for op in stage.recompute if op not in discarded(problem.graph, stage.recompute, 1)}
    if declared:
        return 0.0
    tensors = problem.tensors_of(stage.ops)
    gradients = np.zeros(len(stage.ops))
    for param in problem.graph.params:
        readers = problem.graph.readers[param.name]
        # A sum that another stage has a part in stays, too.
        if param.trainable and readers and not readers & ~inside:
            gradients[tensors.at[readers.bit_length() - 1]] += param.num_bytes
    first = tensors.first_backward(gradients, stage.recompute, stage.offload, stage.samples, stage.boundaries)
    whole = memory.peak(count)
    later = memory.peak(count - 1) if count > 1 else 0.0
    return float(np.clip(whole - max(later, whole - memory.transient - gradients.sum() + first), 0.0, memory.transient))
