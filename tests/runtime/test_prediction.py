"""Predicted weights against what the optimizer really does: exact where the rule's assumption holds, off as it says elsewhere."""

from __future__ import annotations

import pytest
import torch

from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, RMSprop
from gpp.runtime.worker.weights.prediction import keep_direction, predictor
from gpp.weights.base import Predictor

START, GRADIENT = 1.5, 0.7


class Run:
    """One float64 weight under an optimizer and gradients of the test's choice."""

    def __init__(self, spec: AbstractOptimizer) -> None:
        self.spec = spec
        self.weight = torch.nn.Parameter(torch.full((3,), START, dtype=torch.float64))
        self.optimizer = spec.build([self.weight])

    def steps(self, count: int, gradient: float = GRADIENT) -> None:
        for _ in range(count):
            self.weight.grad = torch.full_like(self.weight, gradient)
            self.optimizer.step()
            if not self.spec.keeps_direction:
                keep_direction(self.spec, self.optimizer, [self.weight])

    def predicted(self, horizon: int, **options) -> torch.Tensor:
        out = torch.empty_like(self.weight, requires_grad=False)
        predictor(self.spec, self.optimizer, Predictor(**options))([out], [self.weight], [self.spec.lr] * horizon)
        return out

    def error(self, horizon: int, gradient: float = GRADIENT, **options) -> float:
        """Of the prediction, against the steps really made."""
        guess = self.predicted(horizon, **options)
        self.steps(horizon, gradient)
        return float((guess - self.weight.detach()).abs().max())


@pytest.mark.parametrize("done", [1, 2, 5, 40])
@pytest.mark.parametrize("horizon", [1, 3, 7])
def test_adam_with_a_constant_gradient_is_exact(done: int, horizon: int) -> None:
    run = Run(Adam(lr=0.01))
    run.steps(done)
    assert run.error(horizon) < 1e-8  # eps is all that differs


@pytest.mark.parametrize(("done", "horizon"), [(3, 3), (1, 5), (10, 2)])
def test_momentum_with_a_constant_gradient_is_off_by_the_closed_form(done: int, horizon: int) -> None:
    lr, u = 0.1, 0.9
    run = Run(SGD(lr=lr, momentum=u))
    run.steps(done)
    guess = run.predicted(horizon)
    run.steps(horizon)
    off = lr * GRADIENT * u**done / (1 - u) * (horizon - u * (1 - u**horizon) / (1 - u))
    torch.testing.assert_close(guess - run.weight.detach(), torch.full((3,), off, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    if (done, horizon) == (3, 3):
        assert off == pytest.approx(0.2862783, abs=1e-7)


@pytest.mark.parametrize("spec", [SGD(lr=0.1), Adam(lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("horizon", [1, 4])
def test_momentum_that_runs_out_is_exact_without_gradients(spec: AbstractOptimizer, horizon: int) -> None:
    run = Run(spec)
    run.steps(5)
    exact = run.error(horizon, gradient=0.0, future="zero")
    # Adam's second moment decays meanwhile, which the rule leaves out.
    assert exact < (1e-14 if isinstance(spec, SGD) else 1e-4)
    other = Run(spec)
    other.steps(5)
    assert other.error(horizon, gradient=0.0) > 10 * exact


@pytest.mark.parametrize("horizon", [1, 3, 6])
def test_decoupled_decay_is_part_of_the_prediction_if_asked(horizon: int) -> None:
    spec = Adam(lr=0.05, weight_decay=0.3, decoupled=True)
    run, plain = Run(spec), Run(spec)
    run.steps(4)
    plain.steps(4)
    assert run.error(horizon, decay=True) < 1e-8
    assert plain.error(horizon) > 1e-3


def test_rmsprop_goes_on_along_its_last_direction() -> None:
    run = Run(RMSprop(lr=0.01))
    run.steps(200)  # by then the mean square is that of the gradient
    assert run.error(4) < 1e-3
    with_momentum = Run(RMSprop(lr=0.01, momentum=0.9))
    with_momentum.steps(300)
    assert with_momentum.error(4) < 1e-2
    sgd = Run(SGD(lr=0.1, momentum=0.0))
    sgd.steps(2)
    assert sgd.error(5) < 1e-14


def test_rates_of_the_schedule_are_summed_up() -> None:
    run = Run(SGD(lr=0.1))
    run.steps(1)
    out = torch.empty(3, dtype=torch.float64)
    predictor(run.spec, run.optimizer, Predictor())([out], [run.weight], [0.1, 0.05, 0.0])
    buffer = run.optimizer.state[run.weight]["momentum_buffer"]
    torch.testing.assert_close(out, run.weight.detach() - 0.15 * buffer, rtol=0, atol=1e-15)


@pytest.mark.parametrize("spec", [SGD(lr=0.1), Adam(lr=0.01), RMSprop(lr=0.01)], ids=["sgd", "adam", "rmsprop"])
def test_without_an_update_or_a_horizon_it_is_a_copy(spec: AbstractOptimizer) -> None:
    run = Run(spec)
    assert torch.equal(run.predicted(3), run.weight.detach())
    run.steps(2)
    assert torch.equal(run.predicted(0), run.weight.detach())
    assert not torch.equal(run.predicted(1), run.weight.detach())


def test_an_optimizer_without_a_rule_is_refused() -> None:
    run = Run(SGD(lr=0.1))
    with pytest.raises(InvalidConfig, match="no rule to predict"):
        predictor(object(), run.optimizer, Predictor())  # type: ignore[arg-type]
