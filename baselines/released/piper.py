"""Piper's planner as its authors released it, so that its users get the plan values that they know.

Source: msr-fiddle/piper at d7fc8cf, algo.cpp (MIT, Microsoft). Repeated here:

1. A stage takes `compute / d + 2 (cut bytes + sync bytes) / (d bandwidth) + 4 (d - 1) w / (d N bandwidth)` seconds a
   micro-batch: terms
   are added, nothing overlaps. Every cut *edge* is charged at both its ends: a tensor with two readers elsewhere is paid twice.
2. Memory of a device is `A y + B` over its operators, y = sum of data-parallel degrees from the stage to the end, divided by its
   own and
   rounded up. A, B and w of an operator that declares nothing: its saved bytes, twice its parameters, its parameters.
3. d divides N, the number of micro-batches, and the degrees' sum is at most N and at most the number of devices.
4. The ways to run the operators of a stage are chosen by a greedy heuristic when memory binds: `baselines.released.knapsack`.
5. More than 40,000 states are refused. One bandwidth, no latency, no filling and draining of the pipeline.
6. Times are added to bytes / bandwidth whatever their unit; the ResNet and GNMT inputs that ship with it are in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from baselines.released.knapsack import changed, changes, squeeze
from baselines.released.pipedream import offer_unchanged
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractReleased, Predict
from gpp.planners.chains.bottleneck import Room, Way, best_chain
from gpp.planners.chains.chain_tables import Best, Part, Seconds
from gpp.planners.chains.downsets import Budget, Stages, StateFamily, all_states, linear_states
from gpp.planners.chains.piper import MOST_STATES, Piper
from gpp.planners.common.linear_orders import depth_first_order
from gpp.settings import settings


@final
@settings("strategy.planner.released")
class PiperPlanner(AbstractReleased[Piper]):
    """The released planner's own plan, at the micro-batch sizes at which it is a plan of this problem."""

    def plan(self, planner: Piper, problem: Problem, predict: Predict) -> Plan:
        budget = Budget("piper", planner.time_limit_s, planner.memory_limit_bytes)
        best = Best(problem, "piper", predict, planner.replication)
        cluster = problem.cluster
        found = published_plan(
            problem.graph,
            cluster.num_devices,
            memory_bytes=problem.memory_limit_bytes,
            bandwidth=cluster.wiring.common.bandwidth_bytes_per_s,
            num_microbatches=problem.minibatch_size,
            linear=planner.linearize == "always",
            recompute=True,
            seconds=np.sum(Seconds(problem).of(1), axis=0),
            budget=budget,
            max_states=planner.max_states,
        )
        parts = [
            Part(
                mask_of(stage.ops),
                stage.replicas,
                mechanisms=(
                    *((Marks(recompute=stage.recompute),) if stage.recompute else ()),
                    *((TensorParallel(degree=stage.degree),) if stage.degree > 1 else ()),
                ),
            )
            for stage in found.stages
        ]
        if parts:
            offer_unchanged(problem, best, found.value_s, parts)
        if best.plan is None:
            what = f"plan (own objective {found.value_s:.6g} s) does not fit" if parts else "planner finds no plan that fits"
            raise Infeasible(
                f"the released {what} this memory, or its replicas no micro-batch",
                "strategy.planner.compatible=false, or devices with more memory",
            )
        objective = Objective(value_s=found.value_s, scope="a sample for the slowest stage")
        line = f"own objective: {objective}, as the released planner reckons it"
        return replace(best.plan, objective=objective, explanation=(line,))


class PiperStage(NamedTuple):
    """One stage of Piper's plan."""

    ops: tuple[int, ...]
    replicas: int
    degree: int
    recompute: tuple[int, ...]


class Published(NamedTuple):
    """Piper's plan: its own objective, and the stages in order."""

    value_s: float
    stages: tuple[PiperStage, ...]


class Menu(NamedTuple):
    """How the operators can be run at one tensor-parallel degree: arrays of shape [num_ops], for one micro-batch.

    Args:
        seconds, kept, fixed: time, A and B of the fastest way; `params`: w.
        added_s, saved_a, saved_b: of the other way, in relation to the fastest; zero where there is none.
        recomputes: whether the fastest way is the one that recomputes.
        declared: whether the operator can be run at this degree.
        edges: (from, to, bytes charged to the reader, bytes charged to the producer).
    """

    degree: int
    seconds: np.ndarray
    kept: np.ndarray
    fixed: np.ndarray
    params: np.ndarray
    added_s: np.ndarray
    saved_a: np.ndarray
    saved_b: np.ndarray
    recomputes: np.ndarray
    declared: np.ndarray
    edges: tuple[tuple[int, int, float, float], ...]


