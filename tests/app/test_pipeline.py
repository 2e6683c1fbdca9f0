"""`gpp.parallelize` against a plain loop over the same model."""

from __future__ import annotations

import json
import math
import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gpp
from gpp.app.optimizer_factory import optimizer_of
from gpp.app.wanted import plain_module
from gpp.errors import InvalidConfig, WorkerFailed
from gpp.runtime.checkpoint.state import whole_state
from gpp.runtime.torch_optimizer import TorchOptimizer
from tests.support.call import call
from tests.support.cli import workers_of

SIZE, CLIP = 16, 0.5

Batch = tuple[tuple[Tensor, Tensor], Tensor]


class Towers(nn.Module):
    """Two branches that meet in a sum; the first reads a sequence of any length, at places that a buffer tells apart."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12))
        self.right = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12))
        self.head = nn.Linear(12, 5)
        self.register_buffer("places", torch.linspace(0.5, 1.5, 9).unsqueeze(1))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        placed = x * self.places[: x.shape[1]] * math.sqrt(x.shape[1])
        return self.head(torch.relu(self.left(placed).mean(1) + self.right(z)))


class Tempered(nn.Module):
    """A loss with tensors of its own: weights of classes, and a temperature that is trained."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7).double())
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 5).double())

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores / self.temperature, labels, weight=self.weight)


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return Towers().double()


def batches(count: int, shapes: Sequence[tuple[int, int]] = ()) -> list[Batch]:
    """Mini-batches of the example's samples and length, or of some (samples, length) in turn; half of the later labels count."""
    torch.manual_seed(2)
    out = []
    for i in range(count):
        size, length = shapes[i % len(shapes)] if shapes else (SIZE, 4)
        out.append(((torch.randn(size, length, 8).double(), torch.randn(size, 6).double()), torch.randint(5, (size,))))
    return [out[0], *((inputs, half_of(targets)) for inputs, targets in out[1:])]


