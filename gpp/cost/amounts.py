"""Bytes of a stage, by what holds them: the one formula of memory, for a single stage or for arrays of stages.

Weights, their gradients, the optimizer's state and the rows of the user's inputs; copies of the weights beyond one; the
activations of every micro-batch in flight (saved tensors and what crosses the stage's boundary); what the computation of one
micro-batch takes beyond them: temporaries, gradients under way, a weight's gradient before it is added to the sum
(`gpp.graph.transients`). An update takes bytes as well (`AbstractOptimizer.update_factors`): no pass runs meanwhile, and no
micro-batch is in flight where the pipeline drains. What is copied to the host between forward and backward is on the device for
two micro-batches at most: for the one that goes, and for the one that comes or is in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gpp.graph.op_graph import Param
from gpp.graph.transients import larger

RESIDENT_COPIES = 2
"""Micro-batches whose copied bytes a device holds at a time: of one that goes to the host, and of one that has come back."""


class StageBytes(NamedTuple):
    """Bytes on one device of a stage; numbers, or arrays of one element for each stage.

    Args:
        static: weights, gradients, optimizer's state, and rows of the user's inputs.
        versions: copies of the weights beyond one.
        microbatch: held for each micro-batch in flight.
        transient: held while one micro-batch is computed.
        moved: held for each micro-batch whose copy to the host is not done yet, or has come back: `RESIDENT_COPIES` at most.
        late: held for each micro-batch until the gradients of the weights are made, where a backward leaves them for later.
        waiting: of `transient`, what may be there while another stage of the device computes: messages that wait for their pass.
        update: taken by an update for itself, while no micro-batch is computed.
        drains: whether no micro-batch is in flight then.
    """

    static: Any
    versions: Any
    microbatch: Any
    transient: Any
    moved: Any = 0.0
    late: Any = 0.0
    waiting: Any = 0.0
    update: Any = 0.0
    drains: Any = True

    @property
    def resident(self) -> Any:
        """Bytes without any micro-batch in flight."""
        return self.static + self.versions + self.transient

    @property
    def passing(self) -> Any:
        """Bytes that are there while the stage itself computes, and at no other time."""
        return self.transient - self.waiting

    def settled(self, in_flight: Any) -> StageBytes:
        """The bytes of a stage that has so many micro-batches in flight at most: what its update takes is transient, too."""
        if _surely_none(self.update):
            return self
        more = self.update - self.microbatch * in_flight if self.drains else self.update
        return self._replace(transient=larger(more, self.transient), update=0.0)

    def peak(self, in_flight: Any, late: int = 0) -> Any:
        """Most bytes held at a time, with so many micro-batches in flight on the device, and so many held late beside them."""
        if not _surely_none(self.update):
            return self.settled(in_flight).peak(in_flight, late)
        held = self.resident + self.microbatch * in_flight
        if late:
            held = held + self.late * late
        if _surely_none(self.moved):
            return held
        copies = min(in_flight, RESIDENT_COPIES) if isinstance(in_flight, int) else np.minimum(in_flight, RESIDENT_COPIES)
        return held + self.moved * copies

    def depth(self, limit_bytes: float, otherwise: Any) -> np.ndarray:
        """Micro-batches in flight that fit `limit_bytes`, as an array; 0 where not even the resident bytes do.

        A hair of rounding is allowed: a stage that fits exactly must not be lost to it.

        Args:
            otherwise: what to say where a micro-batch in flight takes no memory.
        """
        if not _surely_none(self.update):
            alone = self.settled(0)
            passes = self._replace(update=0.0) if self.drains else alone
            return np.where(alone.resident <= limit_bytes, passes.depth(limit_bytes, otherwise), 0)
        room = limit_bytes - self.resident
        if _surely_none(self.moved):
            return np.where(room >= 0, self._times(room, otherwise), 0)
        # With so many in flight all copies are resident; with fewer each micro-batch brings its own.
        many = self._times(room - RESIDENT_COPIES * self.moved, otherwise)
        few = self._replace(microbatch=self.microbatch + self.moved)._times(room, RESIDENT_COPIES)
        return np.where(room >= 0, np.where(many >= RESIDENT_COPIES, many, np.minimum(few, RESIDENT_COPIES)), 0)

    def _times(self, room: Any, otherwise: Any) -> np.ndarray:
        """The number of micro-batches whose bytes fit into so many bytes."""
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.floor(room / self.microbatch + 1e-9)
        return np.where(self.microbatch > 0, fits, otherwise)


def _surely_none(amount: Any) -> bool:
    """Whether an amount is the number 0. It does not walk over arrays."""
    return isinstance(amount, float) and not amount


class Params(NamedTuple):
    """Bytes of the parameters that a stage reads, each counted once: numbers, or arrays of one element for each stage.

    Args:
        trainable, frozen: one copy.
        narrow: of the frozen ones, copies of others in the type of the passes, which every version of the weights has.
        largest: the trainable parameter with most bytes.
    """

    trainable: Any
    frozen: Any
    narrow: Any = 0.0
    largest: Any = 0.0

    @classmethod
    def of(cls, params: Iterable[Param]) -> Params:
        """Of some parameters, as numbers."""
        trainable = frozen = narrow = largest = 0.0
        for param in params:
            trainable += param.num_bytes * param.trainable
            frozen += param.num_bytes * (not param.trainable)
            narrow += param.num_bytes * bool(param.copy_of)
            largest = max(largest, param.num_bytes * param.trainable)
        return cls(trainable, frozen, narrow, largest)

    def beside(self, other: Params) -> Params:
        """Those of stages that read both, none of them twice."""
        *sums, _ = (own + more for own, more in zip(self, other, strict=True))
        return Params(*sums, largest=np.maximum(self.largest, other.largest))

    def times(self, share: Any) -> Params:
        """The same share of each."""
        return Params(*(own * share for own in self))


class Amounts(NamedTuple):
    """The parts of a stage's bytes: numbers, or arrays of one element for each stage.

    Args:
        trainable: bytes of trainable parameters, one copy.
        version: bytes of one version of the weights.
        static: weights, a gradient for each trained one, the optimizer's state, and rows of the user's inputs (`rows_bytes`).
        kept: bytes for each sample in flight.
        once: bytes for each sample of one micro-batch.
        fixed: bytes while one micro-batch is computed, at any number of samples.
        moved: bytes for each sample that go to the host and come back.
        late: bytes for each sample that a backward which leaves gradients of weights for later holds until then.
        waiting: of `once`, bytes for each sample of messages that may wait while another stage of the device computes.
        update, drains: as in `StageBytes`.
    """

    trainable: Any
    version: Any
    static: Any
    kept: Any
    once: Any
    fixed: Any
    moved: Any = 0.0
    late: Any = 0.0
    waiting: Any = 0.0
    update: Any = 0.0
    drains: Any = True

    def held(self, samples: Any, copies: int) -> StageBytes:
        """The bytes with so many samples of a micro-batch on the device, and so many copies of the weights."""
        return StageBytes(
            self.static,
            self.version * (copies - 1) if copies > 1 else 0.0,
            self.kept * samples,
            self.once * samples + self.fixed,
            self.moved * samples,
            self.late * samples,
            self.waiting * samples,
            self.update,
            self.drains,
        )

    def buffered(self, buffers: int, rows: Any) -> Amounts:
        """The amounts of a stage that has forwards alone: it holds nothing between passes but messages.

        A pass takes its messages, those that come in and those that it sends, beside its rows and its temporaries; every edge has
        room for some more.

        Args:
            buffers: messages for which an edge has room.
            rows: bytes per sample of the user inputs that the stage reads.
        """
        return self._replace(kept=0.0 * self.kept, once=self.once + rows + (1 + buffers) * self.kept, late=0.0, waiting=0.0)

    def take(self, index: Any) -> Amounts:
        """The amounts of some stages, where they are arrays."""
        return Amounts(*(amount[index] if np.ndim(amount) else amount for amount in self))


MINIBATCHES = 2
"""Mini-batches whose rows a device holds: the one that it computes, and the next, which it fetches while it waits."""


def rows_bytes(rows: Any, minibatch_size: int) -> Any:
    """Bytes of user inputs and targets.

    Args:
        rows: bytes per sample of those that a stage reads.
    """
    return MINIBATCHES * minibatch_size * rows
