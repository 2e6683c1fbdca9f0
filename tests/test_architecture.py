"""The house's rules: imports run one way, planning knows no torch, only the command line knows Hydra."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import its own level's rooms only where `SAME_LEVEL` says so, and any room above it.
LEVELS: list[set[str]] = [
    {"errors", "serialization"},
    {"cluster", "graph", "weights"},
    {"cost", "plan", "routing", "optimizers"},
    {"program"},
    {"timeline"},
    {"planners"},
    {"schedules", "simulate", "models", "data", "capture"},
    {"strategy"},
    {"analysis"},
    {"runtime", "loggers", "report"},
    {"app"},
]
SAME_LEVEL = {
    ("plan", "cost"),
    ("plan", "routing"),
    ("data", "models"),
    ("capture", "models"),
    ("loggers", "report"),
}
# A wing, or a file beside the wings, sees only what stands before it in its room.
WINGS: dict[str, list[set[str]]] = {
    "planners": [{"base"}, {"common"}, {"chains"}, {"graphpipe"}, {"bounds"}],
    "runtime": [
        {"job", "engine", "stretches", "cut_batches"},
        {"transport"},
        {"hang_detection"},
        {"checkpoint"},
        {"worker"},
        {"emulator"},
        {"reference"},
        {"controller"},
        {"engines"},
    ],
}
TORCH = {"capture", "models", "data", "runtime", "optimizers", "app"}


def unit_of(path: Path) -> str:
    part = path.relative_to(ROOT / "gpp").parts[0]
    return part.removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at run time)."""
    out = []
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.dump(guard.test)
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        )
        out += [(name, id(node) not in typing_only) for name in names]
    return out


SOURCES = sorted((ROOT / "gpp").rglob("*.py"))
BASELINES = sorted((ROOT / "baselines").glob("*.py"))
ABOVE_ENGINES = {"app"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_upwards(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        return
    level = next(i for i, units in enumerate(LEVELS) if unit in units)
    for module, at_run_time in imports(path):
        if not module.startswith("gpp.") or not at_run_time:
            continue
        other = module.split(".")[1]
        if other == unit:
            continue
        other_level = next(i for i, units in enumerate(LEVELS) if other in units)
        allowed = other_level < level or (unit, other) in SAME_LEVEL
        assert allowed, f"{unit} must not import {other}"


@pytest.mark.parametrize("room", WINGS)
def test_wings_see_only_those_before_them(room: str) -> None:
    for path in sorted((ROOT / "gpp" / room).rglob("*.py")):
        own = path.relative_to(ROOT).with_suffix("").parts
        if own[2] == "__init__":
            continue
        level = next(i for i, wings in enumerate(WINGS[room]) if own[2] in wings)
        for module, _ in imports(path):
            other = module.split(".")
            if other[:2] != ["gpp", room] or len(other) < 3 or other[2] == own[2]:
                continue
            found = next(i for i, wings in enumerate(WINGS[room]) if other[2] in wings)
            assert found < level or other[2] in WINGS[room][level], f"{path.relative_to(ROOT)} must not import {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_who_knows_torch_and_hydra(path: Path) -> None:
    unit, relative = unit_of(path), str(path.relative_to(ROOT / "gpp"))
    roots = {module.split(".")[0] for module, at_run_time in imports(path) if at_run_time}
    assert "torch" not in roots or unit in TORCH, f"{relative} imports torch"
    assert not roots & {"hydra", "omegaconf"} or relative == "app/cli.py", f"{relative} imports Hydra"
    assert "baselines" not in roots
    assert not roots & {"pickle", "dill", "cloudpickle"}, f"{relative} reads pickles"


@pytest.mark.parametrize("path", BASELINES, ids=lambda p: p.name)
def test_baselines_know_what_engines_know(path: Path) -> None:
    for module, at_run_time in imports(path):
        head, _, rest = module.partition(".")
        assert head not in ("hydra", "omegaconf", "pickle", "dill", "cloudpickle")
        assert head != "gpp" or not at_run_time or rest.split(".")[0] not in ABOVE_ENGINES, f"{path.name} must not import {module}"


def test_no_cycle_between_modules() -> None:
    import networkx as nx

    graph = nx.DiGraph()
    for path in [*SOURCES, *BASELINES]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for module, at_run_time in imports(path):
            if at_run_time and module.startswith(("gpp.", "baselines.")) and module != name:
                graph.add_edge(name, module)
    assert not list(nx.simple_cycles(graph))


def test_planning_modules_leave_torch_alone() -> None:
    modules = (
        "gpp.strategy, gpp.planners.graphpipe.graphpipe, gpp.planners.chains.sequential, gpp.planners.chains.even, "
        "gpp.app.experiment, gpp.app.recording, gpp.cost.models.analytical, gpp.cost.models.profiled, "
        "gpp.runtime.engines.distributed, gpp.runtime.engines.reference, gpp.models.mmt, gpp.data.digits, "
        "baselines.single, baselines.data_parallel, baselines.torch_pipelining, baselines.deepspeed"
    )
    code = f"import sys, {modules}; print([m for m in ('torch', 'hydra', 'wandb', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [*SOURCES, *BASELINES], ids=lambda p: str(p.relative_to(ROOT)))
def test_budgets(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 420, f"{path.name} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or 0) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
            assert length <= 72, f"{path.name}:{node.name} has {length} lines"
