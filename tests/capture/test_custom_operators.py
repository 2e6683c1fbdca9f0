"""Operators that the user has registered: workers import the module that does so, or the capture is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpp.capture.build import capture
from gpp.capture.codec import operator_of
from gpp.capture.homes import import_homes
from gpp.errors import CaptureError
from gpp.graph.captured import Captured
from gpp.serialization import from_json, to_json
from tests.support.cli import ROOT

OPERATORS = """
import torch
import torch.utils.flop_counter

library = torch.library.Library("gpp_mine", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")


@torch.library.custom_op("gpp_mine::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda context, gradient: 3 * context.saved_tensors[0] ** 2 * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
torch.utils.flop_counter.register_flop_formula(torch.ops.gpp_mine.cube)(lambda shape, **_: 2 * shape[0] * shape[1])


def forget():
    torch.utils.flop_counter.flop_registry.pop(torch.ops.gpp_mine.cube, None)
    library._destroy()
    cube._lib._destroy()
"""


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.outer, self.name = nn.Linear(4, 4), nn.Linear(4, 2), name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "twice":  # it has no formula of its gradient
            return self.outer(self.inner(torch.ops.gpp_mine.twice(x)))
        return self.outer(torch.ops.gpp_mine.cube(self.inner(x)))


def captured_with(name: str) -> Captured:
    return capture(Net(name), {"x": torch.randn(3, 4)}, torch.zeros(3, 2), nn.functional.mse_loss, name="net")


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that has registered them in this process."""
    (tmp_path / "operators_of_mine.py").write_text(OPERATORS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import operators_of_mine  # pyright: ignore[reportMissingImports]

    yield "operators_of_mine"
    sys.modules.pop("operators_of_mine", operators_of_mine).forget()


@pytest.mark.parametrize("name", ["cube", "twice"])
def test_another_process_registers_them_from_what_the_capture_says(registered: str, name: str) -> None:
    captured = captured_with(name)
    (call,) = [node for node in captured.nodes if node.home]
    assert (call.target, call.home) == (f"gpp_mine.{name}.default", registered)
    assert {node.home for node in captured.nodes if node.target.startswith("aten")} == {""}
    again = from_json(Captured, to_json(captured))
    assert again == captured and to_json(captured).count('"home"') == 1

    sys.modules.pop(registered).forget()  # as in a process that has only read the file
    with pytest.raises(CaptureError, match="is not registered in this process"):
        operator_of(call.target)
    import_homes(again)
    assert torch.equal(operator_of(call.target)(torch.ones(2)), torch.ones(2) * (1 if name == "cube" else 2))

    lost = replace(again, nodes=tuple(replace(node, home="nowhere_at_all") if node.home else node for node in again.nodes))
    with pytest.raises(CaptureError, match=r"registered by nowhere_at_all, which cannot be imported here.*PYTHONPATH"):
        import_homes(lost)


def test_what_no_worker_can_import_is_refused_with_operator_line_and_fix(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sys.modules[registered].cube._init_fn
    for module, says in (("__main__", "in the program that was started"), ("of_a_notebook", "by of_a_notebook, which no worker")):
        monkeypatch.setattr(made, "__module__", module)
        with pytest.raises(CaptureError, match=rf"gpp_mine::cube at .*{Path(__file__).name}:\d+: .*{says}.*Fix: register it in a"):
            captured_with("cube")
    monkeypatch.setattr(sys.modules[registered], "__file__", None)
    with pytest.raises(CaptureError, match=r"gpp_mine::twice at .* by a module that is not known"):
        captured_with("twice")


def test_an_operator_without_a_formula_of_its_gradient_is_named(registered: str) -> None:
    class Behind(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.ops.gpp_mine.twice(self.inner(x)))

    with pytest.raises(CaptureError, match=r"no gradient comes back to aten.linear.default at .*register_autograd"):
        capture(Behind("twice"), {"x": torch.randn(3, 4)}, torch.zeros(3, 2), nn.functional.mse_loss, name="net")


@pytest.mark.long
def test_a_program_in_another_folder_trains_with_them(tmp_path: Path) -> None:
    """The workers' own folder is that of the command, and the operators lie beside the script."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "operators_of_mine.py").write_text(OPERATORS)
    source = Path(__file__).read_text()
    net = source[source.index("class Net") : source.index("def captured_with")]
    (tmp_path / "code" / "train.py").write_text(f"""import copy, json
import torch, gpp, operators_of_mine
from torch import Tensor, nn

{net}
model = Net("cube")
plain, (x, y) = copy.deepcopy(model), torch.randn(2, 8, 4)
step, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
strategy = gpp.Planning(strategy="even", cost=gpp.Analytical())
options = {{"strategy": strategy, "optimizer": gpp.SGD(lr=0.1, momentum=0.0), "run": gpp.Run(folder="run")}}
with gpp.parallelize(model, x, y[:, :2], loss=nn.functional.mse_loss, devices=2, **options) as pipeline:
    for _ in range(3):
        step.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y[:, :2])
        loss.backward()
        step.step()
        losses.append((pipeline.step(x, y[:, :2]), loss.item()))
print(json.dumps(losses))
""")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "code/train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for mine, theirs in json.loads(done.stdout.splitlines()[-1]):
        assert mine == pytest.approx(theirs, rel=1e-6)
