"""Plans under torch.distributed.pipelining: torch reads our lists of actions, and trains as our own workers do."""

from __future__ import annotations

import csv
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute, _validate_schedule

from gpp import SGD, Even, GPipe, OneFOneB, Split1F1B, Strategy, VHalf, ZeroBubbleH1, ZeroBubbleV
from gpp.app.exporting import of_pipeline, settled
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export.base import Exported, ToExport
from gpp.export.deepspeed import DeepSpeed
from gpp.export.torch import Torch
from gpp.plan.build import make_plan
from gpp.plan.chain import as_chain, device_order
from gpp.runtime.job import Job
from gpp.schedules.base import AbstractSchedule
from tests.checks.runtime import Program
from tests.checks.torch_runtime import losses_of
from tests.support import inprocess
from tests.support.ranks import run_ranks
from tests.support.staged import DATA, captured, parts_of, problem_of

STEPS = 2
ROOT = Path(__file__).resolve().parents[2]

Case = tuple[str, tuple[int, ...], AbstractSchedule, str]
CASES: dict[str, Case] = {
    "a skip over two stages, on 2": ("Skip", (0, 0, 1, 1), OneFOneB(), "torch"),
    "branches, 2 ranks": ("Fork", (0, 1, 0, 1), OneFOneB(), "plan"),
    "branches, 4 ranks": ("Fork", (0, 1, 2, 3), OneFOneB(), "torch"),
    "branches, 4 ranks, split backwards": ("Fork", (0, 1, 2, 3), ZeroBubbleH1(), "plan"),
    "chain, 4 ranks, all forwards first": ("Chain4", (0, 1, 2, 3), GPipe(), "plan"),
    "chain, 2 ranks in a V": ("Chain4", (0, 1, 1, 0), ZeroBubbleV(), "torch"),
    "chain, 2 ranks in a V, little memory": ("Chain4", (0, 1, 1, 0), VHalf(), "plan"),
    "chain, 2 ranks, halves at once": ("Chain4", (0, 0, 1, 1), Split1F1B(), "torch"),
    "towers, 2 ranks": ("TwoSources", (0, 0, 1), OneFOneB(), "torch"),
    "a weight in both ends, 2 ranks": ("Tied", (0, 0, 1), OneFOneB(), "torch"),
}
QUICK = "a skip over two stages, on 2"


def asked(case: Case, **more: object) -> tuple[ToExport, Job, dict[str, torch.Tensor]]:
    network, devices, schedule, _ = case
    model, found, weights = captured(network)
    problem = problem_of(found, schedule, max(devices) + 1)
    parts = [(mask, 1) for mask in parts_of(problem.graph)][: len(devices)]
    plan = make_plan(problem, "test", parts, 4, ordered=True, placement=[(device,) for device in devices])
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    optimizer = SGD(lr=0.1, momentum=0.5)
    job = inprocess.make_job(
        found, problem, plan, schedule, model=model, data=DATA, optimizer=optimizer, steps=STEPS, dtype="float64"
    )
    e = ToExport(model=network, captured=found, problem=problem, strategy=strategy, plan=plan)
    return replace(e, **more), job, weights


def rows_of(made: Exported, name: str) -> dict[int, list[Any]]:
    rows = csv.reader(made.files[name].splitlines())
    found = {rank: [_Action.from_str(word) for word in row] for rank, row in enumerate(rows)}
    assert all(action is not None for row in found.values() for action in row)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_torch_reads_both_lists_and_its_dry_run_ends(case: Case) -> None:
    """The placement that torch finds in them is the plan's, and no message waits for itself."""
    e, _, _ = asked(case)
    made = Torch().exported(e)
    ranks, count = len(device_order(e.plan)), e.plan.minibatch_size // 4
    place = _validate_schedule(rows_of(made, "schedule.csv"), ranks, len(e.plan.stages), count)
    assert place == {s: device_order(e.plan).index(stage.devices[0]) for s, stage in enumerate(e.plan.stages)}
    full = {
        rank: [action for action in row if action.computation_type.value != "REDUCE_GRAD"]
        for rank, row in rows_of(made, "schedule_messages.csv").items()
    }
    dry = _simulate_comms_compute(full, place.__getitem__, len(e.plan.stages))
    passes = [[a for a in row if a is not None and a.is_compute_op] for row in dry.values()]
    assert [len(own) for own in passes] == [len(row) for row in rows_of(made, "schedule.csv").values()]
    last = {rank: str(row[-1]) for rank, row in rows_of(made, "schedule_messages.csv").items()}
    assert all(word.endswith("REDUCE_GRAD") or "SEND_B" in word for word in last.values())


def test_both_ends_have_messages_between_two_ranks_in_one_order() -> None:
    """Transports that match by order alone need it: of both directions of passes, and of all pairs of stages."""
    for case in CASES.values():
        e, _, _ = asked(case)
        rows = rows_of(Torch().exported(e), "schedule_messages.csv")
        order = device_order(e.plan)
        place = {s: order.index(stage.devices[0]) for s, stage in enumerate(e.plan.stages)}
        sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        taken: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for rank, row in rows.items():
            for action in row:
                kind, _, way = action.computation_type.value.partition("_")
                step = 1 if way == "F" else -1
                if kind == "SEND":
                    peer = action.stage_index + step
                    sent.setdefault((rank, place[peer]), []).append((way, peer, action.microbatch_index or 0))
                elif kind == "RECV":
                    peer = place[action.stage_index - step]
                    taken.setdefault((peer, rank), []).append((way, action.stage_index, action.microbatch_index or 0))
        assert sent and sent == taken


