"""The loop of the longest path (`gpp.simulate.longest_path`, which says what a step is), over arrays: compiled (`gpp.compiled`)."""

from __future__ import annotations

from gpp.compiled import integers, reals


class Walk:
    """Steps in their order, which is topological.

    Args:
        groups: the steps that are walked in the rounds from a first one on, until another one; in each round, those of the first
            group go first.
    """

    def __init__(self, groups) -> None:
        self.num_groups = len(groups)
        self.low, self.high, self.first = integers(len(groups)), integers(len(groups)), integers(len(groups) + 1)
        steps = needs = 0
        for _, _, own in groups:
            for step in own:
                steps += 1
                needs += len(step[4]) + (len(step[1]) if step[0] < 0 else 0)
        self.resource, self.node, self.first_need, self.need = (
            integers(steps),
            integers(steps),
            integers(steps + 1),
            integers(needs),
        )
        self.seconds, self.late = reals(steps), reals(steps)
        self.num_slots = self.num_nodes = 0
        self._pack(groups)

    def _pack(self, groups) -> None:
        i = k = 0
        for g, (low, high, own) in enumerate(groups):
            self.low[g], self.high[g] = low, high
            for resource, node, seconds, late, slots in own:
                self.resource[i], self.seconds[i], self.late[i] = resource, seconds, late
                for slot in slots:
                    self.need[k] = self._read(slot)
                    k += 1
                if resource < 0:
                    # Behind the resources of its members a meeting has their nodes.
                    for slot in node:
                        self.need[k] = self._begun(slot)
                        k += 1
                else:
                    self.node[i] = self._begun(node)
                    self._read(resource)
                i += 1
                self.first_need[i] = k
            self.first[g + 1] = i

    def _read(self, slot: int) -> int:
        if slot < 0:
            raise IndexError(f"slot {slot} of a step is below 0")
        if slot >= self.num_slots:
            self.num_slots = slot + 1
        return slot

    def _begun(self, node: int) -> int:
        if node >= self.num_nodes:
            self.num_nodes = node + 1
        return self._read(node)

    def go(self, at, begin, m: int = 0) -> None:
        """Walk a round, and write when each step is over and when it begins.

        A slot that is read before it is written holds what an earlier walk has left there.

        Args:
            at: by slot; begin: by node.
            m: the round.
        """
        # Compiled code does not look whether it writes behind an array's end.
        if len(at) < self.num_slots or len(begin) < self.num_nodes:
            raise IndexError(f"{len(at)} slots and {len(begin)} nodes, and steps have {self.num_slots} and {self.num_nodes}")
        for g in range(self.num_groups):
            if self.low[g] <= m < self.high[g]:
                self._steps(g, at, begin)

    def _steps(self, g: int, at, begin) -> None:
        for i in range(self.first[g], self.first[g + 1]):
            d = self.resource[i]
            k = self.first_need[i]
            until = self.first_need[i + 1]
            if d < 0:
                until = (k + until) // 2
                members = until - k
                now = at[self.need[k]]
                for j in range(k + 1, until):
                    if at[self.need[j]] > now:
                        now = at[self.need[j]]
                now += self.seconds[i]
                for j in range(k, until):
                    d = self.need[j]
                    node = self.need[j + members]
                    begin[node] = at[d]
                    at[node] = at[d] = now
                continue
            now = at[d]
            for j in range(k, until):
                when = at[self.need[j]]
                if when > now:
                    now = when
            node = self.node[i]
            begin[node] = now
            now += self.seconds[i]
            at[d] = now
            at[node] = now + self.late[i]

    def openings(self, first: int, count: int):
        """For each of `count` resources from slot `first` on the node that occupies it first; -1 for one that none does."""
        out = integers(count)
        for r in range(count):
            out[r] = -1
        for i in range(self.first[self.num_groups] - 1, -1, -1):
            d = self.resource[i]
            if d < 0:
                k = self.first_need[i]
                members = (self.first_need[i + 1] - k) // 2
                for j in range(k, k + members):
                    d = self.need[j]
                    if first <= d < first + count:
                        out[d - first] = self.need[j + members]
            elif first <= d < first + count:
                out[d - first] = self.node[i]
        return out


def grown(at, before, grew: float, hair: float) -> bool:
    """Whether all times of an earlier state have grown by the same since, but for a hair."""
    same = 1
    for i in range(len(before)):
        if abs(at[i] - before[i] - grew) >= hair:
            same = 0
            break
    return bool(same)
