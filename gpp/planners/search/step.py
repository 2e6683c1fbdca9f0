"""The step of a plan whose devices may hold several stages, from plain numbers: what a search asks a hundred thousand times.

It is what `gpp.schedules.merge`, `gpp.program.lower` and `gpp.simulate.longest_path` say together of plans with whole backwards,
one micro-batch size, 1F1B and updates that drain, without a program in between:

* `StageShapes`   which passes there are, how long they take, and who sends to whom;
* `_order`  which pass each device takes next: list scheduling in seconds without messages, as `merge` does it;
* `_walk`   when passes begin and end in that order, with messages on their channels, sums and updates, until the period shows.

Whatever else a plan may have, the simulator has the last word. This file is compiled (`gpp.compiled`); as plain Python it
does the same, slower. So it keeps to arrays and numbers, and no result depends on who runs it.
"""

from __future__ import annotations

from typing import Final

from gpp.compiled import integers, reals
from gpp.planners.search.known import KnownSteps
from gpp.planners.search.late import LateSteps

MOST: Final = 8
SAME: Final = 1e-9
ROUNDING: Final = 1 + 1e-9
"""As `gpp.simulate.period` and `gpp.schedules.merge` have them, which lie above planners."""
INF: Final = float("inf")
AT_LEAST: Final = 16
"""Passes for which a plan counts that is dismissed before any is timed."""


