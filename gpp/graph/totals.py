"""The totals of a set of operators, from its members and the tensors and parameters that they touch: compiled (`gpp.compiled`)."""

from __future__ import annotations

from gpp.compiled import integers, reals


class SetTotals:
    """Adds up sets of operators of one graph.

    Args:
        graph: the arrays of the graph (`gpp.graph.sums.GraphNumbers`).
        totals: an array that gets the `gpp.graph.sums.SetSums` of the set that was asked for last.
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
        self.shared_bytes, (self.first_shared, self.sharing) = graph.shared_bytes, graph.shared
        self.num_shared = len(graph.shared_bytes)
        self.inside, self.ops, self.slope, self.waiting = integers(self.n), integers(self.n), reals(self.n), reals(self.n)
        self.seen = integers(len(graph.size))
        self.seen_param, self.seen_row = integers(len(graph.trainable)), integers(len(graph.row_bytes))

    def add_up(self, packed: bytes) -> None:
        """Fill the totals.

        Args:
            packed: the mask of the set, as little-endian bytes for all operators.
        """
        count = 0
        for op in range(self.n):
            self.inside[op] = packed[op >> 3] >> (op & 7) & 1
            if self.inside[op]:
                self.ops[count] = op
                count += 1
        self.ask += 1
        trainable = frozen = rows = saved = late = narrow = largest = again = 0.0
        incoming = incoming_back = outgoing = outgoing_back = unsaved = 0.0
        for i in range(count):
            op = self.ops[i]
            saved += self.saved[op]
            late += self.late[op]
            again += self.again[op]
            for k in range(self.first_param[op], self.first_param[op + 1]):
                p = self.param[k]
                if self.seen_param[p] != self.ask:
                    self.seen_param[p] = self.ask
                    trainable += self.trainable[p]
                    frozen += self.frozen[p]
                    narrow += self.narrow[p]
                    largest = max(largest, self.trainable[p])
            for k in range(self.first_row[op], self.first_row[op + 1]):
                p = self.row[k]
                if self.seen_row[p] != self.ask:
                    self.seen_row[p] = self.ask
                    rows += self.row_bytes[p]
            for k in range(self.first_read[op], self.first_read[op + 1]):
                t = self.read[k]
                if not self.inside[self.producer[t]] and self.seen[t] != self.ask:
                    self.seen[t] = self.ask
                    incoming += self.size[t]
                    incoming_back += self.back[t]
            self.slope[op] = self.own[op]
            for k in range(self.first_made[op], self.first_made[op + 1]):
                t = self.made[k]
                if self._leaves(t):
                    outgoing += self.size[t]
                    outgoing_back += self.back[t]
                    unsaved += self.unsaved[t]
                    self.slope[op] -= self.withheld[t]
        self.steepest = self.highest = 0.0
        if self.any_transient:
            self._find_lines(count)
        # Gradients of what goes out are there during the whole backward, those of what came in at its end.
        slope = outgoing_back + max(self.steepest + again, incoming_back)
        fixed = max(outgoing_back + max(self.highest + again, incoming_back) - slope, 0.0)
        out = self.totals
        out[0], out[1], out[2], out[3], out[4], out[5] = trainable, frozen, rows, saved, incoming + unsaved, slope
        out[6], out[7], out[8], out[9], out[10] = fixed, incoming, outgoing, incoming_back, outgoing_back
        out[11], out[12], out[13] = late, narrow, largest

    def _leaves(self, t: int) -> bool:
        """Whether an operator outside the set reads a tensor."""
        outside = 0
        for k in range(self.first_reader[t], self.first_reader[t + 1]):
            outside += 1 - self.inside[self.reader[k]]
        return outside > 0

    def _find_lines(self, count: int) -> None:
        """Find the steepest line and the largest value at one sample (`gpp.graph.transients`)."""
        for i in range(count):
            op = self.ops[i]
            self.waiting[op] = 0.0
            if self.saved[op] > 0.0:
                for k in range(count):
                    self.slope[self.ops[k]] -= self.after[op * self.n + self.ops[k]]
        for i in range(self.num_shared):
            self._wait(i)
        for i in range(count):
            op = self.ops[i]
            self.steepest = max(self.steepest, self.slope[op])
            self.highest = max(self.highest, self.slope[op] + (self.fixed[op] + self.waiting[op]))

    def _wait(self, i: int) -> None:
        """Add up the gradients that wait for others of the same weight (`gpp.graph.transients.gradients_waiting`)."""
        left = met = 0
        for k in range(self.first_shared[i], self.first_shared[i + 1]):
            left += self.inside[self.sharing[k]]
        for k in range(self.first_shared[i], self.first_shared[i + 1]):
            reader = self.sharing[k]
            met += self.inside[reader]
            left -= self.inside[reader]
            if met and left:
                for op in range(reader, self.sharing[k + 1]):
                    if self.inside[op]:
                        self.waiting[op] += self.shared_bytes[i]
                if self.inside[reader]:
                    self.waiting[reader] += self.shared_bytes[i]
