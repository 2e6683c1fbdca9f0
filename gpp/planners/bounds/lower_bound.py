"""No plan is predicted to finish sooner than this.

Objective: the largest T for which the arguments below prove that no valid plan has a predicted iteration time under T.

Space: every partition into convex stages with an acyclic stage graph (and order edges, as in a chain), every
placement on disjoint devices, every stage with its own micro-batch size b, which divides the mini-batch (or the imposed one), its
own number of replicas r dividing b, any k and any samples in flight; every synchronous order of the passes. Operators of
`Problem.minibatch_ops` have the whole mini-batch at once on one device.

A step is a period: each device begins its next step as soon as its own part of the last is over (`gpp.simulate.period`). So devices
that fill the pipeline for a step may do so while others still drain the one before, and only what goes around in a circle
counts: a device's own work, and the way from a device to another and back.

Notation: a *choice* of an operator is the (b, r) of its stage; M = B / b micro-batches, q = b / r samples on a replica.
F and G are an operator's forward and backward seconds for q samples on the fastest device, and E what follows the last
backward: the optimizer's step and the ring all-reduce of the parameters, 2 (r - 1) / r of their bytes over the fastest
link that r devices can have between them. A parameter that several operators read is charged to one of them. A(o), the way
around, is the longest way of F + G over differentiable tensors that ends at operator o, o itself included, and the E of the
operator that it begins at; U(o) is the longest way of F + G behind o. Sums over a stage S hold for each of its devices; F(S) is
the sum of F.

Arguments (each is a necessary condition for a plan whose period is T seconds, so the first T that breaks none is a lower bound):
1. One operator: its device does M (F + G), then E, in every period. Where a way leads to it, the device at the beginning of the
   way does its own first forward, waits for the work behind, does its last backward, then E, before its next step begins:
   A + (M - 1) (F + G) <= T. The last forward of o is followed by the way through everything behind it:
   A + (M - 1) F + U <= T; the same with G for the backwards that follow the first. What a stage holds of these ways it computes
   itself, so absorbing them saves nothing. Choices that break this are struck out, which makes A and U longer; repeated.
2. Work: all devices together have N T seconds, and the operators take sum r (M (F + G) + E) of them.
3. Around: on a device of S, for every o in S: A(o) + (M - 1) (F + G)(S) <= T, since the way to S and the first forward, and the
   last backward and the way back, are no shorter than A(o). So sum over S of (M - 1) (F + G) / (T - A(o)) <= 1, and r times that
   over all operators <= N. Since M (F + G)(S) <= T too, and M is the same all over S, each operator counts the larger of
   (F + G) (M - 1) / (T - A) and (F + G) M / T.
4. Path: one way there and back and the E where it begins, sum (F + G) + E <= T; and (M - 1) (F + G) more at its turning
   point, or (M - 1) F or G more at any place of it.
5. Memory: an operator alone leaves room for i micro-batches in flight, and each is in flight for F + G + U at least:
   A - (F + G) + ceil(M / i) (F + G + U) <= T. All together: the activations of a micro-batch, q times the saved bytes,
   are held for a share (F + G + U) / T of the time, so sum r (weights, gradients, optimizer state; M times that share,
   but at least one, of the activations) <= the devices' memory, for a mean over time is no more than the peak.
6. Packing: of 2 and 3, where operators are large: if x_o >= 0 sum up to 1 at most on a device, so does u(x_o) for the
   dual feasible functions u (Fekete and Schepers, 2001), which round the shares as no packing could do better.
7. Division: the stage of one large operator has r devices, under one of its choices. The others join it, with the same choice, or
   share the N - r devices left: two resources as in 2 or 3. If that is impossible for each of its choices, so is T.

8. A loss on the whole mini-batch (`Problem.minibatch_ops`): all forwards of the operators before it are over when it begins, and
   none of their backwards begins before it ends. So no device computes any of them meanwhile: their work over all devices, and
   F + G of the loss on top. For such problems this and the simplest of the arguments above are all that is asked.
9. A path: what `gpp.planners.bounds.line` says of the stages that a path is cut into, their messages, and their devices.

2 to 6 are sums over operators of what each one's choice takes, each <= 1 in units of its resource; so is every mean of
them. Minimising a mean operator by operator is a Lagrangian bound: if that minimum is above 1, T is impossible. The
weights are sought by a few multiplicative steps; any weights are sound.

Devices of unequal speed: F and G are those of the fastest, and a device counts as the largest share of such a
device that it reaches with any operator.

Complexity: O(C n) for each T tried (about 15), with n operators and C choices (b, r); bisection to 0.2 %.

Departures: none; there is no publication. Transfers are taken as free but in 9: elsewhere a stage may hold both of their ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import bits
from gpp.plan.plan import Plan
from gpp.planners.bounds.bound_tables import ROUNDING, BoundTables
from gpp.planners.bounds.line import CELLS, PathBound
from gpp.planners.bounds.ways import all_before, longest_behind, longest_to, producers_of
from gpp.quantities import seconds

PRECISION = 1.002
"""The bisection ends when its ends are this close."""

LINE_STEP = 1.02
"""The same for the arguments on a path, each of which takes longer: where they do not raise the bound by so much, one is enough."""

FOREVER = 1e9
"""Times the bound: what is impossible in so long a time is impossible."""

IMPOSSIBLE = 1e18
"""What a choice takes that is struck out."""

ROUNDS = 8
"""Steps in search of weights."""

PACKING_CELLS = 10_000
"""Packing and division are tried on tables of at most so many cells (they pay where operators are few and large)."""

PACKED = 2
"""Of the resources, the first so many are a device's time."""

