"""The shape of a plan whose devices may hold several stages, in numbers: its passes, how long they take, and who sends to whom.

`StageShapes.prepare` fills arrays that `gpp.planners.search.step` reads, in these steps:

* `_priced`     seconds of each stage's passes and update, and whether a device has too much to do;
* `StageEdges`  the stages' edges, their topological order, and how far each is from the sink;
* `_pairs`      replicas, and which of them send to which;
* `_find_sums`  who sums gradients.

This file is compiled (`gpp.compiled`); as plain Python it does the same, slower. So it keeps to arrays and numbers.
"""

from __future__ import annotations

from typing import Final

from gpp.compiled import integers, reals
from gpp.planners.search.edges import StageEdges
from gpp.planners.search.numbers import ORDER_ONLY

INF: Final = float("inf")


class StageShapes:
    """Finds the shapes of plans of one problem and micro-batch size.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the arrays that are filled (`gpp.planners.search.numbers.PlanArrays`), and those that are read: the stage of each
            operator, and the set of each stage's devices as bits.
    """

    def __init__(self, facts, room) -> None:
        self.num_stages, self.num_types, self.replicas = 0, facts.num_types, integers(facts.most_stages)
        self.trainable, self.backs = reals(facts.most_stages), integers(facts.most_stages)
        self.mark, self.has_type = integers(facts.most_stages), integers(facts.most_stages * facts.num_types)
        self.num_devices, self.sets, self.type_of = facts.num_devices, room.devices, facts.type_of
        self.num_params, self.first_trained, self.of = len(facts.param_bytes), facts.first_trained, room.stage_of
        self.trained, self.param_bytes, self.load = facts.trained, facts.param_bytes, reals(facts.num_devices)
        self.parts_updates, self.update_s = facts.parts_updates, reals(facts.most_stages)
        self.update_fixed, self.update_each, self.update_none = facts.update_fixed, facts.update_each, facts.update_none
        self.count, self.forward_s, self.backward_s = facts.count, reals(facts.most_stages), reals(facts.most_stages)
        self.sum_ahead, self.sum_back, self.n = reals(facts.most_stages), reals(facts.most_stages), facts.num_ops
        self.op_forward_s, self.op_backward_s, self.differentiated = facts.forward_s, facts.backward_s, facts.differentiated
        self.fixed, self.edges = facts.fixed, StageEdges(facts, room, self.backs)
        self.wide, self.edge, self.back_edge = facts.most_stages, self.edges.edge, self.edges.back_edge
        self.ahead, self.back, self.place, self.dst = self.edges.ahead, self.edges.back, self.edges.place, self.edges.dst
        self.first_from, self.next_from = self.edges.first_from, self.edges.next_from
        self.order, self.facts, self.first_unit, self.bit_of = room.order, facts, room.first_unit, facts.bit_of
        self.most_units, self.unit_stage, self.unit_device = facts.most_units, room.unit_stage, room.unit_device
        self.num_units, self.sizes, self.samples, self.first_out = 0, room.sizes, facts.microbatch_size, room.first_out
        self.most_pairs, self.pair_src, self.pair_dst = facts.most_pairs, room.pair_src, room.pair_dst
        self.pair_back, self.pair_samples, self.pair_late = room.pair_back, integers(facts.most_pairs), room.pair_late
        self.pair_ahead_s, self.pair_back_s, self.latency = room.pair_ahead_s, room.pair_back_s, facts.latency
        self.bandwidth, self.num_pairs, self.first_in = facts.bandwidth, 0, room.first_in
        self.head, self.in_pair, self.over = integers(facts.most_units), room.in_pair, facts.overheads
        self.updates_s, self.pass_s, self.sum_set, self.sum_s = room.update_s, room.pass_s, room.sum_set, room.sum_s
        self.norm_bytes, self.rings, self.shares = facts.norm_bytes, {}, False

    def prepare(self, num_stages: int, below_s: float, chain: bool) -> bool:
        """Fill the arrays; False if the plan is none, or if its busiest device alone has `below_s` or more to do.

        Args:
            chain: whether each stage also waits for the one before it, by number.
        """
        self.num_stages = num_stages
        if not self._priced(below_s) or not self.edges.arrange(num_stages, chain):
            return False
        if self.shares:
            self.edges.hand_on()
        if not self._pairs():
            return False
        self._find_sums()
        return True

    def busiest(self) -> int:
        """The device that has most to do in the plan that was prepared last."""
        found = 0
        for d in range(self.num_devices):
            if self.load[d] > self.load[found]:
                found = d
        return found

    def _priced(self, below_s: float) -> bool:
        """Find the seconds of every stage; False if a device has too much to do."""
        size = self.num_stages
        types = self.num_types
        for s in range(size):
            self.replicas[s] = 0
            self.trainable[s] = 0.0
            self.backs[s] = 0
            self.mark[s] = -1
            for k in range(types):
                self.has_type[s * types + k] = 0
            rest = self.sets[s]
            while rest:
                d = self._first(rest)
                rest &= rest - 1
                self.replicas[s] += 1
                self.has_type[s * types + self.type_of[d]] = 1
        for i in range(self.num_params):
            for k in range(self.first_trained[i], self.first_trained[i + 1]):
                s = self.of[self.trained[k]]
                if self.mark[s] != i:
                    self.mark[s] = i
                    self.trainable[s] += self.param_bytes[i]
        self._pass_times()
        for d in range(self.num_devices):
            self.load[d] = 0.0
        for s in range(size):
            took = self.trainable[s] / self.replicas[s] if self.parts_updates else self.trainable[s]
            rest = self.sets[s]
            d = self._first(rest)
            # As the bill has it, the first device's.
            self.update_s[s] = self.update_fixed[d] + self.update_each[d] * took if took > 0.0 else self.update_none[d]
            took = self.count * (self.forward_s[s] + self.backward_s[s]) + self.update_s[s]
            while rest:
                d = self._first(rest)
                rest &= rest - 1
                self.load[d] += took
                if self.load[d] >= below_s:
                    return False
        self._share()
        return True

    def _first(self, own: int) -> int:
        """The first device of a set."""
        return self.bit_of[(own & -own) % 67]

    def _share(self) -> None:
        """Find whether any stages have the same devices."""
        self.shares = False
        seen = 0
        for s in range(self.num_stages):
            own = self.sets[s]
            if own & seen:
                for t in range(s):
                    if self.sets[t] == own:
                        self.shares = True
                        return
            seen |= own

    def _pass_times(self) -> None:
        """The seconds of each stage's operators: those of its slowest device."""
        types = self.num_types
        for s in range(self.num_stages):
            self.forward_s[s] = self.backward_s[s] = 0.0
        for k in range(types):
            for s in range(self.num_stages):
                self.sum_ahead[s] = self.sum_back[s] = 0.0
            for op in range(self.n):
                s = self.of[op]
                row = (k * (self.num_devices + 1) + self.replicas[s]) * self.n + op
                self.sum_ahead[s] += self.op_forward_s[row]
                self.sum_back[s] += self.op_backward_s[row]
                self.backs[s] |= self.differentiated[op]
            for s in range(self.num_stages):
                if self.has_type[s * types + k]:
                    self.forward_s[s] = max(self.forward_s[s], self.sum_ahead[s])
                    self.backward_s[s] = max(self.backward_s[s], self.sum_back[s])
        for s in range(self.num_stages):
            self.forward_s[s] += self.fixed[0]
            self.backward_s[s] += self.fixed[1] if self.backs[s] else 0.0

    def _pairs(self) -> bool:
        """Find the replicas, and which of them send to which; False if they are too many."""
        p = 0
        units = 0
        size = self.num_stages
        for i in range(size):
            self.first_unit[i] = units
            rest = self.sets[self.order[i]]
            while rest:
                if units == self.most_units:
                    return False
                self.unit_stage[units], self.unit_device[units] = i, self._first(rest)
                rest &= rest - 1
                units += 1
        self.first_unit[size] = units
        self.num_units = self.sizes[0] = units
        self.edges.list_by_sender()
        for i in range(size):
            s = self.order[i]
            low = self.samples // (self.first_unit[i + 1] - self.first_unit[i])
            for u in range(self.first_unit[i], self.first_unit[i + 1]):
                self.first_out[u] = p
                k = self.first_from[s]
                while k >= 0:
                    t = self.dst[k]
                    k = self.next_from[k]
                    between = s * self.wide + t
                    if not self.edge[between]:
                        continue
                    j = self.place[t]
                    high = self.samples // (self.first_unit[j + 1] - self.first_unit[j])
                    for v in range(self.first_unit[j], self.first_unit[j + 1]):
                        many = _overlap(low * (u - self.first_unit[i]), low, high * (v - self.first_unit[j]), high)
                        if not many:
                            continue
                        if p == self.most_pairs:
                            return False
                        self.pair_src[p], self.pair_dst[p] = u, v
                        self.pair_back[p], self.pair_samples[p] = self.back_edge[between], many
                        d = self.unit_device[u] * self.num_devices + self.unit_device[v]
                        if self.unit_device[u] == self.unit_device[v]:
                            self.pair_late[p] = self.pair_ahead_s[p] = self.pair_back_s[p] = 0.0
                        else:
                            self.pair_late[p] = self.latency[d]
                            # A message of an order-only edge is one byte.
                            only = 1.0 if self.edge[between] == ORDER_ONLY else 0.0
                            self.pair_ahead_s[p] = (self.ahead[between] * many + only) / self.bandwidth[d]
                            self.pair_back_s[p] = (self.back[between] * many + only) / self.bandwidth[d]
                        p += 1
        self.first_out[units] = p
        self.num_pairs = self.sizes[1] = p
        self._group_by_reader()
        self._pass_seconds()
        return True

    def _group_by_reader(self) -> None:
        for u in range(self.num_units + 1):
            self.first_in[u] = 0
        for p in range(self.num_pairs):
            self.first_in[self.pair_dst[p] + 1] += 1
        for u in range(self.num_units):
            self.first_in[u + 1] += self.first_in[u]
            self.head[u] = self.first_in[u]
        for p in range(self.num_pairs):
            u = self.pair_dst[p]
            self.in_pair[self.head[u]] = p
            self.head[u] += 1

    def _pass_seconds(self) -> None:
        """The seconds of each stage's passes with what its fullest replica spends on messages, for all of its replicas."""
        handled = self.over[0] > 0 or self.over[1] > 0 or self.over[2] > 0 or self.over[3] > 0 or self.over[4] > 0
        for i in range(self.num_stages):
            s = self.order[i]
            ahead = back = 0.0
            for u in range(self.first_unit[i], self.first_unit[i + 1]):
                if not handled:
                    break
                own = own_back = 0.0
                for k in range(self.first_out[u], self.first_out[u + 1]):
                    own += self._handling(k, False, True)
                    own_back += self._handling(k, True, False)
                for k in range(self.first_in[u], self.first_in[u + 1]):
                    p = self.in_pair[k]
                    own += self._handling(p, False, False)
                    own_back += self._handling(p, True, True)
                ahead, back = max(ahead, own), max(back, own_back)
            self.updates_s[i] = self.update_s[s]
            self.pass_s[2 * i] = self.forward_s[s] + ahead
            self.pass_s[2 * i + 1] = self.backward_s[s] + back if self.backs[s] else -1.0

    def _handling(self, p: int, backward: bool, sends: bool) -> float:
        """Seconds of one end of a message."""
        src = self.pair_src[p]
        dst = self.pair_dst[p]
        i = self.unit_stage[src]
        j = self.unit_stage[dst]
        if self.unit_device[src] == self.unit_device[dst] or (backward and not self.pair_back[p]):
            return 0.0
        between = self.order[i] * self.wide + self.order[j]
        many = self.pair_samples[p]
        size = (self.back[between] if backward else self.ahead[between]) * many
        tensors = self.back_edge[between] if backward else self.edge[between]
        if tensors == ORDER_ONLY:
            tensors = 1
        return self.over[0] + size * self.over[1 if sends else 2] + (tensors - 1) * self.over[3 if sends else 4]

    def _find_sums(self) -> None:
        """Find who sums gradients, in the order of their devices, and the seconds of each sum."""
        count = 0
        for s in range(self.num_stages):
            own, size = self.sets[s], self.trainable[s]
            if not own & (own - 1) or size <= 0.0:
                continue
            i = count
            while i > 0 and _before(own, self.sum_set[i - 1]):
                i -= 1
            if i > 0 and self.sum_set[i - 1] == own:
                self.sum_s[i - 1] += size
                continue
            count += 1
            for k in range(count - 1, i, -1):
                self.sum_set[k], self.sum_s[k] = self.sum_set[k - 1], self.sum_s[k - 1]
            self.sum_set[i], self.sum_s[i] = own, size
        for i in range(count):
            self.sum_s[i] = self._ring_s(self.sum_set[i], self.sum_s[i])
        if self.norm_bytes > 0.0:
            own = 0
            for s in range(self.num_stages):
                own |= self.sets[s]
            self.sum_set[count], self.sum_s[count] = own, self._ring_s(own, self.norm_bytes)
            count += 1
        self.sizes[2] = count

    def _ring_s(self, own: int, size: float):
        """Seconds of a sum of so many bytes over a set of devices."""
        ring = self.rings.get(own)
        if ring is None:
            ring = self.rings[own] = self.facts.ring(own)
        out = 0.0
        for fixed, each in ring:
            out = max(out, fixed + each * size)
        return out


def _overlap(i: int, count: int, j: int, others: int) -> int:
    """Samples of a micro-batch that two replicas both have, one `count` from number i on, one `others` from number j on."""
    low = max(i, j)
    high = min(i + count, j + others)
    return high - low if high > low else 0


def _before(one: int, other: int) -> bool:
    """Whether the devices of one set, ascending, stand before those of another as words do in a dictionary."""
    low = (one ^ other) & -(one ^ other)
    if one & low:
        return other > low
    return one < low and one != other
