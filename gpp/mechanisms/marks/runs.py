"""Runs: connected operators of a stage of which nothing is held, so that they are computed again together.

What the operators of a stage make is kept, or discarded. Of a discarded operator that is a boundary, what it hands to other
operators is kept all the same. Discarded operators that hand tensors to each other, over no boundary, are a run. When the
backward first needs a storage of a run, the whole run is computed again, and its storages are freed one by one behind the
backward. Operators on which none of its saved storages depends are left out. What a run reads of operators that are not
discarded, and of boundaries, has to be there: a tensor that nobody saves is then held in addition, and counts with the operator
that makes it.

A stage runs its operators in ascending order, and autograd goes back in exactly that order, so a run is alive from the last
operator that may need one of its storages down to its first operator. Most runs follow each other, and one is alive at a time;
with a long skip connection, or a storage that two of them read, several are. While operator v is at work in the backward there
are, beyond what is kept,

    transient_bytes[v] - what the operators that follow from v have freed      (as in `gpp.graph.transients`)
    + storages of the runs that are alive, of their operators up to v
    + gradients under way past v: of tensors made before v and read after v.

A run is computed again when the gradients of what operator v makes have come, and nothing else of its backward is there yet. This
takes an operator's own transients, its storages and those before it, and tensors between them that nobody saves. Who keeps a saved
tensor is not known, its maker or one of its readers; so v is any of them that may be the first to ask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np

from gpp.cost.problem import Problem, Remembered
from gpp.cost.tensors import Moments, StageTensors
from gpp.cost.variants import running
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.marks.stage import Marks


class OpRun(NamedTuple):
    """A run, by positions of a stage's operators.

    Args:
        again: of the operators that are computed again, ascending.
        askers: of the operators whose backward may be the first to need one of its storages.
    """

    again: tuple[int, ...]
    askers: tuple[int, ...]


class Discarded(NamedTuple):
    """The effect on a stage of discarding some of its operators, in bytes per sample.

    Args:
        runs: those that are computed again at all.
        again: operators that are computed again, ascending.
        held: [operators] what each holds for each sample in flight, on the device or on the host.
        incoming: what came in, of each sample in flight.
        once, fixed: transient, as in `gpp.cost.amounts.Amounts`, for the number of samples that was asked. What leaves the stage
            and is not held is there until it is sent: for one micro-batch.
    """

    runs: tuple[OpRun, ...]
    again: tuple[int, ...]
    held: np.ndarray
    incoming: float
    once: float
    fixed: float

    def kept_and_moved(self, offload: Sequence[int]) -> tuple[float, float]:
        """Bytes of each sample in flight on the device, and on the host.

        Args:
            offload: positions of the operators that are on the host.
        """
        moved = float(self.held[list(offload)].sum())
        return self.incoming + float(self.held.sum()) - moved, moved


Computing: TypeAlias = dict[tuple[tuple[int, ...], frozenset[int]], tuple[np.ndarray, float]]
"""Positions of a run, and the boundaries among them -> bytes per sample of its storages up to each position of the stage, and the
most at a time while it is computed again."""


@final
class Runs:
    """A stage's operators for many choices of what is discarded."""

    def __init__(self, tensors: StageTensors) -> None:
        self.tensors = tensors

    def discard(
        self,
        discarded: Sequence[int],
        samples: int,
        boundaries: Sequence[int] = (),
        computing: Computing | None = None,
    ) -> Discarded:
        """The runs of some operators of the stage, and what follows from them.

        Args:
            samples: of a micro-batch on a device.
            boundaries: those of the discarded operators whose outputs stay.
            computing: what is known of runs; more is added. For whoever asks for many choices, whose runs are mostly the same ones.
        """
        gone = {self.tensors.at[op] for op in discarded}
        ends = gone & {self.tensors.at[op] for op in boundaries}
        runs, held_of, sent = self._held(gone, ends)
        slopes, asked = self._moments(runs, ends, held_of, {} if computing is None else computing)
        slope = max(self.tensors.incoming_back, float(slopes.max()), float(asked.max()))
        most = max(slope * samples, float((slopes * samples + self.tensors.fixed).max()))
        named = tuple(self.tensors.ops[i] for run in runs for i in run.again)
        once = self.tensors.outgoing_back + slope + sent
        return Discarded(tuple(runs), tuple(sorted(named)), held_of, self.tensors.incoming, once, most - slope * samples)

    def first_backward(self, gradients: np.ndarray, marks: Marks, samples: int) -> float:
        """`StageTensors.first_backward` of the stage with some marks."""
        at = self.tensors.at
        gone = {at[op] for op in marks.recompute}
        ends = gone & {at[op] for op in marks.boundaries}
        runs, held_of, sent = self._held(gone, ends)
        return self.tensors.first_backward(gradients, samples, Moments(*self._moments(runs, ends, held_of, {}), sent))

    def _held(self, gone: set[int], ends: set[int]) -> tuple[list[OpRun], np.ndarray, float]:
        """The runs, bytes per sample that each operator holds, and those that leave the stage and are not held."""
        runs = self.runs(gone, ends)
        again = {i for run in runs for i in run.again}
        held_of, sent = self.tensors.saved.copy(), 0.0
        held_of[list(gone)] = 0.0
        held_of[list(ends)] = self.tensors.handed[list(ends)]
        for made, readers, size, saved, leaves in self.tensors.tensors:
            held = (made not in gone or made in ends) and (saved or any(reader in again for reader in readers))
            if held and not saved:
                held_of[made] += size
            if leaves and not held:
                sent += size
        return runs, held_of, sent

    def _moments(
        self, runs: Sequence[OpRun], ends: set[int], held_of: np.ndarray, computing: Computing
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per sample beyond all that is held: in the backward of each operator, and when a run is computed again in it."""
        alive, asked = np.zeros(len(self.tensors.ops)), np.full(len(self.tensors.ops), -np.inf)
        for run in runs:
            own = run.again, frozenset(ends.intersection(run.again))
            if own not in computing:
                computing[own] = self._computing(*own)
            storages, most = computing[own]
            span = slice(run.again[0], max(run.askers) + 1)
            alive[span] += storages[span]
            for asker in run.askers:
                asked[asker] = max(asked[asker], most - storages[-1])
        there = self.tensors.pending + alive - self.tensors.follows @ held_of
        return there + self.tensors.transient - self.tensors.leaving, there + self.tensors.arrived + asked

    def again(self, discarded: Sequence[int], boundaries: Sequence[int] = ()) -> tuple[int, ...]:
        """The discarded operators that are computed again."""
        runs = self.runs({self.tensors.at[op] for op in discarded}, {self.tensors.at[op] for op in boundaries})
        return tuple(sorted(self.tensors.ops[i] for run in runs for i in run.again))

    def runs(self, gone: set[int], ends: set[int]) -> list[OpRun]:
        """The runs of the operators at some positions, of which some are boundaries, without those that nobody needs."""
        parent = {i: i for i in gone}
        needed = {i for i in gone if self.tensors.saved[i] > (self.tensors.handed[i] if i in ends else 0.0)}
        inner: list[tuple[int, tuple[int, ...]]] = []
        for made, readers, _, _, _ in self.tensors.tensors:
            if made in gone and made not in ends and (within := tuple(r for r in readers if r in gone)):
                inner.append((made, within))
                for reader in within:
                    parent[_root(parent, reader)] = _root(parent, made)
        # What a needed operator reads is needed; tensors in the order of their producers, the last ones first.
        for made, within in sorted(inner, reverse=True):
            if any(reader in needed for reader in within):
                needed.add(made)
        members: dict[int, list[int]] = {}
        for i in sorted(needed):
            members.setdefault(_root(parent, i), []).append(i)
        # The last one of a run keeps something, or its readers do.
        askers = {root: {again[-1]} for root, again in members.items()}
        for made, readers, _, saved, _ in self.tensors.tensors:
            if saved and made in needed and made not in ends:
                root = _root(parent, made)
                askers[root].update(reader for reader in readers if reader > members[root][-1])
        return [OpRun(tuple(again), tuple(sorted(askers[root]))) for root, again in members.items()]

    def _computing(self, ordered: tuple[int, ...], ends: frozenset[int]) -> tuple[np.ndarray, float]:
        """Bytes per sample of a run's storages up to each position, and the most at a time while it is computed again."""
        again, n = set(ordered), len(self.tensors.ops)
        own, between = np.zeros((2, n))
        own[list(ordered)] = self.tensors.saved[list(ordered)]
        # A boundary may make what it has handed on once more, and lets go of it.
        twice = [i for i in ordered if i in ends]
        own[twice] -= self.tensors.handed[twice]
        between[twice] = self.tensors.handed[twice]
        storages = np.cumsum(own)
        for made, readers, size, saved, _ in self.tensors.tensors:
            # An operator's own output is among its transients while it runs.
            if made in again and not saved and made not in ends and (reading := [r for r in readers if r in again]):
                between[made + 1 : max(reading) + 1] += size
        return storages, float((storages + self.tensors.transient + between)[list(ordered)].max())


def _root(parent: dict[int, int], i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


_RUNS = Remembered[tuple[tuple[int, ...], tuple[int, ...], int], Runs]()


def discarded(graph: OpGraph, recompute: Collection[int], degree: int) -> tuple[int, ...]:
    """The recomputed operators that declare nothing about it, ascending: their forwards run once more.

    Raises:
        InvalidPlan: the stage is split, and one of them does not declare how it is then recomputed.
    """
    found = tuple(op for op in sorted(recompute) if not any(v.degree == degree and v.recompute for v in graph.ops[op].variants))
    if found and degree > 1:
        running(graph, found[0], 0.0, 0.0, True, degree)
    return found


def runs_of(problem: Problem, ops: tuple[int, ...], declared: tuple[int, ...] = (), degree: int = 1) -> Runs:
    """The runs of a stage's operators; some are recomputed as they declare."""
    key, made = (ops, declared, degree), _RUNS.of(problem)
    if key not in made:
        tensors = problem.tensors_of(ops)
        if declared or degree > 1:
            saved = {op: running(problem.graph, op, 0.0, 0.0, op in declared, degree).saved_bytes for op in ops}
            tensors = StageTensors(problem.graph, ops, saved, problem.sums(mask_of(ops)))
        made[key] = Runs(tensors)
    return made[key]
