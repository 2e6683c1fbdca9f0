"""Fewer, larger operators for the planner, without making branches wait for each other.

    stem ─┬─ a1 ─ a2 ─ a3 ─┬─ head            stem ─┬─ a1+a2+a3 ─┬─ head
          └─ b1 ─ b2 ─ b3 ─┘           ──►          └─ b1+b2+b3 ─┘

Write inc(u) for the operators that are neither before nor after u. Groups of equal inc follow each other in a line. Two
neighbours u, v of such a line either have nothing between them (a *chain* link), and then merging them loses no
parallelism, or they have a region between them that all operators outside see as one (q, k and v between their fork and
their join). Chains are merged while the result is light enough. A region is merged as a whole, and only if it is
lighter than 1/16 of the model and than the cap, which keeps the model's real branches apart. Neither merge changes the
order among the others, so groups are convex and the graph stays acyclic.

The cap starts at 1/(4 max_ops) of the model, whatever its size (this removes views, sums and norms), and grows by a
fifth until the count fits. A pass is finished even where the count fits half-way, so repeated layers are cut alike.
Links deep inside one module are merged first, then light ones, so groups follow the user's modules.

If that cannot reach `max_ops`, branches are glued, and those that lose the least parallelism come first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import pairwise

from gpp.errors import InvalidConfig
from gpp.graph.coarsen.groups import in_groups, merged
from gpp.graph.coarsen.naming import common, group_names
from gpp.graph.op_graph import OpGraph, bits, mask_of

# The nominal device that weighs operators: 10 TFLOP/s and 1 TB/s. Only ratios matter.
_FLOP_PER_S, _BYTES_PER_S = 1e13, 1e12
# Samples of the nominal micro-batch, over which an operator's parameters are read once.
_SAMPLES = 8
# Weights are integers, the whole model being about 2**40, so that equal layers have exactly equal sums.
_WHOLE = 1 << 40
# A group lighter than a 16th of the cap, or of its neighbour, is dust: too light for a cut, it joins the neighbour.
_DUST_SHIFT = 4
_GROWTH = 1.2
# A region heavier than this has branches worth a stage of their own.
_REGION = _WHOLE >> 4


def coarsen(graph: OpGraph, max_ops: int) -> OpGraph:
    """Group operators into at most `max_ops` convex groups; deterministic.

    Args:
        graph: operators, one or many per module.
        max_ops: the most groups.

    Returns:
        A graph whose operators are the groups: amounts summed, names of the modules they came from, captured nodes
        in topological order. Tensors inside a group vanish; what they save for backward stays counted.

    Raises:
        InvalidConfig: `max_ops` is below 1.
    """
    if not isinstance(max_ops, int) or max_ops < 1:
        raise InvalidConfig("graph.max_ops", max_ops, "must be an integer of at least 1", "set graph.max_ops=128")
    groups = _Groups(graph)
    total = groups.total()
    _reduce(groups, max_ops, until=total)
    if len(groups.members) > max_ops:
        # A second start keeps some grain in the chains where the branches alone are too many.
        groups = _Groups(graph)
        cap = _reduce(groups, max_ops, until=min(total, 8 * _WHOLE // max_ops))
        while len(groups.members) > max_ops:
            groups.glue(cap, max_ops)
            cap = int(cap * _GROWTH) + 1
            groups.shrink(cap, dust=0)
    return _build(graph, groups)


def _weights(graph: OpGraph) -> list[tuple[int, int]]:
    """(time, parameter bytes) of each operator, each as a share of the model's, in units of 1/2**40."""
    amounts = graph.amounts
    moved = amounts.traffic_bytes + (amounts.param_bytes - amounts.gathered_bytes) / _SAMPLES
    times = ((amounts.forward_flops + amounts.backward_flops) / _FLOP_PER_S + 3 * moved / _BYTES_PER_S).tolist()
    sizes = amounts.param_bytes.tolist()
    if not any(times):
        times = [1.0] * len(times)
    whole_time, whole_size = sum(times), sum(param.num_bytes for param in graph.params) or 1
    return [(round(t / whole_time * _WHOLE), round(s / whole_size * _WHOLE)) for t, s in zip(times, sizes, strict=True)]


