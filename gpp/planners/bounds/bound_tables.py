"""Lower bounds on every operator under every micro-batch size and number of replicas, for bounds and exact planners."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import Amounts, Params, StageBytes
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import OpGraph, bits

ROUNDING = 1 + 1e-9
"""Slack for the order in which sums are taken."""


class BoundTables(NamedTuple):
    """Rows: choices (b, r). Columns: operators. Seconds and bytes of one replica; `capacity` in fastest devices."""

    micro: np.ndarray
    replicas: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    finish: np.ndarray
    memory: StageBytes
    amounts: Amounts
    in_flight: np.ndarray
    held: np.ndarray
    fits: np.ndarray
    capacity: float
    slowest: float
    total_memory: float

    @classmethod
    def of(cls, problem: Problem) -> BoundTables:
        cluster, graph, total = problem.cluster, problem.graph, problem.minibatch_size
        choices, offered = _choices(problem)
        kinds = sorted(set(problem.type_of_device))
        passes = {q: [problem.op_times(q, kind) for kind in kinds] for q in sorted({b // r for b, r in choices})}
        first = {q: np.min([t.forward_s for t in times], axis=0) for q, times in passes.items()}
        back = {q: np.min([t.backward_s for t in times], axis=0) for q, times in passes.items()}
        slowness = _slowness(passes, first, back, len(kinds))
        own, read = _params(graph)
        trainable = own.trainable
        update = np.array(
            [min(problem.cost.update_s(size, cluster.devices[kind]) for kind in kinds) for size in trainable.tolist()]
        )
        reduce_s = {r: _reduce_s_per_byte(problem, r) for r in {r for _, r in choices}}
        samples = np.array([[b // r] for b, r in choices])
        # Boundaries, transients and updates are left out: the most of a sum is less than the sum of the most. What an operator
        # holds alone counts every parameter it reads; in a sum each counts once.
        alone, amounts = (
            problem.amounts_of(params, graph.amounts.saved_bytes, 0.0, 0.0)._replace(update=0.0) for params in (read, own)
        )
        alone, each = (of.held(samples, problem.regime.assumed_copies) for of in (alone, amounts))
        micro = np.array([[total // b] for b, _ in choices], dtype=float)
        largest = max(device.memory_bytes for device in cluster.devices)
        held = micro if problem.regime.keeps_all else np.ones_like(micro)
        in_flight = np.minimum(alone.depth(largest * ROUNDING, micro), micro)
        fits = offered & (in_flight >= held)
        if not fits.any(axis=0).all():
            op = int(np.argmin(fits.any(axis=0)))
            need = float(alone.peak(held)[:, op].min())
            raise Infeasible(
                f"operator {graph.ops[op].name} alone needs {need:.3e} bytes, more than any device has",
                f"cluster.memory_bytes={need:.3e}",
            )
        return cls(
            micro=micro,
            replicas=np.array([[r] for _, r in choices], dtype=float),
            forward=np.array([first[b // r] for b, r in choices]),
            backward=np.array([back[b // r] for b, r in choices]),
            finish=np.array([update + trainable * reduce_s[r] for _, r in choices]),
            memory=each,
            amounts=amounts,
            in_flight=np.maximum(in_flight, 1.0),
            held=held,
            fits=fits,
            capacity=sum(1 / slowness[kinds.index(kind)] for kind in problem.type_of_device),
            slowest=max(slowness),
            total_memory=sum(device.memory_bytes for device in cluster.devices),
        )


def _choices(problem: Problem) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The choices (b, r), and which of them each operator has, of shape [choices, operators].

    Operators that need the whole mini-batch at once (`Problem.minibatch_ops`) have it on one device.
    """
    cluster, total = problem.cluster, problem.minibatch_size
    most = min(cluster.num_devices, problem.max_replicas or cluster.num_devices)
    choices = [(b, r) for b in problem.microbatch_sizes() for r in range(1, min(most, b) + 1) if b % r == 0]
    if problem.copies:
        choices = [(b * r, r) for b, _ in choices for r in range(1, cluster.num_devices + 1) if total % (b * r) == 0]
    offered, apart = np.ones((len(choices), problem.graph.num_ops), dtype=bool), list(bits(problem.minibatch_ops))
    if not apart:
        return choices, offered
    if (total, 1) not in choices:
        choices, offered = [*choices, (total, 1)], np.concatenate([offered, np.zeros_like(offered[:1])])
    offered[:, apart] = [[choice == (total, 1)] for choice in choices]
    return choices, offered


def _slowness(passes: dict, first: dict[int, np.ndarray], back: dict[int, np.ndarray], num_kinds: int) -> list[float]:
    """For each kind of device the least factor by which it is slower than the fastest with some operator."""
    out = [float("inf")] * num_kinds
    for q, times in passes.items():
        for kind, t in enumerate(times):
            for have, best in ((t.forward_s, first[q]), (t.backward_s, back[q])):
                timed = best > 0
                if timed.any():
                    out[kind] = min(out[kind], float((have[timed] / best[timed]).min()))
    return [max(1.0, x) if x < float("inf") else 1.0 for x in out]


def _params(graph: OpGraph) -> tuple[Params, Params]:
    """Parameters of each operator: every one charged to its first reader; and those it reads, with repetition."""
    own, read = np.zeros((2, len(Params._fields), graph.num_ops))
    for name, readers in graph.readers.items():
        first, *_ = reading = list(bits(readers))
        size = np.array(Params.of([graph.param_of[name]]))
        read[:, reading] += size[:, None]
        own[:, first] += size
    return Params(*own), Params(*read)


def _reduce_s_per_byte(problem: Problem, replicas: int) -> float:
    """Seconds for each byte that `replicas` devices reduce, over the fastest links that so many devices can have."""
    if replicas < 2:
        return 0.0
    rate = problem.cluster.wiring.widest(replicas) * problem.cluster.collective_efficiency
    return 2 * (replicas - 1) / replicas / rate
