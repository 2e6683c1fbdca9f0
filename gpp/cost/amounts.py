"""Bytes of a stage, by what holds them: the one formula of memory, for a single stage or for arrays of stages.

Weights, their gradients, the optimizer's state and the rows of the user's inputs; copies of the weights beyond one; the
activations of every micro-batch in flight (saved tensors and what crosses the stage's boundary); what the computation of one
micro-batch takes beyond them: temporaries, gradients under way, a weight's gradient before it is added to the sum
(`gpp.graph.transients`). What is copied to the host between forward and backward is on the device for two micro-batches at
most: for the one that goes, and for the one that comes or is in use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    """

    static: Any
    versions: Any
    microbatch: Any
    transient: Any
    moved: Any = 0.0
    late: Any = 0.0
    waiting: Any = 0.0

    @property
    def resident(self) -> Any:
        """Bytes without any micro-batch in flight."""
        return self.static + self.versions + self.transient

    @property
    def passing(self) -> Any:
        """Bytes that are there while the stage itself computes, and at no other time."""
        return self.transient - self.waiting

    def peak(self, in_flight: Any, late: int = 0) -> Any:
        """Most bytes held at a time, with so many micro-batches in flight on the device, and so many held late beside them."""
        held = self.resident + self.microbatch * in_flight
        if late:
            held = held + self.late * late
        if self._moves_nothing:
            return held
        copies = min(in_flight, RESIDENT_COPIES) if isinstance(in_flight, int) else np.minimum(in_flight, RESIDENT_COPIES)
        return held + self.moved * copies

    @property
    def _moves_nothing(self) -> bool:
        """Whether surely nothing goes to the host. It does not walk over arrays."""
        return isinstance(self.moved, float) and not self.moved

    def depth(self, limit_bytes: float, otherwise: Any) -> np.ndarray:
        """Micro-batches in flight that fit `limit_bytes`, as an array; 0 where not even the resident bytes do.

        A hair of rounding is allowed: a stage that fits exactly must not be lost to it.

        Args:
            otherwise: what to say where a micro-batch in flight takes no memory.
        """
        room = limit_bytes - self.resident
        if self._moves_nothing:
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


class Amounts(NamedTuple):
    """The parts of a stage's bytes: numbers, or arrays of one element for each stage.

    Args:
        trainable: bytes of trainable parameters, one copy.
        static: see `static_bytes`, and `rows_bytes`.
        kept: bytes for each sample in flight.
        once: bytes for each sample of one micro-batch.
        fixed: bytes while one micro-batch is computed, at any number of samples.
        moved: bytes for each sample that go to the host and come back.
        late: bytes for each sample that a backward which leaves gradients of weights for later holds until then.
        waiting: of `once`, bytes for each sample of messages that may wait while another stage of the device computes.
    """

    trainable: Any
    static: Any
    kept: Any
    once: Any
    fixed: Any
    moved: Any = 0.0
    late: Any = 0.0
    waiting: Any = 0.0

    def held(self, samples: Any, copies: int) -> StageBytes:
        """The bytes with so many samples of a micro-batch on the device, and so many copies of the weights."""
        return StageBytes(
            self.static,
            self.trainable * (copies - 1) if copies > 1 else 0.0,
            self.kept * samples,
            self.once * samples + self.fixed,
            self.moved * samples,
            self.late * samples,
            self.waiting * samples,
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


def static_bytes(trainable: Any, frozen: Any, state_factor: float) -> Any:
    """Bytes that do not depend on the batch: weights, a gradient for each trained one, and the optimizer's state."""
    return trainable * (2.0 + state_factor) + frozen
