"""Predicted weights against what the optimizer really does: exact where the rule's assumption holds, off as it says elsewhere."""

from contextlib import nullcontext

import pytest
import torch

from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.costs import Predictor, extrapolation
from gpp.mechanisms.weight_versions.on_worker.prediction import direction_kept, predictor
from gpp.optimizers import SGD, AbstractOptimizer, Adam, Muon, NAdam, RMSprop
from gpp.weights.base import WeightWork
from tests.support.moved import Moved

START, GRADIENT = 1.5, 0.7


class Run:
    """One float64 weight under an optimizer and gradients of the test's choice."""

    def __init__(self, spec: AbstractOptimizer, **options) -> None:
        self.spec, self.rule = spec, Predictor(**options)
        self.weight = torch.nn.Parameter(torch.full((3,), START, dtype=torch.float64))
        self.optimizer = spec.build([self.weight])

    def kept(self, params: list[torch.nn.Parameter]):
        keeps = extrapolation(self.spec, self.rule).kept
        return direction_kept(self.spec, self.optimizer, params) if keeps else nullcontext()

    def steps(self, count: int, gradient: float = GRADIENT) -> None:
        for _ in range(count):
            self.weight.grad = torch.full_like(self.weight, gradient)
            with self.kept([self.weight]):
                self.optimizer.step()

    def predicted(self, horizon: int) -> torch.Tensor:
        return predictor(self.spec, self.optimizer, self.rule)([self.weight], [self.spec.lr] * horizon)[0]

    def error(self, horizon: int, gradient: float = GRADIENT) -> float:
        """Of the prediction, against the steps really made."""
        guess = self.predicted(horizon)
        self.steps(horizon, gradient)
        return float((guess - self.weight.detach()).abs().max())


DECAY = 0.3
OPTIMIZERS: list[AbstractOptimizer] = [
    *(SGD(lr=0.001, momentum=u, weight_decay=decay) for u in (0.0, 0.9) for decay in (0.0, DECAY)),
    *(RMSprop(lr=1e-4, momentum=u, weight_decay=decay) for u in (0.0, 0.9) for decay in (0.0, DECAY)),
    *(Adam(lr=0.001, weight_decay=decay) for decay in (0.0, DECAY)),
    Adam(lr=0.001, weight_decay=DECAY, decoupled=True),
    *(NAdam(lr=0.001, weight_decay=decay) for decay in (0.0, DECAY)),
    NAdam(lr=0.001, weight_decay=DECAY, decoupled=True),
]
MUON = Muon(lr=0.001, weight_decay=DECAY)
RULES = [
    Predictor(),
    Predictor(decay=True),
    Predictor(nesterov=True),
    Predictor(future="zero"),
    Predictor(future="zero", decay=True),
]


@pytest.mark.parametrize("spec", [*OPTIMIZERS, MUON], ids=repr)
def test_one_update_ahead_is_the_last_step_once_more(spec: AbstractOptimizer) -> None:
    """L2 decay is a part of it, whatever the optimizer; decoupled decay is taken where the weights are, if it is asked for."""
    for decay in (False, True):
        run = Run(spec, decay=decay)
        run.steps(3, gradient=0.2)
        before = run.weight.detach().clone()
        run.steps(1)
        now = run.weight.detach().clone()
        last = now - before
        if isinstance(spec, Muon) or (isinstance(spec, Adam | NAdam) and spec.decoupled):
            last += spec.lr * spec.weight_decay * (before - (now if decay else 0.0))
        torch.testing.assert_close(run.predicted(1) - now, last, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("spec", [*OPTIMIZERS, MUON], ids=repr)
def test_predicted_steps_are_the_real_ones_where_the_gradient_repeats(spec: AbstractOptimizer, horizon: int) -> None:
    """After 300 equal gradients the momentum is full, and steps change slowly. Without its decay a step would be a tenth of it."""
    run = Run(spec, decay=True)
    run.steps(300, gradient=0.05)
    before, guess = run.weight.detach().clone(), run.predicted(horizon)
    run.steps(horizon, gradient=0.05)
    real = run.weight.detach() - before
    assert real.abs().min() > 1e-5
    torch.testing.assert_close(guess - before, real, rtol=0.06, atol=0)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
def test_predicted_steps_are_the_real_ones_where_no_gradient_comes(spec: AbstractOptimizer, horizon: int) -> None:
    """Exact for SGD; the others' second moments move meanwhile."""
    run = Run(spec, future="zero", decay=True)
    run.steps(20)
    before, guess = run.weight.detach().clone(), run.predicted(horizon)
    run.steps(horizon, gradient=0.0)
    tolerance = 1e-10 if isinstance(spec, SGD) else 0.03 if isinstance(spec, RMSprop) else 0.01
    torch.testing.assert_close(guess - before, run.weight.detach() - before, rtol=tolerance, atol=1e-15)


def test_nadam_without_gradients_is_exact_but_for_the_second_moment() -> None:
    """A second factor next to 1 keeps that as it is; the momentum's factor grows from update to update, and the rate falls."""
    for decay, decoupled in ((0.0, False), (DECAY, False), (DECAY, True)):
        run = Run(NAdam(lr=0.01, betas=(0.8, 1 - 1e-9), weight_decay=decay, decoupled=decoupled), future="zero", decay=True)
        run.steps(4)
        before, rates = run.weight.detach().clone(), [0.01, 0.004, 0.001]
        (guess,) = predictor(run.spec, run.optimizer, run.rule)([run.weight], rates)
        for rate in rates:
            run.optimizer.param_groups[0]["lr"] = rate
            run.steps(1, gradient=0.0)
        # L2 decay is a gradient, too, which adds to the second moment a little.
        tolerance = 0.05 if decay and not decoupled else 1e-6
        torch.testing.assert_close(guess - before, run.weight.detach() - before, rtol=tolerance, atol=0)


@pytest.mark.parametrize("decay", [False, True])
def test_muons_last_step_goes_on_where_no_gradient_comes(decay: bool) -> None:
    """A momentum that shrinks keeps its singular vectors, and the step has those alone (computed in bfloat16)."""
    run = Run(Muon(lr=0.01, weight_decay=DECAY if decay else 0.0), decay=True)
    run.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).sin())
    run.optimizer = run.spec.build([run.weight])
    for t in range(3):
        run.weight.grad = torch.cos(run.weight.detach() * (3 + t))
        with run.kept([run.weight]):
            run.optimizer.step()
    run.steps(1, gradient=0.0)
    before, guess = run.weight.detach().clone(), run.predicted(3)
    run.steps(3, gradient=0.0)
    real = run.weight.detach() - before
    assert (guess - before - real).norm() < 0.08 * real.norm()


