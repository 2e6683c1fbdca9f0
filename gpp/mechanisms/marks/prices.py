"""Bounds on the seconds of a chain by prices: of a byte in the final peak, and of a byte that is copied behind other passes.

With a price for each, what is best is a shortest path over the operators that are held, so all bounds from there on follow from one
walk. Whatever the prices, no choice that fits takes fewer seconds than the path, less what the room and the hidden copies are
worth at these prices (Lagrange). The path's own choice often fits, or nearly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.tensors import StageTensors
from gpp.mechanisms.marks.choices import HAIR, Choices, Marking


class Segments(NamedTuple):
    """Amounts of a chain, bytes per sample. [a, b] is the run of the operators from a to b, both included.

    Args:
        exact: whether each operator hands tensors to the next one and to no other of the stage; else the tensors to later ones
            are taken to go to the next one.
        saved: [n] what each operator holds if it is kept.
        handed: [n] the part of it that is handed to other operators, which a boundary holds.
        links: [n] what it holds in addition if the next operator is computed again.
        moments: [n] what the backward of each operator takes beyond what is held.
        asking: [n] what is there beyond that when a run is computed again at the beginning of it.
        sent_kept, sent_gone: [n] of what leaves the stage, what is not held where the operator is kept, and where it is not.
        sent_links: [n] the part of `sent_kept` that `links` holds.
        needed: [n, n] whether anything of a run is computed again.
        again: [n, n] whose forward passes that takes: the number of the last operator, and one.
        peaks: [n, n] the most during a run's own backward beyond what is held below it.
        tails: [2, n, n] what it adds to the backward of the operator behind it, and what it takes when it is computed again there;
            minus infinity where it is not.
        ends: [2, n, n] of a run whose last operator is a boundary, in place of `peaks`: the most before that one's backward, and in
            it, beyond what is held below either.
    """

    exact: bool
    saved: np.ndarray
    handed: np.ndarray
    links: np.ndarray
    moments: np.ndarray
    asking: np.ndarray
    sent_kept: np.ndarray
    sent_gone: np.ndarray
    sent_links: np.ndarray
    needed: np.ndarray
    again: np.ndarray
    peaks: np.ndarray
    tails: np.ndarray
    ends: np.ndarray


def segments_of(stage: StageTensors, samples: int) -> Segments:
    """The stretches of a stage's operators in their order, with so many samples of a micro-batch on a device."""
    n = len(stage.ops)
    links, sent_kept, sent_gone, sent_links = np.zeros((4, n))
    saved_link, linked = np.zeros((2, n), dtype=bool)
    exact = True
    for made, readers, size, saved, leaves in stage.tensors:
        exact &= all(reader == made + 1 for reader in readers)
        linked[made] |= bool(readers)
        saved_link[made] |= saved and bool(readers)
        if leaves:
            sent_gone[made] += size
            sent_kept[made] += 0.0 if saved else size
        if readers and not saved:
            links[made] += size
            sent_links[made] += size if leaves else 0.0
    exact &= bool(linked[: n - 1].all())
    moments = stage.transient - stage.leaving + stage.pending + stage.fixed / samples
    asking = stage.pending + stage.arrived
    last = np.maximum.accumulate(np.where(stage.saved > 0, np.arange(n), -1))
    # Of the operators behind the last needed one of a run: the most that the backward of one takes.
    idle = np.full(n, -np.inf)
    for b in range(n):
        if last[b] < b:
            idle[b] = max(moments[b], idle[b - 1] if b and last[b - 1] == last[b] else -np.inf)
    needed, again = np.zeros((n, n), dtype=bool), np.zeros((n, n), dtype=int)
    peaks, tails = np.full((n, n), -np.inf), np.full((2, n, n), -np.inf)
    tails[0], ends = 0.0, np.full((2, n, n), -np.inf)
    for a in range(n):
        storages = np.cumsum(stage.saved[a:])
        between = np.concatenate([[0.0], links[a : n - 1]])
        most = np.maximum.accumulate(storages + stage.transient[a:] + between)
        alive = np.maximum.accumulate(moments[a:] + storages)
        ends[0, a, a + 1 :] = alive[:-1]
        ends[1, a, a:] = np.maximum(moments[a:] + storages - stage.handed[a:], asking[a:] + most)
        end = last[a:]
        needed[a, a:] = end >= a
        at = np.maximum(end - a, 0)
        # A run is there when a backward asks for it: that of its last operator, or the next one's, if somebody keeps the link.
        trigger = np.minimum(end + saved_link[end], n - 1)
        inside = trigger <= np.arange(a, n)
        asked = np.where(inside, np.maximum(moments[trigger] + storages[at], asking[trigger] + most[at]), -np.inf)
        asked = np.maximum(asked, asking[end] + most[at])
        own = np.maximum(np.maximum(alive[at], asked), idle[a:])
        peaks[a, a:] = np.where(needed[a, a:], own, np.maximum.accumulate(moments[a:]))
        outside = needed[a, a:] & ~inside
        tails[0, a, a:] = np.where(outside, storages[at], 0.0)
        tails[1, a, a:] = np.where(outside, most[at], -np.inf)
        again[a, a:] = np.where(needed[a, a:], end + 1, a)
    own = stage.saved, stage.handed, links, moments, asking, sent_kept, sent_gone, sent_links
    return Segments(exact, *own, needed, again, peaks, tails, ends)