def published_plan(
    graph: OpGraph,
    num_devices: int,
    *,
    memory_bytes: float,
    bandwidth: float,
    num_microbatches: int,
    linear: bool = False,
    recompute: bool = True,
    seconds: np.ndarray | None = None,
    budget: Budget | None = None,
    max_states: int = MOST_STATES,
) -> Published:
    """Piper's plan for a profile.

    Args:
        num_microbatches: N.
        linear: with artificial edges of no bytes that leave only the prefixes of one depth-first order.
        seconds: [num_ops] forward plus backward; None for a profile, whose graph holds seconds.

    Raises:
        Infeasible: more than `max_states` states, or the budget is spent.
    """
    budget = budget or Budget("piper", math.inf, math.inf)
    if seconds is None:
        seconds = np.array([op.forward_flops + op.backward_flops for op in graph.ops])
    menus = published_menus(graph, seconds, recompute)
    work_of = np.min([np.where(m.declared, m.degree * np.minimum(m.seconds, m.seconds + m.added_s), np.inf) for m in menus], axis=0)
    masks = linear_states(depth_first_order(graph)) if linear else all_states(graph, max_states, budget)
    if masks is None:
        raise Infeasible(
            f"the graph has more than {max_states:,} downsets, where Piper gives up", "strategy.planner.linearize=auto"
        )
    family = StateFamily(graph, masks, work_of, budget)
    limit = min(num_microbatches, num_devices)
    at_most = None
    if not linear and len(masks) > 4 * graph.num_ops:
        # Cuts of one order are some of the cuts: their best is an upper bound, which makes the large search small.
        line = published_plan(
            graph,
            num_devices,
            memory_bytes=memory_bytes,
            bandwidth=bandwidth,
            num_microbatches=num_microbatches,
            linear=True,
            recompute=recompute,
            seconds=seconds,
            budget=budget,
        )
        at_most = line.value_s if math.isfinite(line.value_s) else None
    search = _Search(family, menus, num_devices, limit, memory_bytes, bandwidth, num_microbatches)
    chain = best_chain(
        family,
        family.sums(work_of),
        search.ways,
        num_devices,
        budget,
        depth=limit,
        depth_is_devices=len(menus) == 1 and num_microbatches >= num_devices,
        bounded=num_microbatches < num_devices,
        at_most_s=at_most,
    )
    if chain is None:
        return Published(math.inf, ())
    return Published(chain.value_s, tuple(search.stage(cut) for cut in chain.cuts))


def published_menus(graph: OpGraph, seconds: np.ndarray, recompute: bool) -> list[Menu]:
    """What the operators' profiles declare; without declarations one device, nothing recomputed."""
    n = graph.num_ops
    params = np.array([float(sum(graph.param_of[name].num_bytes for name in op.params)) for op in graph.ops])
    # Shares are no times, and the released planner knows none.
    ways = [{(v.degree, v.recompute): v for v in op.variants if v.share is None} for op in graph.ops]
    out = []
    for t in sorted({1} | {degree for way in ways for degree, _ in way}):
        first, other = (np.zeros((4, n)) for _ in range(2))
        has_other, declared = np.zeros(n, dtype=bool), np.ones(n, dtype=bool)
        for i, (op, way) in enumerate(zip(graph.ops, ways, strict=True)):
            vanilla, again = way.get((t, False)), way.get((t, True))
            if vanilla is not None:
                w = params[i] * vanilla.params
                first[:, i] = (vanilla.forward + vanilla.backward) * seconds[i], vanilla.saved_bytes, 2 * w + vanilla.extra_bytes, w
            else:
                declared[i] = t == 1
                first[:, i] = seconds[i], op.saved_bytes, 2 * params[i], params[i]
            if again is not None and recompute:
                w = params[i] * again.params
                other[:, i] = (again.forward + again.backward) * seconds[i], again.saved_bytes, 2 * w + again.extra_bytes, w
                has_other[i] = True
        faster = has_other & (other[0] < first[0])
        first, other = np.where(faster, other, first), np.where(faster, first, np.where(has_other, other, first))
        time_s, kept, fixed, weights = first
        changed_s, spared = other[0] - time_s, (kept - other[1], fixed - other[2])
        out.append(Menu(t, time_s, kept, fixed, weights, changed_s, *spared, faster, declared, _edges(graph, ways, t)))
    return out


