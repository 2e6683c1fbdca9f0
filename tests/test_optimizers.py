"""What an optimizer says of itself is what torch's does."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from gpp import Stash
from gpp.app.optimizer_factory import ByFactory, optimizer_of
from gpp.capture import profiler
from gpp.cost.regime import Regime
from gpp.cost.stage import StageCost
from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, AroundSteps, Muon, NAdam, RMSprop
from gpp.runtime.job import describe, restore
from gpp.runtime.torch_optimizer import TorchOptimizer
from gpp.runtime.worker.allocator import MemoryEvents, states, storage_bytes
from gpp.stage import Stage
from tests.support import inprocess

OPTIMIZERS = [
    SGD(lr=0.1, momentum=0.0),
    SGD(lr=0.1, momentum=0.9),
    Adam(lr=0.1),
    Adam(lr=0.1, decoupled=True),
    RMSprop(lr=0.1),
    RMSprop(lr=0.1, momentum=0.9),
    NAdam(lr=0.1),
    Muon(lr=0.1),
]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (SGD, torch.optim.SGD),
        (Adam, torch.optim.Adam),
        (RMSprop, torch.optim.RMSprop),
        (NAdam, torch.optim.NAdam),
        (Muon, torch.optim.Muon),
    ],
)
def test_defaults_are_torchs(ours: type[AbstractOptimizer], torchs: type[torch.optim.Optimizer]) -> None:
    """Momentum, betas, eps, weight decay, Nesterov and all else but the rate, which has no default, and the kernels."""
    weight, kernels = torch.nn.Parameter(torch.ones(2, 2)), {"lr", "fused", "foreach"}
    made, theirs = ours(lr=0.1).build([weight]).param_groups[0], torchs([weight]).param_groups[0]  # pyright: ignore
    differing = {name: (made.get(name), value) for name, value in theirs.items() if name not in kernels | {"params"}}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    # None is torch's word for the original rule.
    assert differing in ({}, {"adjust_lr_fn": ("original", None)})


class Clamped(torch.optim.AdamW):
    """Keeps the weights of a group below its own setting, which its constructor does not take."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.clamp_(max=group.get("upper"), min=-1.0)
        return found


