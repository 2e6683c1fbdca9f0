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

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.sums import SetSums


class Run(NamedTuple):
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

    runs: tuple[Run, ...]
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


class StageTensors:
    """The operators of a stage and the tensors between them, for many choices of what is discarded.

    Args:
        ops: ascending.
        saved: operator -> bytes per sample that it makes and holds if it is not discarded.
        sums: of the stage.
    """

    def __init__(self, graph: OpGraph, ops: Sequence[int], saved: Mapping[int, float], sums: SetSums) -> None:
        self.ops = tuple(ops)
        self.at = {op: i for i, op in enumerate(self.ops)}
        n, at, inside = len(self.ops), self.at, mask_of(self.ops)
        self.incoming, self.incoming_back, self.outgoing_back = sums.incoming, sums.incoming_back, sums.outgoing_back
        self.saved = np.array([saved[op] for op in self.ops])
        self.transient = np.array([graph.ops[op].transient_bytes for op in self.ops])
        self.fixed = np.array([graph.ops[op].fixed_bytes for op in self.ops])
        # Of what each holds, what it hands to others; there is more where an operator declares that it is computed again.
        self.handed = np.zeros(n)
        self.follows = np.zeros((n, n))  # [v, w]: whether w follows from v
        for i, op in enumerate(self.ops):
            self.follows[i, [at[w] for w in bits(graph.descendants[op] & inside)]] = 1
        # Gradients under way past each operator, those that leave with the stage's outputs, and those of what it makes.
        self.pending, self.leaving, self.arrived = np.zeros((3, n))
        # Of each tensor made inside: producer, readers inside, bytes, whether anybody saves it, whether it leaves.
        self.tensors: list[tuple[int, tuple[int, ...], float, bool, bool]] = []
        for index in graph.touching(inside):
            tensor = graph.tensors[index]
            size, readers = tensor.bytes_per_sample, tuple(at[c] for c in tensor.consumers if c in at)
            made = at.get(tensor.producer, -1)
            if tensor.differentiable and readers:
                self.pending[made + 1 : max(readers)] += size
            if made < 0:
                continue
            leaves = len(readers) < len(tensor.consumers)
            self.handed[made] += size if tensor.saved else 0.0
            self.arrived[made] += size if tensor.differentiable and readers else 0.0
            self.tensors.append((made, readers, size, tensor.saved, leaves))
            if leaves and tensor.differentiable and not tensor.saved:
                self.leaving[made] += size
        self.handed = np.minimum(self.handed, self.saved)

    @cached_property
    def alike(self) -> bytes:
        """A digest that tells stages apart which differ in more than the names of their operators."""
        digest = hashlib.blake2b(repr((self.tensors, self.incoming, self.incoming_back, self.outgoing_back)).encode())
        for column in (self.saved, self.transient, self.fixed, self.pending, self.leaving, self.arrived, self.handed, self.follows):
            digest.update(column.tobytes())
        return digest.digest()

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
        gone = {self.at[op] for op in discarded}
        ends = gone & {self.at[op] for op in boundaries}
        runs, held_of, sent = self._held(gone, ends)
        slopes, asked = self._moments(runs, ends, held_of, {} if computing is None else computing)
        slope = max(self.incoming_back, float(slopes.max()), float(asked.max()))
        most = max(slope * samples, float((slopes * samples + self.fixed).max()))
        named = tuple(self.ops[i] for run in runs for i in run.again)
        once = self.outgoing_back + slope + sent
        return Discarded(tuple(runs), tuple(sorted(named)), held_of, self.incoming, once, most - slope * samples)

    def first_backward(
        self,
        gradients: np.ndarray,
        discarded: Sequence[int],
        offload: Sequence[int],
        samples: int,
        boundaries: Sequence[int],
    ) -> float:
        """The most bytes beyond all that is held, in a backward that begins without sums of gradients and makes them.

        Args:
            gradients: [operators] bytes of the sums that each one's backward makes.
            discarded, offload, samples, boundaries: as in `discard`.
        """
        gone = {self.at[op] for op in discarded}
        ends = gone & {self.at[op] for op in boundaries}
        if gone or offload:
            runs, held_of, sent = self._held(gone, ends)
            slopes, asked = self._moments(runs, ends, held_of, {})
        else:
            slopes, asked, sent = self.transient - self.leaving - self.follows @ self.saved, np.full(len(self.ops), -np.inf), 0.0
        made = np.cumsum(gradients[::-1])[::-1]
        # What would be added to a sum is the sum; the rest of the fixed bytes comes beside it.
        own = slopes * samples + made + np.maximum(self.fixed - gradients, 0.0)
        when_asked = asked * samples + made - gradients
        most = max(float(own.max()), float(when_asked.max()), self.incoming_back * samples + float(made[0]))
        return (self.outgoing_back + sent) * samples + most

    def _held(self, gone: set[int], ends: set[int]) -> tuple[list[Run], np.ndarray, float]:
        """The runs, bytes per sample that each operator holds, and those that leave the stage and are not held."""
        runs = self.runs(gone, ends)
        again = {i for run in runs for i in run.again}
        held_of, sent = self.saved.copy(), 0.0
        held_of[list(gone)] = 0.0
        held_of[list(ends)] = self.handed[list(ends)]
        for made, readers, size, saved, leaves in self.tensors:
            held = (made not in gone or made in ends) and (saved or any(reader in again for reader in readers))
            if held and not saved:
                held_of[made] += size
            if leaves and not held:
                sent += size
        return runs, held_of, sent

    def _moments(
        self, runs: Sequence[Run], ends: set[int], held_of: np.ndarray, computing: Computing
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per sample beyond all that is held: in the backward of each operator, and when a run is computed again in it."""
        alive, asked = np.zeros(len(self.ops)), np.full(len(self.ops), -np.inf)
        for run in runs:
            own = run.again, frozenset(ends.intersection(run.again))
            if own not in computing:
                computing[own] = self._computing(*own)
            storages, most = computing[own]
            span = slice(run.again[0], max(run.askers) + 1)
            alive[span] += storages[span]
            for asker in run.askers:
                asked[asker] = max(asked[asker], most - storages[-1])
        there = self.pending + alive - self.follows @ held_of
        return there + self.transient - self.leaving, there + self.arrived + asked

    def again(self, discarded: Sequence[int], boundaries: Sequence[int] = ()) -> tuple[int, ...]:
        """The discarded operators that are computed again."""
        runs = self.runs({self.at[op] for op in discarded}, {self.at[op] for op in boundaries})
        return tuple(sorted(self.ops[i] for run in runs for i in run.again))

    def runs(self, gone: set[int], ends: set[int]) -> list[Run]:
        """The runs of the operators at some positions, of which some are boundaries, without those that nobody needs."""
        parent = {i: i for i in gone}
        needed = {i for i in gone if self.saved[i] > (self.handed[i] if i in ends else 0.0)}
        inner: list[tuple[int, tuple[int, ...]]] = []
        for made, readers, _, _, _ in self.tensors:
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
        for made, readers, _, saved, _ in self.tensors:
            if saved and made in needed and made not in ends:
                root = _root(parent, made)
                askers[root].update(reader for reader in readers if reader > members[root][-1])
        return [Run(tuple(again), tuple(sorted(askers[root]))) for root, again in members.items()]

    def _computing(self, ordered: tuple[int, ...], ends: frozenset[int]) -> tuple[np.ndarray, float]:
        """Bytes per sample of a run's storages up to each position, and the most at a time while it is computed again."""
        again, n = set(ordered), len(self.ops)
        own, between = np.zeros((2, n))
        own[list(ordered)] = self.saved[list(ordered)]
        # A boundary may make what it has handed on once more, and lets go of it.
        twice = [i for i in ordered if i in ends]
        own[twice] -= self.handed[twice]
        between[twice] = self.handed[twice]
        storages = np.cumsum(own)
        for made, readers, size, saved, _ in self.tensors:
            # An operator's own output is among its transients while it runs.
            if made in again and not saved and made not in ends and (reading := [r for r in readers if r in again]):
                between[made + 1 : max(reading) + 1] += size
        return storages, float((storages + self.transient + between)[list(ordered)].max())


def _root(parent: dict[int, int], i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i
