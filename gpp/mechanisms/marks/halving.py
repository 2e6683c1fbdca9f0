"""Binary partitioning: the stages are halved, and one cut is sought between the halves, again and again.

Of a stretch of operators and k stages that stand in a row, T(half) is the time of a half with everything kept, for each of its
stages, and R(half) what its best partition takes beyond that. Where the cut that shares T in proportion to the stages lets both
halves keep everything, it is taken, or one beside it: cuts are whole operators. Else T + R of the left half rises with the cut and
that of the right one falls, so the best cut is where they meet: at the cut of equal T the half with more R is slower, at the cut of
equal R the one with more T. It lies between these two cuts. Where a cut of equal R is not to be had, or nothing fits between the
two, the bracket is widened until a cut that fits is inside.

What was seen is remembered by stretch and positions, and nothing slower than the best so far is searched. R is that of the half's
balanced cuts, so that the bracket costs k bills for each step of a bisection.

Complexity: at most `CUTS` cuts of each stretch that is met, each a bill in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.mechanisms.marks.fitted import FittedStages, Stretch

CUTS = 12
"""Cuts of a bracket that are tried, spread evenly over wider ones."""

BESIDE = 2
"""Cuts beside the bracket's ends that are tried too."""


class _LinePart(NamedTuple):
    """Operators first .. last - 1, for the stages at positions `low` .. `high` from the sink."""

    first: int
    last: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1


class Halving:
    """The search of one order.

    Args:
        stages: its number of stages is given, or all numbers up to the devices are tried, the largest first.
    """

    proven = False

    def __init__(self, stages: FittedStages) -> None:
        self.stages = stages
        self._best: dict[_LinePart, tuple[float, tuple[Stretch, ...]]] = {}
        self._above: dict[_LinePart, float] = {}
        self._added: dict[_LinePart, float] = {}
        self._prefix_s = stages.fastest_s

    def solve(self, below_s: float = float("inf")) -> tuple[float, list[Stretch]] | None:
        """Seconds of the slowest stage, and the stages in order; None if nothing below `below_s` is found."""
        best: tuple[float, list[Stretch]] | None = None
        most = self.stages.most
        for count in (most,) if self.stages.depth is not None else range(most, 0, -1):
            found = self._solve(_LinePart(0, self.stages.n, 1, count), below_s)
            if found is not None:
                below_s, best = found[0], (found[0], list(found[1]))
        return best

    def _solve(self, part: _LinePart, below_s: float) -> tuple[float, tuple[Stretch, ...]] | None:
        """The best that is found of a part, if it is below `below_s`."""
        if part in self._best:
            found = self._best[part]
            return found if found[0] < below_s else None
        if part.last - part.first < part.size or max(self._kept_s(part), self._above.get(part, 0.0)) >= below_s:
            return None
        if part.size == 1:
            stretch = Stretch(part.first, part.last, part.low)
            self._best[part] = self.stages.seconds(stretch), (stretch,)
            return self._solve(part, below_s)
        found = self._halved(part, below_s)
        if found is None:
            self._above[part] = max(below_s, self._above.get(part, 0.0))
        else:
            self._best[part] = found
        return found

    def _halved(self, part: _LinePart, below_s: float) -> tuple[float, tuple[Stretch, ...]] | None:
        balanced = self._balanced(part)
        left, right = self._halves(part, balanced)
        keeps = self._added_s(left) == self._added_s(right) == 0.0
        evened = balanced if keeps else self._evened(part)
        ends = (balanced, balanced if evened is None else evened)
        low, high, step = min(ends) - BESIDE, max(ends) + BESIDE, 1
        # Both halves have an operator for each of their stages.
        first, last = part.first + left.size, part.last - right.size
        best, best_s, tried = None, below_s, set[int]()
        while True:
            for cut in self._spread(max(low, first), min(high, last), balanced):
                if cut not in tried:
                    tried.add(cut)
                    found = self._at(part, cut, best_s)
                    if found is not None:
                        best, best_s = found, found[0]
            if best is not None or (low <= first and high >= last):
                return best
            low, high, step = low - step, high + step, 2 * step

    def _halves(self, part: _LinePart, cut: int) -> tuple[_LinePart, _LinePart]:
        """The stages before a cut, which stand farther from the sink, and those behind it; of an odd number the former are more."""
        near = part.low + part.size // 2
        return _LinePart(part.first, cut, near, part.high), _LinePart(cut, part.last, part.low, near - 1)

    def _balanced(self, part: _LinePart) -> int:
        """The cut that shares the time with everything kept in proportion to the stages."""
        near = part.size // 2
        prefix, far = self._prefix_s, part.size - near
        wanted = prefix[part.first] + (prefix[part.last] - prefix[part.first]) * far / part.size
        cut = int(np.searchsorted(prefix, wanted))
        if cut > part.first and wanted - prefix[cut - 1] < prefix[min(cut, part.last)] - wanted:
            cut -= 1
        return min(max(cut, part.first + far), part.last - near)

    def _added_s(self, part: _LinePart) -> float:
        """The most seconds that a stage takes beyond its operators' own where all its cuts are balanced; infinite if one does not
        fit."""
        if part not in self._added:
            if part.last - part.first < part.size:
                self._added[part] = float("inf")
            elif part.size == 1:
                stretch = Stretch(part.first, part.last, part.low)
                self._added[part] = self.stages.seconds(stretch) - self.stages.kept_s(stretch)
            else:
                self._added[part] = max(map(self._added_s, self._halves(part, self._balanced(part))))
        return self._added[part]

    def _evened(self, part: _LinePart) -> int | None:
        """The cut from which on the left half has more added seconds than the right one; None where neither half fits."""
        left, right = self._halves(part, self._balanced(part))
        low, high = part.first + left.size, part.last - right.size
        while low < high:
            middle = (low + high) // 2
            left, right = (self._added_s(half) for half in self._halves(part, middle))
            if left == right == float("inf"):
                return None
            if left > right:
                high = middle
            else:
                low = middle + 1
        return low

    @staticmethod
    def _spread(low: int, high: int, around: int) -> list[int]:
        """Cuts of a bracket, those near the balanced one first."""
        count = min(high - low + 1, CUTS)
        cuts = {int(cut) for cut in np.linspace(low, high, count).round()} if count > 0 else set[int]()
        return sorted(cuts, key=lambda cut: (abs(cut - around), cut))

    def _kept_s(self, part: _LinePart) -> float:
        """Seconds of each stage if everything were kept and all were equally busy."""
        return float(self._prefix_s[part.last] - self._prefix_s[part.first]) / part.size

    def _at(self, part: _LinePart, cut: int, below_s: float) -> tuple[float, tuple[Stretch, ...]] | None:
        """The best with a cut, if it is below `below_s`."""
        found = []
        # The half that is slower with everything kept says no sooner.
        halves = self._halves(part, cut)
        for half in sorted(halves, key=self._kept_s, reverse=True):
            one = self._solve(half, below_s)
            if one is None:
                return None
            found.append(one)
        stretches = sorted(stretch for _, chain in found for stretch in chain)
        return max(seconds for seconds, _ in found), tuple(stretches)