class StepTimer:
    """Times plans of one problem and micro-batch size.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the arrays of its `StageShapes` (`gpp.planners.search.numbers.PlanArrays`).
        shape: what fills them.
    """

    def __init__(self, facts, room, shape) -> None:
        resources = facts.num_devices + 2 * facts.most_pairs
        self.work, self.shape, self.num_stages, self.num_units, self.num_pairs, self.num_sums = facts.work, shape, 0, 0, 0, 0
        passes = 2 * facts.most_units * facts.count
        self.sizes, self.line, self.num_pushed, self.num_popped = room.sizes, 16 * facts.num_devices, 0, 0
        self.wakes_s, self.waker = reals(self.line), integers(self.line)
        self.unit_stage, self.count = room.unit_stage, facts.count
        self.held, self.distance, self.order, self.pass_s = facts.held, room.distance, room.order, room.pass_s
        self.first_out, self.pair_back = room.first_out, room.pair_back
        self.over_by, self.first_in, self.ahead = integers(2 * facts.most_units), room.first_in, integers(facts.most_units)
        self.head, self.num_devices = integers(facts.most_units), facts.num_devices
        self.running, self.awake = integers(facts.num_devices), integers(facts.num_devices)
        self.depth, self.unit_device, self.most = integers(facts.most_units), room.unit_device, facts.most_stages
        self.sequence = integers(passes)
        self.sequence_mb, self.num_nodes, self.pair_dst = integers(passes), 0, room.pair_dst
        self.in_pair, self.pair_src, self.free, self.start = room.in_pair, room.pair_src, reals(resources), reals(resources)
        self.began, self.middle, self.arrived = reals(resources), reals(resources), reals(2 * facts.most_pairs * facts.count)
        self.pair_ahead_s, self.pair_late, self.pair_back_s = room.pair_ahead_s, room.pair_late, room.pair_back_s
        self.sum_set, self.sum_s, self.last = room.sum_set, room.sum_s, integers(facts.most_stages)
        self.update_s, self.over, self.first_unit = room.update_s, facts.overheads, room.first_unit
        self.of_device, self.next_unit = integers(facts.num_devices), integers(facts.most_units)
        self.ready, self.missing, self.listed = integers(facts.most_units), integers(facts.most_units), integers(facts.num_devices)
        self.urgency, self.behind, self.first = integers(facts.most_units), integers(facts.most_units), integers(facts.num_devices)
        self.num_listed, self.known, self.late, self.reach = 0, KnownSteps(facts, room), LateSteps(facts, room), 0.0

    def step_s(self, num_stages: int, below_s: float, chain: bool = False) -> float:
        """Seconds of a step of the plan that the room holds; infinity if it is none, or takes `below_s` or more.

        Args:
            chain: whether each stage also waits for the one before it, by number.
        """
        return self.timed_s(below_s) if self.prepare(num_stages, below_s, chain) else INF

    def prepare(self, num_stages: int, below_s: float, chain: bool) -> bool:
        """Find the shape of the plan that the room holds; False if it is none, or surely takes `below_s` or more."""
        self.work[0] += AT_LEAST
        if not self.shape.prepare(num_stages, below_s, chain):
            return False
        self.num_stages, self.num_units, self.num_pairs, self.num_sums = num_stages, self.sizes[0], self.sizes[1], self.sizes[2]
        return True

    def timed_s(self, below_s: float) -> float:
        """Seconds of a step of the plan that was prepared; infinity if it cannot run, or takes `below_s` or more."""
        if self.known.find(self.num_stages):
            took = self.known.step_s(below_s)
            if took >= 0.0:
                self.work[0] += self.known.passes[self.known.row]
                return INF if took >= below_s else took
        self.reach = 0.0
        if not self._order(below_s):
            self.known.keep(self.num_nodes, INF, self.reach)
            return INF
        took = self._walk(below_s)
        self.known.keep(self.num_nodes, took, self.reach)
        return INF if took >= below_s else took

    def passes(self) -> int:
        """The passes of the plan that was prepared."""
        total = 0
        for i in range(self.num_stages):
            ways = 2 if self.pass_s[2 * i + 1] >= 0.0 else 1
            total += ways * self.count * (self.first_unit[i + 1] - self.first_unit[i])
        return total

    def _push(self, when: float, device: int) -> None:
        """Line a device up by when it wakes: nearly always behind most of the others."""
        if self.num_pushed == self.line:
            for at in range(self.num_popped, self.line):
                self.wakes_s[at - self.num_popped], self.waker[at - self.num_popped] = self.wakes_s[at], self.waker[at]
            self.num_pushed, self.num_popped = self.line - self.num_popped, 0
        at = self.num_pushed
        self.num_pushed += 1
        while at > self.num_popped and self.wakes_s[at - 1] > when:
            self.wakes_s[at], self.waker[at] = self.wakes_s[at - 1], self.waker[at - 1]
            at -= 1
        self.wakes_s[at], self.waker[at] = when, device

    def _node_at(self, u: int, at: int) -> int:
        """The pass at a place of a replica's order: twice its micro-batch, and 1 more for a backward; -1 at its end."""
        m = self.count
        ahead = self.ahead[u]
        if ahead < 0:
            return 2 * at if at < m else -1
        if at < ahead:
            return 2 * at
        at -= ahead
        if at < 2 * (m - ahead):
            return 2 * (ahead + (at >> 1)) if at & 1 else at + 1
        at -= m - ahead
        return 2 * at + 1 if at < m else -1

    def _order(self, below_s: float) -> bool:
        """Find an order in which all passes can run: they are listed as they begin; False if there is none.

        Also False as soon as a step is known to take too long, whatever messages take. `reach` tells the one from the other.
        """
        done = 0
        now = 0.0
        total = self._begin()
        self.late.prepare()
        self.late.watch(below_s)
        self.num_nodes = total  # whether or not they are timed: a walk ends by them
        self.work[0] += total
        if self.late.surely():
            self.reach = below_s
            return False
        while True:
            for at in range(self.num_listed):
                d = self.listed[at]
                self.awake[d] = 0
                u = self.first[d]
                if u >= 0:
                    self.first[d] = self.behind[u]
                    what = self.ready[u]
                    way = what & 1
                    self.head[u] += 1
                    self.running[d] = self.sequence[done] = 2 * u + way
                    self._ask(u)
                    self.sequence_mb[done] = what >> 1
                    done += 1
                    took = self.pass_s[2 * self.unit_stage[u] + way]
                    self._push(now + took, d)
                    if self.late.late(d, now, took):
                        self.reach = below_s
                        return False
            self.num_listed = 0
            if self.num_popped == self.num_pushed:
                break
            now = self.wakes_s[self.num_popped]
            while self.num_popped < self.num_pushed and self.wakes_s[self.num_popped] <= now * ROUNDING:
                d = self.waker[self.num_popped]
                self.num_popped += 1
                node = self.running[d]
                self.running[d] = -1
                if self.first[d] >= 0:
                    self._wake(d)
                self._ended(node)
        if done < total:
            self.reach = INF
        return done == total

    def _begin(self) -> int:
        """Put all devices at their start; returns how many passes there are."""
        total = 0
        m = self.count
        self.num_pushed = self.num_popped = self.num_listed = 0
        for d in range(self.num_devices):
            self.running[d] = self.of_device[d] = self.first[d] = -1
            self.awake[d] = 0
        for u in range(self.num_units - 1, -1, -1):
            d = self.unit_device[u]
            self.next_unit[u] = self.of_device[d]
            self.of_device[d] = u
            i = self.unit_stage[u]
            self.depth[u] = self.distance[self.order[i]]
            self.ahead[u] = self.held[self.depth[u]] if self.pass_s[2 * i + 1] >= 0.0 else -1
            self.head[u] = self.over_by[2 * u] = self.over_by[2 * u + 1] = 0
            total += 2 * m if self.ahead[u] >= 0 else m
        for u in range(self.num_units):
            self._ask(u)
        return total

    def _ask(self, u: int) -> None:
        """Find a replica's next pass, and how many passes of others it still waits for; one more than there are at its end."""
        what = self._node_at(u, self.head[u])
        b = what >> 1
        missing = 0
        if what < 0:
            missing = self.num_pairs + 1
        elif what & 1:
            for k in range(self.first_out[u], self.first_out[u + 1]):
                if self.pair_back[k] and self.over_by[2 * self.pair_dst[k] + 1] <= b:
                    missing += 1
        else:
            for k in range(self.first_in[u], self.first_in[u + 1]):
                if self.over_by[2 * self.pair_src[self.in_pair[k]]] <= b:
                    missing += 1
        self.ready[u], self.missing[u] = what, missing
        if missing == 0:
            self._line_up(u)

    def _line_up(self, u: int) -> None:
        """Put a replica that may run its next pass in its device's line, the most urgent first, and let the device look for it."""
        d = self.unit_device[u]
        urgency = self.depth[u]
        if not self.ready[u] & 1:
            urgency += (self.most + 1) * (1 if self.ahead[u] >= 0 else 2 + (self.ready[u] >> 1))
        self.urgency[u] = urgency
        at = self.first[d]
        before = -1
        while at >= 0 and (self.urgency[at] < urgency or (self.urgency[at] == urgency and at < u)):
            before, at = at, self.behind[at]
        self.behind[u] = at
        if before < 0:
            self.first[d] = u
        else:
            self.behind[before] = u
        self._wake(d)

    def _wake(self, d: int) -> None:
        """Let an idle device look for its next pass."""
        if self.running[d] < 0 and not self.awake[d]:
            self.awake[d] = 1
            self.listed[self.num_listed] = d
            self.num_listed += 1

    def _ended(self, what: int) -> None:
        """Count a pass of a replica and direction as over, and wake those that waited for it alone."""
        u = what >> 1
        way = what & 1
        waited = 2 * self.over_by[what] + way
        self.over_by[what] += 1
        if way:
            for k in range(self.first_in[u], self.first_in[u + 1]):
                p = self.in_pair[k]
                if self.pair_back[p]:
                    self._one_less(self.pair_src[p], waited)
        else:
            for k in range(self.first_out[u], self.first_out[u + 1]):
                self._one_less(self.pair_dst[k], waited)

    def _one_less(self, u: int, what: int) -> None:
        """Let a replica wait for one pass less if `what` is its next one's."""
        if self.ready[u] == what:
            self.missing[u] -= 1
            if self.missing[u] == 0:
                self._line_up(u)

    def _walk(self, below_s: float) -> float:
        """Seconds between two steps, once they repeat; infinity as soon as they are known to be `below_s` or more."""
        resources = self.num_devices + 2 * self.num_pairs
        before, grew = 0.0, 0.0
        for i in range(resources):
            self.free[i] = 0.0
        for turn in range(1, MOST + 1):
            for i in range(resources):
                self.start[i] = self.free[i]
                self.began[i] = INF
            self.late.watch(below_s if turn == 1 else INF)
            if not self._step():
                self.reach = below_s
                return INF
            low, high, most, end = INF, 0.0, 0.0, 0.0
            for i in range(resources):
                if self.began[i] < INF:
                    end = max(end, self.free[i])
                    most = max(most, self.free[i] - self.start[i])
                    high = max(high, self.free[i] - self.began[i])
                    if self.began[i] <= self.start[i]:
                        low = min(low, self.free[i] - self.start[i])
            if abs(high - low) <= SAME * high:
                return high
            if low < INF and low * (1.0 - SAME) >= below_s:
                self.reach = below_s
                return INF
            if low < INF:
                self.reach = max(self.reach, low * (1.0 - SAME))
            earlier, grew, before = grew, end - before, end
            if turn > 2 and abs(grew - earlier) <= SAME * grew and most - grew <= SAME * grew:
                return grew
            if turn == MOST // 2:
                for i in range(resources):
                    self.middle[i] = self.free[i]
        most = 0.0
        for i in range(resources):
            most = max(most, self.free[i] - self.middle[i])
        return most / (MOST // 2)

    def _step(self) -> bool:
        """Walk the passes once, from when each resource is free; False if that surely takes too long."""
        m = self.count
        for at in range(self.num_nodes):
            node, b = self.sequence[at], self.sequence_mb[at]
            u, way = node >> 1, node & 1
            d = self.unit_device[u]
            now = self.free[d]
            if way == 0:
                for k in range(self.first_in[u], self.first_in[u + 1]):
                    when = self.arrived[2 * self.in_pair[k] * m + b]
                    if when > now:
                        now = when
            else:
                for k in range(self.first_out[u], self.first_out[u + 1]):
                    when = self.arrived[(2 * k + 1) * m + b] if self.pair_back[k] else 0.0
                    if when > now:
                        now = when
            if self.began[d] == INF:
                self.began[d] = now
            took = self.pass_s[2 * self.unit_stage[u] + way]
            if self.late.below < INF and self.late.late(d, now, took):
                return False
            now += took
            self.free[d] = now
            if way == 0:
                for k in range(self.first_out[u], self.first_out[u + 1]):
                    c = self.num_devices + 2 * k
                    self.arrived[2 * k * m + b] = self._sent(c, now, self.pair_ahead_s[k]) + self.pair_late[k]
            else:
                for k in range(self.first_in[u], self.first_in[u + 1]):
                    p = self.in_pair[k]
                    if self.pair_back[p]:
                        c = self.num_devices + 2 * p + 1
                        self.arrived[(2 * p + 1) * m + b] = self._sent(c, now, self.pair_back_s[p]) + self.pair_late[p]
        self._finish()
        return True

    def _sent(self, channel: int, now: float, took: float) -> float:
        """When a message has left its channel."""
        if self.free[channel] > now:
            now = self.free[channel]
        if self.began[channel] == INF:
            self.began[channel] = now
        now += took
        self.free[channel] = now
        return now

    def _finish(self) -> None:
        """Sum and update."""
        for s in range(self.num_sums):
            now = 0.0
            for d in range(self.num_devices):
                if self.sum_set[s] >> d & 1:
                    now = max(now, self.free[d])
            for d in range(self.num_devices):
                if self.sum_set[s] >> d & 1:
                    if self.began[d] == INF:
                        self.began[d] = self.free[d]
                    self.free[d] = now + self.sum_s[s]
        for i in range(self.num_stages):
            self.last[i] = 0
        for d in range(self.num_devices):
            # The last stage of a device bears what a step costs it.
            u = s = self.of_device[d]
            while u >= 0:
                s, u = u, self.next_unit[u]
            if s >= 0:
                self.last[self.unit_stage[s]] = 1
        for i in range(self.num_stages):
            took = self.update_s[i]
            if self.last[i]:
                took += self.over[5]
            for u in range(self.first_unit[i], self.first_unit[i + 1]):
                d = self.unit_device[u]
                if self.began[d] == INF:
                    self.began[d] = self.free[d]
                self.free[d] += took
