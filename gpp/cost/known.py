"""Bytes that a stage takes less than the sum of the amounts that planners tabulate, once all of the stage is known.

* The transients of a stage that keeps everything are one line for any number of samples (`gpp.graph.transients`); with the number
  that it has they may be less.
* A sum of gradients is counted for every trained weight, and all micro-batches in flight beside them. Where a stage has all
  micro-batches of a mini-batch in flight, both are never there together: the sums are let go of at the update, the first backward
  makes them, and then one micro-batch is gone.

Whoever makes stages fit counts on neither: what is found to fit, fits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpp.cost.amounts import StageBytes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import mask_of
from gpp.stage import Stage

FirstBackward = Callable[[np.ndarray], float | None]
"""[operators] bytes of the sums of gradients -> what `AbstractBill.first_backward` says."""


def known(problem: Problem, stage: Stage, memory: StageBytes, first: FirstBackward | None = None) -> StageBytes:
    """The bytes of a stage whose samples and micro-batches in flight are known.

    Args:
        memory: `gpp.cost.stage.stage_bytes`.
        first: of a mechanism that makes the stage hold less; None: it holds what plain passes do.
    """
    mask = mask_of(stage.ops)
    if not mask & problem.graph.differentiated or stage.devices_per_replica > 1:
        return memory
    if first is None:
        memory = memory._replace(transient=min(memory.transient, problem.transient_bytes(mask, stage.samples)))
    return memory._replace(transient=memory.transient - _unmet_bytes(problem, stage, memory, first))


def _unmet_bytes(problem: Problem, stage: Stage, memory: StageBytes, first: FirstBackward | None) -> float:
    """Bytes by which the peak of a stage with a backward is lower because gradients and micro-batches do not meet.

    None with several devices, whose sums of gradients stay between mini-batches, none without a flush, and none where backwards are
    in parts: the sums come with the last.
    """
    count = problem.accumulation(stage.microbatch_size)
    inside = mask_of(stage.ops)
    regime = problem.regime
    if len(stage.devices) > 1 or not regime.weights.flushes or regime.holds.parts or stage.ahead < count:
        return 0.0
    tensors = problem.tensors_of(stage.ops)
    gradients = np.zeros(len(stage.ops))
    for param in problem.graph.params:
        readers = problem.graph.readers[param.name]
        # A sum that another stage has a part in stays, too.
        if param.trainable and readers and not readers & ~inside:
            gradients[tensors.at[readers.bit_length() - 1]] += param.num_bytes
    most = tensors.first_backward(gradients, stage.samples) if first is None else first(gradients)
    if most is None:
        return 0.0
    passes = memory._replace(update=0.0)
    whole = passes.peak(count)
    later = passes.peak(count - 1) if count > 1 else 0.0
    return float(np.clip(whole - max(later, whole - memory.transient - gradients.sum() + most), 0.0, memory.transient))
