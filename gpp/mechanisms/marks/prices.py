"""Bounds on the seconds of a chain by prices: of a byte in the final peak, and of a byte that is copied behind other passes.

With a price for each, what is best is a shortest path over the operators that are held, so all bounds from there on follow from one
walk. Whatever the prices, no choice that fits takes fewer seconds than the path, less what the room and the hidden copies are
worth at these prices (Lagrange). The path's own choice often fits, or nearly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.mechanisms.marks.choices import HAIR, Choices, Marking
from gpp.mechanisms.marks.segments import Segments

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
