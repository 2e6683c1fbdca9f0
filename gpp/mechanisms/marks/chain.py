"""The least added seconds of a chain of operators, by a dynamic program over partial choices.

Operators are decided from the sink to the source, in the order of the backward: one that is held (kept, or on the host) comes
before a run of discarded ones, which may be empty. What a boundary hands on is held like an operator, and the boundary itself is
the first of the run behind. Let W(v) be the bytes held up to operator v, K those kept and V those on the host, e(v) what the
backward of v takes beyond what is held, storages of its run included, and h the micro-batches in flight. The peak is the largest
over all v of

    (h - 1) K + (min(h, 2) - 1) V + W(v) + e(v),

so whatever is decided further towards the source adds the same bytes to every moment that is known already. A partial choice is
thus known by the most of these moments, the bytes that it adds to moments still to come, those on the host, and its seconds. One
that is no better in any of them than another one is dropped, and so is one that cannot end within the room, or below the seconds
of a choice already found (`gpp.mechanisms.marks.prices` says so).

A stage with any mark holds nothing of what has left it, and one without marks does; so a choice without marks is none here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.problem import Remembered
from gpp.mechanisms.marks.choices import HAIR, Choices, Judged, Marking
from gpp.mechanisms.marks.prices import Prices, Segments, segments_of

BLOCK = 64
"""Partial choices that are compared with each other at a time."""

_EARLIER = np.triu(np.ones((BLOCK, BLOCK), dtype=bool), 1)

TRIES = 4
"""Rooms for which a first choice is asked."""


class _Labels(NamedTuple):
    """Partial choices, arrays of one element for each. The last operator that is decided is held, or its outputs are.

    Args:
        number: of all that were kept, in the order in which they were found.
        at: its position; the number of operators where nothing is decided yet. With `parted` that of the next one.
        behind: the choice that this one goes on from.
        host: whether that operator is on the host.
        parted: whether it is a boundary: what it hands on is held, and it is in the run that comes next.
        size: bytes per sample that it holds.
        most: the most of the moments behind it, per sample, with all bytes decided so far.
        later: bytes per sample that moments still to come have beyond what is held up to them.
        moved: bytes per sample on the host.
        seconds: of computing again.
        marked: whether any operator is marked.
    """

    number: np.ndarray
    at: np.ndarray
    behind: np.ndarray
    host: np.ndarray
    parted: np.ndarray
    size: np.ndarray
    most: np.ndarray
    later: np.ndarray
    moved: np.ndarray
    seconds: np.ndarray
    marked: np.ndarray

    def take(self, index: np.ndarray) -> _Labels:
        return _Labels(*(column[index] for column in self))

    def with_(self, other: _Labels) -> _Labels:
        return _Labels(*(np.concatenate([a, b]) for a, b in zip(self, other, strict=True)))


_SEGMENTS = Remembered[tuple[tuple[int, ...], int], Segments]()


class ChainProgram:
    """The dynamic program of one question.

    Args:
        limit: bytes that a device may hold.
        width: partial choices for each operator at most: where more than that are each best in something, those with the lowest
            bounds go on, and the result may not be the best one.
    """

    def __init__(self, choices: Choices, limit: float, width: int = 512) -> None:
        self.choices, self.limit, self.width = choices, limit, width
        known, key = _SEGMENTS.of(choices.problem), (choices.stage.ops, choices.samples)
        if key not in known:
            known[key] = segments_of(choices.tensors, choices.samples)
        self.parts = known[key]
        self.n, self.b, self.h = len(choices.stage.ops), choices.samples, choices.held
        self.copies = min(self.h, RESIDENT_COPIES)
        tensors = choices.tensors
        self.floor = max(tensors.incoming_back, 0.0)
        there = choices.keeping.static + choices.keeping.versions
        per_sample = tensors.incoming * self.h + tensors.outgoing_back
        # Bytes per sample, what is held in flight and once together.
        self.room = (limit * (1 + HAIR) - there) / self.b - per_sample
        self.moments, self.asking = (np.append(values, -np.inf) for values in (self.parts.moments, self.parts.asking))
        self.prices = Prices(choices, self.parts, self.room - max(self.floor, float(self.parts.moments[-1])))
        # For whoever holds an operator the most that any backward up to it takes beyond what is held.
        highest = np.maximum(self.parts.peaks, self.parts.moments).max(axis=0)
        ends = np.maximum(highest, self.parts.ends.max(axis=(0, 1)))
        self.highest = np.maximum.accumulate([highest, ends], axis=1)

    def solve(self, within: float = 0.0) -> Marking | None:
        """The best choice; None if none fits.

        Args:
            within: share of the seconds by which the choice may be above the least ones.
        """
        least = self.prices.solve()
        if not np.isfinite(least):
            return None
        start = self._first_fit()
        if start is not None and (np.isinf(within) or start[0] <= least * (1 + max(within, HAIR))):
            return start[1]
        found = self._search(np.inf if start is None else start[0]) or start
        return None if found is None else found[1]

    def first_fit(self) -> Judged | None:
        """A good choice that fits by the bill, whatever the form of the stage; None if prices find none."""
        if not np.isfinite(self.prices.solve()):
            return None
        found = self._first_fit()
        return None if found is None else self.choices.judge(found[1])

    def _first_fit(self) -> tuple[float, Marking] | None:
        """A choice that fits, by prices for less room than there is; seconds and choice."""
        best: tuple[float, Marking] | None = None
        capacity = self.prices.capacity
        for _ in range(TRIES):
            ends = self.prices.around(capacity)
            if ends is None:
                break
            over, under = ends
            lacking = self.choices.judge(under).peak - self.limit * (1 + HAIR)
            if lacking <= 0:
                return min((one for one in (best, *self._between(over, under)) if one is not None), default=None)
            if not np.isfinite(lacking):  # The host has no room for it.
                break
            capacity -= lacking / self.b * 1.01
        return best

    def _between(self, over: Marking, under: Marking) -> list[tuple[float, Marking]]:
        """The best choices that do as one that fits does on one side of an operator, and as one with fewer seconds on the other."""
        ops, found = self.choices.stage.ops, list[tuple[float, Marking]]()
        for late in (True, False):
            low, high = 0, self.n  # With `high` operators treated as in `under` it fits; with `low`, perhaps not.
            asked = high
            while True:
                inside = {*(ops[self.n - asked :] if late else ops[:asked])}
                pairs = zip(under, over, strict=True)
                judged = self.choices.judge(
                    Marking(*(tuple(op for op in ops if op in (a if op in inside else b)) for a, b in pairs))
                )
                if judged.fits(self.limit) and any(judged.marking):
                    found.append((judged.added_s, judged.marking))
                    high = asked
                else:
                    low = asked
                if high - low <= 1 or not found:
                    break
                asked = (low + high) // 2
        return found

    def _search(self, best: float) -> tuple[float, Marking] | None:
        """Seconds and choice below `best`, if there is one."""
        zero, no = np.zeros(1), np.zeros(1, dtype=bool)
        none, floor = np.array([-1]), np.array([self.floor])
        labels = _Labels(np.zeros(1, dtype=int), np.array([self.n]), none, no, no, zero, floor, zero, zero, zero, no)
        found = [labels]
        for i in range(self.n - 1, -1, -1):
            labels, runs = self._going_on(labels, i, best)
            new = self._held(runs, i, best)
            if len(new.at):
                first = int(found[-1].number[-1]) + 1
                found.append(new._replace(number=np.arange(first, first + len(new.at))))
                labels = labels.with_(found[-1])
        labels, runs = self._going_on(labels, -1, best)
        seconds = np.where(runs.marked, runs.seconds + self._residue_s(runs.moved), np.inf)
        if not np.isfinite(seconds).any():
            return None
        chosen = int(np.argmin(seconds))
        return float(seconds[chosen]), self._marking(found, int(labels.number[chosen]))

    def _going_on(self, labels: _Labels, i: int, best: float) -> tuple[_Labels, _Labels]:
        """The choices of which some may end in a run from position i, and these by `_before`.

        A longer run takes no less, so what does not fit, or takes too long, never will.
        """
        runs = self._before(labels, i)
        good = (runs.most <= self.room) & (runs.seconds + self._residue_s(runs.moved) < best)
        if not self.choices.recomputes:
            good &= labels.at == i + 1
        if good.all():
            return labels, runs
        index = np.flatnonzero(good)
        return labels.take(index), runs.take(index)

    def _before(self, labels: _Labels, i: int) -> _Labels:
        """The choices with all between position i and their last operator in one run, and without the link from i."""
        parts, j = self.parts, labels.at
        a, b = np.minimum(i + 1, self.n - 1), np.maximum(j - 1, 0)
        empty = i + 1 > j - 1
        needed = parts.needed[a, b] & ~empty
        behind = empty | (j == self.n)
        own = np.maximum(
            self.moments[j] + np.where(behind, 0.0, parts.tails[0, a, b]),
            self.asking[j] + np.where(behind, -np.inf, parts.tails[1, a, b]),
        )
        own = np.where(labels.parted, parts.ends[1, a, b], own) + labels.size + labels.later
        peaks = np.where(empty, -np.inf, np.where(labels.parted, parts.ends[0, a, b], parts.peaks[a, b])) + labels.later
        gone = self.prices.gone
        # What leaves a boundary counts with what it holds.
        sent = np.where(empty, 0.0, gone[j - labels.parted] - gone[i + 1])
        return labels._replace(
            most=np.maximum(np.maximum(labels.most, own), peaks) + sent,
            later=labels.later + sent,
            seconds=labels.seconds + self.prices.run_s[i + 1, j],
            marked=labels.marked | ~empty,
            size=needed.astype(float),
        )

    def _held(self, runs: _Labels, i: int, best: float) -> _Labels:
        """The choices in which operator i is the last that is held, or what it hands on.

        Args:
            runs: those with all behind it in one run, by `_before`.
        """
        parts, count = self.parts, len(runs.at)
        linked = runs.size > 0
        sent = parts.sent_kept[i] - parts.sent_links[i] * linked

        def holding(saved: float, *, host: bool = False, parted: bool = False) -> _Labels:
            copies, size = self.copies if host else self.h, saved + parts.links[i] * linked
            return runs._replace(
                at=np.full(count, i + parted),
                behind=runs.number,
                host=np.full(count, host),
                parted=np.full(count, parted),
                size=size,
                most=runs.most + (size * copies + sent),
                later=runs.later + (size * (copies - 1) + sent),
                moved=runs.moved + size * host,
                marked=runs.marked | host | parted,
            )

        new = holding(parts.saved[i])
        if self.choices.offloads and max(parts.saved[i], parts.links[i], parts.sent_kept[i]) > 0:
            new = new.with_(holding(parts.saved[i], host=True))
        new = self._best(new, i, best, parted=False)
        if self.prices.parting[i]:
            new = new.with_(self._best(holding(parts.handed[i], parted=True), i, best, parted=True))
        return new

    def _best(self, new: _Labels, i: int, best: float, *, parted: bool) -> _Labels:
        """Those of the choices down to operator i that may be part of the best one."""
        hidden = self.parts.saved[i] - self.parts.handed[i] if parted else 0.0
        there = np.maximum(new.most, self.moments[i] + hidden + new.size + new.later)
        beyond = self.prices.beyond(i, there - self.room, new.moved, parted=parted)
        bound = new.seconds + self._residue_s(new.moved) + beyond
        good = np.flatnonzero((there <= self.room) & (bound < best))
        new = new.take(good[np.argsort(bound[good], kind="stable")])
        return new.take(self._front(new, self.highest[int(parted), i]))

    def _residue_s(self, moved: np.ndarray) -> np.ndarray:
        if not self.choices.offloads:
            return np.zeros(len(moved))
        return np.where(moved <= self.choices.most_moved * (1 + HAIR), self.choices.residue_s(moved), np.inf)

    def _front(self, new: _Labels, highest: float) -> np.ndarray:
        """The choices that no other one is at least as good as in everything; ties keep the first. At most `width`."""
        columns = [new.seconds]
        if not (new.marked.all()):
            columns.append(~new.marked)
        # What moments to come can never reach, they are not compared by.
        reached = new.most - highest
        columns += [new.most, np.maximum(new.later, reached), np.maximum(new.size + new.later, reached)]
        if self.choices.offloads:
            columns.append(new.moved)
        rows, kept = np.array(columns, dtype=float), list[int]()
        front = rows[:, :0]
        for begin in range(0, rows.shape[1], BLOCK):
            block = rows[:, begin : begin + BLOCK]
            alive = np.flatnonzero(~_no_better(front, block).any(axis=0))
            block = block[:, alive]
            better = _no_better(block, block)
            # Of equal ones the first goes on.
            better &= ~better.T | _EARLIER[: len(alive), : len(alive)]
            alive = alive[~better.any(axis=0)]
            kept.extend((begin + alive).tolist())
            front = np.concatenate([front, rows[:, begin + alive]], axis=1)
            if len(kept) >= self.width:
                break
        return np.array(kept[: self.width], dtype=int)

    def _marking(self, found: list[_Labels], chosen: int) -> Marking:
        """The marks of the choice with a number."""
        at, behind, host, ended = (
            np.concatenate(columns) for columns in zip(*((one.at, one.behind, one.host, one.parted) for one in found), strict=True)
        )
        ops, begin = self.choices.stage.ops, 0
        recompute, idle, offload, boundaries = list[int](), list[int](), list[int](), list[int]()
        while chosen >= 0:
            j = int(at[chosen])
            if begin < j:
                (recompute if self.parts.needed[begin, j - 1] else idle).extend(ops[begin:j])
            if host[chosen]:
                offload.append(ops[j])
            if parted := bool(ended[chosen]):
                boundaries.append(ops[j - 1])
            chosen, begin = int(behind[chosen]), j + 1 - parted
        # Runs that nobody needs change nothing, unless they are all that is marked.
        return Marking(tuple(recompute or (() if offload else idle)), tuple(offload), tuple(boundaries))


def _no_better(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[rows, others] whether each row is at least as good as the other in every column; both are [columns, number]."""
    out = rows[0][:, None] <= others[0]
    for mine, theirs in zip(rows[1:], others[1:], strict=True):
        out &= mine[:, None] <= theirs
    return out
