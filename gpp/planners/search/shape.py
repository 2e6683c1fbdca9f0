"""The shape of a plan whose devices may hold several stages, in numbers: its passes, how long they take, and who sends to whom.

`StageShapes.prepare` fills arrays that `gpp.planners.search.step` reads, in these steps:

* `_priced`     seconds of each stage's passes and update, and whether a device has too much to do;
* `_arrange`    the stages' edges, their topological order, and how far each is from the sink;
* `_hand_on`    what a stage gets from another of its devices, which has received it (`gpp.plan.carrying`);
* `_pairs`      replicas, and which of them send to which;
* `_find_sums`  who sums gradients.

This file is compiled (`gpp.compiled`); as plain Python it does the same, slower. So it keeps to arrays and numbers.
"""

from __future__ import annotations

from typing import Final

from gpp.compiled import integers, reals

INF: Final = float("inf")
ORDER_ONLY: Final = 1 << 20
"""In place of the number of tensors of an edge that has none, and only keeps its ends in order."""


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
        self.fixed, self.edge, self.back_edge = facts.fixed, integers(facts.most_stages**2), integers(facts.most_stages**2)
        self.ahead, self.back = reals(facts.most_stages**2), reals(facts.most_stages**2)
        self.degree, self.place = integers(facts.most_stages), integers(facts.most_stages)
        self.num_tensors, self.producer, self.first_reader = len(facts.producer), facts.producer, facts.first_reader
        self.reader, self.ahead_bytes, self.back_bytes = facts.reader, facts.ahead_bytes, facts.back_bytes
        self.order, self.distance, self.facts, self.first_unit = room.order, room.distance, facts, room.first_unit
        self.most_units, self.unit_stage, self.unit_device = facts.most_units, room.unit_stage, room.unit_device
        self.num_units, self.sizes, self.samples, self.first_out = 0, room.sizes, facts.microbatch_size, room.first_out
        self.most_pairs, self.pair_src, self.pair_dst = facts.most_pairs, room.pair_src, room.pair_dst
        self.pair_back, self.pair_samples, self.pair_late = room.pair_back, integers(facts.most_pairs), room.pair_late
        self.pair_ahead_s, self.pair_back_s, self.latency = room.pair_ahead_s, room.pair_back_s, facts.latency
        self.bandwidth, self.num_pairs, self.first_in = facts.bandwidth, 0, room.first_in
        self.head, self.in_pair, self.over = integers(facts.most_units), room.in_pair, facts.overheads
        self.updates_s, self.pass_s, self.sum_set, self.sum_s = room.update_s, room.pass_s, room.sum_set, room.sum_s
        self.norm_bytes, self.rings, self.shares = facts.norm_bytes, {}, False
        self.reaches, self.group = integers(facts.most_stages**2), integers(facts.most_stages)

    def prepare(self, num_stages: int, below_s: float, chain: bool) -> bool:
        """Fill the arrays; False if the plan is none, or if its busiest device alone has `below_s` or more to do.

        Args:
            chain: whether each stage also waits for the one before it, by number.
        """
        self.num_stages = num_stages
        if not self._priced(below_s) or not self._arrange(chain):
            return False
        if self.shares:
            self._hand_on()
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
            for d in range(self.num_devices):
                if self.sets[s] >> d & 1:
                    self.replicas[s] += 1
                    self.has_type[s * types + self.type_of[d]] = 1
        for i in range(self.num_params):
            for k in range(self.first_trained[i], self.first_trained[i + 1]):
                s = self.of[self.trained[k]]
                if self.mark[s] != i:
                    self.mark[s] = i
                    self.trainable[s] += self.param_bytes[i]
        self._pass_times()
        self.shares = False
        for s in range(1, size):
            for t in range(s):
                if self.sets[s] == self.sets[t]:
                    self.shares = True
        for d in range(self.num_devices):
            self.load[d] = 0.0
        for s in range(size):
            took = self.trainable[s] / self.replicas[s] if self.parts_updates else self.trainable[s]
            self.update_s[s] = 0.0
            for d in range(self.num_devices):
                if self.sets[s] >> d & 1:
                    # As the bill has it, the first device's.
                    self.update_s[s] = self.update_fixed[d] + self.update_each[d] * took if took > 0.0 else self.update_none[d]
                    break
            took = self.count * (self.forward_s[s] + self.backward_s[s]) + self.update_s[s]
            for d in range(self.num_devices):
                if self.sets[s] >> d & 1:
                    self.load[d] += took
                    if self.load[d] >= below_s:
                        return False
        return True

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

    def _arrange(self, chain: bool) -> bool:
        """Find the edges between stages, their topological order and their distances to the sink; False if there is a cycle."""
        size = self.num_stages
        for i in range(size * size):
            self.edge[i] = self.back_edge[i] = 0
            self.ahead[i] = self.back[i] = 0.0
        for s in range(size):
            self.mark[s] = -1
            self.degree[s] = 0
            self.place[s] = -1
        for i in range(self.num_tensors):
            s = self.of[self.producer[i]]
            for k in range(self.first_reader[i], self.first_reader[i + 1]):
                t = self.of[self.reader[k]]
                if t != s and self.mark[t] != i:
                    self.mark[t] = i
                    if not self.edge[s * size + t]:
                        self.degree[t] += 1
                    self.edge[s * size + t] += 1
                    self.ahead[s * size + t] += self.ahead_bytes[i]
                    if self.back_bytes[i] >= 0.0:
                        self.back_edge[s * size + t] += 1
                        self.back[s * size + t] += self.back_bytes[i]
        if chain:
            for s in range(size - 1):
                if not self.edge[s * size + s + 1]:
                    self.edge[s * size + s + 1] = ORDER_ONLY
                    self.back_edge[s * size + s + 1] = ORDER_ONLY if self.backs[s] and self.backs[s + 1] else 0
                    self.degree[s + 1] += 1
        # Stages are numbered by their first operators as long as no edge says otherwise, as in every plan.
        for s in range(size):
            self.mark[s] = self.n
        for i in range(self.n - 1, -1, -1):
            self.mark[self.of[i]] = i
        for i in range(size):
            best = -1
            for s in range(size):
                if self.place[s] < 0 and not self.degree[s] and (best < 0 or self.mark[s] < self.mark[best]):
                    best = s
            if best < 0:
                return False
            self.order[i] = best
            self.place[best] = i
            for t in range(size):
                if self.edge[best * size + t]:
                    self.degree[t] -= 1
        for i in range(size - 1, -1, -1):
            s = self.order[i]
            self.distance[s] = 1
            for t in range(size):
                if self.edge[s * size + t] and self.distance[t] >= self.distance[s]:
                    self.distance[s] = self.distance[t] + 1
        return True

    def _hand_on(self) -> None:
        """Let a stage get a tensor from the first one of its devices that receives it, and that it may have it from."""
        size = self.num_stages
        self._reach()
        for i in range(self.num_tensors):
            s = self.of[self.producer[i]]
            count = 0
            for k in range(self.first_reader[i], self.first_reader[i + 1]):
                t = self.of[self.reader[k]]
                j = count
                while j > 0 and self._farther(t, self.group[j - 1]):
                    j -= 1
                if t == s or self.sets[t] == self.sets[s] or (j > 0 and self.group[j - 1] == t):
                    continue
                for c in range(count, j, -1):
                    self.group[c] = self.group[c - 1]
                self.group[j] = t
                count += 1
            for j in range(1, count):
                t = self.group[j]
                for k in range(j):
                    c = self.group[k]
                    if c < 0 or self.sets[c] != self.sets[t] or not (self.reaches[c * size + t] or self.back_bytes[i] >= 0.0):
                        continue
                    self.group[j] = -1
                    self._move(i, s * size + t, c * size + t)
                    break

    def _farther(self, s: int, t: int) -> bool:
        """Whether stage s is farther from the sink than stage t, or as far and the first of them."""
        further = self.distance[s] - self.distance[t]
        return further > 0 or (further == 0 and self.place[s] < self.place[t])

    def _reach(self) -> None:
        """Find which stages wait for which, forwards and backwards."""
        size = self.num_stages
        for i in range(size * size):
            self.reaches[i] = 0
        for i in range(size - 1, -1, -1):
            s = self.order[i]
            for t in range(size):
                if self.back_edge[s * size + t]:
                    self.reaches[s * size + t] = 1
                    for k in range(size):
                        if self.reaches[t * size + k]:
                            self.reaches[s * size + k] = 1

    def _move(self, tensor: int, old: int, new: int) -> None:
        """Let a tensor go over another edge, between stages of the same devices, where its bytes do not count."""
        self.edge[old] -= 1
        self.edge[new] += 1
        self.ahead[old] = self.ahead[old] - self.ahead_bytes[tensor] if self.edge[old] else 0.0
        if self.back_bytes[tensor] >= 0.0:
            self.back_edge[old] -= 1
            self.back_edge[new] += 1
            self.back[old] = self.back[old] - self.back_bytes[tensor] if self.back_edge[old] else 0.0

    def _pairs(self) -> bool:
        """Find the replicas, and which of them send to which; False if they are too many."""
        p = 0
        units = 0
        size = self.num_stages
        for i in range(size):
            s = self.order[i]
            self.first_unit[i] = units
            for d in range(self.num_devices):
                if self.sets[s] >> d & 1:
                    if units == self.most_units:
                        return False
                    self.unit_stage[units], self.unit_device[units] = i, d
                    units += 1
        self.first_unit[size] = units
        self.num_units = self.sizes[0] = units
        for i in range(size):
            s = self.order[i]
            low = self.samples // (self.first_unit[i + 1] - self.first_unit[i])
            for u in range(self.first_unit[i], self.first_unit[i + 1]):
                self.first_out[u] = p
                for j in range(0 if self.shares else i + 1, size):
                    t = self.order[j]
                    if not self.edge[s * size + t]:
                        continue
                    high = self.samples // (self.first_unit[j + 1] - self.first_unit[j])
                    for v in range(self.first_unit[j], self.first_unit[j + 1]):
                        many = _overlap(low * (u - self.first_unit[i]), low, high * (v - self.first_unit[j]), high)
                        if not many:
                            continue
                        if p == self.most_pairs:
                            return False
                        between = s * size + t
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
        between = self.order[i] * self.num_stages + self.order[j]
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
        return ring[0] + ring[1] * size


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
