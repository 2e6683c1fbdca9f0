"""Bytes of a stage, by what holds them: the one formula of memory, for a single stage or for arrays of stages.

Weights, their gradients, the optimizer's state and the rows of the user's inputs; copies of the weights beyond one; the
activations of every micro-batch in flight (saved tensors and what crosses the stage's boundary); what the computation of one
micro-batch takes beyond them: temporaries, gradients under way, a weight's gradient before it is added to the sum
(`gpp.graph.transients`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class StageBytes(NamedTuple):
    """Bytes on one device of a stage; numbers, or arrays of one element for each stage.

    Args:
        static: weights, gradients, optimizer's state, and rows of the user's inputs.
        versions: copies of the weights beyond one.
        microbatch: of each micro-batch in flight.
        transient: held while one micro-batch is computed.
    """

    static: Any
    versions: Any
    microbatch: Any
    transient: Any

    @property
    def resident(self) -> Any:
        """Bytes without any micro-batch in flight."""
        return self.static + self.versions + self.transient

    def peak(self, in_flight: Any) -> Any:
        """Most bytes held at a time, with so many micro-batches in flight on the device."""
        return self.resident + self.microbatch * in_flight

    def depth(self, limit_bytes: float, otherwise: Any) -> np.ndarray:
        """Micro-batches in flight that fit `limit_bytes`, as an array; 0 where not even the resident bytes do.

        A hair of rounding is allowed: a stage that fits exactly must not be lost to it.

        Args:
            otherwise: what to say where a micro-batch in flight takes no memory.
        """
        room = limit_bytes - self.resident
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.floor(room / self.microbatch + 1e-9)
        return np.where(room >= 0, np.where(self.microbatch > 0, fits, otherwise), 0)


class Amounts(NamedTuple):
    """What the bytes of a stage are made of; numbers, or arrays of one element for each stage.

    Args:
        trainable: bytes of trainable parameters, one copy.
        static: see `static_bytes`, and `rows_bytes`.
        kept: bytes for each sample in flight.
        once: bytes for each sample of one micro-batch.
        fixed: bytes while one micro-batch is computed, at any number of samples.
    """

    trainable: Any
    static: Any
    kept: Any
    once: Any
    fixed: Any

    def held(self, samples: Any, copies: int) -> StageBytes:
        """The bytes with so many samples of a micro-batch on the device, and so many copies of the weights."""
        return StageBytes(
            self.static, self.trainable * (copies - 1) if copies > 1 else 0.0, self.kept * samples, self.once * samples + self.fixed
        )

    def take(self, index: Any) -> Amounts:
        """Those of some stages, where the amounts are arrays."""
        return Amounts(*(amount[index] for amount in self))


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