def test_a_worker_s_optimizer_has_what_its_groups_were_given_beyond_the_settings_of_the_class() -> None:
    model = torch.nn.Linear(2, 3)
    own = Clamped([{"params": [model.weight], "upper": 0.1, "name": "clamped"}, {"params": [model.bias]}], lr=0.01)
    torch.optim.lr_scheduler.StepLR(own, 1)
    found, _ = optimizer_of(own, model)
    assert isinstance(found, TorchOptimizer)
    copy = torch.nn.Linear(2, 3)
    copy.load_state_dict(model.state_dict())
    made = found.build_named(copy.named_parameters())
    for one, optimizer in ((model, own), (copy, made)):
        one(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
    assert torch.equal(copy.weight, model.weight) and copy.weight.max() <= 0.1 and torch.equal(copy.bias, model.bias)
    found.build([torch.nn.Parameter(torch.ones(2))])
    own.param_groups[0]["upper"] = len
    with pytest.raises(InvalidConfig, match="Clamped: has settings that are no plain numbers or words"):
        optimizer_of(own, model)


def kinds(of: type[AbstractOptimizer] = AbstractOptimizer) -> set[str]:
    """Names of all classes of optimizers that can be made; a class with slots is there twice."""
    found = {name for sub in of.__subclasses__() for name in ({sub.__name__} | kinds(sub))}
    return {name for name in found if not name.startswith("Abstract")}


def test_every_optimizer_keeps_the_whole_contract_also_as_a_worker_reads_it() -> None:
    """What the rest of the program may ask of an optimizer: its public names, each of which must be there whatever the class."""
    asked = ByFactory(factory=torch.optim.AdamW, clip_norm=0.5, clip_scope="stage", log_gradient_norm=True, shard="replicas")
    found, _ = optimizer_of(asked, torch.nn.Linear(2, 3))
    made = [*OPTIMIZERS, found]
    assert {type(one).__name__ for one in made} == kinds()
    names = [name for name in dir(AbstractOptimizer) if not name.startswith("_")]
    for one in (*made, *(restore(describe(one)) for one in made)):
        for name in (*names, *(field.name for field in fields(AbstractOptimizer))):
            getattr(one, name)
        assert (one.norm_for is not None) == (one.clips_model or one.log_gradient_norm)
    for setting in fields(AroundSteps):
        assert getattr(found, setting.name) == getattr(asked, setting.name)


def test_a_torch_optimizer_is_what_measured_times_of_updates_are_kept_by() -> None:
    model = torch.nn.Linear(2, 3)
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    every = (adamw, partial(adamw, foreach=True), sgd, partial(sgd, momentum=0.9), partial(sgd, momentum=0.5), partial(sgd, lr=0.2))
    assert len({optimizer_of(cls, model)[0].kind for cls in every}) == 4
    assert Adam(lr=0.1).kind == Adam(lr=0.2).kind != Adam(lr=0.1, weight_decay=0.1).kind


def test_a_worker_takes_a_parameter_that_is_in_no_group_for_a_defect() -> None:
    found, _ = optimizer_of(torch.optim.SGD, torch.nn.Linear(2, 3))
    assert isinstance(found, TorchOptimizer)
    with pytest.raises(InvalidConfig, match="has no group for other"):
        found.build_named([("other", torch.nn.Parameter(torch.ones(2)))])


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=repr)
def test_state_factor_is_the_state_that_torch_keeps(settings: AbstractOptimizer) -> None:
    weight = torch.nn.Parameter(torch.ones(8, 4))
    weight.grad = torch.ones_like(weight)
    optimizer = settings.build([weight])
    optimizer.step()
    held = [weight, weight.grad, *(tensor for tensor in states([optimizer]) if tensor.numel() > 1)]  # no step counters
    assert storage_bytes(held) == (2 + settings.state_factor) * 8 * 4 * 4


def test_rmsprop_is_the_published_rule() -> None:
    weight, value = (
        torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64)),
        torch.tensor([2.0, -1.0], dtype=torch.float64),
    )
    optimizer = RMSprop(lr=0.1, alpha=0.9, eps=1e-3, momentum=0.5, weight_decay=0.01).build([weight])
    square, momentum = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(3):
        weight.grad = torch.tensor([1.0 + step, -3.0], dtype=torch.float64)
        gradient = weight.grad + 0.01 * value
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        momentum = 0.5 * momentum + gradient / (square.sqrt() + 1e-3)
        value = value - 0.1 * momentum
        torch.testing.assert_close(weight.detach(), value)


