"""A bound on every plan from a path through the graph: stages cut it into intervals, and cuts cost messages and devices.

A stage is convex, so its operators on a path are consecutive there, and every operator between two of them, on another way
from one to the other, is in the stage too: the interval's *closure*. So every plan cuts the path into intervals that belong
to different stages on different devices. The arguments operator by operator (`gpp.planners.bounds.lower_bound`) let the
operators of a stage choose apart; these see what a stage as a whole takes, and the messages over each cut.

Notation: a *stage* here is an interval with a choice (b, r): M = B / b micro-batches, q = b / r samples on a replica. P is
the sum of F + G over the closure, E the reduction and the update of the closure's parameters. A *detour* is a way from one
operator of the path to a later one that leaves the path, or a tensor that skips operators; it counts with its smallest
tensor, since wherever a plan cuts it, one of its tensors goes from stage to stage.

Arguments, for a period of T seconds:
1. A cut hands over the tensor between its two operators, and its gradient; also the largest tensor beside it, if the two
   stages hold both of its ends. The first replicas of both stages have the first min(q, q') samples of a micro-batch in
   common (half as many at least where micro-batches differ and do not line up), and every way waits for this message. All
   messages of a mini-batch on the busiest channel take T at most. Both stages' replicas fit the cluster.
2. front is the least way around to a stage: over the stages that may end at the cut, the larger of what is in front of the
   stage and its own E, then P, then the messages over the cut. behind is the least way from a stage's last operator to the
   end of the path and back, and at least that over every detour that leaves the stage.
3. The memory holds i micro-batches of a stage in flight, and each is in flight for P + behind:
   max(front, E) + max(M P, ceil(M / i) (P + behind)) <= T.
4. The stages on the path have devices of their own: their least number is at most N. Operators off the path need device
   seconds, too: for any share a, the sum of a r + (1 - a) (device seconds of the closure) / T over the stages, and of
   (1 - a) (least device seconds) / T over the other operators, is at most N. It is the same with bytes in place of device
   seconds: what is in flight is held for a share (P + behind) / T of the time.

Each is a shortest path over the cuts; the choices on both sides of a cut are a part of its state. Stages that break 3, and
cuts at which no two stages may meet, are struck out, and the rest is tried again.

Complexity: O(C n^2 + n C^2) for each T, with n operators on the path and C choices.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from gpp.cost.problem import Problem
from gpp.planners.bounds.bound_tables import ROUNDING, BoundTables

CELLS = 1_500_000
"""Paths with more stages than this, over all choices, are left out."""

SHARES = (0.25, 0.5, 0.75)
"""Shares of the devices against work, or memory, that are tried."""

EXACT_CHOICES = 150
"""Choices up to which the busiest channel of every pair is counted; beyond, all channels count as equally busy."""

REPEATS = 4
"""Times that stages are struck out for one T."""


class _PathStages(NamedTuple):
    """Stages that are left: arrays of one element for each, ordered by where they begin.

    A choice is `reader` where the stage begins: twice the choice, and one more if it holds the far end of the cut's detour; and
    `maker` where it ends: likewise, if it holds the near end.
    """

    choice: np.ndarray
    reader: np.ndarray
    maker: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    passes: np.ndarray
    finish: np.ndarray
    bytes: np.ndarray
    kept: np.ndarray

    def where(self, keep: np.ndarray) -> _PathStages:
        return _PathStages(*(column[keep] for column in self))


def _busiest(samples: np.ndarray, replicas: np.ndarray) -> np.ndarray:
    """[choices, choices] share of all samples that goes over the busiest channel between the replicas of two stages.

    Replica i of a stage has the samples x with x // q mod r = i.
    """
    count = len(samples)
    out = 1.0 / (replicas[:, None] * replicas)
    if count > EXACT_CHOICES:
        return out
    known: dict[tuple[int, int, int, int], float] = {}
    for c in range(count):
        for d in range(c, count):
            common = gcd(int(samples[c]), int(samples[d]))
            key = int(samples[c]) // common, int(replicas[c]), int(samples[d]) // common, int(replicas[d])
            if key not in known:
                q, r, other_q, other_r = key
                x = np.arange(lcm(q * r, other_q * other_r))
                pair = x // q % r * other_r + x // other_q % other_r
                known[key] = float(np.bincount(pair).max()) / len(x)
            out[c, d] = out[d, c] = known[key]
    return out


def _times(table: np.ndarray, seconds: np.ndarray | float) -> np.ndarray:
    """Samples times seconds of each; infinite where a pair of choices has no message, also where one would take no time."""
    return np.multiply(table, seconds, out=np.full(table.shape, np.inf), where=np.isfinite(table))


def _groups(places: np.ndarray, keys: np.ndarray, count: int) -> tuple[list[int], list[np.ndarray]]:
    """Where each place begins in a list that is ordered by place and key, and where each key begins, counted from its place."""
    bounds = np.searchsorted(places, np.arange(count + 1))
    new = np.flatnonzero(np.concatenate([[True], (np.diff(places) != 0) | (np.diff(keys) != 0)])) if len(places) else places
    cuts = np.searchsorted(new, bounds)
    return bounds.tolist(), [new[cuts[i] : cuts[i + 1]] - bounds[i] for i in range(count)]


class _PathCut(NamedTuple):
    """Choices of the stages that may end and that may begin at a place, and seconds of the messages between them, both ways."""

    left: np.ndarray
    right: np.ndarray
    seconds: np.ndarray


class PathBound:
    """One path of a problem."""

    def __init__(self, problem: Problem, tables: BoundTables, path: list[int]) -> None:
        self.problem, self.t, self.path, self.n = problem, tables, path, len(path)
        self.micro, self.replicas = tables.micro[:, 0], tables.replicas[:, 0]
        self.sizes = problem.minibatch_size / self.micro
        self.samples = self.sizes / self.replicas
        self.num_devices = problem.cluster.num_devices
        self.memory = max(device.memory_bytes for device in problem.cluster.devices) * ROUNDING
        link = problem.cluster.wiring.best
        self.latency_s, self.bandwidth = link.latency_s, link.bandwidth_bytes_per_s
        self._closures()
        self._borders()
        self._pairs()

    def _closures(self) -> None:
        """Where each operator lies between operators of the path, and sums over closures, of shape [.., n + 1, n + 1]."""
        graph, at = self.problem.graph, {op: i for i, op in enumerate(self.path)}
        first, last = np.full(graph.num_ops, -1), np.full(graph.num_ops, self.n)
        for op in range(graph.num_ops):
            known = [first[p] for p in range(op) if graph.successors[p] >> op & 1]
            first[op] = at.get(op, max(known, default=-1))
        for op in reversed(range(graph.num_ops)):
            known = [last[s] for s in range(op + 1, graph.num_ops) if graph.successors[op] >> s & 1]
            last[op] = at.get(op, min(known, default=self.n))
        self.first, self.last = first, last
        self.inside = (first >= 0) & (last < self.n)
        t = self.t
        each = {float(q): row for row, q in enumerate(self.samples)}
        self.row = np.array([list(each).index(float(q)) for q in self.samples])
        self.passes = self._sums((t.forward + t.backward)[list(each.values())])
        by_replicas = {float(r): row for row, r in enumerate(self.replicas)}
        self.finish_row = np.array([list(by_replicas).index(float(r)) for r in self.replicas])
        self.finish = self._sums(t.finish[list(by_replicas.values())])
        amounts = t.amounts
        self.static, self.trainable, self.saved = self._sums(np.array([amounts.static, amounts.trainable, amounts.kept]))

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the closure of the interval [i, j): [.., n + 1, n + 1] of [.., operators]."""
        out = np.zeros((len(values), self.n + 1, self.n + 1))
        ops = np.flatnonzero(self.inside)
        for op in ops.tolist():
            out[:, self.first[op], self.last[op] + 1] += values[:, op]
        # An operator counts for every interval that begins at or before its first place and ends behind its last.
        out = np.cumsum(out[:, ::-1], axis=1)[:, ::-1]
        return np.cumsum(out, axis=2)

    def _borders(self) -> None:
        """Bytes per sample over the cut before each place of the path, the same forwards and backwards, and beside it."""
        self.border = np.zeros(self.n + 1)
        for k in range(1, self.n):
            between = [
                tensor.bytes_per_sample
                for tensor in self.problem.graph.tensors
                if tensor.producer == self.path[k - 1] and self.path[k] in tensor.consumers and tensor.differentiable
            ]
            self.border[k] = max(between)
        self.detours = [(a, b, size) for a, row in enumerate(self._wide()) for b, size in row.items()]
        # The largest detour over each cut that is one tensor from the path to the path: stages that hold both ends send it along.
        self.near, self.far, self.beside = np.full(self.n + 1, -1), np.full(self.n + 1, self.n), np.zeros(self.n + 1)
        at = {op: i for i, op in enumerate(self.path)}
        for tensor in self.problem.graph.tensors:
            a, places = at.get(tensor.producer, self.n), [at[c] for c in tensor.consumers if c in at]
            far = max(places, default=0)
            if tensor.differentiable and far > a + 1:
                for k in range(a + 1, far + 1):
                    # A tensor goes to a stage once, however many read it there: the reader next to the cut takes it along.
                    next_place = min(b for b in places if b >= k)
                    if tensor.bytes_per_sample > self.beside[k] and not (a == k - 1 and next_place == k):
                        self.near[k], self.far[k], self.beside[k] = a, next_place, tensor.bytes_per_sample

    def _wide(self) -> list[dict[int, float]]:
        """For each place of the path: later places to which data go on another way, and the bytes that cross every cut between.

        Wherever a plan cuts such a way, one of its tensors goes from stage to stage: the smallest is taken, of the way that has the
        largest smallest one.
        """
        graph, at = self.problem.graph, {op: i for i, op in enumerate(self.path)}
        largest: list[dict[int, float]] = [{} for _ in graph.ops]
        for tensor in graph.tensors:
            if tensor.differentiable:
                for consumer in tensor.consumers:
                    known = largest[tensor.producer].get(consumer, 0.0)
                    largest[tensor.producer][consumer] = max(known, tensor.bytes_per_sample)
        out: list[dict[int, float]] = []
        for a, start in enumerate(self.path):
            ends: dict[int, float] = {}
            width = {start: float("inf")}
            for op in range(start, graph.num_ops):
                if op not in width:
                    continue
                for consumer, size in largest[op].items():
                    size = min(size, width[op])
                    if consumer not in at:
                        width[consumer] = max(size, width.get(consumer, 0.0))
                    elif op != start or at[consumer] > a + 1:
                        ends[at[consumer]] = max(size, ends.get(at[consumer], 0.0))
            out.append(ends)
        return out

    def _pairs(self) -> None:
        """For two choices the samples of their common message, at least, and those of a mini-batch on their busiest channel."""
        q, b, r = self.samples, self.sizes, self.replicas
        small, large = np.minimum(q[:, None], q), np.maximum(q[:, None], q)
        same = b[:, None] == b
        self.message = np.where(same | (large % small == 0), small, small / 2)
        self.channel = self.problem.minibatch_size * _busiest(q.astype(int), r.astype(int))
        for table in (self.message, self.channel):
            table[r[:, None] + r > self.num_devices] = np.inf

    def impossible(self, seconds: float, around: np.ndarray, allowed: np.ndarray) -> str | None:
        """The argument by which no plan takes less than `seconds`; None if there is none.

        Args:
            around, allowed: the ways and the choices that the arguments operator by operator leave.
        """
        limit = seconds * ROUNDING
        stages = self._stages(limit, around, allowed)
        trip, cuts = stages.passes, list[_PathCut]()
        for _ in range(REPEATS):
            before = len(stages.begin)
            cuts = self._cuts(stages, limit)
            micro = self.micro[stages.choice]
            head, tail = self._behind(stages, cuts, stages.passes, timed=True)
            trip = stages.passes + np.maximum(tail[stages.end, stages.maker], self._around_cuts(stages, head, limit))
            front = self._front(stages, cuts)[stages.begin, stages.reader]
            flight = micro if self.problem.regime.keeps_all else self._in_flight(stages)
            took = np.maximum(front, stages.finish) + np.maximum(micro * stages.passes, np.ceil(micro / flight) * trip)
            keep = took <= limit
            stages, trip = stages.where(keep), trip[keep]
            if not (stages.begin == 0).any() or not (stages.end == self.n).any():
                return "cuts"
            if len(stages.begin) == before:
                break
        # A stage that was struck out costs infinitely much, so that the cuts of before still hold.
        return self._counted(stages, cuts, trip, seconds, allowed)

    def _in_flight(self, stages: _PathStages) -> np.ndarray:
        """Micro-batches of each stage that fit the memory of a device."""
        held, micro = stages.kept * self.samples[stages.choice], self.micro[stages.choice]
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.floor((self.memory - stages.bytes) / held + 1e-9)
        return np.clip(np.where(held > 0, fit, micro), 1, micro)

    def _stages(self, limit: float, around: np.ndarray, allowed: np.ndarray) -> _PathStages:
        """The stages whose own work and memory do not break the limit."""
        found, regime = [], self.problem.regime
        way = np.concatenate([[0.0], np.maximum.accumulate(around[self.path])])
        enters, both = self.border[:, None], self.border[:, None] + self.border[None, :]
        # A stage has one choice: the first operator that does not allow it ends it.
        for c, (row, last_row) in enumerate(zip(self.row.tolist(), self.finish_row.tolist(), strict=True)):
            forbidden = np.concatenate([[0], np.cumsum(~allowed[c, self.path])])
            fine = np.triu(forbidden[None, :] == forbidden[:, None], 1)
            passes, finish, q, m = self.passes[row], self.finish[last_row], self.samples[c], self.micro[c]
            fine &= (m * passes + finish <= limit) & (way[None, :] + (m - 1) * passes <= limit)
            kept = self.saved + enters
            fixed = self.static + self.trainable * (regime.assumed_copies - 1) + q * both
            fine &= fixed + kept * q * (m if regime.keeps_all else 1.0) <= self.memory
            begin, end = np.nonzero(fine)
            reader = 2 * c + (end > self.far[begin])
            maker = 2 * c + (begin <= self.near[end])
            found.append((np.full(len(begin), c), reader, maker, begin, end, passes[fine], finish[fine], fixed[fine], kept[fine]))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.lexsort((columns[1], columns[3]))
        return _PathStages(*(column[order] for column in columns))

    def _cuts(self, stages: _PathStages, limit: float) -> list[_PathCut]:
        """For each place of the path the choices that may meet there."""
        shape = (self.n + 1, 2 * len(self.samples))
        ends, begins = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        ends[stages.end, stages.maker] = True
        begins[stages.begin, stages.reader] = True
        out = []
        for k in range(self.n + 1):
            left, right = ends[k].nonzero()[0], begins[k].nonzero()[0]
            if not len(left) or not len(right):
                out.append(_PathCut(left, right, np.empty((len(left), len(right)))))
                continue
            pairs = np.ix_(left // 2, right // 2)
            both = (left[:, None] & right & 1) > 0
            slow = (self.border[k] + np.where(both, self.beside[k], 0.0)) / self.bandwidth
            sent = np.where(_times(self.channel[pairs], slow) <= limit, self.message[pairs], np.inf)
            out.append(_PathCut(left, right, 2 * (self.latency_s + _times(sent, slow))))
        return out

    def _behind(
        self, stages: _PathStages, cuts: list[_PathCut], cost: np.ndarray, *, timed: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The least sum of costs to the end of the path: for a stage of each choice that begins at, or ends at, each place.

        Args:
            cost: of each stage.
            timed: whether the messages over the cuts count.
        """
        shape = (self.n + 1, 2 * len(self.samples))
        head, tail = np.full(shape, np.inf), np.full(shape, np.inf)
        tail[self.n] = 0.0
        places, firsts = _groups(stages.begin, stages.reader, self.n)
        for i in range(self.n - 1, -1, -1):
            if places[i] == places[i + 1]:
                continue
            here, first = slice(places[i], places[i + 1]), firsts[i]
            found = np.minimum.reduceat(cost[here] + tail[stages.end[here], stages.maker[here]], first)
            head[i, stages.reader[here][first]] = found
            left, right, message = cuts[i]
            if len(left):
                between = message if timed else np.where(np.isfinite(message), 0.0, np.inf)
                tail[i, left] = (between + head[i, right]).min(axis=1)
        return head, tail

    def _front(self, stages: _PathStages, cuts: list[_PathCut]) -> np.ndarray:
        """[n + 1, choices] the least way around to a stage of each choice that begins at each place."""
        out = np.full((self.n + 1, 2 * len(self.samples)), np.inf)
        out[0] = 0.0
        stages = stages.where(np.lexsort((stages.maker, stages.end)))
        places, firsts = _groups(stages.end, stages.maker, self.n)
        for j in range(1, self.n):
            here = slice(places[j], places[j + 1])
            _, right, message = cuts[j]
            if places[j] == places[j + 1] or not len(right):
                continue
            ways = np.maximum(out[stages.begin[here], stages.reader[here]], stages.finish[here]) + stages.passes[here]
            out[j, right] = (np.minimum.reduceat(ways, firsts[j])[:, None] + message).min(axis=0)
        return out

    def _around_cuts(self, stages: _PathStages, head: np.ndarray, limit: float) -> np.ndarray:
        """For each stage the longest way from it over a detour to a stage behind its end, to the end of the path, and back.

        Infinite where a channel of the detour would be busy for longer than the limit, at either end.
        """
        # The least way from the beginning of the stage that holds a place, which may begin before it.
        within = np.minimum.accumulate(head.min(axis=1))
        choices = np.zeros(len(self.samples), dtype=bool)
        choices[stages.choice] = True
        floor, busy = (table[:, choices].min(axis=1, initial=np.inf) for table in (self.message, self.channel))
        # A detour counts for every stage that it leaves, so for all that begin earlier, or that it enters, for all that end later.
        leaves, enters = np.zeros((2, len(floor), self.n + 1, self.n + 1))
        for a, b, size in self.detours:
            took = 2 * self.latency_s + _times(floor, 2 * size / self.bandwidth) + within[b]
            took[_times(busy, size / self.bandwidth) > limit] = np.inf
            left, entered = leaves[:, a, a + 1 : b + 1], enters[:, a + 1 : b + 1, b + 1]
            np.maximum(left, took[:, None], out=left)
            np.maximum(entered, np.where(np.isfinite(took), 0.0, np.inf)[:, None], out=entered)
        np.maximum.accumulate(leaves[:, ::-1], axis=1, out=leaves[:, ::-1])
        np.maximum.accumulate(enters, axis=2, out=enters)
        index = stages.choice, stages.begin, stages.end
        return np.maximum(leaves[index], enters[index])

    def _counted(
        self, stages: _PathStages, cuts: list[_PathCut], trip: np.ndarray, seconds: float, allowed: np.ndarray
    ) -> str | None:
        """Argument 4."""
        t, c = self.t, stages.choice
        r, micro = self.replicas[c], self.micro[c]
        devices = r / self.num_devices
        if self._behind(stages, cuts, devices)[0][0].min() > ROUNDING:
            return "cuts"
        each = np.where(allowed, t.replicas * (t.micro * (t.forward + t.backward) + t.finish / t.slowest), np.inf).min(axis=0)
        spent = r * (micro * stages.passes + stages.finish / t.slowest) / (t.capacity * seconds)
        held = stages.bytes + stages.kept * self.samples[c] * np.maximum(
            micro if self.problem.regime.keeps_all else 1.0, micro * trip / seconds
        )
        least = np.where(allowed, t.replicas * t.memory.peak(t.held), np.inf).min(axis=0)
        for takes, alone in ((spent, each / (t.capacity * seconds)), (r * held / t.total_memory, least / t.total_memory)):
            off = np.where(np.isin(np.arange(len(alone)), self.path), 0.0, alone)
            # The closure's operators off the path are in the stage's share already.
            counted = self._sums(off[None])[0][stages.begin, stages.end]
            for share in (0.0, *SHARES):
                cost = share * devices + (1 - share) * (takes - counted)
                if (1 - share) * off.sum() + self._behind(stages, cuts, cost)[0][0].min() > ROUNDING:
                    return "cuts"
        return None
