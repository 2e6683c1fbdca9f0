"""The totals of a set of operators, from its members and the tensors and parameters that they touch: compiled (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import integers, reals

TOTALS: Final = (
    *("trainable", "frozen", "rows", "saved", "late", "incoming", "incoming_back"),
    *("outgoing", "outgoing_back", "unsaved", "num_tensors", "slope", "first", "narrow", "largest"),
)
"""What is added up, in order; `unsaved` are bytes of what goes out and is not saved, `slope` and `first` are a `TransientLine`.

`largest` is the parameter with most trainable bytes."""


class SetTotals:
    """Adds up sets of operators of one graph.

    Args:
        graph: the arrays of the graph (`gpp.graph.sums.GraphNumbers`).
        totals: an array that gets `TOTALS` of the set that was asked for last.
    """

    def __init__(self, graph, totals) -> None:
        self.n, self.totals, self.any_transient, self.ask = graph.num_ops, totals, graph.any_transient, 0
        self.saved, self.late, self.again, self.own, self.fixed = graph.saved, graph.late, graph.again, graph.own, graph.fixed
        self.after, self.producer, self.size = graph.after, graph.producer, graph.size
        self.back, self.unsaved, self.narrow = graph.back, graph.unsaved, graph.narrow
        self.withheld, self.trainable, self.frozen, self.row_bytes = graph.withheld, graph.trainable, graph.frozen, graph.row_bytes
        self.first_made, self.made = graph.made
        self.first_read, self.read = graph.read
        self.first_reader, self.reader = graph.readers
        self.first_param, self.param = graph.params
        self.first_row, self.row = graph.rows
        self.inside, self.ops, self.slope = integers(self.n), integers(self.n), reals(self.n)
        self.seen = integers(len(graph.size))
        self.seen_param, self.seen_row = integers(len(graph.trainable)), integers(len(graph.row_bytes))

    def add_up(self, packed: bytes) -> None:
        """Fill the totals.

        Args:
            packed: the mask of the set, as little-endian bytes for all operators.
        """
        out = self.totals
        count = 0
        for op in range(self.n):
            self.inside[op] = packed[op >> 3] >> (op & 7) & 1
            if self.inside[op]:
                self.ops[count] = op
                count += 1
        for i in range(15):
            out[i] = 0.0
        self.ask += 1
        again = 0.0
        for i in range(count):
            op = self.ops[i]
            out[3] += self.saved[op]
            out[4] += self.late[op]
            again += self.again[op]
            for k in range(self.first_param[op], self.first_param[op + 1]):
                p = self.param[k]
                if self.seen_param[p] != self.ask:
                    self.seen_param[p] = self.ask
                    out[0] += self.trainable[p]
                    out[1] += self.frozen[p]
                    out[13] += self.narrow[p]
                    out[14] = max(out[14], self.trainable[p])
            for k in range(self.first_row[op], self.first_row[op + 1]):
                p = self.row[k]
                if self.seen_row[p] != self.ask:
                    self.seen_row[p] = self.ask
                    out[2] += self.row_bytes[p]
            for k in range(self.first_read[op], self.first_read[op + 1]):
                t = self.read[k]
                if not self.inside[self.producer[t]] and self.seen[t] != self.ask:
                    self.seen[t] = self.ask
                    out[5] += self.size[t]
                    out[6] += self.back[t]
                    out[10] += 1.0
            self.slope[op] = self.own[op]
            for k in range(self.first_made[op], self.first_made[op + 1]):
                t = self.made[k]
                if self._leaves(t):
                    out[7] += self.size[t]
                    out[8] += self.back[t]
                    out[9] += self.unsaved[t]
                    out[10] += 1.0
                    self.slope[op] -= self.withheld[t]
        if self.any_transient:
            self._transients(count)
            out[11] += again
            out[12] += again

    def _leaves(self, t: int) -> bool:
        """Whether an operator outside the set reads a tensor."""
        outside = 0
        for k in range(self.first_reader[t], self.first_reader[t + 1]):
            outside += 1 - self.inside[self.reader[k]]
        return outside > 0

    def _transients(self, count: int) -> None:
        """Find the steepest line and the largest value at one sample (`gpp.graph.transients`)."""
        for i in range(count):
            op = self.ops[i]
            if self.saved[op] > 0.0:
                for k in range(count):
                    self.slope[self.ops[k]] -= self.after[op * self.n + self.ops[k]]
        for i in range(count):
            op = self.ops[i]
            self.totals[11] = max(self.totals[11], self.slope[op])
            self.totals[12] = max(self.totals[12], self.slope[op] + self.fixed[op])
