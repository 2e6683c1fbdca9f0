"""The order in which workers run the samples of a mini-batch whose work differs from sample to sample (`gpp.cost.uneven`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from gpp.cost.uneven import Varying, evened, varying_shares
from gpp.runtime.job import Job
from gpp.simulate.spread import part_bounds

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def amounts_of(masks: Tensor) -> np.ndarray:
    """The amounts of samples, [samples] in 0..1, by their masks [samples, ...]."""
    return masks.reshape(len(masks), -1).double().mean(1).numpy()


@final
class EvenOrder:
    """Deals the samples of a job's mini-batches out to micro-batches of even work. Every process finds the same order.

    `amount` is the input that says how much work a sample makes; None: samples stay in their order.
    """

    def __init__(self, job: Job) -> None:
        asked = job.settings.uneven
        self.amount = asked.amount if asked is not None and asked.evened else None
        if self.amount is not None:
            varying = Varying(shares=varying_shares(job.captured, job.graph, self.amount), amount=1.0)
            self._bounds = part_bounds(job.plan, varying, job.plan.minibatch_size)

    def of(self, masks: Tensor) -> np.ndarray:
        """The order of a mini-batch, a permutation of its samples, given their masks [minibatch_size, ...]."""
        return evened(amounts_of(masks), self._bounds)