STEPS = 20
"""Prices of a byte that are tried at most for each price of a copy."""

CLOSE = 1e-3
"""Share by which a bound may be below the largest one: it stays a bound."""

COPY_STEPS = 4
"""Prices of a copied byte that are tried."""


class _PricedChoice(NamedTuple):
    """The best choice at some prices.

    Args:
        seconds, num_bytes, moved: of computing again; counted against the room; on the host.
        least: [2, n + 1] the least of all before each operator, if it is held, and the least before what a boundary there hands on,
            seconds and prices together; the last one of the first is of all.
        marking: as positions.
    """

    seconds: float
    num_bytes: float
    moved: float
    least: np.ndarray
    marking: Marking


class Prices:
    """The prices of one question.

    Args:
        capacity: bytes per sample that may be held in flight, and once.
    """

    def __init__(self, choices: Choices, parts: Segments, capacity: float) -> None:
        self.choices, self.parts, self.capacity = choices, parts, capacity
        self.n, self.h = len(choices.stage.ops), choices.held
        self.copies = min(self.h, RESIDENT_COPIES)
        self.hidden = choices.hidden if choices.offloads else 0.0
        self._stretches()
        self.bounds: list[tuple[float, float, np.ndarray]] = []

    def _stretches(self) -> None:
        """Seconds and bytes of every run, by the held operator before it (the source first) and the one behind it."""
        parts, n = self.parts, self.n
        before, behind = np.arange(-1, n)[:, None], np.arange(n + 1)[None, :]
        a, b = np.minimum(before + 1, n - 1), np.maximum(behind - 1, 0)
        run = before + 1 < behind
        needed = run & parts.needed[a, b]
        # Of a link the least that it may cost: its operator may be on the host.
        per_link = self.copies if self.choices.offloads else self.h
        links = np.where(needed & (before >= 0), (parts.links * per_link - parts.sent_links)[before], 0.0)
        # Up to each position the seconds of computing all again, and what is sent of it.
        self.again_s = np.concatenate([[0.0], np.cumsum(self.choices.slowest_s)])
        self.gone = np.concatenate([[0.0], np.cumsum(parts.sent_gone)])
        self.run_s = np.where(needed, self.again_s[parts.again[a, b]] - self.again_s[a], 0.0)
        self.run_bytes = np.where(run, self.gone[behind] - self.gone[before + 1], 0.0) + links
        if not self.choices.recomputes:
            self.run_s[run] = np.inf
        never = np.concatenate([[0], np.cumsum(~self.choices.able)])
        self.run_s[run & (never[behind] > never[before + 1])] = np.inf
        self.kept_bytes = np.concatenate([parts.saved * self.h + parts.sent_kept, [0.0]])
        self.host_bytes = np.concatenate([parts.saved * self.copies + parts.sent_kept, [0.0]])
        self.saved = np.concatenate([parts.saved, [0.0]])
        self.parting = self.choices.parting & self.choices.recomputes
        self.end_bytes = parts.handed * self.h + parts.sent_kept - parts.sent_gone

    def _path(self, price: float, copy_price: float) -> _PricedChoice:
        """The shortest path at two prices: seconds for each byte, seconds for each byte copied."""
        n, cost = self.n, self.kept_bytes * price
        host = np.zeros(n + 1, dtype=bool)
        if self.choices.offloads:
            there = self.host_bytes * price + self.saved * copy_price
            host = there < cost
            cost = np.where(host, there, cost)
        # [k, j]: from the operator before k to the held operator j; one less far, to what the boundary before j hands on.
        steps = self.run_s + self.run_bytes * price
        least, chosen = np.full((2, n + 1), np.inf), np.zeros((2, n + 1), dtype=int)
        # From the source to where k begins, what is held before k included; and whether that is of a boundary.
        start, parted = np.zeros(n + 1), np.zeros(n + 1, dtype=bool)
        end_cost = np.where(self.parting, self.end_bytes * price, np.inf)
        for j in range(n + 1):
            if j:
                through = start[:j] + steps[:j, j]
                k = int(through.argmin())
                least[1, j - 1], chosen[1, j - 1] = through[k], k
                ends = least[0, j - 1] + cost[j - 1], least[1, j - 1] + end_cost[j - 1]
                parted[j] = ends[1] < ends[0]
                start[j] = min(ends)
            through = start[: j + 1] + steps[: j + 1, j]
            k = int(through.argmin())
            chosen[0, j], least[0, j] = k, through[k]
        seconds = num_bytes = moved = 0.0
        recompute, offload, boundaries, j = list[int](), list[int](), list[int](), n
        k = int(chosen[0, n])
        while True:
            # A run from k to j, or an empty one.
            seconds, num_bytes = seconds + float(self.run_s[k, j]), num_bytes + float(self.run_bytes[k, j])
            recompute += range(j - 1, k - 1, -1)
            if not k:
                break
            i = k - 1
            if parted[k]:
                boundaries.append(i)
                num_bytes += float(self.end_bytes[i])
                j, k = k, int(chosen[1, i])
                continue
            num_bytes += float((self.host_bytes if host[i] else self.kept_bytes)[i])
            if host[i]:
                offload.append(i)
                moved += float(self.saved[i])
            j, k = i, int(chosen[0, i])
        marking = Marking(*(tuple(named[::-1]) for named in (recompute, offload, boundaries)))
        return _PricedChoice(seconds, num_bytes, moved, least, marking)

    def _dual(self, capacity: float, copy_price: float) -> tuple[float, float, _PricedChoice, _PricedChoice] | None:
        """The largest bound at a price of copies, its price of a byte, and the paths just above and within the capacity; None if
        nothing stays within it."""
        value = copy_price * self.hidden
        over, under = self._path(0.0, copy_price), self._path(FREE_S, copy_price)
        if over.num_bytes <= capacity:
            return float(over.least[0, -1]) - value, 0.0, over, over
        if under.num_bytes > capacity + HAIR * abs(capacity):
            return None
        price, bound = 0.0, -np.inf
        for _ in range(STEPS):
            if over.num_bytes <= under.num_bytes:
                break
            ends = [path.seconds + copy_price * path.moved for path in (over, under)]
            tried = (ends[1] - ends[0]) / (over.num_bytes - under.num_bytes)
            path = self._path(tried, copy_price)
            reached = float(path.least[0, -1]) - tried * capacity - value
            if reached > bound:
                price, bound = tried, reached
            # Where the paths are ends of one line, no other one is below it.
            line = ends[0] + tried * (over.num_bytes - capacity) - value
            if reached >= line - CLOSE * abs(line):
                break
            if path.num_bytes > capacity:
                over = path
            else:
                under = path
        return bound, price, over, under

    def solve(self) -> float:
        """The largest bound on the seconds of any choice that fits; infinite if none does."""
        best = self._dual(self.capacity, 0.0)
        if best is None:
            return np.inf
        found = [(0.0, best)]
        if self.choices.offloads and (best[1] > 0 or best[3].moved > self.hidden):
            most = self.choices.per_moved_s
            for step in range(1, COPY_STEPS + 1):
                copy_price = most * step / COPY_STEPS
                tried = self._dual(self.capacity, copy_price)
                if tried is not None:
                    found.append((copy_price, tried))
        self.copy_price, best = max(found, key=lambda one: one[1][0])
        for copy_price, (_, price, _, _) in sorted(found, key=lambda one: -one[1][0])[:3]:
            self.bounds.append((price, copy_price, self._path(price, copy_price).least))
        return max(best[0], 0.0)

    def around(self, capacity: float) -> tuple[Marking, Marking] | None:
        """The choices next to a capacity, above it and within it, that are best at some price; None if none is within."""
        found = self._dual(capacity, self.copy_price)
        if found is None:
            return None
        ops, (_, _, over, under) = self.choices.stage.ops, found
        one, other = (Marking(*(tuple(ops[i] for i in at) for at in path.marking)) for path in (over, under))
        return one, other

    def beyond(self, i: int, num_bytes: np.ndarray, moved: np.ndarray, *, parted: bool = False) -> np.ndarray:
        """Seconds that partial choices down to operator i take at least before it.

        Args:
            num_bytes, moved: bytes per sample of each beyond the room, and on the host.
            parted: whether the operator is a boundary, and is in the next run.
        """
        out = np.zeros(len(num_bytes))
        for price, copy_price, least in self.bounds:
            free = np.maximum(self.hidden - moved, 0.0) * copy_price
            np.maximum(out, price * num_bytes + least[int(parted), i] - free, out=out)
        return out


FREE_S = 1e6
"""A price of a byte at which seconds hardly count."""