WORDS = ["train.py", "--steps", str(STEPS), "--save-gradients"]


def train(folder: str) -> None:
    """What a launcher does on each rank."""
    os.chdir(folder)
    sys.argv = WORDS
    runpy.run_path(WORDS[0], run_name="__main__")


def torchrun(folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
    words = [*launcher, str(ranks), *WORDS]
    return subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def run(folder: Path, ranks: int, forked: bool) -> list[float]:
    out = run_ranks(ranks, __name__, "train", str(folder)) if forked else torchrun(folder, ranks)
    assert out.returncode == 0, out.stdout[-3000:]
    (folder / "steps.jsonl").write_text("".join(line for line in out.stdout.splitlines(keepends=True) if line.startswith("{")))
    program = Program([], [folder / "steps.jsonl"])
    ((first, *later),) = program.ends()
    assert later and later == sorted(later) and first < later[0]  # what `tests.checks.torch_runtime` takes steps from
    return losses_of(program)


@pytest.mark.parametrize(
    ("name", "forked"), [(QUICK, True), *(pytest.param(name, False, marks=pytest.mark.long) for name in CASES)]
)
def test_losses_and_gradients_are_those_of_our_workers(name: str, forked: bool, tmp_path: Path) -> None:
    case = CASES[name]
    e, job, weights = asked(case)
    made = Torch(messages=case[3]).exported(e)  # type: ignore[arg-type]
    with inprocess.recorded_gradients() as seen:
        losses, _, workers = inprocess.run(job, tmp_path / "ours", weights)
    folder = tmp_path / "torch"
    job.save(folder, weights)
    for name, text in made.files.items():
        (folder / name).write_text(text)
    ranks = len(device_order(e.plan))
    assert run(folder, ranks, forked) == pytest.approx(losses, abs=1e-12)
    compared = 0
    for step in range(STEPS):
        theirs = {name: g for r in range(ranks) for name, g in load_file(folder / f"gradients_{r}_{step}.safetensors").items()}
        for worker in workers:
            for module in worker.modules.values():
                for name, param in module.named_parameters():
                    torch.testing.assert_close(theirs[name], seen(param)[step], rtol=0, atol=1e-12)
                    compared += 1
    assert compared >= 2 * STEPS


def test_carrying_is_on_the_bill() -> None:
    """What passes a stage is received, held and sent there: the chain takes longer, and moves the bytes twice."""
    e, _, _ = asked(("Skip", (0, 1, 2, 3), OneFOneB(), "torch"))
    plan, problem = as_chain(e.plan, e.problem)
    assert plan.edges == ((0, 1), (1, 2), (2, 3)) and problem.graph.num_ops == e.problem.graph.num_ops + 2
    own, carried = (e.strategy.predict(p, q).metrics for p, q in ((e.plan, e.problem), (plan, problem)))
    size = 6 * 8  # of the tensor, for each sample
    assert carried.communication_bytes - own.communication_bytes == 2 * size * e.plan.minibatch_size
    assert carried.iteration_s > own.iteration_s
    (lost,) = Torch().exported(e).lost
    assert "from stage 0 to stage 3" in lost.what and lost.seconds == pytest.approx(carried.iteration_s - own.iteration_s)
    chain = asked(("Chain4", (0, 1, 2, 3), OneFOneB(), "torch"))[0]
    assert as_chain(chain.plan, chain.problem) == (chain.plan, chain.problem) and not Torch().exported(chain).lost


@pytest.mark.parametrize(
    ("network", "devices", "words"),
    [("TwoLosses", (0, 1, 2), "stage 1 makes loss:middle, but stage 2"), ("Frozen", (0, 1, 2, 3), "runs no backward")],
)
def test_what_torch_cannot_run_is_refused_by_stage(network: str, devices: tuple[int, ...], words: str) -> None:
    e, _, _ = asked((network, devices, OneFOneB(), "torch"))
    with pytest.raises(UnsupportedPlan, match=words):
        Torch().exported(e)


def test_replicas_are_refused_by_stage() -> None:
    e, _, _ = asked(CASES[QUICK])
    stages = list(e.plan.stages)
    stages[1] = replace(stages[1], devices=(2, 3))
    with pytest.raises(UnsupportedPlan, match=r"stage 1 has 2 devices, and export=torch gives a stage one"):
        Torch().exported(e.having(replace(e.plan, stages=tuple(stages))))


def test_a_pipeline_of_ones_own_loop_is_written_but_for_engines_that_read_its_data(tmp_path: Path) -> None:
    e, job, _ = asked(("Chain4", (0, 0, 1, 1), OneFOneB(), "torch"))
    page = of_pipeline(job, e.problem, e.strategy, DeepSpeed(nearest=True), tmp_path / "parts")
    assert "nearest plan that the engine can run" in page.read_text()
    found = json.loads((tmp_path / "parts" / "parts.json").read_text())
    assert found["layers"][-3:] == ["s1", "s2", "s3"] and found["parts"][-1] == len(found["layers"])
    with pytest.raises(InvalidConfig, match="reads the model's data by its settings"):
        of_pipeline(job, e.problem, e.strategy, Torch(), tmp_path / "torch")


def test_a_chain_that_carries_nothing_is_written_where_it_is_faster() -> None:
    e, _, _ = asked(("Fork", (0, 1, 0, 1), OneFOneB(), "torch"))
    own = Torch().exported(e)
    assert own.lost and settled(e, Torch())[0] is e
    other, made, why = settled(e, Torch(nearest=True))
    assert why is not None and "edges that pass stages" in why and not made.lost
    assert made.ran.step_s() < own.ran.step_s() and other is not e
