"""The equality matrix: gradients, losses and weights of every shape of pipeline under every schedule equal one device's.

The reference is plain PyTorch on whole mini-batches in float64; with dropout it is the plan's own stages in one process and
one autograd graph, under the same seeding rule.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.runtime.job import Job
from tests.support.long import thinned
from tests.support.one_device import equals_one_device
from tests.support.staged import SCHEDULES, job_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and how its submodules s0, s1, ... are run.

    Args:
        sizes: micro-batch of each stage, or of all.
        replicas: devices of each stage.
        where: devices of each stage, instead of devices of their own.
        round_robin: replicas take whole micro-batches in turn.
    """

    network: str
    sizes: int | tuple[int, ...] = 4
    replicas: tuple[int, ...] | None = None
    where: tuple[tuple[int, ...], ...] | None = None
    chain: bool = False
    round_robin: bool = False

    def job(self, schedule: str, **more: Any) -> tuple[Job, dict[str, Tensor]]:
        """As `staged.job_of` has it."""
        order, k = SCHEDULES[schedule]
        sharing, own = IN_TURN if self.round_robin else None, {"sizes": self.sizes, "replicas": self.replicas, "where": self.where}
        return job_of(self.network, order, k=k, chain=self.chain, sharing=sharing, **own, **more)


CASES = {
    "chain": Case(network="Chain"),
    # In DeepSpeed 0.19.2 (deepspeedai/DeepSpeed#8152) each stage divided what it got by the number of micro-batches: gradients at
    # distance d to the last stage were M^d times too small. In torchtitan (#1733) the gradients of earlier steps were divided again
    # with every step that was accumulated. The losses looked right in both.
    "one micro-batch": Case(network="Chain4", sizes=16),
    "eight micro-batches": Case(network="Chain4", sizes=2),
    "fork and join": Case(network="Fork"),
    "fork and join as a chain": Case(network="Fork", chain=True),
    "skip over two stages": Case(network="Skip"),
    "three outputs": Case(network="ThreeOutputs"),
    "two sources": Case(network="TwoSources"),
    "two sinks": Case(network="TwoSinks"),
    "two losses": Case(network="TwoLosses"),
    "tied weights": Case(network="Tied"),
    "tied weights, replicas": Case(network="Tied", replicas=(2, 1, 3)),
    "frozen tower": Case(network="Frozen"),
    "frozen tower, replicas": Case(network="Frozen", replicas=(2, 1, 2, 1)),
    "frozen tower in a chain": Case(network="Frozen", chain=True),
    "frozen stage with a skip": Case(network="FrozenSkip"),
    "integer inputs": Case(network="Integers"),
    "boolean edge": Case(network="Masking"),
    "transposed edge": Case(network="Turned"),
    "unequal micro-batches": Case(network="Skip", sizes=(2, 8, 4, 16)),
    "unequal replicas": Case(network="Fork", sizes=8, replicas=(2, 3, 1, 2)),
    "two stages on a device": Case(network="Skip", where=((0,), (1,), (0,), (1,))),
    "two stages on replicated devices": Case(network="Fork", where=((0, 1), (1,), (2,), (0, 2))),
    "tied weights on one device": Case(network="Tied", where=((0,), (1,), (0,))),
    "dropout": Case(network="Dropping", sizes=(4, 8, 4), replicas=(1, 2, 1)),
    "dropout, two stages on a device": Case(network="Dropping", where=((0,), (1,), (0,))),
    "in turn, fork and join": Case(network="Fork", sizes=2, replicas=(2, 4, 1, 2), round_robin=True),
    "in turn, unequal micro-batches": Case(network="Skip", sizes=(2, 8, 4, 1), replicas=(2, 2, 4, 1), round_robin=True),
    "in turn, more replicas than samples": Case(network="Chain", sizes=1, replicas=(1, 4, 2), round_robin=True),
    "in turn, tied weights": Case(network="Tied", replicas=(2, 1, 4), round_robin=True),
    "in turn, frozen tower": Case(network="Frozen", replicas=(2, 1, 2, 1), round_robin=True),
    "in turn, dropout": Case(network="Dropping", sizes=(4, 8, 4), replicas=(1, 2, 1), round_robin=True),
    "in turn, two stages on replicated devices": Case(network="Fork", where=((0, 1), (1,), (2,), (0, 2)), round_robin=True),
    "in turn, last micro-batch smaller": Case(network="TwoSinks", sizes=(3, 5, 3), replicas=(3, 2, 2), round_robin=True),
    "last micro-batch smaller": Case(network="Skip", sizes=(3, 5, 7, 6)),
    "last micro-batch smaller than its replicas": Case(network="TwoSinks", sizes=(5, 5, 3), replicas=(2, 3, 1)),
}


# Each case once, under one schedule after the other; the others are long.
@pytest.mark.parametrize(
    ("name", "schedule"),
    thinned([(name, [*SCHEDULES][(turn + more) % 3]) for turn, name in enumerate(CASES) for more in range(3)], 3),
)
def test_gradients_and_weights_equal_one_device(name: str, schedule: str, tmp_path: Path) -> None:
    equals_one_device(*CASES[name].job(schedule), tmp_path, gradients_within=1e-12)


def test_batch_norm_of_whole_mini_batches_is_that_of_one_device(tmp_path: Path) -> None:
    equals_one_device(*Case(network="NormedBatch", sizes=16).job("1F1B"), tmp_path)