def _edges(graph: OpGraph, ways: Sequence[dict], t: int) -> tuple[tuple[int, int, float, float], ...]:
    def sync(op: int, side: str, peer: int) -> float:
        variant = ways[op].get((t, False))
        return dict(getattr(variant, side)).get(peer, 0.0) if variant else 0.0

    return tuple(
        (
            tensor.producer,
            c,
            tensor.bytes_per_sample + sync(c, "receive", tensor.producer),
            tensor.bytes_per_sample + sync(tensor.producer, "send", c),
        )
        for tensor in graph.tensors
        for c in tensor.consumers
    )


class _Search(NamedTuple):
    family: StateFamily
    menus: list[Menu]
    num_devices: int
    limit: int
    memory_bytes: float
    bandwidth: float
    num_microbatches: int

    def ways(self, room: Room) -> list[Way]:
        out = []
        for menu in self.menus:
            kept = {}
            for d in range(1, self.num_devices // menu.degree + 1):
                if self.num_microbatches % d == 0:
                    kept[d] = room.pairs(d * menu.degree)
            if kept:
                out += self._of(menu, kept, room)
        return out

    def _of(self, menu: Menu, kept: dict[int, np.ndarray], room: Room) -> list[Way]:
        every = np.unique(np.concatenate(list(kept.values())))
        stages = self.family.stages(every)
        if not menu.declared.all():
            able = stages.total((~menu.declared).astype(float)) < 0.5
            every = every[able]
            stages = self.family.stages(every)
        compute, kept_a, fixed = stages.total(menu.seconds), stages.total(menu.kept), stages.total(menu.fixed)
        params, moved = stages.total(menu.params), self._moved(menu, stages)
        out = []
        for d, pairs in kept.items():
            at = np.searchsorted(every, pairs)
            at = at[(at < len(every)) & (every[np.minimum(at, len(every) - 1)] == pairs)] if len(every) else at[:0]
            sync = 4 * (d - 1) * params[at] / d / self.num_microbatches
            base = compute[at] / d + (2 * moved[at] / d + sync) / self.bandwidth
            at, base = at[base <= room.cap_s], base[base <= room.cap_s]
            rows = self._rows(menu, d, stages, at, base, kept_a[at], fixed[at])
            keep = np.flatnonzero(rows.min(axis=0) <= room.cap_s) if len(at) else np.arange(0)
            out.append(Way((menu, d), d * menu.degree, d, every[at[keep]], rows[:, keep]))
        return out

    def _moved(self, menu: Menu, stages: Stages) -> np.ndarray:
        moved = np.zeros(len(stages.start))
        for a, b, receive, send in menu.edges:
            made, read = stages.holds(a), stages.holds(b)
            moved += receive * (read & ~made) + send * (made & ~read)
        return moved

    def _rows(
        self, menu: Menu, d: int, stages: Stages, at: np.ndarray, base: np.ndarray, kept: np.ndarray, fixed: np.ndarray
    ) -> np.ndarray:
        """Times by the sum of degrees, or one row if memory does not bind."""
        most = -(-self.limit // d)
        lacks = np.flatnonzero(kept * most + fixed > self.memory_bytes)
        if not len(lacks):
            return base[None, :]
        members = Stages(self.family, stages.start[at[lacks]], stages.end[at[lacks]]).members()
        by_y = np.tile(base, (most + 1, 1))
        excess = fixed[lacks] - self.memory_bytes
        by_y[1:, lacks] += squeeze(
            members, kept[lacks], excess, list(range(1, most + 1)), menu.added_s / d, menu.saved_a, -menu.saved_b
        )
        return by_y[-(-np.arange(self.limit + 1) // d)]

    def stage(self, cut) -> PiperStage:
        menu, d = cut.way.key
        mask = self.family.masks[self.family.start[cut.pair]] & ~self.family.masks[self.family.end[cut.pair]]
        ops = list(bits(mask))
        y = -(-cut.depth // d)
        lacking = float((menu.kept[ops] * y + menu.fixed[ops]).sum()) - self.memory_bytes
        saved = menu.saved_a * y + menu.saved_b
        swapped = set(changed(ops, lacking, changes(menu.added_s / d, saved), saved)) if lacking > 0 else set()
        recompute = tuple(op for op in ops if (op in swapped) != bool(menu.recomputes[op]))
        return PiperStage(tuple(ops), d, menu.degree, recompute)
