"""The ways through a partition's stages, each of which bounds the time of a step from below: compiled (`gpp.compiled`).

What is asked of a stage (times, bytes, messages) is kept with it: neighbours of a local search differ in one or two stages.
"""

from __future__ import annotations

from array import array

from gpp.compiled import integers, reals


class MessageRoute:
    """The links that the largest message of a micro-batch between two groups of devices may take.

    Args:
        share: of the micro-batch in that message.
        links: latency of each, and its seconds for a byte.
    """

    def __init__(self, share, links) -> None:
        self.share, self.num_links = share, len(links)
        self.late, self.slow = (array("d", values) for values in zip(*links, strict=True))


class DeviceGroup:
    """The devices of a stage, and the routes from them to other groups."""

    def __init__(self, devices) -> None:
        self.devices, self.routes = devices, {}


class KnownPart:
    """Operators and a number of devices that may be a stage, and what is known of it at one micro-batch size.

    `needs` are bytes by the number of what it has in flight; `on` are seconds by its devices: of a forward, a backward, what is
    late of that, and an update; `sent` are bytes for a sample to another piece, there and back.
    """

    def __init__(self, mask, count, ops) -> None:
        self.mask, self.count, self.ops, self.least_s = mask, count, ops, -1.0
        self.needs, self.on, self.sent = {}, {}, {}


