"""Bytes of stages in tests, by operators and numbers rather than by `Stage`."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.cost.stage import stage_bytes
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.stage import Stage


def peak_bytes(
    problem: Problem,
    ops: tuple[int, ...],
    microbatch_size: int,
    num_devices: int,
    in_flight: int,
    recompute: tuple[int, ...] = (),
    degree: int = 1,
    offload: tuple[int, ...] = (),
) -> float:
    """Most bytes on one of `num_devices` devices that split every micro-batch, with `in_flight` samples in flight."""
    stage = Stage(ops=ops, devices=tuple(range(num_devices)), microbatch_size=microbatch_size, in_flight=in_flight)
    stage = stage.having(TensorParallel(degree=degree)) if degree > 1 else stage
    return stage_bytes(problem, marked(stage, recompute=recompute, offload=offload)).peak(stage.ahead)
