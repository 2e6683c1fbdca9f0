"""Corrections of late gradients against their formulas, written down once more for one number at a time.

Every stage of the network holds one weight w and the loss w^2 / 2, so its gradient is the weight that the forward used.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baselines.reference.pipeline import run_reference
from baselines.reference.stage import Table, advance
from gpp import Flush, PipeMare, PipeOptim, Stash
from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.mechanisms.weight_versions.corrections.delayed_momentum import DelayedMomentum
from gpp.mechanisms.weight_versions.corrections.gap_aware import GapAware
from gpp.mechanisms.weight_versions.corrections.rescheduled import Rescheduled
from gpp.mechanisms.weight_versions.corrections.spike import Spike
from gpp.optimizers import SGD, AbstractOptimizer, Adam, NAdam
from gpp.weights.base import AbstractWeights, PipelinePosition
from tests.support.asynchronous import MINIBATCH, make_job

DEPTH, STEPS, LR, U, DECAY = 4, 30, 0.02, 0.8, 0.1
SGDM = SGD(lr=LR, momentum=U, weight_decay=DECAY)

Step = Callable[[list[float], int, int], float]
"""(the weight after each update so far, delay, update) -> the weight after the next."""


def plain(w: list[float], delay: int, t: int, v: list[float], *, rate: float = LR, u: float = U, damped: float = 1.0) -> float:
    """SGD with momentum, coupled decay and a late gradient; `v` holds the momentum."""
    v[0] = u * v[0] + w[max(t - delay, 0)] * damped + DECAY * w[t]
    return w[t] - rate * v[0]


def spiked(w: list[float], delay: int, t: int, v: list[float]) -> float:
    gradient = w[max(t - delay, 0)] + DECAY * w[t]
    v[0] = U * v[0] + gradient
    return w[t] - LR * (U**delay * v[0] + (1 - U**delay) / (1 - U) * gradient)


def rescheduled(w: list[float], delay: int, t: int, v: list[float]) -> float:
    share = 1 - min(t / 20, 1)
    return plain(w, delay, t, v, rate=LR / delay**share if delay else LR)


def delayed_momentum(w: list[float], delay: int, t: int, v: list[float]) -> float:
    return plain(w, delay, t, v, u=U + delay * (0.99 - U) / DEPTH)


def gap_aware(w: list[float], delay: int, t: int, v: list[float]) -> float:
    if not t or not delay:
        return plain(w, delay, t, v)
    weights = [0.9 ** (t - 1 - j) * 0.1 for j in range(t)]
    usual = math.sqrt(sum(weight * (w[j + 1] - w[j]) ** 2 for j, weight in enumerate(weights)) / (1 - 0.9**t))
    return plain(w, delay, t, v, damped=1 / (1 + abs(w[t] - w[max(t - delay, 0)]) / (usual + 1e-8)))


CORRECTIONS: dict[str, tuple[AbstractCorrection | None, Callable[..., float]]] = {
    "none": (None, plain),
    "spike": (Spike(), spiked),
    "rescheduled": (Rescheduled(over=20), rescheduled),
    "delayed momentum": (DelayedMomentum(), delayed_momentum),
    "gap-aware": (GapAware(memory=0.9), gap_aware),
}


def ends(correction: AbstractCorrection | None) -> list[float]:
    """The final weight of each stage."""
    _, state = run_reference(*make_job("Springs", Stash(correction=correction), SGDM, steps=STEPS, sizes=MINIBATCH))
    return [state[f"s{k}.w"].item() for k in range(DEPTH)]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_its_formula(name: str) -> None:
    correction, step = CORRECTIONS[name]
    expected = []
    for k in range(DEPTH):
        w, v = [1.0], [0.0]
        for t in range(STEPS):
            w.append(step(w, DEPTH - 1 - k, t, v))
        expected.append(w[-1])
    found = ends(correction)
    assert found == pytest.approx(expected, rel=1e-12)
    if correction:
        # Stages whose gradients are not late go on as they are, and those of a delay of 1 where a power of it is the factor.
        same = 2 if name == "rescheduled" else 1
        assert [a == b for a, b in zip(found, ends(None), strict=True)] == [False] * (DEPTH - same) + [True] * same


def test_spikes_make_up_for_the_momentum_that_was_missed() -> None:
    """Over all later steps a gradient counts 1 / (1 - u) times, whatever the delay: D steps at once, the rest by and by."""
    for delay in (1, 3, 9):
        found = Spike().direction(U, delay)
        assert found.gradient + found.momentum / (1 - U) == pytest.approx(1 / (1 - U))


@pytest.mark.parametrize(
    ("policy", "optimizer", "size", "rule"),
    [
        (Stash(correction=Spike()), Adam(lr=0.01), MINIBATCH, "SGD with momentum"),
        (Stash(correction=Spike()), SGD(lr=0.1, momentum=0.0), MINIBATCH, "SGD with momentum"),
        (Stash(correction=DelayedMomentum()), SGD(lr=0.1, momentum=0.0), MINIBATCH, "raises the momentum"),
        (PipeOptim(correction=GapAware()), SGDM, MINIBATCH, "the weights of the forward"),
        (Stash(correction=GapAware()), SGDM, MINIBATCH // 2, "sum over 2 micro-batches"),
    ],
)
def test_a_correction_without_what_it_needs_is_refused(
    policy: AbstractWeights, optimizer: AbstractOptimizer, size: int, rule: str
) -> None:
    with pytest.raises(InvalidConfig, match=rule) as caught:
        make_job("Chain4", policy, optimizer, sizes=size)
    assert caught.value.field == "strategy.weights.correction"


def test_nothing_is_corrected_where_nothing_is_late() -> None:
    first, last = PipelinePosition(warmup=3, depth=4), PipelinePosition(warmup=0, depth=4)
    policy = Stash(correction=DelayedMomentum())
    assert policy.corrects(first) is policy.correction and policy.corrects(last) is None
    spec = NAdam(lr=0.01, betas=(0.9, 0.99))
    assert policy.optimizer_at(spec, last) == spec == Flush().optimizer_at(spec, first)
    assert policy.optimizer_at(spec, first) == replace(spec, betas=(0.9 + 3 * (0.99 - 0.9) / 4, 0.99))


def test_pipemare_goes_back_along_a_running_mean_of_updates() -> None:
    """Equal updates lead back to the very weights of the forward; others by the formula."""
    policy, position = PipeMare(discrepancy=0.2), PipelinePosition(warmup=3, depth=4)
    weight, spec = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64)), SGD(lr=0.1, momentum=0.0)
    optimizer = spec.build([weight])
    table = Table(policy, position, [weight], optimizer=optimizer, spec=spec, rate=lambda update: spec.lr)
    table.begin(0, 1000)
    assert torch.equal(table.backward()[0], weight.detach())
    drift, memory = 0.0, 0.2 ** (1 / 3)
    for t in range(100):
        gradient = 2.0 if t > 3 else math.cos(t)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        drift = memory * drift + (1 - memory) * -0.1 * gradient
        advance(table, spec.lr)
        table.updated()
        assert table.backward()[0].item() == pytest.approx(weight.item() - 3 * drift, rel=1e-12)
    assert table.backward()[0].item() == pytest.approx(weight.item() + 3 * 0.1 * 2.0, rel=1e-12)
