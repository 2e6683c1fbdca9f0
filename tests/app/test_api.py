"""The platform from Python, as docs/models.md shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpp
from gpp.errors import InvalidConfig
from tests.support.call import call


class TwoTowers(torch.nn.Module):
    """A model of one's own: two towers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        self.right = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        self.head = torch.nn.Linear(64, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], -1)).squeeze(-1)


@pytest.mark.dist
def test_train_from_python(tmp_path: Path) -> None:
    call(__name__, "train_and_go_on", str(tmp_path))


def train_and_go_on(folder: str) -> None:
    torch.manual_seed(0)
    model, reference = TwoTowers().double(), TwoTowers().double()
    reference.load_state_dict(model.state_dict())
    inputs = {"a": torch.randn(64, 8, dtype=torch.float64), "b": torch.randn(64, 8, dtype=torch.float64)}
    targets = inputs["a"].sum(-1) * 0.3
    loss = torch.nn.functional.mse_loss

    captured = gpp.capture_model(model, {name: t[:4] for name, t in inputs.items()}, targets[:4], loss)
    optimizer = gpp.SGD(lr=0.05, momentum=0.9)
    problem = gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=64, microbatch_size=16, optimizer=optimizer)
    strategy = gpp.Strategy(name="graphpipe", planner=gpp.GraphPipe(), schedule=gpp.OneFOneB())
    plan = strategy.plan(problem)
    outcome = gpp.train(
        model,
        captured,
        problem,
        strategy,
        plan,
        data=gpp.Data(train=(inputs, targets), held_out=(inputs, targets)),
        run=gpp.Run(folder=folder, steps=10, checkpoint=gpp.Checkpoints(every=4), resume="auto"),
    )

    torch_optimizer = optimizer.build(reference.parameters())
    for _ in range(10):
        torch_optimizer.zero_grad()
        value = loss(reference(**inputs), targets)
        value.backward()
        torch_optimizer.step()
    assert outcome.losses[-1] == pytest.approx(value.item(), abs=1e-9)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-8)
    assert outcome.evaluations[-1]["loss"] == pytest.approx(loss(reference(**inputs), targets).item(), abs=1e-9)
    assert outcome.measured is not None
    assert outcome.measured.metrics.iteration_s > 0

    other = TwoTowers().double()
    late = gpp.Run(folder=folder, steps=10, imports=("json",))
    with pytest.raises(InvalidConfig, match=r"run.imports=.*: are read when a model is captured.*gpp.capture_model"):
        gpp.train(other, captured, problem, strategy, plan, data=(inputs, targets), run=late)
    resumed = gpp.train(
        other,
        captured,
        problem,
        strategy,
        plan,
        data=(inputs, targets),
        run=gpp.Run(folder=folder, steps=10, resume="auto"),
    )
    assert resumed.losses == outcome.losses[8:]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_every_public_name_is_listed_and_sorted() -> None:
    assert list(gpp.__all__) == sorted(gpp.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in gpp.__all__:
        assert hasattr(gpp, name)
    assert set(gpp.__all__) <= set(dir(gpp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpp.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, gpp; print([name for name in sys.modules if name.startswith('gpp.') or name in ('torch', 'numpy')])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(gpp.__file__).parents[1]
    )
    assert out.stdout.strip() == "[]"


def test_public_names_are_not_shadowed_by_packages() -> None:
    """`import gpp.capture.build` sets `gpp.capture` to the package; a function of that name would be gone then."""
    packages = {path.stem for path in Path(gpp.__file__).parent.iterdir()}
    assert not packages & set(gpp.__all__)