def _reduce(groups: _Groups, max_ops: int, until: int) -> int:
    """Merge without loss under a growing cap until the count fits or the cap passes `until`; returns the cap."""
    cap = _WHOLE // (4 * max_ops)
    dust = cap >> _DUST_SHIFT
    while True:
        groups.shrink(cap, dust)
        if len(groups.members) <= max_ops or cap >= until:
            return cap
        cap = min(int(cap * _GROWTH) + 1, until)


class _Groups:
    """A partition of the operators and the order among its groups.

    A group is named by its smallest operator. All masks are over the operators of the fine graph, so a merge that
    leaves the order unchanged needs no update of other groups.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.members = {op: 1 << op for op in range(graph.num_ops)}
        self.owner = list(range(graph.num_ops))
        self.before = list(graph.ancestors)
        self.after = list(graph.descendants)
        self.weight = _weights(graph)
        self.scope = [tuple(op.name.split(".")) for op in graph.ops]
        self._fine_weight = list(self.weight)
        self._work = mask_of(i for i, op in enumerate(graph.ops) if op.forward_flops + op.backward_flops > 0)
        self._region_weight: dict[int, int] = {}
        self._known_lines: list[list[int]] | None = None
        self._known_regions: list[tuple[int, int]] | None = None

    def total(self) -> int:
        return max(sum(t for t, _ in self._fine_weight), sum(p for _, p in self._fine_weight))

    def size(self, *groups: int) -> int:
        """Weight of the groups together: the larger of their shares of time and of parameters."""
        return max(sum(self.weight[g][0] for g in groups), sum(self.weight[g][1] for g in groups))

    def of(self, mask: int) -> list[int]:
        """The groups that hold the operators of a mask, ascending."""
        found = set()
        while mask:
            g = self.owner[(mask & -mask).bit_length() - 1]
            found.add(g)
            mask &= ~self.members[g]
        return sorted(found)

    def incomparable(self, g: int) -> int:
        return self.graph.all_mask & ~(self.before[g] | self.after[g] | self.members[g])

    def neighbours(self, g: int, table: tuple[int, ...]) -> list[int]:
        """Direct successors or predecessors, by the graph's table of them."""
        mask = 0
        for op in bits(self.members[g]):
            mask |= table[op]
        return self.of(mask & ~self.members[g])

    def merge(self, parts: list[int]) -> None:
        """Make one group. No path between two parts may pass through a third group."""
        self._known_lines = self._known_regions = None
        into = min(parts)
        members = before = after = 0
        for g in parts:
            members |= self.members[g]
            before |= self.before[g]
            after |= self.after[g]
        before, after = before & ~members, after & ~members
        if any((self.before[g] & ~members, self.after[g] & ~members) != (before, after) for g in parts):
            for g in self.of(before):
                self.after[g] |= members | after
            for g in self.of(after):
                self.before[g] |= members | before
        heaviest = max(self.size(g) for g in parts)
        scopes = [self.scope[g] for g in parts if self.size(g) << _DUST_SHIFT >= heaviest]
        self.weight[into] = (sum(self.weight[g][0] for g in parts), sum(self.weight[g][1] for g in parts))
        for g in parts:
            del self.members[g]
        for op in bits(members):
            self.owner[op] = into
        self.members[into], self.before[into], self.after[into] = members, before, after
        self.scope[into] = scopes[0][: common(scopes)]

    def shrink(self, cap: int, dust: int) -> None:
        """Make all merges without loss under `cap`: light regions, chains, and dust beside them."""
        changed = True
        while changed:
            changed = self._merge_regions(min(cap, _REGION))
            for line in self._lines():
                self._merge_chain(line, cap)
            changed |= self._sweep(dust, cap)

    def _lines(self) -> list[list[int]]:
        """Groups of equal inc, each line in its (total) order."""
        if self._known_lines is None:
            lines = defaultdict(list)
            for g in sorted(self.members):
                lines[self.incomparable(g)].append(g)
            for line in lines.values():
                line.sort(key=lambda g: self.before[g].bit_count())
            self._known_lines = list(lines.values())
        return self._known_lines

    def _merge_chain(self, line: list[int], cap: int) -> None:
        """Merge neighbours in a line: deepest common module first, then lightest, then leftmost.

        Pairs above the cap come last: a heavy neighbour swallows what does no products (an activation, a sum).
        """
        at, right = list(line), list(range(1, len(line) + 1))
        left = list(range(-1, len(line) - 1))
        heap: list[tuple[int, bool, int, int, int, int]] = []

        def offer(i: int, j: int) -> None:
            if i < 0 or j >= len(at) or self.after[at[i]] & self.before[at[j]]:
                return
            (light, g), (heavy, _) = sorted((self.size(x), x) for x in (at[i], at[j]))
            swallowed = self.size(at[i], at[j]) > cap
            if not swallowed or light <= cap >> _DUST_SHIFT or (light <= heavy >> 2 and not self.members[g] & self._work):
                depth = common([self.scope[at[i]], self.scope[at[j]]])
                heapq.heappush(heap, (-depth, swallowed, light if swallowed else light + heavy, i, j, light + heavy))

        for i in range(len(at) - 1):
            offer(i, i + 1)
        while heap:
            *_, i, j, size = heapq.heappop(heap)
            if right[i] != j or left[j] != i or self.size(at[i]) + self.size(at[j]) != size or self._waits(at[i], at[j], cap):
                continue
            pair = [at[i], at[j]]
            self.merge(pair)
            at[i] = min(pair)
            right[i], right[j] = right[j], -1
            if right[i] < len(at):
                left[right[i]] = i
            offer(left[i], i)
            offer(i, right[i])

    def _waits(self, u: int, v: int, cap: int) -> bool:
        """Whether a larger cap lets u or v (the dust, if one is dust to the other) join a deeper module's groups."""
        depth = common([self.scope[u], self.scope[v]])
        light, heavy = sorted((u, v), key=self.size)
        alone = self.size(u, v) > cap or self.size(light) << _DUST_SHIFT <= self.size(heavy)
        for g in (light,) if alone else (u, v):
            around = self.neighbours(g, self.graph.successors) + self.neighbours(g, self.graph.predecessors)
            closer = [n for n in around if common([self.scope[g], self.scope[n]]) > depth]
            if closer and self.size(g, *closer) > cap:
                return True
        return False

    def _merge_regions(self, limit: int) -> bool:
        """Merge every region of at most `limit`, inner ones first."""
        changed = False
        for inside, weight in self._regions():
            if weight <= limit and len(parts := self.of(inside)) > 1:
                self.merge(parts)
                changed = True
        return changed

    def _regions(self) -> list[tuple[int, int]]:
        """(mask, weight) of the light regions between neighbours of a line and at its open ends."""
        if self._known_regions is None:
            found = set()
            for line in self._lines():
                found |= {self.after[u] & self.before[v] for u, v in pairwise(line)}
                found.add(self._open_end(line[0], self.before, self.graph.predecessors))
                found.add(self._open_end(line[-1], self.after, self.graph.successors))
            light = [(mask, weight) for mask in found - {0} if (weight := self._weigh(mask)) <= _REGION]
            self._known_regions = sorted(light, key=lambda pair: (pair[0].bit_count(), pair[0]))
        return self._known_regions

    def _weigh(self, mask: int) -> int:
        if mask not in self._region_weight:
            pairs = [self._fine_weight[op] for op in bits(mask)]
            self._region_weight[mask] = max(sum(t for t, _ in pairs), sum(p for _, p in pairs))
        return self._region_weight[mask]

    def _open_end(self, g: int, side: list[int], table: tuple[int, ...]) -> int:
        """The region that ends (or begins) a branch without a fork (or join) of its own; 0 if none or too heavy."""
        outer = self.incomparable(g)
        inside, queue = 0, [g]
        while queue:
            for nxt in self.neighbours(queue.pop(), table):
                inc = self.incomparable(nxt)
                if not inside & self.members[nxt] and inc != outer and not outer & ~inc:
                    inside |= self.members[nxt]
                    if self._weigh(inside) > _REGION:
                        return 0
                    queue.append(nxt)
        parts = self.of(inside)
        seen = {(self.before[p] & ~inside, self.after[p] & ~inside) for p in parts}
        return inside if len(seen) == 1 and all(side[g] & self.members[p] for p in parts) else 0

    def _sweep(self, dust: int, cap: int) -> bool:
        """Merge dust that is an arm of its own (a mask, a constant) into its only next or previous group."""
        changed = False
        for g in sorted(self.members):
            if g not in self.members or self.size(g) > dust:
                continue
            nexts = [s for s in self.neighbours(g, self.graph.successors) if self.after[g] == self.after[s] | self.members[s]]
            lasts = [p for p in self.neighbours(g, self.graph.predecessors) if self.before[g] == self.before[p] | self.members[p]]
            if target := nexts + lasts:
                best = max(target, key=lambda t: common([self.scope[g], self.scope[t]]))
                if not self._waits(g, best, cap):
                    self.merge([g, best])
                    changed = True
        return changed

    def glue(self, cap: int, max_ops: int) -> None:
        """One round of lossy merges of at most `cap`, least loss first, until the count fits."""
        pairs = {(g, s) for g in self.members for s in self.neighbours(g, self.graph.successors)}
        pairs |= set(pairwise(self.order()))
        alike = defaultdict(list)
        for g in sorted(self.members, key=lambda g: (self.size(g), g)):
            alike[self.before[g], self.after[g]].append(g)
        pairs |= {pair for groups in alike.values() for pair in pairwise(groups)}
        touched: set[int] = set()
        for u, v in sorted(pairs, key=lambda pair: (self._loss(*pair), self.size(*pair), pair)):
            if len(self.members) <= max_ops:
                return
            if touched & {u, v} or self.size(u, v) > cap or self.after[u] & self.before[v] or self.after[v] & self.before[u]:
                continue
            self.merge([u, v])
            touched |= {u, v}

    def _loss(self, u: int, v: int) -> int:
        """Weight times number of the operators that could no longer run beside u or v."""
        a, b = self.incomparable(u), self.incomparable(v)
        both = a & b
        return self.size(u) * (a & ~both).bit_count() + self.size(v) * (b & ~both).bit_count()

    def order(self) -> list[int]:
        """A topological order in which branches stay in one piece: depth first, smallest operator first."""
        out: list[int] = []
        seen: set[int] = set()
        for root in sorted(self.members, reverse=True):
            stack = [(root, False)]
            while stack:
                g, done = stack.pop()
                if done:
                    out.append(g)
                elif g not in seen:
                    seen.add(g)
                    stack.append((g, True))
                    stack.extend((s, False) for s in self.neighbours(g, self.graph.successors) if s not in seen)
        return out[::-1]


def _build(graph: OpGraph, groups: _Groups) -> OpGraph:
    """The graph of the groups."""
    order = groups.order()
    parts = [tuple(bits(groups.members[g])) for g in order]
    weight = [max(pair) for pair in _weights(graph)]
    names = group_names([op.name for op in graph.ops], weight, parts)
    position = {g: i for i, g in enumerate(order)}
    group = [position[g] for g in groups.owner]
    kinds = [graph.ops[max(part, key=weight.__getitem__)].kind for part in parts]  # of the heaviest operator
    ops = [merged(name, kind, graph, part) for name, kind, part in zip(names, kinds, parts, strict=True)]
    return in_groups(graph, group, ops)
