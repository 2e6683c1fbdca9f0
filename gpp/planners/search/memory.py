"""The memory that is missing in a plan whose devices may hold several stages: compiled (`gpp.compiled`).

What a stage needs is asked once for its operators, its number of devices and what it has in flight, and kept in a hash table.
"""

from __future__ import annotations

from gpp.compiled import integers, reals
from gpp.cost.together import Together

BITS = 62
"""Operators in a word of a set."""

LOW, WORD, FACTOR = (1 << 31) - 1, (1 << 40) - 1, 1000003
"""Of the hash: its products stay within a processor's number."""

ROUNDING = 1 + 1e-12
"""Bytes that are added up in another order may differ so much: the assessor has the last word on what fits."""


class MissingMemory:
    """Adds up what is missing in the plan that the room holds.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the arrays that are read (`gpp.planners.search.numbers.PlanArrays`): the stage of each operator, the set of each
            stage's devices as bits, and its distance to the sink.
    """

    def __init__(self, facts, room) -> None:
        self.facts, self.n, self.num_devices, self.most = facts, facts.num_ops, facts.num_devices, facts.most_stages
        self.of, self.sets, self.distance, self.memory = room.stage_of, room.devices, room.distance, facts.memory
        self.bit_of = facts.bit_of
        self.added, self.words = Together(facts.num_devices), (facts.num_ops + BITS - 1) // BITS
        self.ops, self.state_of, self.states = integers(facts.most_stages * self.words), integers((facts.most_stages + 1) ** 2), {}
        self.used, self.size, self.wide = 0, 1024, self.words + 1
        # A row of the table: the state and the number of devices as one number, 0 in a free row; then the operators.
        self.keys, self.needs, self.passing = integers(self.size * self.wide), reals(self.size), reals(self.size)

    def excess(self, num_stages: int) -> float:
        """The memory that is missing, as a share of a device's, over all devices; 0 where the stages of each fit together."""
        words = self.words
        deepest = 0
        for s in range(num_stages):
            if self.distance[s] > deepest:
                deepest = self.distance[s]
            for w in range(words):
                self.ops[s * words + w] = 0
        one = 1
        for op in range(self.n):
            self.ops[self.of[op] * words + op // BITS] |= one << (op % BITS)
        self.added.clear()
        for s in range(num_stages):
            row = self._row(s, deepest)
            own = self.sets[s]
            while own:
                self.added.add(self.bit_of[(own & -own) % 67], self.needs[row], self.passing[row])
                own &= own - 1
        out = 0.0
        for d in range(self.num_devices):
            most = self.added.most(d)
            if most > self.memory[d] * ROUNDING:
                out += most / self.memory[d] - 1.0
        return out

    def _row(self, s: int, deepest: int) -> int:
        """The row of a stage."""
        count = 0
        own = self.sets[s]
        while own:
            own &= own - 1
            count += 1
        at = self.distance[s] * (self.most + 1) + deepest
        if not self.state_of[at]:
            self.state_of[at] = self._state(self.distance[s], deepest)
        head = self.state_of[at] * (self.num_devices + 1) + count
        row = self._find(head, s)
        if self.keys[row * self.wide]:
            return row
        self.keys[row * self.wide] = head
        for w in range(self.words):
            self.keys[row * self.wide + 1 + w] = self.ops[s * self.words + w]
        self._ask(row, s, count, deepest)
        self.used += 1
        if 2 * self.used > self.size:
            self._grow()
            row = self._find(head, s)
        return row

    def _find(self, head: int, s: int) -> int:
        """The row of a key: its own, or the free one that it may have."""
        at = self._hashed(head, self.ops, s * self.words)
        while True:
            first = at * self.wide
            if not self.keys[first]:
                return at
            if self.keys[first] == head:
                same = 1
                for w in range(self.words):
                    if self.keys[first + 1 + w] != self.ops[s * self.words + w]:
                        same = 0
                        break
                if same:
                    return at
            at = (at + 1) % self.size

    def _hashed(self, head: int, ops, first: int) -> int:
        """Where a key's row is looked for first."""
        out = head
        for w in range(first, first + self.words):
            out = ((out ^ (ops[w] & LOW)) * FACTOR + (ops[w] >> 31)) & WORD
        return (out ^ (out >> 20)) % self.size

    def _grow(self) -> None:
        """Make room for twice as many rows."""
        size, keys, needs, passing = self.size, self.keys, self.needs, self.passing
        self.size = 2 * size
        self.keys, self.needs, self.passing = integers(self.size * self.wide), reals(self.size), reals(self.size)
        for row in range(size):
            if keys[row * self.wide]:
                at = self._hashed(keys[row * self.wide], keys, row * self.wide + 1)
                while self.keys[at * self.wide]:
                    at = (at + 1) % self.size
                for w in range(self.wide):
                    self.keys[at * self.wide + w] = keys[row * self.wide + w]
                self.needs[at], self.passing[at] = needs[row], passing[row]

    def _ask(self, row: int, s: int, count: int, deepest: int) -> None:
        """Write down what a stage needs."""
        mask = 0
        for w in range(self.words - 1, -1, -1):
            mask = (mask << BITS) | self.ops[s * self.words + w]
        self.needs[row], self.passing[row] = self.facts.needs(mask, count, self.distance[s], deepest)

    def _state(self, distance: int, deepest: int) -> int:
        """The number, from 1 on, of what a stage has in flight: all that its place decides."""
        return self.states.setdefault(self.facts.in_flight(distance, deepest), len(self.states) + 1)
