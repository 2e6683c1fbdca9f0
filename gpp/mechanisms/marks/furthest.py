"""The chain of fitted stages whose slowest one is fastest: bisection over its seconds, the furthest ends first.

For a time T stages are laid from the sink on. At each position the stage takes as many operators as it can within T, found by
steps that double and then halve; if the rest cannot be done, it takes others. A rest that failed once is not tried again. What is
left must be doable by the positions that are left even if everything were kept, which leaves few ends near the least T.

A stage of fewer operators mostly takes less time and less memory, but not always: where it begins inside of what would be
computed again, it holds what comes in. So the furthest end alone is no proof. All ends are tried, until some bills were made
in vain for one T, which small graphs never reach: their result is exact. Then T counts as out of reach, and the chain that was
found has the borders of its slowest stage moved inwards as long as that helps.

Complexity: O(S log n) bills for each of O(log) times T, if the furthest ends do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpp.mechanisms.marks.fitted import FittedStages, Stretch

EXACT, NEAR = 1e-9, 5e-3
"""Share of the least seconds to which they are found, in graphs of up to `LARGE` operators, and in others."""

LARGE = 128

STEPS = (1, 2, 4, 8)
"""Operators that are moved over a border of the slowest stage at a time."""

FEW, FIRST, SHARED = 2, 8, 1_000_000
"""Bills that are made in vain for one T: so many for each position (more where any chain does, and few T are tried), and those
shared out over the pairs of operators."""

RISES = (1.0 + 1e-9, 1.01, 1.03, 1.1, 1.3, 2.0, 4.0, float("inf"))
"""Times that are tried first, in units of the least that endless memory could give."""

FIRST_RISES = (1.03, 1.3, 2.0, float("inf"))
"""Those that are tried where any chain does."""


class _Spent(Exception):
    """No more bills for this T."""


class FurthestEnds:
    """The search of one order.

    Args:
        stages: its number of stages is given, or any up to the devices is searched.
        first: whether any chain does.
    """

    def __init__(self, stages: FittedStages, first: bool = False) -> None:
        self.stages, self.n, self.most, self.first = stages, stages.n, stages.most, first
        self.exactly = stages.depth is not None
        self.proven = not first
        """Whether every T below the result was refuted."""
        self._kept_s = [stages.prefix_s(p) for p in range(1, self.most + 1)]
        self._rest_s = stages.fastest_s
        self._until = 0
        self._dead: set[tuple[int, int]] = set()

    @property
    def least_s(self) -> float:
        """What no chain is faster than: everything kept, and all equally busy."""
        return float(self._rest_s[-1]) / self.most

    def solve(self, below_s: float = float("inf")) -> tuple[float, list[Stretch]] | None:
        """Seconds of the slowest stage, and the stages in order; None if nothing below `below_s` fits."""
        low, found = 0.0, None
        for rise in FIRST_RISES if self.first else RISES:
            limit = min(self.least_s * rise, below_s * (1 - EXACT))
            found = self._within(limit)
            if found is not None or limit >= below_s * (1 - EXACT):
                break
            low = limit
        if found is None:
            return None
        best = max(map(self.stages.seconds, found))
        if self.first:
            return best, found
        tolerance = EXACT if self.n <= LARGE else NEAR
        while best - low > tolerance * best:
            limit = (low + best) / 2
            better = self._within(limit)
            if better is None:
                low = limit
            else:
                found, best = better, max(map(self.stages.seconds, better))
        return (best, found) if self.proven else self._evened(found)

    def _evened(self, chain: list[Stretch]) -> tuple[float, list[Stretch]]:
        """A chain that is not proven, with the borders of its slowest stage moved inwards while that makes the chain faster."""
        best = max(map(self.stages.seconds, chain))
        while True:
            s = max(range(len(chain)), key=lambda i: self.stages.seconds(chain[i]))
            moved = [self._moved(chain, s, step, early) for step in STEPS for early in (True, False)]
            tried = [(max(map(self.stages.seconds, other)), other) for other in moved if other]
            least, other = min(tried, default=(best, chain))
            if least >= best * (1 - EXACT):
                return best, chain
            best, chain = least, other

    @staticmethod
    def _moved(chain: list[Stretch], s: int, step: int, early: bool) -> list[Stretch]:
        """The chain with so many operators of a stage given to the one before it, or behind it; empty if that cannot be."""
        other, stage = s - 1 if early else s + 1, chain[s]
        if not 0 <= other < len(chain) or stage.last - stage.first <= step:
            return []
        out = list(chain)
        if early:
            out[s], out[other] = stage._replace(first=stage.first + step), chain[other]._replace(last=stage.first + step)
        else:
            out[s], out[other] = stage._replace(last=stage.last - step), chain[other]._replace(first=stage.last - step)
        return out

    def _within(self, limit_s: float) -> list[Stretch] | None:
        """A chain of which no stage takes longer."""
        each = FIRST if self.first or limit_s == float("inf") else FEW
        self._until, self._dead = self.stages.asked + each * self.most + SHARED // self.n**2, set()
        chain: list[Stretch] = []
        try:
            return chain[::-1] if self._lay(self.n, 1, limit_s, chain) else None
        except _Spent:
            self.proven = False
            return None

    def _lay(self, last: int, position: int, limit_s: float, chain: list[Stretch]) -> bool:
        """Lay stages for the operators before `last`, from a position on."""
        if (last, position) in self._dead:
            return False
        for first in self._ends(last, position, limit_s):
            chain.append(Stretch(first, last, position))
            if not first or self._lay(first, position + 1, limit_s, chain):
                return True
            chain.pop()
        self._dead.add((last, position))
        return False

    def _ends(self, last: int, position: int, limit_s: float) -> Iterator[int]:
        """Where a stage that ends at `last` may begin, the furthest one first."""
        left, kept = self.most - position, self._kept_s[position - 1]
        low = int(np.searchsorted(kept, kept[last] - limit_s * (1 + EXACT)))
        # The operators before it must be doable by the positions that are left.
        rest_s = left * limit_s * (1 + EXACT) if left else 0.0  # a limit may be infinite
        high = min(int(np.searchsorted(self._rest_s, rest_s, side="right")) - 1, last - 1)
        if self.exactly:
            low, high = max(low, left), 0 if not left else high
        if low > high:
            return
        found = self._furthest(low, high, last, position, limit_s)
        if found is None:
            return
        yield found
        for first in range(low, high + 1):
            if first != found and self._does(Stretch(first, last, position), limit_s):
                yield first

    def _furthest(self, low: int, high: int, last: int, position: int, limit_s: float) -> int | None:
        """The first begin that does, if those behind one that does all do; None if no begin at all does."""
        step, at, failed = 1, low, low - 1
        while not self._does(Stretch(at, last, position), limit_s):
            failed = at
            if at == high:
                return next((i for i in range(high, low - 1, -1) if self._does(Stretch(i, last, position), limit_s)), None)
            at, step = min(at + step, high), step * 2
        while at - failed > 1:
            middle = (at + failed) // 2
            if self._does(Stretch(middle, last, position), limit_s):
                at = middle
            else:
                failed = middle
        return at

    def _does(self, stretch: Stretch, limit_s: float) -> bool:
        if not self.stages.known(stretch) and self.stages.asked >= self._until:
            raise _Spent
        seconds = self.stages.seconds(stretch)
        return seconds <= limit_s and seconds < float("inf")
