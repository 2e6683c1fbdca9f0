"""A search over plans with shared devices that knows no planner: random plans, random moves, the better one stays, begin again.

It shares nothing with the planners but the prediction: no tables, no bounds but the plainest, no order of preference.
A layout is a list of stages, each with its operators and any set of devices, and one micro-batch size. Climbs begin from the model
in one piece, from random intervals of a random topological order, from operators merged at random, and from the best layout after
a few random moves.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from gpp import Plan, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan, MalformedProgram
from gpp.graph.op_graph import bits
from gpp.plan.build import make_plan

IN_VAIN = 200
"""Moves without a better plan that end a climb."""

KICKS = (2, 6)
"""Random moves between the best layout and a climb that begins there: at least, at most."""


class Part(NamedTuple):
    """A stage of a layout: the mask of its operators, and its devices."""

    ops: int
    devices: tuple[int, ...]


class Layout(NamedTuple):
    """Stages in the order in which they are numbered where data allow it, and the micro-batch size of all."""

    parts: tuple[Part, ...]
    microbatch_size: int


class Found(NamedTuple):
    """The best plan, its predicted seconds, how many plans were predicted, and how many of them below what they surely take."""

    plan: Plan
    seconds: float
    predicted: int


@dataclass(slots=True)
class RandomSearch:
    """The search of one problem.

    Args:
        strategy: whose prediction decides.
    """

    problem: Problem
    strategy: Strategy
    rng: random.Random
    seen: dict[Layout, float] = field(default_factory=dict)
    busy: dict[tuple[Part, int], float] = field(default_factory=dict)
    best: tuple[float, Layout, Plan] | None = None
    predicted: int = 0

    def run(self, cpu_s: float, climbs: int | None = None) -> Found:
        """The best plan that is found in so many seconds of the processor, and in so many climbs."""
        end = time.process_time() + cpu_s
        for _ in itertools.count() if climbs is None else range(climbs):
            if time.process_time() >= end:
                break
            self._climb(self._start(), end)
        assert self.best is not None, "nothing fits"
        return Found(self.best[2], self.best[0], self.predicted)

    def _climb(self, layout: Layout, end: float) -> None:
        seconds, in_vain = self._seconds(layout, float("inf")), 0
        while in_vain < IN_VAIN and time.process_time() < end:
            moved = self._ordered(self._moved(layout))
            took = float("inf") if moved is None else self._seconds(moved, seconds)
            if moved is not None and took < seconds:
                layout, seconds, in_vain = moved, took, 0
            else:
                in_vain += 1

    def _start(self) -> Layout:
        """Where a climb begins."""
        kind = self.rng.choice(("whole", "intervals", "merged", "best", "best", "best"))
        if kind == "best" and self.best is not None:
            layout = self.best[1]
            for _ in range(self.rng.randint(*KICKS)):
                layout = self._ordered(self._moved(layout)) or layout
            return layout
        ops, most = self.problem.graph.num_ops, min(self.problem.graph.num_ops, 2 * self.problem.cluster.num_devices)
        b, every = self._size(), tuple(range(self.problem.cluster.num_devices))
        if kind == "whole":
            return Layout((Part(self.problem.graph.all_mask, every),), b)
        count = self.rng.randint(1, most)
        order = self._random_order()
        if kind == "intervals":
            cuts = [0, *sorted(self.rng.sample(range(1, ops), count - 1)), ops]
            masks = [sum(1 << op for op in order[i:j]) for i, j in itertools.pairwise(cuts)]
            return Layout(tuple(Part(mask, self._devices()) for mask in masks), b)
        layout = Layout(tuple(Part(1 << op, self._devices()) for op in order), b)
        for _ in range(20 * ops):
            if len(layout.parts) <= count:
                break
            layout = self._ordered(self._merged(layout)) or layout
        return layout

    def _random_order(self) -> list[int]:
        """A random topological order of the operators."""
        graph, left, done, out = self.problem.graph, set(range(self.problem.graph.num_ops)), 0, []
        while left:
            op = self.rng.choice(sorted(op for op in left if not graph.predecessors[op] & ~done))
            left.remove(op)
            done |= 1 << op
            out.append(op)
        return out

    def _size(self) -> int:
        return self.rng.choice(self.problem.microbatch_sizes())

    def _devices(self) -> tuple[int, ...]:
        """Any set of devices, small ones as often as large ones."""
        count = self.problem.cluster.num_devices
        return tuple(sorted(self.rng.sample(range(count), self.rng.choice((1, 1, self.rng.randint(1, count))))))

    def _moved(self, layout: Layout) -> Layout:
        """The layout after one random move; it may be none that can run."""
        return self.rng.choice((self._shifted, self._shifted, self._merged, self._split, self._dealt, self._dealt, self._swapped))(
            layout
        )

    def _shifted(self, layout: Layout) -> Layout:
        """One operator, or what of a stage comes before or after it, goes to another stage."""
        graph, parts = self.problem.graph, list(layout.parts)
        op = self.rng.randrange(graph.num_ops)
        source = next(i for i, part in enumerate(parts) if part.ops >> op & 1)
        goal = self.rng.randrange(len(parts))
        more = self.rng.choice((0, 0, graph.ancestors[op], graph.descendants[op])) & parts[source].ops
        moving = 1 << op | more
        if goal == source:
            return layout
        parts[goal] = parts[goal]._replace(ops=parts[goal].ops | moving)
        parts[source] = parts[source]._replace(ops=parts[source].ops & ~moving)
        return layout._replace(parts=tuple(part for part in parts if part.ops))

    def _merged(self, layout: Layout) -> Layout:
        """Two stages become one, on the devices of one of them or on those of both."""
        if len(layout.parts) < 2:
            return layout
        i, j = sorted(self.rng.sample(range(len(layout.parts)), 2))
        a, b = layout.parts[i], layout.parts[j]
        devices = self.rng.choice((a.devices, b.devices, tuple(sorted({*a.devices, *b.devices}))))
        parts = [*layout.parts[:i], Part(a.ops | b.ops, devices), *layout.parts[i + 1 : j], *layout.parts[j + 1 :]]
        return layout._replace(parts=tuple(parts))

    def _split(self, layout: Layout) -> Layout:
        """A stage becomes two, at a place of a random order of its operators; one of them, or both, may get other devices."""
        i = self.rng.randrange(len(layout.parts))
        part = layout.parts[i]
        order = [op for op in self._random_order() if part.ops >> op & 1]
        if len(order) < 2:
            return layout
        cut = self.rng.randrange(1, len(order))
        masks = [sum(1 << op for op in order[:cut]), sum(1 << op for op in order[cut:])]
        halves = [Part(mask, part.devices if self.rng.random() < 0.5 else self._devices()) for mask in masks]
        return layout._replace(parts=(*layout.parts[:i], *halves, *layout.parts[i + 1 :]))

    def _dealt(self, layout: Layout) -> Layout:
        """A stage gets other devices, two stages exchange theirs, or all get another micro-batch size, perhaps with it."""
        parts, b = list(layout.parts), layout.microbatch_size
        i, what = self.rng.randrange(len(parts)), self.rng.random()
        if what < 0.2:
            b = self._size()
        elif what < 0.4:
            j = self.rng.randrange(len(parts))
            parts[i], parts[j] = parts[i]._replace(devices=parts[j].devices), parts[j]._replace(devices=parts[i].devices)
        else:
            parts[i] = parts[i]._replace(devices=self._devices())
            b = self._size() if what > 0.9 else b
        return Layout(tuple(parts), b)

    def _swapped(self, layout: Layout) -> Layout:
        """Two stages exchange their numbers, where data allow it: a device prefers the stage of the higher one."""
        parts = list(layout.parts)
        i, j = self.rng.randrange(len(parts)), self.rng.randrange(len(parts))
        parts[i], parts[j] = parts[j], parts[i]
        return layout._replace(parts=tuple(parts))

    def _ordered(self, layout: Layout) -> Layout | None:
        """The layout with its stages in a topological order, near the one they have; None if data go in a circle."""
        graph, left, done, out = self.problem.graph, list(layout.parts), 0, []
        before = {part.ops: self._before(part.ops) for part in left}
        if any(len(part.devices) > (self.problem.max_replicas or len(part.devices)) for part in left):
            return None
        while left:
            part = next((part for part in left if not before[part.ops] & ~done), None)
            if part is None or not graph.is_convex(part.ops) or layout.microbatch_size % len(part.devices):
                return None
            left.remove(part)
            done |= part.ops
            out.append(part)
        return layout._replace(parts=tuple(out))

    def _before(self, mask: int) -> int:
        """The operators outside a set whose values it reads."""
        out = 0
        for op in bits(mask):
            out |= self.problem.graph.predecessors[op]
        return out & ~mask

    def _seconds(self, layout: Layout, limit_s: float) -> float:
        """The predicted step; infinite for a layout that is none, does not fit, or certainly takes `limit_s`."""
        known = self.seen.get(layout)
        if known is not None:
            return known
        ordered = self._ordered(layout)
        if ordered is None or (least_s := self._least_s(ordered)) >= limit_s:
            return float("inf")
        parts = [(part.ops, len(part.devices)) for part in ordered.parts]
        placement = [part.devices for part in ordered.parts]
        plan = make_plan(self.problem, "search", parts, ordered.microbatch_size, ordered=True, placement=placement)
        try:
            plan.validate(self.problem)
            seconds = self.strategy.predict(plan, self.problem, record=False).metrics.iteration_s
        except (Infeasible, InvalidPlan, MalformedProgram):
            seconds = float("inf")
        assert seconds >= least_s * (1 - 1e-9), f"{plan} takes {seconds} s, and no plan like it less than {least_s} s"
        self.predicted += 1
        self.seen[layout] = seconds
        if seconds < (self.best[0] if self.best else float("inf")):
            self.best = seconds, ordered, plan
        return seconds

    def _least_s(self, layout: Layout) -> float:
        """Seconds that a layout certainly takes.

        A device has its passes to do. Where every operator has a backward, a stage has its own between the first micro-batch's
        way to it and the last one's way back.
        """
        b, loads, ways, least = layout.microbatch_size, [0.0] * self.problem.cluster.num_devices, list[float](), 0.0
        rounds, returns = self.problem.minibatch_size // b, self.problem.graph.differentiated == self.problem.graph.all_mask
        for s, part in enumerate(layout.parts):
            if (part, b) not in self.busy:
                self.busy[part, b] = sum(self.problem.stage_times(tuple(bits(part.ops)), b, part.devices))
            own, reads = self.busy[part, b], self._before(part.ops)
            way = max((ways[p] for p in range(s) if returns and layout.parts[p].ops & reads), default=0.0)
            least = max(least, way + rounds * own)
            ways.append(way + own)
            for device in part.devices:
                loads[device] += rounds * own
        return max(least, *loads)
