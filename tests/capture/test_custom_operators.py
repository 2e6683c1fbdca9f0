"""Operators that the user has registered: workers import the module that does so, or the capture is refused with the reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gpp
from gpp.capture.build import capture
from gpp.capture.codec import operator_of
from gpp.capture.homes import home_of, import_homes
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import Captured
from gpp.models.dotted import import_named
from gpp.serialization import from_json, to_json
from tests.support.cli import ROOT, TOWERS, run_cold

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
    elsewhere = replace(again, nodes=tuple(replace(node, home="json") if node.home else node for node in again.nodes))
    with pytest.raises(
        CaptureError, match=rf"operator gpp_mine.{name}.default is not registered by importing json. .*gpp.Run\(imports="
    ):
        import_homes(elsewhere)
    import_homes(again)
    assert torch.equal(operator_of(call.target)(torch.ones(2)), torch.ones(2) * (1 if name == "cube" else 2))

    lost = replace(again, nodes=tuple(replace(node, home="nowhere_at_all") if node.home else node for node in again.nodes))
    with pytest.raises(CaptureError, match=r"registered by nowhere_at_all, which cannot be imported here.*PYTHONPATH"):
        import_homes(lost)


def test_what_no_worker_can_import_is_refused_with_operator_line_and_fix(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, fix = sys.modules[registered], r"Fix: register it in a .* model.imports=\[its.module\]"
    with monkeypatch.context() as patch:
        patch.setattr(module.cube._init_fn, "__module__", "__main__")
        held = module.cube
        patch.delattr(module, "cube")
        says = r"in the program that was started \(__main__\), and no worker process could"
        with pytest.raises(CaptureError, match=rf"gpp_mine::cube at .*{Path(__file__).name}:\d+: .*{says}.*{fix}"):
            captured_with("cube")
        patch.setattr(module, "__file__", None)
        patch.delattr(module, "library")
        with pytest.raises(CaptureError, match=r"gpp_mine::twice at .* by a module that is not known, and no worker"):
            captured_with("twice")
    assert module.cube is held


def test_an_operator_that_nobody_has_registered_is_named_with_the_setting() -> None:
    class Calls(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.ops.gpp_mine.nothing(super().forward(input))

    with pytest.raises(CaptureError, match=r"registers the operator gpp_mine::nothing. Fix: .* gpp.Run\(imports="):
        capture(Calls(2, 1), {"input": torch.zeros(3, 2)}, torch.zeros(3, 1), nn.functional.mse_loss, name="calls")


HIDDEN = """
import torch

kept = []


