"""The engines' own parsers and splitters accept what is written for them.

They run in another Python, which GPP_PEERS_PYTHON names: one with torchtitan 0.3.0, megatron-core 0.16.1,
deepspeed, vllm, or sglang.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpp import Even, GPipe, Interleaved1F1B, OneFOneB, Strategy, ZeroBubbleH1, ZeroBubbleV
from gpp.export.base import AbstractExporter, ToExport
from gpp.export.deepspeed import DeepSpeed
from gpp.export.imports import layout_of
from gpp.export.megatron import Megatron
from gpp.export.modules import Modules
from gpp.export.torchtitan import TorchTitan
from gpp.graph.captured import Captured
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.serving.exporter import SgLang, Vllm
from gpp.schedules.base import AbstractSchedule
from tests.export.test_mimo import branching
from tests.support.inprocess import captured_named, problem_of

pytestmark = pytest.mark.long
PEERS = os.environ.get("GPP_PEERS_PYTHON", "")
LAYERS = 6  # as torchtitan's llama3_debugmodel


@cache
def gpt() -> Captured:
    return captured_named("gpt_small", f"model.num_layers={LAYERS}")[1]


def planned(
    text: str, schedule: AbstractSchedule | None = None, *, ranks: int | None = None, vee: bool = False, replicas: int = 1
) -> ToExport:
    modules = Modules.of(gpt())
    count = text.count("|") + 1
    problem = replace(problem_of(gpt(), count * replicas, 32, microbatch_size=2 * replicas), graph=modules.graph)
    layout = layout_of(text)
    assert layout is not None
    plan = layout.plan(problem, modules)
    ranks = ranks or count
    rank_of = [min(s, 2 * ranks - 1 - s) if vee else s % ranks for s in range(count)]
    devices = [tuple(range(r * replicas, (r + 1) * replicas)) for r in rank_of]
    stages = tuple(replace(stage, devices=own) for stage, own in zip(plan.stages, devices, strict=True))
    strategy = Strategy(name="test", planner=Even(), schedule=schedule or OneFOneB())
    return ToExport(model="gpt", captured=gpt(), problem=problem, strategy=strategy, plan=replace(plan, stages=stages))


def recomputed(e: ToExport) -> ToExport:
    stages = tuple(s.having(Marks(recompute=s.ops, boundaries=s.ops)) for s in e.plan.stages)
    return e.having(replace(e.plan, stages=stages))


def plans() -> dict[str, ToExport]:
    return {
        "even": planned("Et|tt|tt|tL"),
        "uneven": planned("Ettt|tt|tL"),
        "all forwards first": planned("Ett|ttttL", GPipe()),
        "split backwards": planned("Ett|tt|ttL", ZeroBubbleH1()),
        "interleaved": planned("Et|tt|tt|tL", Interleaved1F1B(), ranks=2),
        "a V": planned("Et|tt|tt|tL", ZeroBubbleV(), ranks=2, vee=True),
        "replicas": planned("Ettt|tttL", replicas=2),
        "recomputed": recomputed(planned("Ett|tt|ttL")),
    }


def read_by(exporter: AbstractExporter, chosen: dict[str, ToExport], folder: Path, by: str = "") -> dict[str, Any]:
    for name, e in chosen.items():
        for file, text in exporter.exported(e).files.items():
            (folder / name).mkdir(exist_ok=True)
            (folder / name / file).write_text(text)
    words = [PEERS, str(Path(__file__).with_name("peers.py")), by or exporter.name, *(str(folder / name) for name in chosen)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.run(words, capture_output=True, text=True, env=env, timeout=550)
    assert out.returncode == 0, f"{out.stdout[-2000:]}\n{out.stderr[-4000:]}"
    lines = [line.removeprefix("READ ") for line in out.stdout.splitlines() if line.startswith("READ ")]
    for name, line in zip(chosen, lines, strict=True):
        print(f"{exporter.name}, {name}: {line}")
    return dict(zip(chosen, map(json.loads, lines), strict=True))


@pytest.mark.skipif(not PEERS, reason="GPP_PEERS_PYTHON names no Python with torchtitan")
def test_torchtitan_parses_splits_and_schedules(tmp_path: Path) -> None:
    chosen = plans()
    found = read_by(TorchTitan(config="llama3_debugmodel"), chosen, tmp_path)
    for name, e in chosen.items():
        firsts = list(dict.fromkeys(stage.devices[0] for stage in e.plan.stages))
        assert found[name]["stage_rank"] == {str(s): firsts.index(stage.devices[0]) for s, stage in enumerate(e.plan.stages)}
        assert found[name]["microbatches"] == e.plan.minibatch_size // e.plan.stages[0].microbatch_size
    assert found["replicas"]["degrees"] == [2, 1] and found["recomputed"]["ac"] == "FullAC"


@pytest.mark.skipif(not PEERS, reason="GPP_PEERS_PYTHON names no Python with megatron-core")
def test_megatrons_own_check_accepts_the_layouts(tmp_path: Path) -> None:
    chosen = {name: e for name, e in plans().items() if name != "a V"}
    found = read_by(Megatron(), chosen, tmp_path)
    modules = Modules.of(gpt())
    for name, e in chosen.items():
        ranks = len({stage.devices for stage in e.plan.stages})
        own = [len({modules.graph.ops[op].name for op in stage.ops} & set(modules.layers)) for stage in e.plan.stages]
        assert found[name]["layers"] == [own[rank::ranks] for rank in range(ranks)]


@pytest.mark.skipif(not PEERS, reason="GPP_PEERS_PYTHON names no Python with megatron-core")
def test_mimos_own_classes_take_the_grids_and_hand_tensors_on(tmp_path: Path) -> None:
    """Each rank adds its own power of ten: the last one has those of all, once on each way."""
    e = branching()
    (rows,) = read_by(Megatron(), {"towers": e}, tmp_path, by="mimo").values()
    assert [(row["module"], *row["pp"]) for row in rows] == [
        ("image", 0, 2), ("image", 1, 2), ("text", 0, 1), ("multimodal", 0, 2), ("multimodal", 1, 2)
    ]  # fmt: skip
    ran = Megatron().exported(e).ran.plan
    assert [row["warmup"] + 1 for row in rows] == [stage.in_flight // stage.microbatch_size for stage in ran.stages]
    assert [row["ends"] for row in rows] == [[True, False], [False, False], [True, False], [False, False], [False, True]]
    assert rows[3]["from"] == ["image", "text"] and rows[4]["value"] == 11111.0


@pytest.mark.skipif(not PEERS, reason="GPP_PEERS_PYTHON names no Python with deepspeed")
def test_deepspeed_builds_the_planned_parts(tmp_path: Path) -> None:
    chosen = {name: e for name, e in plans().items() if name not in ("a V", "interleaved", "recomputed", "replicas")}
    chosen |= {"two": planned("Etttt|ttL"), "six": planned("Et|t|t|t|t|tL")}
    found = read_by(DeepSpeed(), chosen, tmp_path)
    for name, e in chosen.items():
        own = [sum(e.problem.graph.ops[op].kind == "module" for op in stage.ops) for stage in e.plan.stages]
        assert found[name]["layers"] == own


@pytest.mark.skipif(not PEERS, reason="GPP_PEERS_PYTHON names no Python with vllm and sglang")
@pytest.mark.parametrize("exporter", [Vllm(), SgLang()], ids=lambda e: e.name)
def test_servers_own_function_gives_every_rank_its_layers(exporter: AbstractExporter, tmp_path: Path) -> None:
    texts = ["Et|tt|tt|tL", "Ettt|tt|tL", "Ett|ttttL", "Ettt|tttL", "Etttt|ttL", "Et|t|t|t|t|tL"]
    found = read_by(exporter, {text.replace("|", "-"): planned(text) for text in texts}, tmp_path)
    assert [one["layers"] for one in found.values()] == [[part.count("t") for part in text.split("|")] for text in texts]
