"""The least added seconds of a chain of operators by a dynamic program over partial choices.

Operators are decided from the source to the sink: one that is held (kept, or on the host) follows a run of discarded ones, which
may be empty. A partial choice is known by the bytes held so far, the bytes that count for the final peak, those on the host, the
most that its backward takes so far, and its seconds. One that is no better in any of them than another one is dropped, and so is
one that cannot fit, or cannot end below the seconds of a choice already found.

A stage with any mark holds nothing of what has left it, and one without marks does; so a choice without marks is none here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.memory.choices import HAIR, Choices, Marking
from gpp.memory.segments import Segments, segments_of

NARROW = 6
"""Partial choices for each operator in the search for a first good choice."""

WIDE = 512
"""Partial choices for each operator in the search for the best one: where more than that are each best in something, those with the
least seconds go on, and the result may not be the best one."""


class _Labels(NamedTuple):
    """Partial choices, arrays of one element for each. The last operator that is decided is held.

    Args:
        at: its position; -1 where nothing is decided yet.
        before: the choice that this one goes on from.
        host: whether that operator is on the host.
        held, final, moved: bytes per sample: held so far, counted in the final peak beyond those held once, on the host.
        most: [2, .] the most during the backward so far, without the last operator's own.
        own: [2, .] what its own backward takes, which grows if it holds more for a run behind it.
        seconds: of computing again.
        marked: whether any operator is marked.
    """

    at: np.ndarray
    before: np.ndarray
    host: np.ndarray
    held: np.ndarray
    final: np.ndarray
    moved: np.ndarray
    most: np.ndarray
    own: np.ndarray
    seconds: np.ndarray
    marked: np.ndarray

    def take(self, index: np.ndarray) -> _Labels:
        return _Labels(*(column[..., index] for column in self))

    def with_(self, other: _Labels) -> _Labels:
        return _Labels(*(np.concatenate([a, b], axis=-1) for a, b in zip(self, other, strict=True)))


class ChainProgram:
    """The dynamic program of one question.

    Args:
        limit: bytes that a device may hold.
    """

    def __init__(self, choices: Choices, limit: float) -> None:
        self.choices = choices
        key = "segments", choices.stage.ops
        bills = choices.problem.bills
        if key not in bills:
            bills[key] = segments_of(choices.tensors)
        self.parts: Segments = bills[key]
        self.n, self.b, self.h = len(choices.stage.ops), choices.samples, choices.held
        self.copies = min(self.h, RESIDENT_COPIES)
        tensors = choices.tensors
        self.floor = max(tensors.incoming_back, 0.0)
        there = choices.keeping.static + choices.keeping.versions
        per_sample = tensors.incoming * self.h + tensors.outgoing_back
        self.room = limit * (1 + HAIR) - there - per_sample * self.b
        self.again_s = np.concatenate([[0.0], np.cumsum(choices.slowest_s)])
        self.gone = np.concatenate([[0.0], np.cumsum(self.parts.sent_gone)])
        self.behind = np.concatenate([np.cumsum(self.parts.saved[::-1])[::-1], [0.0]])
        self._bounds()

    def _bounds(self) -> None:
        """For each position the least seconds for so many bytes less in the final peak by the operators from there on."""
        saved, seconds = self.parts.saved, self.choices.slowest_s
        spared = saved * self.h
        order = np.flatnonzero(saved > 0) if self.choices.recomputes else np.arange(0)
        order = order[np.argsort(seconds[order] / spared[order], kind="stable")]
        self.rate = np.inf
        if self.choices.offloads:
            self.rate = self.choices.per_moved_s / (self.h - self.copies)
            order = order[seconds[order] / spared[order] <= self.rate]
        later = order[None, :] >= np.arange(self.n + 1)[:, None]
        zero = np.zeros((self.n + 1, 1))
        self.less = np.concatenate([zero, np.cumsum(later * spared[order], axis=1)], axis=1)
        self.costs = np.concatenate([zero, np.cumsum(later * seconds[order], axis=1)], axis=1)

    def solve(self) -> Marking | None:
        """The best choice; None if none fits."""
        best, found = np.inf, None
        for width in (NARROW, WIDE):
            tried = self._search(width, best)
            if tried is not None:
                best, found = tried
        return found

    def _search(self, width: int, best: float) -> tuple[float, Marking] | None:
        """Seconds and choice below `best`, if there is one."""
        none = np.full((2, 1), -np.inf)
        zero = np.zeros(1)
        labels = _Labels(np.array([-1]), np.array([-1]), np.zeros(1, bool), zero, zero, zero, none, none, zero, np.zeros(1, bool))
        for j in range(self.n):
            new = self._held(labels, j, best, width)
            if len(new.at):
                labels = labels.with_(new)
        ends = self._behind(labels, self.n)
        total = self._total(ends)
        seconds = ends.seconds + self._residue_s(ends.moved)
        good = (total <= self.room) & (seconds < best) & ends.marked
        if not self.choices.recomputes:
            good &= labels.at == self.n - 1
        if not good.any():
            return None
        chosen = int(np.flatnonzero(good)[np.argmin(seconds[good])])
        return float(seconds[chosen]), self._marking(labels, chosen)

    def _behind(self, labels: _Labels, j: int) -> _Labels:
        """The choices with all between their last operator and position j in one run."""
        parts, i = self.parts, labels.at
        a, b = np.minimum(i + 1, self.n - 1), np.maximum(j - 1, 0)
        empty = i + 1 > j - 1
        needed = parts.needed[a, b] & ~empty
        first = i < 0
        link = np.where(needed & ~first, parts.links[i], 0.0)
        sent = np.where(empty, 0.0, self.gone[j] - self.gone[i + 1]) - np.where(needed & ~first, parts.sent_links[i], 0.0)
        held = labels.held + link
        peaks = np.where(empty, -np.inf, parts.peaks[:, a, b]) + held
        return labels._replace(
            held=held,
            final=labels.final + sent + link * np.where(labels.host, self.copies - 1, self.h - 1),
            moved=labels.moved + link * labels.host,
            most=np.maximum(np.maximum(labels.most, labels.own + link), peaks),
            own=np.where(empty | (j == self.n), 0.0, parts.tails[a, b])[None, :] + np.zeros((2, 1)),
            seconds=labels.seconds + np.where(needed, self.again_s[parts.again[a, b]] - self.again_s[a], 0.0),
            marked=labels.marked | ~empty,
        )

    def _held(self, labels: _Labels, j: int, best: float, width: int) -> _Labels:
        """The choices in which operator j is the last that is held."""
        index = np.arange(len(labels.at)) if self.choices.recomputes else np.flatnonzero(labels.at == j - 1)
        runs = self._behind(labels.take(index), j)
        size, out = self.parts.saved[j], []
        moves = max(size, self.parts.links[j], self.parts.sent_kept[j]) > 0
        ways = [False, True] if self.choices.offloads and moves else [False]
        for host in ways:
            held = runs.held + size
            out.append(
                runs._replace(
                    at=np.full(len(index), j),
                    before=index,
                    host=np.full(len(index), host),
                    held=held,
                    final=runs.final + size * ((self.copies if host else self.h) - 1) + self.parts.sent_kept[j],
                    moved=runs.moved + size * host,
                    own=runs.own + held + self.parts.moments[:, j : j + 1],
                    marked=runs.marked | host,
                )
            )
        new = out[0] if len(out) == 1 else out[0].with_(out[1])
        bound = self._bound_s(new, j)
        good = np.flatnonzero((self._total(new, self.parts.sent_links[j]) <= self.room) & (bound < best))
        new = new.take(good[np.argsort(bound[good], kind="stable")])
        return new.take(self._front(new, j, width))

    def _total(self, labels: _Labels, less: float = 0.0) -> np.ndarray:
        """Bytes beyond `there`, at least, whatever follows; `less` may still be taken from the final ones."""
        most = np.maximum(np.maximum(labels.most, labels.own), labels.held + self.floor)
        return (labels.final - less) * self.b + most[0] * (self.b - 1) + most[1]

    def _residue_s(self, moved: np.ndarray) -> np.ndarray:
        if not self.choices.offloads:
            return np.zeros(len(moved))
        return np.where(moved <= self.choices.most_moved * (1 + HAIR), self.choices.residue_s(moved), np.inf)

    def _bound_s(self, labels: _Labels, j: int) -> np.ndarray:
        """Seconds that each choice takes at least in the end."""
        rest = self.behind[j + 1]
        need = labels.final + labels.held - self.parts.sent_links[j] + rest * self.h + self.floor - self.room / self.b
        own = labels.seconds + self._residue_s(labels.moved)
        capacity = self.less[j + 1, -1]
        if self.choices.offloads:
            hidden = np.clip(self.choices.hidden - labels.moved, 0.0, rest)
            need = need - hidden * (self.h - self.copies)
            beyond = np.maximum(need - capacity, 0.0) * self.rate
        else:
            beyond = np.where(need > capacity * (1 + HAIR) + HAIR, np.inf, 0.0)
        return own + np.interp(need, self.less[j + 1], self.costs[j + 1]) + beyond

    def _front(self, new: _Labels, j: int, width: int) -> np.ndarray:
        """The choices that no other one is at least as good as in everything; ties keep the first. At most `width`."""
        link = self.parts.links[j]
        columns = [new.seconds, new.final, new.held, new.most[1], new.own[1], ~new.marked]
        if self.b > 1 and (self.parts.moments[0] != self.parts.moments[1]).any():
            columns += [new.most[0], new.own[0]]
        if self.choices.offloads:
            columns.append(new.moved)
            if link > 0:
                # What the next run needs of this operator counts elsewhere: such choices are not compared.
                columns += [new.host, ~new.host]
        if link <= 0:
            columns[3] = np.maximum(columns[3], columns[4])
        rows, kept = np.array(columns, dtype=float).T, []
        front = np.zeros((0, rows.shape[1]))
        for begin in range(0, len(rows), 128):
            block = rows[begin : begin + 128]
            alive = np.arange(len(block))
            if len(front):
                alive = alive[~(front[None, :, :] <= block[:, None, :]).all(axis=2).any(axis=1)]
            block = block[alive]
            better = (block[None, :, :] <= block[:, None, :]).all(axis=2)
            same = better & better.T
            beaten = (better & ~same).any(axis=1) | np.tril(same, -1).any(axis=1)
            kept.extend((begin + alive[~beaten]).tolist())
            front = np.concatenate([front, block[~beaten]])
            if len(kept) >= width:
                break
        return np.array(kept[:width], dtype=int)

    def _marking(self, labels: _Labels, chosen: int) -> Marking:
        ops, recompute, idle, offload = self.choices.stage.ops, list[int](), list[int](), list[int]()
        end = self.n
        while chosen >= 0:
            i = int(labels.at[chosen])
            if i + 1 < end:
                (recompute if self.parts.needed[i + 1, end - 1] else idle).extend(ops[i + 1 : end])
            if labels.host[chosen]:
                offload.append(ops[i])
            chosen, end = int(labels.before[chosen]), i
        # Runs that nobody needs change nothing, unless they are all that is marked.
        return Marking(tuple(sorted(recompute or (() if offload else idle))), tuple(sorted(offload)))
