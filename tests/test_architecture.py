"""The house's rules: imports run one way, planning knows no torch, only the command line knows Hydra."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest

from gpp.mechanism import SHIPPED, packages
from tests.mechanisms import touched
from tests.support.pages import ROOT
from tests.support.sources import BASELINES, MODULES, SOURCES, name_of, said

# A room may import its own level's rooms only where `SAME_LEVEL` says so, and any room above it.
LEVELS: list[set[str]] = [
    {
        "errors",
        "child",
        "compiled",
        "files",
        "inline",
        "joint_optimizer",
        "mechanism",
        "private",
        "quantities",
        "routing",
        "serialization",
        "settings",
        "setting_types",
    },
    {"cluster", "graph", "links", "optimizers", "stage", "weights"},
    {"cost", "replan"},
    {"plan"},
    {"formats", "memory", "program"},
    {"timeline"},
    {"planners"},
    {"schedules", "simulate", "models", "data", "capture"},
    {"strategy"},
    {"analysis"},
    {"runtime", "loggers", "report"},
    {"export"},
    {"mechanisms"},
    {"app"},
    {"ui"},
]
SAME_LEVEL = {
    ("private", "errors"),
    ("files", "private"),
    ("mechanism", "errors"),
    ("serialization", "errors"),
    ("serialization", "files"),
    ("serialization", "private"),
    ("settings", "errors"),
    ("settings", "setting_types"),
    ("setting_types", "errors"),
    ("stage", "graph"),
    ("weights", "optimizers"),
    ("cluster", "links"),
    ("data", "models"),
    ("capture", "models"),
    ("loggers", "report"),
    ("schedules", "simulate"),
}
# A wing, or a file beside the wings, sees only what stands before it in its room.
WINGS: dict[str, list[set[str]]] = {
    "graph": [
        {"op_graph", "order"},
        {"totals", "transients"},
        {"captured", "random_graphs", "series_parallel", "sums"},
        {"forward_only"},
        {"coarsen"},
    ],
    "planners": [{"base"}, {"search"}, {"common"}, {"chains"}, {"graphpipe"}, {"bounds"}],
    "runtime": [
        {
            "job_asked",
            "job_fit",
            "job",
            "engine",
            "stretches",
            "task",
            "torch_optimizer",
            "cut_batches",
            "devices",
            "even",
            "nonfinite",
            "run_dir",
        },
        {"cards"},
        {"transport"},
        {"hang_detection"},
        {"checkpoint"},
        {"worker"},
        {"mode"},
        {"emulator"},
        {"rehearsal"},
        {"controller"},
        {"live"},
        {"engines"},
    ],
    "analysis": [{"comparison"}, {"gains", "max_batch", "one_stage"}, {"explain"}],
    "export": [
        {"modules", "actions", "ways"},
        {"layout"},
        {"base"},
        {"degrees"},
        {"mimo"},
        {"deepspeed", "megatron", "torch", "torchtitan"},
        {"imports", "nearest", "page"},
    ],
    "report": [{"draw"}, {"run"}, {"compare"}, {"sweep"}],
    "ui": [
        {"guard", "moved", "settings", "views"},
        {"bench", "runs"},
        {"compare", "keeper", "kept"},
        {"app"},
        {"command"},
        {"__main__"},
    ],
    "app": [
        {
            "experiment",
            "capturing",
            "given",
            "in_place",
            "made",
            "moving",
            "sections",
            "several",
            "interrupted",
            "stopping",
            "streams",
            "uneven",
        },
        {"exporting", "judging", "launch", "measuring", "recording", "replanning", "tracked", "tracking"},
        {"surveys"},
        {"vocabulary"},
        {"refusals"},
        {"command", "command_line", "new_project", "sweep_tracking"},
        {"composing"},
        {"training", "values", "words"},
        {"api", "batches", "changes", "forms", "multirun", "optimizer_factory", "parallel", "pipeline", "wanted"},
        {"cli"},
    ],
}
TORCH = {"capture", "models", "data", "runtime", "joint_optimizer", "optimizers", "mechanisms", "app"}


ABOVE_ENGINES = {"app"}


def unit_of(path: Path) -> str:
    part = path.relative_to(ROOT / "gpp").parts[0]
    return part.removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    return said(path).imports


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


# Files of the core that have words of a mechanism (`tests.mechanisms.touched`). The sets may only shrink.
NAMING: dict[str, set[str]] = {
    # A profile's operators with ways to recompute; what a planner says of itself; fixes of errors, words of reports.
    "marks": {
        "capture/trace.py",
        "cluster.py",
        "cost/problem.py",
        "cost/variants.py",
        "formats/piper.py",
        "graph/coarsen/groups.py",
        "graph/op_graph.py",
        "models/profile.py",
        "planners/base.py",
        "planners/chains/pipedream_2bw.py",
        "planners/chains/piper.py",
        "report/run/key_figures.py",
        "report/run/stages.py",
        "runtime/engines/emulate.py",
        "schedules/refused.py",
        "strategy.py",
    },
    # A setting of the engine that workers keep to, its words, what a model may not do.
    "precision": {"capture/draft.py", "runtime/engines/distributed.py", "runtime/job.py", "app/words.py"},
    # Settings that users give the engine, and names in files.
    "serving": {
        "app/experiment.py",
        "app/vocabulary.py",
        "cost/overheads.py",
        "report/run/profile.py",
        "runtime/engine.py",
        "timeline.py",
    },
    # A setting that users give the optimizer.
    "shared_state": {"optimizers.py"},
    # Planners that a setting lets search it.
    "tensor_parallel": {"planners/chains/piper.py", "planners/graphpipe/graphpipe.py"},
    # A list of strategies to compare, and the title of a group of options.
    "weight_versions": {"app/cli.py", "app/vocabulary.py"},
}


def test_the_core_names_no_mechanism() -> None:
    # The package's own list of public names is where a user finds planners, wherever they lie.
    core = [path for path in SOURCES if path.relative_to(ROOT).parts[1] not in ("mechanisms", "__init__.py")]
    assert not [str(path) for path in core for module, _ in imports(path) if module.startswith("gpp.mechanisms.")]
    assert set(touched.WORDS) == {name.rpartition(".")[2] for name in packages() if name.startswith(SHIPPED)}
    assert {name: files for name, files in touched.naming(touched.core()).items() if files} == NAMING


@pytest.mark.parametrize("room", WINGS)
def test_wings_see_only_those_before_them(room: str) -> None:
    level_of = {wing: level for level, wings in enumerate(WINGS[room]) for wing in wings}
    wrong = []
    for path in sorted((ROOT / "gpp" / room).rglob("*.py")):
        wing = path.relative_to(ROOT / "gpp" / room).with_suffix("").parts[0]
        if wing == "__init__":
            continue
        if wing not in level_of:
            wrong.append(f"{path.relative_to(ROOT)} lies in no wing")
            continue
        for module, _ in imports(path):
            other = module.split(".")
            if other[:2] == ["gpp", room] and len(other) > 2 and level_of.get(other[2], len(WINGS[room])) > level_of[wing]:
                wrong.append(f"{path.relative_to(ROOT)} must not import {module}")
    assert not wrong


def test_who_knows_torch_and_hydra() -> None:
    wrong = []
    for path in SOURCES:
        unit, relative = unit_of(path), str(path.relative_to(ROOT / "gpp"))
        roots = {module.split(".")[0] for module, at_run_time in imports(path) if at_run_time}
        if "torch" in roots and unit not in TORCH:
            wrong.append(f"{relative} imports torch")
        if roots & {"hydra", "omegaconf"} and relative not in (
            "app/cli.py",
            "app/command_line.py",
            "app/composing.py",
            "app/multirun.py",
        ):
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
                wrong.append(f"{path.relative_to(ROOT)} must not import {module}")
    assert not wrong


def test_no_cycle_between_modules() -> None:
    """Imports for annotations alone count too."""
    graph = nx.DiGraph()
    for path in [*SOURCES, *BASELINES]:
        name = name_of(path)
        graph.add_edges_from((name, module) for module, _ in imports(path) if module in MODULES and module != name)
    assert not list(nx.simple_cycles(graph))


def test_planning_modules_leave_torch_alone() -> None:
    modules = (
        "gpp.strategy, gpp.planners.graphpipe.graphpipe, gpp.planners.chains.sequential, gpp.planners.chains.even, "
        "gpp.app.experiment, gpp.app.recording, gpp.cost.models.analytical, gpp.cost.models.profiled, "
        "gpp.runtime.engines.distributed, baselines.reference.reference, gpp.models.network, gpp.data.digits, "
        "baselines.single, baselines.data_parallel, baselines.torch_pipelining, baselines.deepspeed, "
        "gpp.mechanisms.helpers.layerpipe, gpp.mechanisms.helpers.lowering, gpp.mechanisms.helpers.prediction, "
        "gpp.mechanisms.helpers.job, gpp.mechanisms.quantised_edges.bill, gpp.mechanisms.quantised_edges.job, "
        "gpp.mechanisms.serving.planning, gpp.mechanisms.serving.mode, gpp.mechanisms.serving.run, "
        "gpp.mechanisms.shared_state.job, gpp.mechanisms.split_backward.job, gpp.mechanisms.tensor_parallel.searching, "
        "gpp.mechanisms.tensor_parallel.job, gpp.mechanisms.split_backward.schedules.optimal, "
        "gpp.mechanisms.precision.asked, gpp.mechanisms.shared_state.asked, gpp.mechanisms.weight_versions.pipeoptim, "
        "gpp.mechanisms.weight_versions.job, gpp.mechanisms.weight_versions.lowering"
    )
    assert loaded_with(modules) <= {"numpy", "pydantic"}


def test_the_command_line_begins_with_little() -> None:
    assert not loaded_with("gpp.app.cli")


def loaded_with(modules: str) -> set[str]:
    """Which of the large packages are there once some modules are imported."""
    code = f"import sys, {modules}; print(*{{'torch', 'hydra', 'wandb', 'scipy', 'numpy', 'pydantic'}} & {{*sys.modules}})"
    return {*subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()}


def test_each_class_has_a_name_of_its_own() -> None:
    """Underscores aside."""
    classes = {(node.name.lstrip("_"), path) for path in SOURCES for node in said(path).classes}
    files = Counter(name for name, _ in classes)
    assert not {name for name, count in files.items() if count > 1}


def test_budgets() -> None:
    wrong = []
    for path in [*SOURCES, *BASELINES]:
        if (lines := path.read_text().count("\n")) > 420:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        wrong += [f"{path.relative_to(ROOT)}:{name} has {length} lines" for name, length in said(path).lengths if length > 72]
    assert not wrong


def test_the_docs_repeat_the_levels_and_wings() -> None:
    page = (ROOT / "docs" / "rooms.md").read_text()
    rows = [f"| {level} | {', '.join(sorted(rooms))} |" for level, rooms in enumerate(LEVELS)]
    rows += [f"| {room} | {'; '.join(', '.join(sorted(names)) for names in wings)} |" for room, wings in WINGS.items()]
    assert not [row for row in rows if row not in page.split("\n")]
