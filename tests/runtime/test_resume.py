"""Real runs that go on: by the same command, under another strategy, or not at all.

`tests.checks.kills` kills them at any instant, and compares every step and the weights with those of an undisturbed run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpp.runtime.checkpoint.final import load_final
from gpp.runtime.checkpoint.resume import find
from gpp.runtime.run_dir import run_of, under_way
from tests.checks.kills import WORDS as FOUR_WORKERS
from tests.checks.kills import Attempt
from tests.support.cli import ROOT, environment, workers_of
from tests.support.cli import run as run_command
from tests.support.inprocess import few_layers

STEPS, EVERY = 8, 2
WORDS = [*FOUR_WORKERS, *few_layers("digits")]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    folder = tmp_path_factory.mktemp("undisturbed")
    ran = run_command(folder / "run", *WORDS, f"steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=9")
    done = Attempt(ran.run_dir, ran.code, ran.out)
    assert done.code == 0, done.out
    assert sorted(path.name for path in (done.run_dir / "checkpoints").iterdir()) == [
        "final",
        "step_2",
        "step_4",
        "step_6",
        "step_8",
    ]
    return done


def test_four_workers_of_a_graph_go_on_as_two_of_a_chain(undisturbed: Attempt, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith("cluster.")]
    source = undisturbed.run_dir / "checkpoints" / "step_6"
    done = run_command(tmp_path, *words, f"steps={STEPS}", f"resume={source}", "strategy=sequential", "cluster.num_devices=2")
    assert done.code == 0, done.out
    assert done.result["resumed"] == {"step": 6, "checkpoint": str(source)}
    owner = run_of(undisturbed.run_dir)
    assert owner is not None
    assert f"going on from {undisturbed.run_dir} (started {owner.started}), step 6" in " ".join(done.out.split())
    assert done.result["plan"]["num_devices"] == 2
    losses = undisturbed.losses
    assert done.result["loss"] == pytest.approx([losses[step] for step in range(6, STEPS)], abs=1e-9)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    assert sorted(set(steps)) == list(range(6, STEPS + 1))  # the last one is the evaluation's


def test_a_resumed_run_that_is_killed_while_it_plans_can_be_resumed(undisturbed: Attempt, tmp_path: Path) -> None:
    """In a new directory: it has no checkpoint of its own, and not even a job."""
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run_command, tmp_path / "new", *WORDS, f"steps={STEPS}", f"resume={undisturbed.run_dir}")
        while (here := under_way(tmp_path / "new")) is None:
            assert not done.done()
            time.sleep(0.001)
        os.kill(here.pid, signal.SIGKILL)
        assert done.result().code == -signal.SIGKILL
    assert not (tmp_path / "new" / "job").exists()
    assert find(tmp_path / "new", STEPS).folder == find(undisturbed.run_dir, STEPS).folder


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path: Path) -> None:
    words = [*WORDS, "strategy=sequential", "resume=auto", "engine=reference"]
    begun = run_command(tmp_path, *words, "steps=2", "checkpoint.every=2")
    assert begun.code == 0 and "resumed" not in begun.result, begun.out
    more = run_command(tmp_path, *words, "steps=3")
    assert more.result["resumed"] == {"step": 2, "checkpoint": str(tmp_path / "checkpoints" / "step_2")}, more.out
    # What is damaged is never trained over in silence.
    (tmp_path / "checkpoints" / "step_2" / "checkpoint.json").write_text("{")
    refused = run_command(tmp_path, *words, "steps=4")
    assert refused.code == 2 and "has no whole checkpoint" in refused.out


@pytest.mark.long
def test_a_launch_that_torchrun_starts_again_goes_on(tmp_path: Path) -> None:
    """One of two workers is killed; no word on the command line asks for it, and the directory's name is that of the instant."""
    words = [*(word for word in WORDS if not word.startswith("cluster.")), "strategy=sequential", "steps=200", "checkpoint.every=5"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "run.py"]
    outputs, env = tmp_path / "outputs", environment(OMP_NUM_THREADS="1")
    name = "hydra.run.dir=" + str(outputs) + "/${now:%H-%M-%S-%f}"
    with open(tmp_path / "said", "w") as said:
        launch = subprocess.Popen(
            [sys.executable, *launcher, *words, "engine.launch=env", name], cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            while not (found := list(outputs.glob("[0-9]*/checkpoints/step_*"))):
                assert launch.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.01)
            run_dir = found[0].parent.parent
            victim = next(pid for pid in workers_of(run_dir) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            os.kill(victim, signal.SIGKILL)
            assert launch.wait(timeout=240) == 0, (tmp_path / "said").read_text()
        finally:
            launch.kill()
    plain = run_command(tmp_path / "plain", *words, "cluster.num_devices=2")
    assert {path.name for path in outputs.iterdir()} == {run_dir.name, "latest"}
    result = json.loads((run_dir / "result.json").read_text())
    assert result["resumed"]["step"] >= 5 and result["loss"] == plain.result["loss"][result["resumed"]["step"] :]
    weights, expected = load_final(run_dir), load_final(plain.run_dir)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_training_is_refused_before_any_process_starts(undisturbed: Attempt, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith("minibatch_size")]
    done = run_command(tmp_path, *words, f"steps={STEPS}", f"resume={undisturbed.run_dir}", "minibatch_size=24")
    assert done.code == 2
    assert "minibatch_size=24: must be 48, as in the checkpoint" in " ".join(done.out.split())
    assert "set minibatch_size=48" in " ".join(done.out.split())
    assert not list(tmp_path.iterdir())