def register():
    @torch.library.custom_op("gpp_hidden::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    kept.append(cube)
    torch.library.define("gpp_hidden::loose", "(Tensor x) -> Tensor")
    torch.library.register_fake("gpp_hidden::loose")(torch.empty_like)
    torch.library.define("gpp_hidden::quiet", "(Tensor x) -> Tensor")


register()
print("hello")
"""


def test_what_a_function_registers_is_tried_in_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hidden_operators.py").write_text(HIDDEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))
    import_named(["hidden_operators"], "model.imports")
    operators, imports = torch.ops.gpp_hidden, ("hidden_operators",)
    try:
        assert home_of(operators.cube.default, "here") == home_of(operators.loose.default, "here") == "hidden_operators"
        with pytest.raises(
            CaptureError, match="gpp_hidden::quiet at here is registered by a module that is not known, and no worker"
        ):
            home_of(operators.quiet.default, "here")
        assert home_of(operators.quiet.default, "here", imports) == "hidden_operators"
        torch.library.define("gpp_hidden::lost", "(Tensor x) -> Tensor")
        with pytest.raises(CaptureError, match=r"not known, but not when a fresh process imports hidden_operators. Fix: register"):
            home_of(operators.lost.default, "here", imports)
    finally:
        del sys.modules["hidden_operators"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("of_nobody.at_all", "no module named 'of_nobody'. Fix: install it, or put its folder on PYTHONPATH"),
        ("needs_another", "importing needs_another needs 'of_nobody', which is not installed. Fix: pip install of_nobody"),
        ("fails", r"raised ValueError: no \(.*fails.py:1, in <module>\). Fix: correct the code there"),
        ("../fails", "must be the name of a module. Fix: write it as an import does"),
    ],
)
def test_a_named_module_that_cannot_be_imported_is_refused(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('no')")
    (tmp_path / "needs_another.py").write_text("import of_nobody")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidConfig, match=rf"^run.imports={re.escape(name)}: {says}"):
        gpp.parallelize(nn.Linear(2, 1), torch.zeros(4, 2), torch.zeros(4, 1), loss=nn.MSELoss(), run=gpp.Run(imports=(name,)))


def test_an_operator_without_a_formula_of_its_gradient_is_named(registered: str) -> None:
    class Behind(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.ops.gpp_mine.twice(self.inner(x)))

    with pytest.raises(CaptureError, match=r"no gradient comes back to aten.linear.default at .*register_autograd"):
        capture(Behind("twice"), {"x": torch.randn(3, 4)}, torch.zeros(3, 2), nn.functional.mse_loss, name="net")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
@pytest.mark.parametrize(("imports", "launcher"), [((), []), (("registers",), []), (("registers",), TORCHRUN)])
def test_a_program_in_another_folder_trains_with_them(tmp_path: Path, imports: tuple[str, ...], launcher: list[str]) -> None:
    """The workers' folder is that of the command, and the operators lie beside the script; a named module registers them."""
    (tmp_path / "code").mkdir()
    hidden = "def register():\n    global cube\n" + "".join(
        f"    {line}\n" for line in OPERATORS.partition("def forget")[0].splitlines()
    )
    (tmp_path / "code" / "operators_of_mine.py").write_text(hidden if imports else OPERATORS)
    (tmp_path / "code" / "registers.py").write_text("import operators_of_mine\n\noperators_of_mine.register()\n")
    source = Path(__file__).read_text()
    net = source[source.index("class Net") : source.index("def captured_with")]
    (tmp_path / "code" / "train.py").write_text(f"""import copy, json
import torch, gpp{"" if imports else ", operators_of_mine"}
from torch import Tensor, nn

{net}
torch.manual_seed(0)
model = Net("cube")
plain, (x, y) = copy.deepcopy(model), torch.randn(2, 8, 4)
step, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
strategy = gpp.Planning(strategy="even", cost=gpp.Analytical())
options = {{"strategy": strategy, "optimizer": gpp.SGD(lr=0.1, momentum=0.0), "run": gpp.Run(folder="run", imports={imports})}}
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
    done = subprocess.run(
        [sys.executable, *launcher, "code/train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for mine, theirs in json.loads(done.stdout.splitlines()[-1]):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.long
def test_a_run_trains_with_the_operators_of_a_module_that_no_other_imports(tmp_path: Path) -> None:
    """The settings name it; without them the run is refused with what to write."""
    (tmp_path / "operators_of_mine.py").write_text(OPERATORS)
    source = Path(__file__).read_text()
    net = (
        source[source.index("class Net") : source.index("def captured_with")]
        .replace("(4, ", "(8, ")
        .replace("name: str", 'name: str = "cube"')
    )
    net = net.replace("Linear(8, 4), nn.Linear(8, 2)", "Linear(8, 8), nn.Linear(8, 1)").replace(
        "(self.inner(x)))", "(self.inner(x))).squeeze(-1)"
    )
    (tmp_path / "net_of_mine.py").write_text(f"import torch\nfrom torch import Tensor, nn\n\n\n{net}")
    words = [
        *TOWERS,
        "model.factory=net_of_mine.Net",
        "cost=analytical",
        "strategy=even",
        "steps=4",
        "minibatch_size=8",
        "logger=[]",
    ]
    words += ["cluster.num_devices=2", "baselines_s=0"]
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    refused = run_cold(tmp_path / "refused", *words, PYTHONPATH=path)
    assert refused.code == 2 and "gpp_mine::cube. Fix: register it" in " ".join(refused.out.split()), refused.out
    done = run_cold(tmp_path / "run", *words, "model.imports=[operators_of_mine]", PYTHONPATH=path)
    assert done.code == 0, done.out
    assert done.result["plan"]["num_devices"] == 2 and done.result["status"] == "ok"
    assert '"home": "operators_of_mine"' in (done.run_dir / "job" / "model.json").read_text()