def test_muon_has_no_rule_for_zero_gradients_and_says_so() -> None:
    with pytest.raises(InvalidConfig, match="future=same"):
        extrapolation(MUON, Predictor(future="zero"))


def test_the_authors_direction_has_the_last_gradient_twice() -> None:
    """u * buffer + gradient, decay included; for SGD with momentum alone."""
    run = Run(SGD(lr=0.1, momentum=0.9, weight_decay=DECAY), nesterov=True)
    run.steps(2, gradient=0.1)
    before = run.weight.detach().clone()
    run.steps(1)
    gradient, buffer = GRADIENT + DECAY * before, run.optimizer.state[run.weight]["momentum_buffer"]
    expected = run.weight.detach() - 2 * 0.1 * (0.9 * buffer + gradient)
    torch.testing.assert_close(run.predicted(2), expected, rtol=0, atol=1e-14)
    for spec in OPTIMIZERS:
        plain, other = Run(spec), Run(spec, nesterov=True)
        plain.steps(3)
        other.steps(3)
        assert torch.equal(plain.predicted(2), other.predicted(2)) != (isinstance(spec, SGD) and spec.momentum > 0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("spec", [*OPTIMIZERS, MUON], ids=repr)
def test_what_a_prediction_costs_is_what_its_operators_move_and_keep(spec: AbstractOptimizer, rule: Predictor) -> None:
    if spec is MUON and rule.future == "zero":
        pytest.skip("has no such rule")
    cost = extrapolation(spec, rule)
    run = Run(spec, future=rule.future, decay=rule.decay, nesterov=rule.nesterov)
    own = Run(spec)
    run.steps(2)
    own.weight.grad = torch.ones_like(own.weight)
    own.optimizer.step()
    size = run.weight.numel() * run.weight.element_size()
    for horizon in (1, 2, 5):
        predict = predictor(spec, run.optimizer, rule)
        with Moved() as moved:
            predict([run.weight], [spec.lr] * horizon)
        assert WeightWork(moved.bytes / size, moved.launches) == cost.of(horizon), horizon
    run.weight.grad = torch.ones_like(run.weight)
    with Moved() as moved, run.kept([run.weight]):
        pass
    assert WeightWork(moved.bytes / size, moved.launches) == cost.update

    def held(one: Run) -> int:
        return sum(t.numel() for t in one.optimizer.state[one.weight].values() if torch.is_tensor(t) and t.numel() > 1)

    assert held(run) - held(own) == cost.kept * run.weight.numel()


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


def test_rates_of_the_schedule_are_summed_up() -> None:
    run = Run(SGD(lr=0.1, momentum=0.9))
    run.steps(1)
    (out,) = predictor(run.spec, run.optimizer, Predictor())([run.weight], [0.1, 0.05, 0.0])
    buffer = run.optimizer.state[run.weight]["momentum_buffer"]
    torch.testing.assert_close(out, run.weight.detach() - 0.15 * buffer, rtol=0, atol=1e-15)


@pytest.mark.parametrize("spec", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01), RMSprop(lr=0.01)], ids=["sgd", "adam", "rmsprop"])
def test_without_an_update_or_a_horizon_it_is_a_copy(spec: AbstractOptimizer) -> None:
    run = Run(spec)
    assert torch.equal(run.predicted(3), run.weight.detach())
    run.steps(2)
    assert torch.equal(run.predicted(0), run.weight.detach())
    assert not torch.equal(run.predicted(1), run.weight.detach())


def test_an_optimizer_without_a_rule_is_refused() -> None:
    run = Run(SGD(lr=0.1, momentum=0.9))
    with pytest.raises(InvalidConfig, match="no rule to predict"):
        predictor(object(), run.optimizer, Predictor())  # type: ignore[arg-type]
