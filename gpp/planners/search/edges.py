"""The edges between the stages of a plan whose devices may hold several: compiled (`gpp.compiled`).

`StageEdges.arrange` finds them, the stages' topological order, and how far each is from the sink; `hand_on` is for what a stage
gets from another of its devices, which has received it (`gpp.plan.carrying`).
"""

from __future__ import annotations

from gpp.compiled import integers, reals
from gpp.planners.search.numbers import ORDER_ONLY


class StageEdges:
    """Finds the edges of plans of one problem.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the arrays of a plan (`gpp.planners.search.numbers.PlanArrays`); its order and distances are filled.
        backs: whether each stage has a backward.
    """

    def __init__(self, facts, room, backs) -> None:
        self.wide, self.num_stages, self.num_edges, self.n, self.backs = facts.most_stages, 0, 0, facts.num_ops, backs
        self.of, self.sets, self.order, self.distance = room.stage_of, room.devices, room.order, room.distance
        self.num_tensors, self.producer, self.first_reader = len(facts.producer), facts.producer, facts.first_reader
        self.reader, self.ahead_bytes, self.back_bytes = facts.reader, facts.ahead_bytes, facts.back_bytes
        self.one_way = any(size < 0.0 for size in facts.back_bytes)
        stages = facts.most_stages
        # Of each pair of stages: whether it is listed, its tensors there and back, and their bytes.
        self.noted, self.edge, self.back_edge = (integers(stages**2) for _ in range(3))
        self.ahead, self.back = reals(stages**2), reals(stages**2)
        self.src, self.dst, self.next_to, self.next_from, self.reaches = (integers(stages**2) for _ in range(5))
        self.first_to, self.first_from, self.mark, self.ranked = (integers(stages) for _ in range(4))
        self.degree, self.place, self.group = (integers(stages) for _ in range(3))

    def arrange(self, num_stages: int, chain: bool) -> bool:
        """Find the edges between stages, their topological order and their distances to the sink; False if there is a cycle."""
        size = self.num_stages = num_stages
        for k in range(self.num_edges):
            self.noted[self.src[k] * self.wide + self.dst[k]] = 0
        self.num_edges = 0
        for s in range(size):
            self.mark[s] = -1
        for i in range(self.num_tensors):
            s = self.of[self.producer[i]]
            for k in range(self.first_reader[i], self.first_reader[i + 1]):
                t = self.of[self.reader[k]]
                if t != s and self.mark[t] != i:
                    self.mark[t] = i
                    at = s * self.wide + t
                    self._note(s, t)
                    self.edge[at] += 1
                    self.ahead[at] += self.ahead_bytes[i]
                    if self.back_bytes[i] >= 0.0:
                        self.back_edge[at] += 1
                        self.back[at] += self.back_bytes[i]
        if chain:
            for s in range(size - 1):
                at = s * self.wide + s + 1
                if not self.noted[at]:
                    self._note(s, s + 1)
                    self.edge[at] = ORDER_ONLY
                    self.back_edge[at] = ORDER_ONLY if self.backs[s] and self.backs[s + 1] else 0
        if not self._sort():
            return False
        for i in range(size):
            self.place[self.order[i]] = i
            self.distance[i] = 1
        self._list_by_reader()
        for i in range(size - 1, -1, -1):
            t = self.order[i]
            k = self.first_to[t]
            while k >= 0:
                s = self.src[k]
                if self.distance[t] >= self.distance[s]:
                    self.distance[s] = self.distance[t] + 1
                k = self.next_to[k]
        return True

    def _note(self, s: int, t: int) -> None:
        """Note an edge between two stages, at first without tensors."""
        at = s * self.wide + t
        if not self.noted[at]:
            self.noted[at] = 1
            self.edge[at] = self.back_edge[at] = 0
            self.ahead[at] = self.back[at] = 0.0
            self.src[self.num_edges], self.dst[self.num_edges] = s, t
            self.num_edges += 1

    def _list_by_reader(self) -> None:
        """List the edges to each stage."""
        for s in range(self.num_stages):
            self.first_to[s] = -1
        for k in range(self.num_edges):
            t = self.dst[k]
            self.next_to[k], self.first_to[t] = self.first_to[t], k

    def list_by_sender(self) -> None:
        """List the edges from each stage, in the order of their readers, from the lists of the edges to each stage."""
        for s in range(self.num_stages):
            self.first_from[s] = -1
        for j in range(self.num_stages - 1, -1, -1):
            k = self.first_to[self.order[j]]
            while k >= 0:
                s = self.src[k]
                self.next_from[k], self.first_from[s] = self.first_from[s], k
                k = self.next_to[k]

    def _sort(self) -> bool:
        """Order the stages by their edges, by their first operators where these leave a choice; False if there is a cycle."""
        size = self.num_stages
        for s in range(size):
            self.degree[s] = 0
            self.mark[s] = self.first_from[s] = -1
        for k in range(self.num_edges):
            s = self.src[k]
            self.degree[self.dst[k]] += 1
            self.next_from[k], self.first_from[s] = self.first_from[s], k
        count = 0
        for i in range(self.n):
            s = self.of[i]
            if self.mark[s] < 0:
                self.mark[s] = 0
                self.ranked[count] = s
                count += 1
        first = 0
        for i in range(size):
            at = first
            while at < size and self.degree[self.ranked[at]]:
                at += 1
            if at == size:
                return False
            s = self.order[i] = self.ranked[at]
            self.degree[s] = -1
            while first < size and self.degree[self.ranked[first]] < 0:
                first += 1
            k = self.first_from[s]
            while k >= 0:
                self.degree[self.dst[k]] -= 1
                k = self.next_from[k]
        return True

    def hand_on(self) -> None:
        """Let a stage get a tensor from the first one of its devices that receives it, and that it may have it from."""
        if self.one_way:
            self._reach()
        for i in range(self.num_tensors):
            if self.first_reader[i + 1] - self.first_reader[i] < 2:
                continue
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
                    if c < 0 or self.sets[c] != self.sets[t]:
                        continue
                    if self.back_bytes[i] < 0.0 and not self.reaches[c * self.wide + t]:
                        continue
                    self.group[j] = -1
                    self._note(c, t)
                    self._move(i, s * self.wide + t, c * self.wide + t)
                    break
        self._list_by_reader()

    def _farther(self, s: int, t: int) -> bool:
        """Whether stage s is farther from the sink than stage t, or as far and the first of them."""
        further = self.distance[s] - self.distance[t]
        return further > 0 or (further == 0 and self.place[s] < self.place[t])

    def _reach(self) -> None:
        """Find which stages wait for which, forwards and backwards."""
        size = self.num_stages
        wide = self.wide
        for s in range(size):
            for t in range(size):
                self.reaches[s * wide + t] = 0
        self.list_by_sender()
        for i in range(size - 1, -1, -1):
            s = self.order[i]
            k = self.first_from[s]
            while k >= 0:
                t = self.dst[k]
                if self.back_edge[s * wide + t]:
                    self.reaches[s * wide + t] = 1
                    for j in range(size):
                        if self.reaches[t * wide + j]:
                            self.reaches[s * wide + j] = 1
                k = self.next_from[k]

    def _move(self, tensor: int, old: int, new: int) -> None:
        """Let a tensor go over another edge, between stages of the same devices, where its bytes do not count."""
        self.edge[old] -= 1
        self.edge[new] += 1
        self.ahead[old] = self.ahead[old] - self.ahead_bytes[tensor] if self.edge[old] else 0.0
        if self.back_bytes[tensor] >= 0.0:
            self.back_edge[old] -= 1
            self.back_edge[new] += 1
            self.back[old] = self.back[old] - self.back_bytes[tensor] if self.back_edge[old] else 0.0
