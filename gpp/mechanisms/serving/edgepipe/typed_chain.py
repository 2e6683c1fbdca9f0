"""The fastest chain of stages on types of devices, of which not all have to be used: exact, on plain arrays.

Objective: the slowest stage or message, where a device computes and sends at the same time,

    max over stages of max(seconds of its operators, seconds of the message behind it).

The bottleneck is bisected. For one bottleneck tau, and for every multiset of used devices and type of the next one, the cuts
that can be reached are the bits of one integer:

    reached[used + u, v] |= (union over the cuts i in reached[used, u] of ends[u][i]) & passable[u, v]

`ends[u][i]` are the cuts j such that operators i..j-1 take at most tau on type u and fit it, and `passable[u, v]` those whose
message takes at most tau from u to v. Whether a stage fits does not follow from whether a longer or a shorter one does (the
message behind it takes memory, too), so every end is asked for. Bisection ends on the bottleneck of a chain that was found,
below which none is.

Devices of one type are interchangeable, so the table has T * prod(n_t + 1) integers for n_t devices of each of T types; each is
made with at most one operation on integers of L bits for each of L cuts.

Source: the problem is that of PipeEdge (Hu et al., DSD 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np

from gpp.graph.op_graph import bits

P = TypeVar("P")

CLOSE = 1e-7
"""Share of the bottleneck at which bisection ends, and single values are tried."""

Used = tuple[int, ...]
"""How many devices of each type are used."""


def least(
    within: Callable[[float], P | None], value: Callable[[P], float], best: P | None, low: float, rounding: float = 1.0
) -> P | None:
    """The plan of the least value, by bisection; None where there is none.

    Args:
        within: a plan of at most a value; None where there is none.
        best: one to begin with, if there is any.
        low: none is of less.
        rounding: factor on `low` for a bound whose terms were added in another order.
    """
    high = math.inf if best is None else value(best)
    while best is not None and low * rounding < high:
        # Close to the end few values are left, so the next one below is as good a guess as the middle.
        tau = (low + high) / 2 if high - low > CLOSE * high else math.nextafter(high, -math.inf)
        found = within(tau)
        if found is None:
            if high - low <= CLOSE * high:
                break
            low = tau
        else:
            best, high = found, min(value(found), tau)
    return best


class PlacedStage(NamedTuple):
    """One stage: operators `start`..`end` - 1 on a device of type `kind`."""

    kind: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class TypedChain:
    """The problem, for T types of devices and L operators in a row.

    Args:
        counts: devices of each type.
        prefix_s: [T, L + 1] seconds of the first operators for one micro-batch on each type, ascending along a row.
        pass_s: seconds of a stage beside its operators.
        fits: [T, L + 1, L + 1] bool: whether operators i..j-1 fit a device of each type; read for i < j only.
        move_s: [T, T, L + 1] seconds of the message over each cut from a device of one type to one of another.
    """

    counts: Used
    prefix_s: np.ndarray
    fits: np.ndarray
    move_s: np.ndarray
    pass_s: float = 0.0

    @property
    def num_ops(self) -> int:
        return self.prefix_s.shape[1] - 1

    def stage_s(self, stage: PlacedStage) -> float:
        """Seconds that a stage computes for one micro-batch."""
        kind, start, end = stage
        return float(self.prefix_s[kind, end] - self.prefix_s[kind, start]) + self.pass_s

    def bottleneck_s(self, chain: Sequence[PlacedStage]) -> float:
        """Seconds of the slowest stage or message of a chain."""
        computing = [self.stage_s(stage) for stage in chain]
        moving = [float(self.move_s[a.kind, b.kind, a.end]) for a, b in pairwise(chain)]
        return max(computing + moving)

    def fastest(self) -> list[PlacedStage] | None:
        """A chain with the least bottleneck, and of those one with the fewest stages; None where none fits."""
        return least(self.within, self.bottleneck_s, self.within(math.inf), self._least_s)

    @cached_property
    def _least_s(self) -> float:
        """No chain is faster: some device has the longest operator, and all of them together are never faster than the fastest."""
        own = np.diff(self.prefix_s, axis=1)
        return float(max(own.min(axis=0).max(), own.min(axis=0).sum() / max(sum(self.counts), 1))) + self.pass_s

    @cached_property
    def _fitting(self) -> list[list[int]]:
        """For each type and start the ends at which a stage fits."""
        later = np.triu(np.ones(self.fits.shape[1:], bool), 1)
        return [[_row(row) for row in table & later] for table in self.fits]

    @cached_property
    def _order(self) -> list[Used]:
        """Multisets of used devices, those with fewer before those with more."""
        return sorted(product(*(range(count + 1) for count in self.counts)), key=lambda used: (sum(used), used))

    def within(self, tau: float) -> list[PlacedStage] | None:
        """A chain of the fewest stages that fits and whose bottleneck is at most tau seconds; None if there is none."""
        kinds, last = range(len(self.counts)), self.num_ops
        ends = [self._ends(kind, tau) for kind in kinds]
        passable = [[_row(self.move_s[u, v] <= tau) for v in kinds] for u in kinds]
        reached: dict[tuple[Used, int], int] = {((0,) * len(self.counts), u): 1 for u in kinds}
        for used in self._order:
            for u in kinds:
                starts = reached.get((used, u), 0)
                if not starts or used[u] == self.counts[u]:
                    continue
                found = 0
                for i in bits(starts):
                    found |= ends[u][i]
                if found >> last & 1:
                    return self._trace(reached, ends, passable, used, u)
                then = using(used, u)
                for v in kinds:
                    if then[v] < self.counts[v] and found & passable[u][v]:
                        reached[then, v] = reached.get((then, v), 0) | found & passable[u][v]
        return None

    def _ends(self, kind: int, tau: float) -> list[int]:
        """For each start the ends of the stages on a type that fit and take at most tau."""
        prefix = self.prefix_s[kind]
        furthest = np.searchsorted(prefix, prefix + (tau - self.pass_s), side="right")
        return [fitting & ((1 << int(end)) - 1) for fitting, end in zip(self._fitting[kind], furthest, strict=True)]

    def _trace(
        self,
        reached: dict[tuple[Used, int], int],
        ends: list[list[int]],
        passable: list[list[int]],
        used: Used,
        kind: int,
    ) -> list[PlacedStage]:
        """The chain whose last stage is on `kind`, with `used` before it."""
        chain, end = list[PlacedStage](), self.num_ops
        while True:
            start = next(i for i in bits(reached[used, kind]) if ends[kind][i] >> end & 1)
            chain.append(PlacedStage(kind, start, end))
            if not start:
                return chain[::-1]
            # What may have been used before, and the type of the stage that ends where this one begins.
            before = [(using(used, w, -1), w) for w, count in enumerate(used) if count and passable[w][kind] >> start & 1]
            used, kind = next(
                (less, w) for less, w in before if any(ends[w][i] >> start & 1 for i in bits(reached.get((less, w), 0)))
            )
            end = start


def using(used: Used, kind: int, more: int = 1) -> Used:
    """With one more device of a type, or with so many."""
    return (*used[:kind], used[kind] + more, *used[kind + 1 :])


def _row(row: np.ndarray) -> int:
    """The integer whose bits are those of a row."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
