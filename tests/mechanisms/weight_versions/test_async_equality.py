"""Real processes against the loop of `baselines.reference.pipeline`, which shares none of the runtime's handling of versions.

Bit for bit in float64: every weight policy, with every optimizer, on a chain, a graph with a fork and a join, and a stage with two
replicas.
"""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from baselines.reference.pipeline import Pipeline, run_reference
from gpp import DoubleBuffer, Flush, PipeOptim, Stash, VerticalSync
from gpp.graph.captured import is_loss
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.mechanisms.weight_versions.corrections.delayed_momentum import DelayedMomentum
from gpp.mechanisms.weight_versions.corrections.gap_aware import GapAware
from gpp.mechanisms.weight_versions.corrections.rescheduled import Rescheduled
from gpp.mechanisms.weight_versions.corrections.spike import Spike
from gpp.optimizers import SGD, AbstractOptimizer, Adam, LearningRate, Muon, NAdam, RMSprop
from gpp.runtime.job import Job
from tests.support.asynchronous import HELD_OUT, MINIBATCH, POLICIES, make_job
from tests.support.crew import Trained, train_all
from tests.support.long import selected

pytestmark = pytest.mark.dist

OPTIMIZERS: dict[str, AbstractOptimizer] = {
    "sgd": SGD(lr=0.1, momentum=0.9),
    "adam": Adam(lr=0.01),
    "adamw": Adam(lr=0.01, weight_decay=0.1, decoupled=True),
}
MORE_OPTIMIZERS: dict[str, AbstractOptimizer] = {
    "nadam": NAdam(lr=0.01, weight_decay=0.1, decoupled=True),
    "muon": Muon(lr=0.02, weight_decay=0.1),
}
CORRECTIONS: dict[str, AbstractCorrection] = {
    "spike": Spike(),
    "rescheduled": Rescheduled(over=15),
    "momentum": DelayedMomentum(),
    "gap-aware": GapAware(),
}
SHAPES: dict[str, tuple[str, tuple[int, ...] | None, int]] = {
    "chain": ("Chain4", None, MINIBATCH),
    "fork": ("Fork", None, MINIBATCH // 2),
    "replicas": ("Chain", (1, 2, 1), MINIBATCH),
}
"""Network, devices of each stage, micro-batch."""

STEPS, OTHER_STEPS = 8, 8
COSINE = LearningRate(shape="cosine", warmup_steps=5)

SIDE_BY_SIDE = ("stash", "spectrain 2", "pipeoptim")

Case = tuple[Job, dict[str, Tensor]]


def _matrix(shape: str, policy: str, optimizer: str) -> Callable[[], Case]:
    network, replicas, size = SHAPES[shape]
    size = MINIBATCH // 4 if policy == "double buffer" else size
    # One of the three with messages through gloo's sockets, the others through shared memory.
    return partial(
        make_job,
        network,
        POLICIES[policy],
        OPTIMIZERS[optimizer],
        replicas=replicas,
        sizes=size,
        steps=STEPS,
        shared_memory=optimizer != "adam",
    )


# A chain under every optimizer where they decide what is computed; elsewhere, where what differs is who holds and sends
# what, each policy has one optimizer in turn, and the forms of one policy are alike. `test_policies_differ` reads every
# policy's chain under AdamW; each other optimizer has one policy that is no long test.
EVERY_OPTIMIZER = ("stash", "spectrain 2", "pipeoptim")
MATRIX = {
    f"{shape}, {policy}, {optimizer}": (shape, policy, optimizer)
    for at, shape in enumerate(SHAPES)
    for turn, policy in enumerate(POLICIES)
    for optimizer in (
        OPTIMIZERS
        if shape == "chain" and policy in EVERY_OPTIMIZER
        else ["adamw"]
        if shape == "chain"
        else list(OPTIMIZERS)[(at + turn) % 3 :][:1]
    )
}
SHORT = {
    "fork": ("spectrain 2",),
    "replicas": ("double buffer", "pipeoptim"),
    "chain, sgd": (),
    "chain, adam": (),
    "drains": ("pipeoptim", "pipeoptim constant"),
    "cosine": ("spectrain 2",),
    "dropout": ("stash",),
    "batch norm": ("pipeoptim",),
    "rmsprop": (),
    "plain sgd": (),
    "unequal": ("pipeoptim",),
    "clipped": ("spectrain 2",),
    "late": ("spectrain 2",),
    "corrected and predicted": ("momentum",),
    "corrected": ("spike", "gap-aware"),
    "helped": ("columns", "spectrain 2"),
    "double buffer": ("tied",),
    "vertical sync": (),
    "flush": ("last micro-batch smaller",),
    "nadam": ("pipeoptim",),
    "muon": ("spectrain 2",),
}
"""The policies of each that are no long test: each of the others holds and sends what one of them does."""


def params(names: Iterable[str]) -> list[object]:
    """Names of cases, as in `drains, stash`; the long ones are marked."""
    out: list[object] = []
    for name in names:
        what, policy, optimizer = [*name.split(", "), "", ""][:3]
        short = SHORT.get(f"{what}, {optimizer}", SHORT.get(what, (policy,)))
        out.append(name if policy in short else pytest.param(name, marks=pytest.mark.long))
    return out


def _others() -> dict[str, Callable[[], Case]]:
    """What else may go wrong: drains, a changing rate, random numbers, running statistics, unequal micro-batches."""
    sgd, adamw = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]
    plain = {"steps": OTHER_STEPS}
    drained = {**plain, "held_out": HELD_OUT, "evaluate_every": 5}
    gentle = SGD(lr=0.02, momentum=0.9)
    out: dict[str, Callable[[], Case]] = {}
    for name, policy in POLICIES.items():
        if name != "double buffer":
            out[f"drains, {name}"] = partial(make_job, "Fork", policy, adamw, **drained)
            out[f"cosine, {name}"] = partial(make_job, "Chain4", policy, SGD(lr=0.1, momentum=0.9, learning_rate=COSINE), **plain)
    for name in ("naive", "stash", "spectrain 1", "spectrain 2", "pipeoptim"):
        policy, half, quarter = POLICIES[name], MINIBATCH // 2, MINIBATCH // 4
        out[f"dropout, {name}"] = partial(make_job, "Dropping", policy, gentle, replicas=(1, 2, 1), sizes=half, **drained)
        out[f"batch norm, {name}"] = partial(make_job, "NormedBatch", policy, sgd, replicas=(2, 2), **drained)
        out[f"rmsprop, {name}"] = partial(make_job, "Chain4", policy, RMSprop(lr=0.003), **plain)
        out[f"plain sgd, {name}"] = partial(make_job, "Fork", policy, SGD(lr=0.1, momentum=0.0), sizes=quarter, **plain)
        out[f"unequal, {name}"] = partial(make_job, "Fork", policy, adamw, sizes=(4, 8, 2, 8), **drained)
        out[f"clipped, {name}"] = partial(
            make_job, "Chain4", policy, SGD(lr=0.1, momentum=0.9, clip_norm=0.2, clip_scope="stage"), **plain
        )
    for name, correction in CORRECTIONS.items():
        policy, optimizer = (
            Stash(correction=correction),
            NAdam(lr=0.01) if name == "momentum" else SGD(lr=0.02, momentum=0.9, weight_decay=0.1),
        )
        out[f"corrected, {name}"] = partial(make_job, "Chain", policy, optimizer, replicas=(1, 2, 1), **drained)
        if name != "gap-aware":
            out[f"corrected and predicted, {name}"] = partial(
                make_job, "Fork", PipeOptim(correction=correction), optimizer, **plain
            )
    for name in SIDE_BY_SIDE:
        # Stages that run side by side are late by twice the stages behind them, and by one more where their W comes later.
        out[f"late, {name}"] = partial(make_job, "Chain4", POLICIES[name], sgd, ahead=(7, 6, 3, 1), **drained)
    # A device with two stages and helpers of each kind: of a stage's reader, of a stage before, and one that only helps.
    together = {"devices": (0, 1, 1, 2), "helpers": (1, 3, 0, None)}
    out["helped, stash"] = partial(make_job, "Chain4", POLICIES["stash"], sgd, sizes=MINIBATCH // 2, **together, **drained)
    # Columns of one product on two devices and on three, on none of the stage's own; one part goes to a reader in memory.
    parts = {1: ((0, 0.25), (3, 0.3)), 2: ((3, 1.0),), 3: ((2, 0.4),)}
    out["helped, columns"] = partial(
        make_job, "Chain4", POLICIES["stash"], adamw, devices=(0, 1, 2, 1), helpers=(1, 2, 3, None), shares=parts, **drained
    )
    each = {"devices": (0, 1, 2, 3), "helpers": (1, 2, 3, None)}
    out["helped, spectrain 2"] = partial(make_job, "Fork", POLICIES["spectrain 2"], adamw, **each, **plain)
    for name in ("nadam", "muon"):
        for policy in ("stash", "pipeoptim", "spectrain 2"):
            out[f"{name}, {policy}"] = partial(make_job, "Chain4", POLICIES[policy], MORE_OPTIMIZERS[name], **plain)
    out["nadam, zero"] = partial(make_job, "Chain4", PipeOptim(future="zero"), NAdam(lr=0.01, weight_decay=0.1), **plain)
    out["double buffer, skip"] = partial(make_job, "Skip", DoubleBuffer(), adamw, sizes=2, **drained)
    out["double buffer, tied"] = partial(make_job, "Tied", DoubleBuffer(), adamw, sizes=2, replicas=(1, 2, 1), **drained)
    out["vertical sync, tied"] = partial(make_job, "Tied", VerticalSync(), sgd, replicas=(1, 2, 1), **drained)
    out["flush"] = partial(make_job, "Fork", Flush(), adamw, sizes=2, **drained)
    out["flush, last micro-batch smaller"] = partial(make_job, "Fork", Flush(), sgd, sizes=(3, 5, 8, 2), **drained)
    return out


def _rounded() -> dict[str, Callable[[], Case]]:
    """Sums over more than two devices, in whose order the backend is free."""
    clipped, settings = SGD(lr=0.1, momentum=0.9, clip_norm=0.2), {"steps": OTHER_STEPS, "held_out": HELD_OUT, "evaluate_every": 5}
    return {
        "three replicas": partial(
            make_job, "NormedBatch", Stash(), OPTIMIZERS["sgd"], replicas=(3, 1), sizes=6, minibatch_size=6, **settings
        ),
        "norm of the model": partial(make_job, "Fork", Flush(), clipped, sizes=2, **settings),
    }


def followed(job: Job, weights: dict[str, Tensor]) -> Trained:
    """What the loop in this process makes of a job, evaluations included."""
    pipeline, losses, evaluations = Pipeline(job, weights), [], []
    for first, count in pipeline.stretches():
        losses += [sum(value for name, value in results.items() if is_loss(name)) for results in pipeline.train(first, count)]
        if job.evaluation and (first + count == job.settings.steps or (first + count) % job.settings.evaluate_every == 0):
            evaluations.append({"step": first + count, **pipeline.evaluate()})
    return Trained(losses, evaluations, {k: t for state in pipeline.final_state().values() for k, t in state.items()})


OTHERS, ROUNDED = _others(), _rounded()
COMPARED = [f"chain, {policy}, adamw" for policy in POLICIES] + ["drains, pipeoptim", "drains, pipeoptim constant"]
"""What `test_policies_differ` reads."""


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> dict[str, Case]:
    """Those that tests ask for."""
    made = {name: _matrix(*words) for name, words in MATRIX.items()} | OTHERS | ROUNDED
    return {name: made[name]() for name in {*selected(request, "name"), *COMPARED}}


@pytest.fixture(scope="module")
def real(jobs: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_all(jobs, tmp_path_factory.mktemp("crew"))


def check_equal(real: Trained, loop: Trained, steps: int) -> None:
    assert len(real.losses) == steps and real.losses == loop.losses
    assert real.evaluations == loop.evaluations
    assert real.state.keys() == loop.state.keys()
    for name, tensor in real.state.items():
        assert torch.equal(tensor, loop.state[name]), name


@pytest.mark.parametrize("name", params(MATRIX))
def test_processes_compute_what_the_table_says(name: str, jobs: dict[str, Case], real: dict[str, Trained]) -> None:
    job, weights = jobs[name]
    losses, state = run_reference(job, weights)
    check_equal(real[name], Trained(losses, [], state), STEPS)
    assert losses[-1] < losses[0] and not torch.equal(next(iter(state.values())), weights[next(iter(state))])


def test_policies_differ(real: dict[str, Trained]) -> None:
    """Else their equality with the loop would prove little."""
    ends = {policy: real[f"chain, {policy}, adamw"].losses[-1] for policy in POLICIES}
    # The constant horizon is the schedule's, but where the pipeline fills, and there is no momentum yet at the start of a run.
    assert ends.pop("pipeoptim constant") == ends["pipeoptim"] and len(set(ends.values())) == len(ends)
    drained = {policy: real[f"drains, {policy}"].losses[-1] for policy in ("pipeoptim", "pipeoptim constant")}
    assert len(set(drained.values())) == 2


@pytest.mark.parametrize("name", params(OTHERS))
def test_processes_compute_what_the_table_says_elsewhere(name: str, jobs: dict[str, Case], real: dict[str, Trained]) -> None:
    """Evaluations in the middle drain the pipeline; a rate that changes within the horizon; dropout; batch norm; and so on."""
    check_equal(real[name], followed(*jobs[name]), OTHER_STEPS)


def test_delays_of_devices_that_run_side_by_side() -> None:
    plan, weights = OTHERS["late, stash"]()[0].plan, POLICIES["stash"]
    places = [plan.position(s) for s in range(4)]
    assert [weights.staleness(place) for place in places] == [6, 5, 2, 0]
    assert [weights.copies(place) for place in places] == [7, 6, 3, 1]


@pytest.mark.parametrize("name", ROUNDED)
def test_sums_over_more_than_two_devices_are_equal_up_to_rounding(
    name: str, jobs: dict[str, Case], real: dict[str, Trained]
) -> None:
    found, expected = real[name], followed(*jobs[name])
    assert found.losses == pytest.approx(expected.losses, rel=1e-11)
    assert [e["loss"] for e in found.evaluations] == pytest.approx([e["loss"] for e in expected.evaluations], rel=1e-11)
    for key, tensor in found.state.items():
        torch.testing.assert_close(tensor, expected.state[key], rtol=1e-9, atol=1e-11)