class StageWays:
    """Arranges the stages of a partition, and bounds a step through them, for one micro-batch size.

    The calls follow each other: `take`, `arrange`, `place`, `bound`. Stages are numbered in their order.

    Args:
        asked: what knows the stages (`gpp.planners.common.candidates.Assessor`).
        first_read, read: the operators that each operator reads.
        groups: the groups of devices that are known; those of one problem share them.
    """

    def __init__(self, asked, microbatch_size, first_read, read, groups) -> None:
        regime = asked.problem.regime
        self.asked, self.b, self.first_read, self.read, self.known_groups = asked, microbatch_size, first_read, read, groups
        self.n, self.count, self.size = len(first_read) - 1, asked.problem.minibatch_size // microbatch_size, 0
        self.minibatches, self.drains, self.parts = regime.minibatches, regime.minibatches == 1, bool(regime.holds.parts)
        self.known, self.states, self.numbers = {}, {}, {}
        self.given, self.pieces, self.groups, self.deepest, self.filled = [], [], [], 0, 0
        # An operator may belong to no stage: then it counts with the first one.
        self.owner, self.mark, self.ranked, self.place_of = (integers(self.n + 1) for _ in range(4))
        self.degree, self.depth, self.state_at, self.held_at = (integers(self.n + 1) for _ in range(4))
        self.first_next, self.came_from = integers(self.n + 2), integers(self.n + 1)
        edges = len(read) + self.n
        self.src, self.dst, self.next = (integers(edges) for _ in range(3))
        self.ahead, self.back = reals(edges), reals(edges)
        self.forward, self.backward, self.late, self.update = (reals(self.n + 1) for _ in range(4))
        self.trip, self.around, self.way, self.bounds = (reals(self.n + 1) for _ in range(4))

    def take(self, parts) -> None:
        """Take the parts of a partition, in any order.

        Raises:
            IndexError: they are more than the operators.
        """
        self.size = len(parts)
        if self.size > self.n:
            raise IndexError(f"{self.size} parts of {self.n} operators")
        self.given = [self._piece(part) for part in parts]

    def _piece(self, part):
        """What is known of a part."""
        found = self.known.get(part)
        if found is None:
            found = self.known[part] = KnownPart(part[0], part[1], self.asked.ops(part[0]))
        return found

    def least_s(self) -> float:
        """The largest lower bound on a step by one of the parts alone, on a cluster of equal devices."""
        most = 0.0
        for p in range(self.size):
            piece = self.given[p]
            if piece.least_s < 0.0:
                piece.least_s = self.asked.least_s(piece.mask, piece.count, self.b)
            if piece.least_s > most:
                most = piece.least_s
        return most

    def arrange(self, chain: bool):
        """The parts in stage order; None if there is a cycle. Of several that may be next, that with the first operator is."""
        size = self.size
        edges = self._edges(chain)
        if chain:
            for p in range(size):
                self.ranked[p] = p
        elif not self._sort(edges):
            return None
        for s in range(size):
            self.place_of[self.ranked[s]] = s
            self.depth[s] = 1
        self._list_next(edges)
        self.deepest = 1
        for s in range(size - 1, -1, -1):
            for k in range(self.first_next[s], self.first_next[s + 1]):
                if self.depth[self.next[k]] >= self.depth[s]:
                    self.depth[s] = self.depth[self.next[k]] + 1
            if self.depth[s] > self.deepest:
                self.deepest = self.depth[s]
        self.pieces = [self.given[self.ranked[s]] for s in range(size)]
        self._fill_states()
        return [self.ranked[s] for s in range(size)]

    def _edges(self, chain: bool) -> int:
        """Find the edges between parts, each once, by their readers; their number."""
        count = 0
        for op in range(self.n):
            self.owner[op] = 0
        for p in range(self.size):
            self.mark[p] = -1
            piece = self.given[p]
            for op in piece.ops:
                self.owner[op] = p
        for q in range(self.size):
            piece = self.given[q]
            self.mark[q] = q
            for op in piece.ops:
                for k in range(self.first_read[op], self.first_read[op + 1]):
                    p = self.owner[self.read[k]]
                    if self.mark[p] != q:
                        self.mark[p] = q
                        self.src[count], self.dst[count] = p, q
                        count += 1
            if chain and q > 0 and self.mark[q - 1] != q:
                self.src[count], self.dst[count] = q - 1, q
                count += 1
        return count

    def _sort(self, edges: int) -> bool:
        """Rank the parts by their edges, by their first operators where these leave a choice; False if there is a cycle."""
        size = self.size
        for p in range(size + 1):
            self.degree[p] = self.first_next[p] = 0
        for k in range(edges):
            self.degree[self.dst[k]] += 1
            self.first_next[self.src[k] + 1] += 1
        for p in range(size):
            self.first_next[p + 1] += self.first_next[p]
            self.mark[p] = self.first_next[p]
        for k in range(edges):
            p = self.src[k]
            self.next[self.mark[p]] = self.dst[k]
            self.mark[p] += 1
        count = 0
        for op in range(self.n):
            p = self.owner[op]
            piece = self.given[p]
            if piece.ops[0] == op:
                self.place_of[count] = p
                count += 1
        first = 0
        for s in range(size):
            at = first
            while at < size and self.degree[self.place_of[at]]:
                at += 1
            if at == size:
                return False
            p = self.ranked[s] = self.place_of[at]
            self.degree[p] = -1
            while first < size and self.degree[self.place_of[first]] < 0:
                first += 1
            for k in range(self.first_next[p], self.first_next[p + 1]):
                self.degree[self.next[k]] -= 1
        return True

    def _list_next(self, edges: int) -> None:
        """List the successors of each stage, ascending."""
        size = self.size
        for s in range(size + 1):
            self.first_next[s] = self.mark[s] = 0
        # Edges lie by their readers: first where those of each begin.
        for k in range(edges):
            self.first_next[self.place_of[self.src[k]] + 1] += 1
            self.mark[self.dst[k]] += 1
        for s in range(size):
            self.first_next[s + 1] += self.first_next[s]
            self.degree[s] = self.first_next[s]
        at = 0
        for q in range(size + 1):
            at += self.mark[q]
            self.mark[q] = at - self.mark[q]
        for t in range(size):
            q = self.ranked[t]
            for k in range(self.mark[q], self.mark[q + 1]):
                s = self.place_of[self.src[k]]
                self.next[self.degree[s]] = t
                self.degree[s] += 1

    def _fill_states(self) -> None:
        """Number what stages have in flight, by their distance to the sink."""
        if self.filled == self.deepest:
            return
        self.filled = self.deepest
        for d in range(1, self.deepest + 1):
            key = d * (self.n + 1) + self.deepest
            found = self.numbers.get(key)
            if found is None:
                state = self.asked.states(self.b, d, self.deepest)
                found = self.numbers[key] = self.states.setdefault(state, len(self.states)), self.asked.in_flight(self.b, d)
            self.state_at[d], self.held_at[d] = found

    def nexts(self):
        """The successors of each stage."""
        return [[self.next[k] for k in range(self.first_next[s], self.first_next[s + 1])] for s in range(self.size)]

    def depths(self):
        """The stages on the longest way from each stage to the end, itself included."""
        return [self.depth[s] for s in range(self.size)]

    def fits(self, limit_bytes: float) -> bool:
        """Whether each stage alone needs at most so many bytes on a device."""
        for s in range(self.size):
            piece = self.pieces[s]
            state = self.state_at[self.depth[s]]
            need = piece.needs.get(state)
            if need is None:
                need = piece.needs[state] = self.asked.need_bytes(piece.mask, piece.count, self.b, self.depth[s], self.deepest)
            if need > limit_bytes:
                return False
        return True

    def place(self, placement) -> None:
        """Give the stages their devices."""
        self.groups = [self._group(devices) for devices in placement]

    def _group(self, devices):
        found = self.known_groups.get(devices)
        if found is None:
            found = self.known_groups[devices] = DeviceGroup(devices)
        return found

    def bound(self, shared: bool, below_s: float) -> float:
        """No iteration is shorter, by any stage: its micro-batches, and its update or the way to it and back.

        Micro-batches take their compute time, or as many round trips to the farthest sink as the samples in flight force one
        after the other. A way there and back ends with the update of the stage where it begins, whose next step waits for both
        (`gpp.simulate.period`). In a pipeline that does not drain there are no ways, and an update holds its stage up every time.

        Where backwards are in parts, only the first ones are on a round trip and on a way; what is late of the last micro-batch
        stands before the update.

        Args:
            shared: whether devices may hold several stages.
            below_s: a stage that takes so long or longer is the last one that is looked at.
        """
        most = self._round_trips(shared, below_s)
        if most >= below_s:
            return most
        return self._ways(below_s)

    def _round_trips(self, shared: bool, below_s: float) -> float:
        """Fill the seconds of each stage and of its round trips; the bound of the one that takes `below_s` or longer, or 0."""
        for s in range(self.size):
            self._times(s)
        for s in range(self.size - 1, -1, -1):
            self._messages(s, shared)
            longest = 0.0
            for k in range(self.first_next[s], self.first_next[s + 1]):
                around = self.trip[self.next[k]] + self.ahead[k] + self.back[k]
                if around > longest:
                    longest = around
            self.trip[s] += longest
            held = self.held_at[self.depth[s]]
            if self.drains:
                self.around[s] = ((self.count + held - 1) // held) * self.trip[s]
                if not self.parts and self.update[s] + self.around[s] >= below_s:
                    return self.update[s] + self.around[s]
            else:
                self.around[s] = self.count / held * self.trip[s]
        return 0.0

    def _ways(self, below_s: float) -> float:
        """Fill the bound of each stage, and the stage before each on its longest way (-1 at its end); the largest bound."""
        most = 0.0
        for s in range(self.size):
            self.way[s], self.came_from[s] = 0.0, -1
        for s in range(self.size):
            busy = self.count * (self.forward[s] + self.backward[s])
            if not self.drains:
                found = max(busy + self.minibatches * self.update[s], self.around[s])
            elif self.parts:
                # While the way back runs, the stage makes gradients of its weights.
                found = self.way[s] + max(busy - self.count * self.late[s], self.around[s])
                found = max(self.update[s] + busy, found)
            else:
                found = max(self.way[s], self.update[s]) + max(busy, self.around[s])
            self.bounds[s] = found
            most = max(most, found)
            if found >= below_s:
                return most
            begun = max(self.way[s], self.update[s] + self.late[s]) + self.forward[s]
            for k in range(self.first_next[s], self.first_next[s + 1]):
                around = begun + self.ahead[k] + self.back[k] + self.backward[s] - self.late[s]
                if around > self.way[self.next[k]]:
                    self.way[self.next[k]], self.came_from[self.next[k]] = around, s
        return most

    def _times(self, s: int) -> None:
        """Fill in the seconds of a stage on its devices."""
        piece, group = self.pieces[s], self.groups[s]
        found = piece.on.get(group)
        if found is None:
            times = self.asked.split_s(piece.mask, self.b, group.devices)
            found = piece.on[group] = *times, self.asked.update_s(piece.mask, group.devices)
        self.forward[s], self.backward[s], self.late[s], self.update[s] = found
        if not self.parts:
            self.late[s] = 0.0
        self.trip[s] = self.forward[s] + self.backward[s] - self.late[s]

    def _messages(self, s: int, shared: bool) -> None:
        """Fill in the shortest times of a micro-batch's largest message from a stage to each successor, there and back.

        An edge of data without gradients has no way back: minus infinity. Readers on the same devices may get all tensors from
        each other (`gpp.plan.carrying`): for them no bytes count.
        """
        piece, group = self.pieces[s], self.groups[s]
        for k in range(self.first_next[s], self.first_next[s + 1]):
            reader, to = self.pieces[self.next[k]], self.groups[self.next[k]]
            found = piece.sent.get(reader)
            if found is None:
                found = piece.sent[reader] = self.asked.crossing(piece.mask, reader.mask)
            forward, backward = found
            if shared:
                for j in range(self.first_next[s], self.first_next[s + 1]):
                    if j != k and self.groups[self.next[j]] is to:
                        forward, backward = 0.0, min(backward, 0.0)
            route = group.routes.get(to)
            if route is None:
                route = group.routes[to] = self.asked.route(group.devices, to.devices)
            samples = self.b * route.share
            self.ahead[k] = route.late[0] + forward * samples * route.slow[0]
            self.back[k] = route.late[0] + backward * samples * route.slow[0]
            for j in range(1, route.num_links):
                self.ahead[k] = min(self.ahead[k], route.late[j] + forward * samples * route.slow[j])
                self.back[k] = min(self.back[k], route.late[j] + backward * samples * route.slow[j])

    def walked(self):
        """The bounds of the stages, and the stage before each on its longest way."""
        return [self.bounds[s] for s in range(self.size)], [self.came_from[s] for s in range(self.size)]
