"""PipeEdge's scheduler as it is published (`src-native/schedule.cpp`, 2022 to 2024), its index error included.

h(i, S, u) is the least bottleneck of the first i layers on the multiset S of used devices, the next stage being reserved for a
device of type u:

    h(j, S + u, v) = min over i, u of max(h(i, S, u), seconds of layers i+1..j on u, seconds of the message behind j from u to v)

for every j at which the layers fit u. Not every device has to be used; ties go to what was found first. Types are in alphabetical
order.

**The index error.** The tool keeps a list with one entry for each host, type after type, and asks it for time, memory and rate with
the *number of the type*. So as soon as the first type has two hosts, all but the first type are planned with another type's
numbers. With `corrected` the list is read as it was meant.

Units: a MB and a Mbit are 2^20 here. One message of the last layer's output is counted in memory, none in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.mechanisms.serving.edgepipe.edgepipe import EdgePipe, Told, is_line, placed
from gpp.mechanisms.serving.edgepipe.forward import Assigned, ForwardProblem, Kinds
from gpp.mechanisms.serving.edgepipe.typed_chain import PlacedStage
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractReleased, Predict
from gpp.settings import settings

BUFFERS = 2
"""Messages that the tool counts for each end of a stage beside the one in use: one under way, and one in a queue."""
MEBI = 2**20 / 1e6
"""What the tool takes a MB, or a Mbit, for."""


@final
@settings("strategy.planner.released")
class PipeEdgeScheduler(AbstractReleased[EdgePipe]):
    """The published tool's schedule, at the micro-batch size at which it is predicted fastest."""

    def plan(self, planner: EdgePipe, problem: Problem, predict: Predict) -> Plan:
        def candidates(forward: ForwardProblem) -> Iterator[Told]:
            found = published(forward, corrected=planner.corrected)
            if found is not None:
                stages, believed_s = found
                yield stages, (f"the published tool's schedule, which it believes to take {believed_s:.6g} s a micro-batch",)

        return planner.fastest(problem, predict, candidates)


def published(forward: ForwardProblem, *, corrected: bool) -> tuple[Assigned, float] | None:
    """The published tool's stages and devices, and the seconds that it believes they take; None where it finds none.

    Types are told apart by their names alone, and the rate of a type's links is that of its devices.

    Raises:
        InvalidConfig: the graph is no chain, or devices lack what the tool's files say of them.
    """
    problem, b = forward.problem, forward.microbatch_size
    graph, devices = problem.graph, problem.cluster.devices
    if not is_line(graph):
        rule = f"plans chains alone, and {graph.name} is none"
        raise InvalidConfig("strategy.planner.compatible", True, rule, "leave it out, or use model=pipeedge")
    if unnamed := [d for d, device in enumerate(devices) if device.name is None or device.bandwidth_bytes_per_s is None]:
        rule = f"needs the name of each device's type, and its own rate; device {unnamed[0]} lacks one"
        raise InvalidConfig("strategy.planner.compatible", True, rule, "use cluster=pipeedge, or give cluster.device.name")
    groups: dict[str, list[int]] = {}
    for d in sorted(range(len(devices)), key=lambda d: (devices[d].name or "", d)):
        groups.setdefault(devices[d].name or "", []).append(d)
    first = [group[0] for group in groups.values()]
    held = [sums.trainable + sums.frozen for sums in (problem.sums(1 << op) for op in range(graph.num_ops))]
    incoming = sum(given.bytes_per_sample for given in graph.inputs)
    outgoing = [sum(graph.tensors[t].bytes_per_sample for t in graph.made_by(1 << op)) for op in range(graph.num_ops)]
    given = Published(
        counts=tuple(map(len, groups.values())),
        time_s=forward.seconds[first],
        memory_bytes=np.array([devices[d].memory_bytes for d in first]) * MEBI,
        bytes_per_s=np.array([devices[d].bandwidth_bytes_per_s or 0.0 for d in first]) * MEBI,
        layer_bytes=np.array(held) * MEBI,
        moved_bytes=np.array([incoming, *outgoing]) * b,
    )
    found = schedule(given, corrected=corrected)
    if found is None:
        return None
    kinds = Kinds(problem.cluster, tuple(map(tuple, groups.values())))
    return placed(found.chain, kinds, tuple(range(graph.num_ops))), found.believed_s


