"""The house's rules: imports run one way, planning knows no torch, only the command line knows Hydra."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A room may import its own level's rooms only where `SAME_LEVEL` says so, and any room above it.
LEVELS: list[set[str]] = [
    {"errors", "serialization", "settings", "setting_types"},
    {"cluster", "graph", "weights"},
    {"cost", "plan", "routing", "timeline", "optimizers"},
    {"planners", "program"},
    {"schedules", "simulate", "models", "data", "capture"},
    {"strategy"},
    {"analysis"},
    {"runtime", "loggers", "report"},
    {"app"},
]
SAME_LEVEL = {
    ("settings", "errors"),
    ("settings", "setting_types"),
    ("setting_types", "errors"),
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
        {"job", "engine", "passes", "cut_batches", "stage_costs"},
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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at run time)."""
    out = []
    tree = tree_of(path)
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


def test_imports_run_upwards() -> None:
    level_of = {unit: level for level, units in enumerate(LEVELS) for unit in units}
    wrong = []
    for path in SOURCES:
        unit = unit_of(path)
        for module, at_run_time in imports(path):
            if unit == "__init__" or not module.startswith("gpp.") or not at_run_time:
                continue
            other = module.split(".")[1]
            if other != unit and level_of[other] >= level_of[unit] and (unit, other) not in SAME_LEVEL:
                wrong.append(f"{path.relative_to(ROOT)} ({unit}) must not import {module}")
    assert not wrong


def test_wings_see_only_those_before_them() -> None:
    wrong = []
    for path in SOURCES:
        own = path.relative_to(ROOT).with_suffix("").parts
        if own[1] not in WINGS or own[2] == "__init__":
            continue
        level_of = {wing: level for level, wings in enumerate(WINGS[own[1]]) for wing in wings}
        for module, _ in imports(path):
            other = module.split(".")
            if other[:2] == ["gpp", own[1]] and len(other) > 2 and other[2] != own[2] and level_of[other[2]] > level_of[own[2]]:
                wrong.append(f"{path.relative_to(ROOT)} must not import {module}")
    assert not wrong


def test_who_knows_torch_and_hydra() -> None:
    wrong = []
    for path in SOURCES:
        unit, relative = unit_of(path), str(path.relative_to(ROOT / "gpp"))
        roots = {module.split(".")[0] for module, at_run_time in imports(path) if at_run_time}
        if "torch" in roots and unit not in TORCH:
            wrong.append(f"{relative} imports torch")
        if roots & {"hydra", "omegaconf"} and relative != "app/cli.py":
            wrong.append(f"{relative} imports Hydra")
        if "baselines" in roots:
            wrong.append(f"{relative} imports the baselines")
        if roots & {"pickle", "dill", "cloudpickle"}:
            wrong.append(f"{relative} reads pickles")
    assert not wrong


def test_baselines_know_what_engines_know() -> None:
    wrong = []
    for path in BASELINES:
        for module, at_run_time in imports(path):
            head, _, rest = module.partition(".")
            above = head == "gpp" and at_run_time and rest.split(".")[0] in ABOVE_ENGINES
            if above or head in ("hydra", "omegaconf", "pickle", "dill", "cloudpickle"):
                wrong.append(f"{path.name} must not import {module}")
    assert not wrong


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
        "gpp.runtime.engines.distributed, gpp.runtime.engines.reference, gpp.models.network, gpp.data.digits, "
        "baselines.single, baselines.data_parallel, baselines.torch_pipelining, baselines.deepspeed"
    )
    code = f"import sys, {modules}; print([m for m in ('torch', 'hydra', 'wandb', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_budgets() -> None:
    wrong = []
    for path in [*SOURCES, *BASELINES]:
        if (lines := path.read_text().count("\n")) > 420:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node, clean=False)
                length = (node.end_lineno or 0) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
                if length > 72:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.name} has {length} lines")
    assert not wrong
