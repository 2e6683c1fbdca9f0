"""The equality matrix: gradients, losses and weights of every shape of pipeline under every schedule equal one device's.

The reference is plain PyTorch on whole mini-batches in float64; with dropout it is the plan's own stages in one process and
one autograd graph, under the same seeding rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from gpp.cost.problem import Problem
from gpp.graph.captured import Captured
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.staged import DATA, MINIBATCH, SCHEDULES, captured, parts_of, problem_of

STEPS = 2
OPTIMIZER = SGD(lr=0.3, momentum=0.9)


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


CASES = {
    "chain": Case(network="Chain"),
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


def plan_of(case: Case, found: Captured, schedule: AbstractSchedule, k: int) -> tuple[Problem, Plan]:
    masks = parts_of(found.graph)
    counts = [len(devices) for devices in case.where] if case.where else list(case.replicas or [1] * len(masks))
    num_devices = 1 + max(d for devices in case.where for d in devices) if case.where else sum(counts)
    problem = problem_of(found, schedule, num_devices)
    parts = list(zip(masks, counts, strict=True))
    sizes = case.sizes if isinstance(case.sizes, int) else list(case.sizes)
    return problem, make_plan(
        problem,
        "test",
        parts,
        sizes,
        k=k,
        ordered=True,
        placement=case.where,
        chain=case.chain,
        sharing=IN_TURN if case.round_robin else None,
    )


@pytest.mark.parametrize(("name", "schedule"), thinned(product(CASES, SCHEDULES), 3))
def test_gradients_and_weights_equal_one_device(name: str, schedule: str, tmp_path: Path) -> None:
    case, (order, k) = CASES[name], SCHEDULES[schedule]
    model, found, weights = captured(case.network)
    problem, plan = plan_of(case, found, order, k)
    job = inprocess.make_job(found, problem, plan, order, model=model, data=DATA, optimizer=OPTIMIZER, steps=STEPS, dtype="float64")
    with inprocess.recorded_gradients() as gradients:
        losses, state, workers = inprocess.run(job, tmp_path, weights)
        if case.network == "Dropping":
            expected, params = inprocess.staged_reference(job, model, DATA, weights)
        else:
            expected, params = inprocess.reference(
                model, DATA, OPTIMIZER, weights, steps=STEPS, minibatch_size=MINIBATCH, dtype="float64"
            )
        inprocess.check_gradients(workers, params, gradients, steps=STEPS)
        assert all(g.abs().max() > 1e-6 for tensor in params.values() for g in gradients(tensor)), "nothing to compare"
    assert losses == pytest.approx(expected, abs=1e-9)
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8, msg=lambda m, n=tensor_name: f"{n}: {m}")