@dataclass(frozen=True, kw_only=True)
class Published:
    """The tool's input, types in the order of their names.

    Args:
        counts: hosts of each type; every type has one at least.
        time_s: [T, L] seconds of each layer for a micro-batch.
        memory_bytes, bytes_per_s: of each type, [T].
        layer_bytes: memory of each layer, [L].
        moved_bytes: the micro-batch's bytes into the first layer, and out of each layer, [L + 1].
    """

    counts: tuple[int, ...]
    time_s: np.ndarray
    memory_bytes: np.ndarray
    bytes_per_s: np.ndarray
    layer_bytes: np.ndarray
    moved_bytes: np.ndarray


class Schedule(NamedTuple):
    """What the tool answers: the stages, and the bottleneck by its own reckoning."""

    chain: list[PlacedStage]
    believed_s: float


def schedule(given: Published, *, corrected: bool) -> Schedule | None:
    """The tool's schedule; None where it finds none."""
    num_types, num_layers = given.time_s.shape
    hosts = [t for t, count in enumerate(given.counts) for _ in range(count)]
    seen_as = list(range(num_types)) if corrected else hosts[:num_types]
    took = [_sums(given.time_s[t]) for t in seen_as]
    fits = [_fits(given, t) for t in seen_as]
    rate = np.minimum.outer(given.bytes_per_s[seen_as], given.bytes_per_s[seen_as])
    move_s = given.moved_bytes[None, None, :] / rate[:, :, None]

    radix = np.cumprod([1, *(count + 1 for count in given.counts)])
    used = np.array([[s // radix[t] % (given.counts[t] + 1) for t in range(num_types)] for s in range(radix[-1])])
    h = np.full((num_layers + 1, radix[-1], num_types), np.inf)
    h[0, 0] = 0.0
    parent = np.full((*h.shape, 2), -1)
    believed, end = np.inf, None
    for i in range(num_layers):
        for s, u in np.argwhere(np.isfinite(h[i])):
            if used[s, u] == given.counts[u]:
                continue
            so_far = np.maximum(h[i, s, u], took[u][i, i + 1 :])
            so_far[~fits[u][i, i + 1 :]] = np.inf
            if so_far[-1] < believed:
                believed, end = float(so_far[-1]), (i, int(s), int(u))
            then = s + radix[u]
            for v in np.flatnonzero(used[s] < given.counts):
                cost = np.maximum(so_far, move_s[u, v, i + 1 :])
                better = cost < h[i + 1 :, then, v]
                h[i + 1 :, then, v][better] = cost[better]
                parent[i + 1 :, then, v][better] = (i, u)
    if end is None:
        return None
    i, s, u = end
    chain = [PlacedStage(u, i, num_layers)]
    while i:
        start, kind = map(int, parent[i, s, u])
        chain.append(PlacedStage(kind, start, i))
        i, s, u = start, int(s - radix[kind]), kind
    return Schedule(chain[::-1], believed)


def _sums(values: np.ndarray) -> np.ndarray:
    """[L + 1, L + 1] sums of values i..j-1, added from the left as the tool adds them."""
    n = len(values)
    out = np.zeros((n + 1, n + 1))
    for i in range(n):
        out[i, i + 1 :] = np.cumsum(values[i:])
    return out


def _fits(given: Published, kind: int) -> np.ndarray:
    """[L + 1, L + 1] whether layers i+1..j fit a type: what they need must be less than what it has."""
    moved, first = given.moved_bytes, np.arange(len(given.moved_bytes)) == 0
    incoming = moved * np.where(first, 1, BUFFERS + 1)
    need = _sums(given.layer_bytes) + incoming[:, None] + (BUFFERS + 1) * moved[None, :]
    return given.memory_bytes[kind] > need