DIVIDERS = 3
"""Operators whose stage is tried as the one that divides the devices."""

PARTS = np.linspace(0.02, 1.0, 25)[:, None]
"""Weights of the stage against the other devices that are tried."""

WORDS = {
    "divided": "one operator's stage: the devices that it takes, and what is left for the others",
    "operator": "one operator leaves no choice: its own work, the way to it and back, its reduction and update",
    "work": "the work of all operators over all devices, with the reduction and the update of what is replicated",
    "around": "the work of all operators while each device waits for the way to it and back",
    "gathered": "the work before the loss over all devices, which all wait while it computes on the whole mini-batch",
    "path": "the longest way through the graph and back",
    "path_work": "the longest way through the graph and back with the whole work of its last operator",
    "path_forward": "the longest way through the graph and back, and the other forwards of one operator on it",
    "path_backward": "the longest way through the graph and back, and the other backwards of one operator on it",
    "memory": "the memory of all devices, which limits replicas",
    "cuts": "every way to cut the longest path into stages: their transfers, memory and devices",
    "work_packed": "how operators can be packed onto devices",
    "around_packed": "how operators can be packed onto devices that wait for the way to them and back",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A certificate.

    It speaks of plans whose stages have devices of their own, that leave operators whole, whose micro-batches divide the
    mini-batch and whose replicas have equal shares; `of` gives that of plans that share devices.

    Args:
        iteration_s: no such plan is predicted to take less.
        binding: the argument that is tight there, in plain words.
        terms: seconds by the simplest arguments alone: `work`, `operator`, `path`.
        spares: whether it speaks also of plans that compute activations again or hold them on the host; none of it is about memory.
    """

    iteration_s: float
    binding: str
    terms: dict[str, float]
    spares: bool = False

    def of(self, plan: Plan) -> Bound | None:
        """The bound on all plans of the plan's kind; None where none is known.

        Where devices may hold several stages, the simplest arguments hold: the work of a device is that of its stages, its list
        of a step begins and ends in a step, and so does the way from its first forward around to its last backward.
        """
        if not self._covers(plan):
            return None
        if not plan.shares_devices:
            return self
        binding = max(self.terms, key=lambda name: self.terms[name])
        return replace(self, iteration_s=self.terms[binding] / ROUNDING, binding=WORDS[binding])

    def _covers(self, plan: Plan) -> bool:
        return all(
            (self.spares or not stage.spares)
            and stage.devices_per_replica == 1
            and stage.stride == 1
            and plan.minibatch_size % stage.microbatch_size == 0
            and stage.microbatch_size % len(stage.devices) == 0
            for stage in plan.stages
        )

    def gap(self, iteration_s: float) -> float:
        """The most by which a plan of `iteration_s` can exceed the best one: 0.1 for ten percent."""
        return max(0.0, iteration_s / self.iteration_s - 1.0) if self.iteration_s > 0 else 0.0

    def text(self, iteration_s: float) -> str:
        """The certificate of a plan in a line: rounding promises no more than is proved."""
        gap = f"at most {math.ceil(1000 * self.gap(iteration_s) - 1e-6) / 10:.1f} % from optimal"
        unit = 10.0 ** (math.floor(math.log10(self.iteration_s)) - 2) if self.iteration_s > 0 else 1.0
        least = seconds(math.floor(self.iteration_s / unit) * unit)
        return f"{gap}: no plan takes less than {least} ({self.binding})"


def lower_bound(problem: Problem, *, spares: bool = False) -> Bound:
    """The best bound that the module's arguments give.

    Args:
        spares: for plans that may spare memory too: they only take longer than they would with endless memory.

    Raises:
        Infeasible: an operator fits no device, all of them together do not fit the cluster, or no cuts do.
    """
    problem = problem.with_endless_memory if spares else problem
    tables = BoundTables.of(problem)
    low, terms = _simple(tables, problem)
    before, binding = producers_of(problem.graph), max(terms, key=lambda name: terms[name])
    if low <= 0:
        return Bound(iteration_s=0.0, binding="nothing takes time", terms=terms, spares=spares)
    if problem.minibatch_ops:  # their stage is most often on a device of another one: only what holds for such plans is of use
        return Bound(iteration_s=low / ROUNDING, binding=WORDS[binding], terms=terms, spares=spares)
    low, binding = _raised(low, binding, lambda seconds: _impossible(tables, before, seconds))
    path = _heaviest_path(tables, before)
    if len(tables.micro) * len(path) ** 2 / 2 <= CELLS:
        line = PathBound(problem, tables, path)
        if _on_line(tables, before, line, FOREVER * low) is not None:
            raise Infeasible(
                "whatever the cuts, some stage of the longest path through the graph does not fit the memory of a device",
                "devices with more memory",
            )
        low, binding = _raised(low, binding, lambda seconds: _on_line(tables, before, line, seconds), LINE_STEP)
    return Bound(iteration_s=low / ROUNDING, binding=WORDS[binding], terms=terms, spares=spares)


def _raised(low: float, binding: str, impossible: Callable[[float], str | None], step: float = PRECISION) -> tuple[float, str]:
    """The largest time found for which `impossible` names an argument, and the argument; what is given if there is none.

    Args:
        step: factor by which the result may be short.
    """
    high, factor = None, max(step, 1.02)
    while high is None or high > low * step:
        middle = low * factor if high is None else (low * high) ** 0.5
        reason = impossible(middle)
        if reason is None:
            high = middle
        else:
            low, binding, factor = middle, reason, min(2.0, factor**2)
    return low, binding


def _heaviest_path(t: BoundTables, before: list[list[int]]) -> list[int]:
    """The path that has most of the work and of the memory."""
    work = np.where(t.fits, t.replicas * t.micro * (t.forward + t.backward), np.inf).min(axis=0)
    held = t.amounts.static + t.amounts.kept
    weights = work / max(work.sum(), 1e-300) + held / max(held.sum(), 1e-300)
    longest = longest_to(before, weights)
    path = [int(longest.argmax())]
    while before[path[-1]]:
        path.append(max(before[path[-1]], key=lambda p: longest[p]))
    return path[::-1]


def _on_line(t: BoundTables, before: list[list[int]], line: PathBound, seconds: float) -> str | None:
    """The argument on a path by which no plan takes less than `seconds`; None if there is none."""
    found = _allowed(t, before, seconds)
    if found is None:
        return "operator"
    allowed, ways = found
    return line.impossible(seconds, ways.around, allowed)


def _impossible(t: BoundTables, before: list[list[int]], seconds: float) -> str | None:
    """The argument by which no plan takes less than `seconds`; None if there is none."""
    found = _allowed(t, before, seconds)
    if found is None:
        return "operator"
    allowed, ways = found
    takes, names = _resources(t, before, allowed, ways, seconds)
    takes = np.where(allowed, takes, IMPOSSIBLE)
    alone = takes.min(axis=1).sum(axis=1)
    if alone.max() > ROUNDING:
        return names[int(alone.argmax())]
    small = takes[0].size <= PACKING_CELLS
    if small and _divided(t, takes[:PACKED], allowed):
        return "divided"
    if small:
        packed = _packed(t, takes[:PACKED], allowed)
        most = packed.min(axis=2).sum(axis=2)
        if most.max() > ROUNDING:
            return names[int(most.max(axis=1).argmax())] + "_packed"
        best = np.argmax(most, axis=1)
        takes = np.concatenate([takes, packed[np.arange(PACKED), best]])
        names = [*names, *(name + "_packed" for name in names[:PACKED])]
        alone = takes.min(axis=1).sum(axis=1)
    weights = np.exp(4 * (alone - alone.max()))
    for _ in range(ROUNDS):
        weights /= weights.sum()
        mean = np.tensordot(weights, takes, 1)
        choice = mean.argmin(axis=0)[None]
        if np.take_along_axis(mean, choice, 0).sum() > ROUNDING:
            return names[int(weights.argmax())]
        used = np.array([np.take_along_axis(each, choice, 0).sum() for each in takes])
        weights = weights * np.exp(4 * np.maximum(used - used.max(), -2.0))
    return None


def _divided(t: BoundTables, takes: np.ndarray, allowed: np.ndarray) -> bool:
    """Argument 7: whether some operator's stage leaves too little, whatever its choice."""
    devices = t.capacity * t.slowest  # At least their number.
    shares = takes * (t.capacity / t.replicas)
    for op in np.argsort(-takes[0].min(axis=0))[:DIVIDERS].tolist():
        for row in np.flatnonzero(allowed[:, op]).tolist():
            left = devices - t.replicas[row, 0]
            outside = np.where(t.replicas > left, IMPOSSIBLE, takes * (t.capacity / max(left, 1e-9))).min(axis=1)
            inside = np.where(allowed[row], shares[:, row], IMPOSSIBLE)
            outside[:, op] = IMPOSSIBLE
            mean = np.minimum(PARTS * inside[:, None], (1 - PARTS) * outside[:, None])
            if mean.sum(axis=2).max() <= ROUNDING:
                break
        else:
            return True
    return False


class _Ways(NamedTuple):
    """The longest ways over the allowed choices, in seconds: A, U, and E, where a way may begin."""

    around: np.ndarray
    behind: np.ndarray
    begin: np.ndarray


def _allowed(t: BoundTables, before: list[list[int]], seconds: float) -> tuple[np.ndarray, _Ways] | None:
    """Argument 1: which choices are left, and the ways; None if an operator has none left."""
    passes, limit = t.forward + t.backward, seconds * ROUNDING
    allowed = t.fits & (t.micro * passes + t.finish <= limit)
    while allowed.any(axis=0).all():
        both, finish = (np.where(allowed, x, np.inf).min(axis=0) for x in (passes, t.finish))
        behind, around = longest_behind(before, both), longest_to(before, both, finish)
        left = allowed & (around - both + passes + (t.micro - 1) * passes <= limit)
        left &= (around - both) + np.ceil(t.micro / t.in_flight) * (passes + behind) <= limit
        left &= around + (t.micro - 1) * t.forward + behind <= limit
        left &= around + (t.micro - 1) * t.backward + behind <= limit
        if (left == allowed).all():
            return allowed, _Ways(around, behind, finish)
        allowed = left
    return None


def _resources(
    t: BoundTables, before: list[list[int]], allowed: np.ndarray, ways: _Ways, seconds: float
) -> tuple[np.ndarray, list[str]]:
    """Arguments 2 to 5: the share of a resource that each choice takes, of shape [resources, choices, operators]."""
    passes, finish = t.forward + t.backward, t.finish / t.slowest
    spread = t.replicas / t.capacity
    # Never zero: an operator that is left has something of its own to do after the way around, or takes nothing at all.
    within = np.maximum(seconds - ways.around, seconds * 1e-9)
    held = np.maximum(t.held, t.micro * (passes + ways.behind) / seconds)
    takes = [
        spread * (t.micro * passes + finish) / seconds,
        spread * passes * np.maximum(t.micro / seconds, (t.micro - 1) / within),
        t.replicas * t.memory.peak(held) / t.total_memory,
    ]
    least = np.where(allowed, (t.micro - 1) * passes, np.inf).min(axis=0)
    for last, more in (
        (int(ways.around.argmax()), None),
        (int((ways.around + least).argmax()), passes),
        (None, t.forward),
        (None, t.backward),
    ):
        way = _critical(before, ways, int(ways.around.argmax()) if last is None else last)
        on_way = np.zeros(len(least))
        on_way[way] = 1.0
        begun = np.zeros(len(least))
        begun[way[-1]] = 1.0
        share = passes * on_way + t.finish * begun
        if more is not None:
            place = np.zeros(len(least))
            extra = np.where(allowed, (t.micro - 1) * more, np.inf).min(axis=0) * on_way
            place[int(extra.argmax()) if last is None else last] = 1.0
            share = share + (t.micro - 1) * more * place
        takes.append(share / seconds)
    return np.array(takes), ["work", "around", "memory", "path", "path_work", "path_forward", "path_backward"]


def _critical(before: list[list[int]], ways: _Ways, last: int) -> list[int]:
    """The longest way there and back to an operator, backwards to where it begins."""
    out = [last]
    while True:
        nearer = max(before[out[-1]], key=lambda p: ways.around[p], default=None)
        if nearer is None or ways.around[nearer] < ways.begin[out[-1]]:
            return out
        out.append(nearer)


def _packed(t: BoundTables, takes: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Argument 6: shares of a device under dual feasible functions, of shape [arguments, functions, choices, operators]."""
    share = np.where(allowed, np.minimum(takes * t.capacity / t.replicas, 1.0), 1.0)
    out = []
    for k in range(1, 6):
        scaled = (k + 1) * share
        whole = np.abs(scaled - np.round(scaled)) < 1e-7
        out.append(np.where(whole, share, np.floor(scaled) / k))
    for small in (0.2, 0.3, 0.4, 0.5):
        out.append(np.where(share > 1 - small + 1e-9, 1.0, np.where(share < small - 1e-9, 0.0, share)))
    return np.where(allowed, np.stack(out, axis=1) * t.replicas / t.capacity, IMPOSSIBLE)


def _simple(tables: BoundTables, problem: Problem) -> tuple[float, dict[str, float]]:
    """The largest of the simplest arguments, and each of them."""
    t = tables
    need = float(np.where(t.fits, t.replicas * t.memory.peak(t.held), np.inf).min(axis=0).sum())
    if need > t.total_memory * ROUNDING:
        raise Infeasible(
            f"the operators need {need:.3e} bytes together, the cluster has {t.total_memory:.3e}",
            f"cluster.memory_bytes={need / problem.cluster.num_devices:.4g} on every device",
        )
    passes, before = t.forward + t.backward, producers_of(problem.graph)
    least = np.where(t.fits, passes, np.inf).min(axis=0)
    spent = t.replicas * (t.micro * passes + t.finish / t.slowest)
    terms = {
        "work": float(np.where(t.fits, spent, np.inf).min(axis=0).sum()) / t.capacity,
        "operator": float(np.where(t.fits, t.micro * passes + t.finish, np.inf).min(axis=0).max()),
        "path": float(np.max(longest_to(before, least))),
    }
    if problem.minibatch_ops:
        work = np.where(t.fits, spent, np.inf).min(axis=0) / t.capacity
        terms["gathered"] = max(float(work[all_before(before, op)].sum() + least[op]) for op in bits(problem.minibatch_ops))
    return max(terms.values()), terms