def half_of(targets: Tensor) -> Tensor:
    """The second half of the labels is left out: whole micro-batches have none."""
    return targets.where(torch.arange(len(targets)) < len(targets) // 2, -100)


SHAPES = ((SIZE, 4), (SIZE, 7), (6, 4), (SIZE, 4), (SIZE, 2), (SIZE, 7), (5, 2))
"""Samples and lengths of a training whose batches differ."""


def decayed(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with two groups of parameters, as users write one."""
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2]}]
    groups[1]["lr"] = 3e-3
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)


def plain_losses(plain: nn.Module, criterion: nn.Module, data: Sequence[Batch]) -> list[float]:
    """Losses of a loop of one's own, which leaves model and loss trained."""
    losses, params = [], [*plain.parameters(), *criterion.parameters()]
    optimizer = decayed(params)
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = criterion(plain(*inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def started(
    model: nn.Module,
    folder: Path,
    strategy: str | gpp.Strategy = "even",
    *,
    lengths: int = 16,
    run: gpp.Run | None = None,
    **settings: Any,
) -> gpp.Pipeline:
    inputs, targets = batches(1)[0]
    planning = gpp.Planning(strategy=strategy, microbatch_size=4, cost=gpp.Analytical(), lengths=lengths)
    given = {"loss": functional.cross_entropy, **settings}
    return gpp.parallelize(model, inputs, targets, strategy=planning, run=replace(run or gpp.Run(), folder=folder), **given)


@pytest.mark.dist
def test_a_training_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """A wrong batch harms nothing, an evaluation neither, and the end leaves the weights and a report."""
    call(__name__, "train", str(tmp_path / "run"))


def train(folder: str) -> None:
    model, plain, criterion, data = model_of(), model_of(), Tempered(), batches(len(SHAPES), SHAPES)
    losses = plain_losses(plain, criterion, data)
    optimizer, own = gpp.ByFactory(factory=decayed, clip_norm=CLIP), Tempered()
    with started(model, Path(folder), optimizer=optimizer, lengths=3, loss=own) as pipeline:
        for inputs, targets in data:
            pipeline.step(inputs, targets)
        assert len(pipeline.plan.stages) > 1
        check_refusals(pipeline)
        assert pipeline.losses == pytest.approx(losses, rel=1e-12)
        inputs, targets = batches(8)[-1]
        with torch.no_grad():
            expected = criterion(plain(*inputs), targets).item()
        assert pipeline.evaluate(inputs, targets) == pytest.approx({"loss": expected}, rel=1e-12)
        assert pipeline.losses == pytest.approx(losses, rel=1e-12)
        state = pipeline.state_dict()
    expected_state = plain.state_dict() | {f"loss.{name}": tensor for name, tensor in criterion.state_dict().items()}
    assert set(state) == set(expected_state) and abs(state["loss.temperature"] - 0.7) > 1e-3
    for name, weight in expected_state.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-12)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert own.temperature.item() == pytest.approx(criterion.temperature.item(), rel=1e-12)
    page = Path(folder, "report.html").read_text()
    assert "Measured" in page and "Towers" in page and "from optimal" in page
    assert json.loads(Path(folder, "result.json").read_text())["plan"]["optimality_gap"] >= 0
    with pytest.raises(InvalidConfig, match="its workers have ended"):
        pipeline.step(*batches(1)[0])


class Several(nn.Module):
    """Tied weights, a weight that nothing reads, a passing buffer, a state of its own, and names that a state dict changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.register_state_dict_post_hook(self.renamed)

    @staticmethod
    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["first.bias"] = state.pop("a.bias")

    def get_extra_state(self) -> dict[str, int]:
        return {"n": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


def test_a_state_dict_has_all_that_the_model_s_has() -> None:
    model, loss = Several(), nn.Module()
    loss.scale = nn.Parameter(torch.ones(()))
    workers = {"a.weight": torch.zeros(4, 4), "a.bias": torch.zeros(4), "passing": torch.zeros(1), "loss.scale": torch.zeros(())}
    found = whole_state(model, workers, loss)
    assert list(found) == [*model.state_dict(), "loss.scale"]
    for name, value in found.items():
        before = model.state_dict().get(name, loss.scale)
        assert value == before if name == "_extra_state" else bool((value == (before if "spare" in name else 0)).all())
    assert found["a.weight"].data_ptr() != found["b.weight"].data_ptr()  # safetensors refuses one tensor under two names


def test_what_workers_could_not_share_is_refused_before_they_start() -> None:
    model, flat = nn.Module(), torch.randn(96)
    model.p, model.q = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[32:].view(8, 8))
    with pytest.raises(InvalidConfig, match=r"model\.q=shared: is the same memory as p"):
        plain_module(model, print)
    model.q = nn.Parameter(flat[64:])
    assert plain_module(model, print) is model  # one flat tensor that is cut into parameters, as optimizers of others make it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.inner = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InvalidConfig, match=r"model\.inner=RecursiveScriptModule: is a script"):
        plain_module(model, print)


def test_a_loss_may_hold_a_weight_of_the_model() -> None:
    model, loss = nn.Linear(2, 2), nn.Module()
    loss.own = model.weight
    found, _ = optimizer_of(lambda params: torch.optim.SGD(params, lr=0.1), model, loss)
    assert isinstance(found, TorchOptimizer) and [group.names for group in found.groups] == [("weight", "bias")]


def check_refusals(pipeline: gpp.Pipeline) -> None:
    """A batch that would train otherwise is refused."""
    (x, z), targets = batches(1)[0]
    for inputs, labels, message in (
        ((x[:5], z), targets, "must all have as many samples"),
        ((x[0], z), targets[:8], "must all have as many samples"),
        ((x[:, 0], z), targets, r"batch=\[16,8\]: 'x' must be of shape \[16, 4, 8\]"),
        ((x.repeat(2, 1, 1), z.repeat(2, 1)), targets.repeat(2), "batch=32: samples must be at most 16"),
        ((x[:, :3], z), targets, "than the 3 that the model has been captured at.*multiples of 64"),
        ((x.float(), z), targets, "batch=float32: 'x' must be float64"),
        ((x.to_sparse(), z), targets, "x=sparse_coo: must be a dense tensor"),
        ({"x": x}, targets, "lacks 'z'"),
        ({"x": x, "y": z}, targets, "inputs.y=y: is none that Towers.forward takes; it takes x, z"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            pipeline.step(inputs, labels)


@pytest.mark.long
@pytest.mark.dist
def test_a_dead_worker_is_named_and_the_others_end(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="killed by SIGKILL"), started(model_of(), tmp_path / "run") as pipeline:
        pipeline.step(*batches(1)[0])
        os.kill(next(iter(workers_of(tmp_path / "run"))), signal.SIGKILL)
        pipeline.step(*batches(1)[0])
    assert not workers_of(tmp_path / "run")


def test_without_targets_loss_and_metrics_get_the_outputs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a contrastive loss has it. What is planned next is another test's."""
    found = []

    class Enough(Exception):
        pass

    def planned(wanted: Any, inputs: Any, targets: Any) -> Any:
        found.append(wanted.capture(inputs, targets))
        raise Enough

    monkeypatch.setattr("gpp.app.parallel._planned", planned)

    def top(scores: Tensor) -> Tensor:
        return scores.argmax(1).double().mean()

    given = gpp.Loss(function=lambda scores: scores.square().mean(), metrics={"top": top})
    with pytest.raises(Enough):
        gpp.parallelize(model_of(), batches(1)[0][0], loss=given, run=gpp.Run(folder=tmp_path / "run"))
    assert set(found[0].results) == {"loss", "metric:top"}
    two = gpp.Loss(function=given.function, metrics={"top": lambda scores, labels: scores.sum()})
    with pytest.raises(InvalidConfig, match=r"metrics.top=<lambda>: takes \(scores, labels\) and is called with \(outputs\)"):
        gpp.parallelize(model_of(), batches(1)[0][0], loss=two, run=gpp.Run(folder=tmp_path / "run"))


def test_what_cannot_be_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    streams = gpp.Strategy(name="streams", planner=gpp.GraphPipe(), schedule=gpp.NoFlush(), weights=gpp.Stash())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": streams}, "strategy=streams: does not drain"),
        ({"optimizer": gpp.Adam(lr=1e-3, learning_rate=gpp.LearningRate(shape="cosine"))}, "steps=null: learning rate cosine"),
        ({"loss": None}, "loss=null: the model's outputs have none"),
        ({"loss": lambda a, b, c: a}, r"loss=<lambda>: takes \(a, b, c\) and is called with \(outputs, targets\)"),
    ]
    for settings, message in cases:
        with pytest.raises(InvalidConfig, match=message):
            started(model_of(), tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