def test_muon_is_for_matrices_and_goes_on_from_its_state() -> None:
    """Each parameter moves as under torch's optimizer for it alone; a copy that gets the state half-way ends the same."""
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(3), torch.randn(2, 3, 3)]
    spec = Muon(lr=0.01, weight_decay=0.1, adjust="match_rms_adamw")

    def train(steps: int, params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, first: int = 0) -> None:
        for t in range(first, first + steps):
            for p in params:
                p.grad = (p.detach() * (t + 1)).cos()
            optimizer.step()

    ours, alone, resumed = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(3))
    optimizer, again = spec.build(ours), spec.build(resumed)
    train(3, ours, optimizer)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for target, p in zip(resumed, ours, strict=True):
        target.data.copy_(p.data)
    train(3, ours, optimizer, 3)
    train(3, resumed, again, 3)
    train(6, alone[:1], torch.optim.Muon(alone[:1], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    train(6, alone[1:], torch.optim.AdamW(alone[1:], lr=0.01, weight_decay=0.1, fused=True))
    for a, b, c in zip(ours, alone, resumed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def updated(optimizer: AbstractOptimizer, params: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer after two steps, and the bytes that the second one has taken for itself."""
    for param in params:
        param.grad = torch.ones_like(param)
    built, events = optimizer.build(params), MemoryEvents(lambda allowed: None)
    built.step()
    events.begin([])
    built.step()
    events.end()
    return built, events.peak_bytes


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1, momentum=0.9),
        Adam(lr=0.1),
        NAdam(lr=0.1),
        NAdam(lr=0.1, weight_decay=0.1),
        NAdam(lr=0.1, weight_decay=0.1, decoupled=True),
        RMSprop(lr=0.1, momentum=0.9),
        RMSprop(lr=0.1, weight_decay=0.1),
        Muon(lr=0.1),
    ],
)
def test_an_update_takes_for_itself_what_a_bill_has_for_it(optimizer: AbstractOptimizer) -> None:
    _, taken = updated(optimizer, [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(4)])
    of_all, of_largest = optimizer.update_factors
    assert taken == pytest.approx((4 * of_all + of_largest) * 64 * 64 * 4, abs=1024)


@pytest.mark.parametrize("name, more", [("AdamW", {}), ("AdamW", {"foreach": True}), ("Adafactor", {}), ("Adagrad", {})])
def test_an_optimizer_of_torchs_is_billed_what_it_holds_and_takes(name: str, more: dict) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200, bias=False) for _ in range(5)))
    found, _ = optimizer_of(lambda params: getattr(torch.optim, name)(params, lr=0.1, **more), model)
    built, taken = updated(found, list(model.parameters()))
    of_all, of_largest = found.update_factors
    assert taken == pytest.approx((5 * of_all + of_largest) * 200 * 200 * 4, rel=0.03)
    held = sum(t.nbytes for entry in built.state.values() for t in entry.values() if t.ndim) / (5 * 200 * 200 * 4)
    assert found.state_factor == pytest.approx(held, rel=0.01, abs=0.03)
    assert found.elementwise == (name != "Adafactor")  # which has a number of each row and of each column


@pytest.mark.parametrize(
    "made",
    [
        partial(torch.optim.SGD, fused=True),  # which changes a flag in itself with its first step
        partial(torch.optim.Adagrad, initial_accumulator_value=0.1),  # whose state is there before
    ],
)
def test_a_new_optimizer_of_torchs_is_not_taken_for_one_that_has_begun(made: Any) -> None:
    model = torch.nn.Linear(2, 3)
    model.scale = torch.nn.Parameter(torch.tensor(1.3))
    optimizer_of(made(model.parameters(), lr=0.1), model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    begun = made(model.parameters(), lr=0.1, **({"momentum": 0.9} if "fused" in made.keywords else {}))
    begun.step()
    with pytest.raises(InvalidConfig, match="has taken steps before"):
        optimizer_of(begun, model)


def test_each_group_of_torchs_is_billed_by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    one, two, three, four = ({"params": layer.parameters()} for layer in model)
    groups: list[Any] = [one | {"lr": 0.2}, two, three | {"amsgrad": True}, four | {"foreach": True}]
    found, _ = optimizer_of(lambda params: torch.optim.Adam(groups, lr=0.1, foreach=False), model)
    plain, _ = optimizer_of(lambda params: torch.optim.Adam(params, lr=0.1, foreach=False), model)
    assert found.kind != plain.kind and found.update_factors > plain.update_factors
    monkeypatch.setattr(profiler, "_cold", lambda step, at: 1.0 + step.__self__.defaults["amsgrad"])
    per_byte = (profiler._update_s_per_byte(one, torch.device("cpu")) for one in (found, plain))
    assert next(per_byte) == pytest.approx(1.25 * next(per_byte))


def test_an_update_beside_micro_batches_in_flight_is_in_the_bill_of_a_pipeline_that_does_not_drain() -> None:
    _, captured, _ = inprocess.captured_named("mlp")
    problem = replace(inprocess.problem_of(captured, 2, 4), microbatch_size=4, regime=Regime(weights=Stash(accumulation=1)))
    stage = Stage(ops=(0, 1), devices=(0,), microbatch_size=4, in_flight=8)
    plain, more = (StageCost.of(replace(problem, optimizer=of), stage) for of in (Adam(lr=0.1), NAdam(lr=0.1)))
    assert plain.transient_bytes < more.transient_bytes == problem.trainable_bytes((0, 1))
