"""The operators of a stage and the tensors between them: what each holds, and what is under way while its backward goes back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.sums import SetSums
from gpp.graph.transients import gradients_waiting, shared_weights


class Moments(NamedTuple):
    """The bytes per sample beyond all that is held in a stage's backward.

    Args:
        slopes: [operators] in the backward of each.
        asked: [operators] when what was let go of is made again in it; minus infinity where nothing is.
        sent: of what leaves the stage and is not held.
    """

    slopes: np.ndarray
    asked: np.ndarray
    sent: float


class StageTensors:
    """The operators of a stage and the tensors between them.

    Args:
        ops: ascending.
        saved: operator -> bytes per sample that it makes and holds.
        sums: of the stage.
    """

    def __init__(self, graph: OpGraph, ops: Sequence[int], saved: Mapping[int, float], sums: SetSums) -> None:
        self.ops = tuple(ops)
        self.at = {op: i for i, op in enumerate(self.ops)}
        n, at, inside = len(self.ops), self.at, mask_of(self.ops)
        self.incoming, self.incoming_back, self.outgoing_back = sums.incoming, sums.incoming_back, sums.outgoing_back
        self.saved = np.array([saved[op] for op in self.ops])
        self.transient = np.array([graph.ops[op].transient_bytes for op in self.ops])
        members = np.zeros((1, graph.num_ops), bool)
        members[0, list(self.ops)] = True
        waiting = gradients_waiting(shared_weights(graph), members)[0]
        self.fixed = np.array([graph.ops[op].fixed_bytes + waiting[op] for op in self.ops])
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

    def first_backward(self, gradients: np.ndarray, samples: int, moments: Moments | None = None) -> float:
        """The most bytes beyond all that is held, in a backward that begins without sums of gradients and makes them.

        Args:
            gradients: [operators] bytes of the sums that each one's backward makes.
            samples: of a micro-batch on a device.
            moments: of a stage that does not hold everything; None: of one that does.
        """
        if moments is None:
            nothing = np.full(len(self.ops), -np.inf)
            moments = Moments(self.transient - self.leaving - self.follows @ self.saved, nothing, 0.0)
        slopes, asked, sent = moments
        made = np.cumsum(gradients[::-1])[::-1]
        # What would be added to a sum is the sum; the rest of the fixed bytes comes beside it.
        own = slopes * samples + made + np.maximum(self.fixed - gradients, 0.0)
        when_asked = asked * samples + made - gradients
        most = max(float(own.max()), float(when_asked.max()), self.incoming_back * samples + float(made[0]))
        return (self.outgoing_back + sent) * samples + most
