"""Trainings that go on under other plans: equal to resumed ones bit for bit, and how fast they are where a worker is slowed.

    python -m tests.checks.replanning --equal 200      random models, plans, schedules, weight policies and optimizers, in threads
    python -m tests.checks.replanning --real           real workers: pipelines without drains, memory policies, clipping
    python -m tests.checks.replanning --kills 20       a worker is killed around the switch, and the run is resumed
    python -m tests.checks.replanning --speed 800 model=gpt_small strategy=vpipe       a worker is slowed to half after 200 steps

`--equal`: a training of three plans takes the second and the third one at a boundary, and is compared with three runs of which each
goes on from the last one's checkpoint on disk. Losses, weights and buffers must be equal. Exit code 1 if anything is not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpp import PipeMare, PipeOptim, SpecTrain
from gpp.errors import GppError
from gpp.optimizers import SGD, AbstractOptimizer, Adam, LearningRate, Muon, NAdam, RMSprop
from gpp.replan import Moved
from gpp.runtime.checkpoint.final import load_final
from gpp.runtime.hang_detection.watch import said_pids
from gpp.runtime.job import Job
from gpp.runtime.worker.announced import announced
from gpp.weights.base import AbstractWeights
from tests.support import switches
from tests.support.cli import ROOT
from tests.support.markings import NAMED, POLICIES, SMALL, Case, keep, random_case, random_ways
from tests.support.options import options

EVERY, STEPS = 2, 5
TURN_S = 0.005
"""Seconds for which a slowed worker stands still, and runs, in turn."""


def random_optimizer(rng: random.Random) -> AbstractOptimizer:
    """Any rule, with everything that a switch could lose: a rate that decays, shared state, clipping."""
    made = rng.choice([Adam(lr=1e-2), Muon(lr=1e-2), NAdam(lr=1e-2), RMSprop(lr=1e-3), SGD(lr=0.05, momentum=0.9), SGD(lr=0.05)])
    more = {
        "shard": rng.choice(["none", "replicas"]),
        "clip_norm": rng.choice([None, 0.5]),
        "learning_rate": rng.choice([LearningRate(), LearningRate(shape="cosine", warmup_steps=2)]),
    }
    return replace(made, **more)


def job_of(case: Case, optimizer: AbstractOptimizer, dtype: str, ways: random.Random | None) -> Job:
    """The job of a case whose plan may be replaced."""
    return case.job(random_ways(ways) if ways else keep, dtype=dtype, steps=STEPS, optimizer=optimizer, replan_every=EVERY)


def random_jobs(name: str, policy: AbstractWeights, dtype: str, rng: random.Random) -> tuple[list[Job], dict[str, torch.Tensor]]:
    """Three jobs of one training, whose plans use the same devices; and the initial weights.

    Raises:
        GppError: some plan cannot be trained so.
    """
    optimizer, jobs, weights = random_optimizer(rng), list[Job](), dict[str, torch.Tensor]()
    while len(jobs) < 3:
        case = random_case(name, policy, rng, dtype=dtype)
        if not jobs or case.plan.devices == jobs[0].plan.devices:
            ways = rng if policy.flushes and rng.random() < 0.3 else None
            jobs.append(job_of(case, optimizer, dtype, ways))
            weights = case.weights
    return jobs, weights


def check_equal(count: int, seed: int) -> int:
    """Random trainings; returns how many differ."""
    wrong = moved = done = 0
    number = seed
    while done < count:
        rng = random.Random(number)
        name = rng.choice(SMALL if rng.random() < 0.8 else sorted(NAMED))
        policy, dtype = (
            rng.choice([POLICIES[0], *POLICIES, PipeMare(), PipeOptim(), SpecTrain()]),
            rng.choice(["float32", "float64"]),
        )
        number += 1
        try:
            jobs, weights = random_jobs(name, policy, dtype, rng)
        except GppError:
            continue
        what = f"seed {number - 1}: {name}, {policy.name}, {jobs[0].settings.optimizer['_target_'].rpartition('.')[2]}, {dtype}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                live = switches.train(jobs[0], Path(folder) / "live", weights, jobs[1:])
                found = switches.differences(live, switches.through_checkpoints(jobs, Path(folder) / "disk", weights))
            except Exception:
                found = [traceback.format_exc()]
                live = {}, {}, []
        bytes_moved = sum(line["bytes"] for line in live[2])
        moved, done, wrong = moved + bool(bytes_moved), done + 1, wrong + bool(found)
        print(f"{what}: {bytes_moved} bytes moved: {'; '.join(found[:4]) or 'equal'}", flush=True)
    print(f"{done} trainings, {moved} of which moved layers between devices; {wrong} differ")
    return wrong


CHAIN = ["model=digits", "strategy=sequential", "strategy.planner.replication=false", "cluster.num_devices=2"]
REAL = {
    "digits, a chain": CHAIN,
    "gpt_small, vPipe": ["model=gpt_small", "strategy=vpipe", "cluster.num_devices=2", "minibatch_size=16"],
    "mmt_small, three workers": ["model=mmt_small", "strategy=sequential", "cluster.num_devices=3", "minibatch_size=12"],
    "digits, no drains": ["model=digits", "strategy=pipedream", "cluster.num_devices=2", "microbatch_size=32"],
    "digits, double buffer": ["model=digits", "strategy=pipedream_2bw", "cluster.num_devices=2", "microbatch_size=16"],
    "digits, recomputed": [*CHAIN, "strategy/memory=recompute"],
    "digits, clipped": [*CHAIN, "optimizer.learning_rate.shape=cosine", "optimizer.clip_norm=0.3"],
    "gpt_small, DawnPiper": ["model=gpt_small", "strategy=dawnpiper", "cluster.num_devices=2", "minibatch_size=16"],
}
"""Settings of real trainings that are compared with resumed ones."""

ALWAYS = ["logger=none", "evaluate_every=0"]
BY_SIZE = ["cost=analytical", "strategy.replan.slower=0.1"]
"""A plan that knows nothing of this machine, so that there is something to gain."""


def run(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    command = [sys.executable, str(ROOT / "run.py"), *ALWAYS, *overrides, f"hydra.run.dir={run_dir}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(run_dir: Path, rank: int = 0) -> int:
    """Lines that a worker has written so far."""
    log = run_dir / "ranks" / f"rank_{rank}.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def ended(process: subprocess.Popen[str]) -> bool:
    """Whether a run is over."""
    return process.poll() is not None


def slow_down(run_dir: Path, world: int, rank: int, after: int, over: Callable[[], bool]) -> None:
    """From so many lines on let a worker run for half of the time, from outside: stopped for a moment, and let go for as long."""
    while steps_of(run_dir, rank) < after:
        if over():
            return
        time.sleep(0.02)
    pid = said_pids(run_dir / "ranks", world)[rank]
    with suppress(ProcessLookupError):
        while not over():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(TURN_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(TURN_S)


def slowed(run_dir: Path, after: int | None, *overrides: str, world: int = 2) -> tuple[int, str, dict[str, Any]]:
    """A run whose last worker is slowed to half after so many steps: exit code, words, result."""
    process = run(run_dir, *overrides)
    if after is not None:
        args = run_dir, world, world - 1, after, partial(ended, process)
        threading.Thread(target=slow_down, args=args, daemon=True).start()
    words, _ = process.communicate(timeout=600)
    found = run_dir / "result.json"
    return process.returncode, words, json.loads(found.read_text()) if found.exists() else {}


def check_real(folder: Path) -> int:
    """Real workers whose layers move, against a run resumed from the checkpoint of that step; returns how many differ."""
    wrong = 0
    for name, settings in REAL.items():
        world = int(next(word for word in settings if word.startswith("cluster.num_devices")).rpartition("=")[2])
        base = folder / name.replace(", ", "_").replace(" ", "_")
        saves = [*BY_SIZE, "steps=400", "checkpoint.every=20", "checkpoint.drain=true", "checkpoint.keep=100"]
        replans = ["strategy.replan.every=20", "strategy.replan.most=1"]
        code, words, live = slowed(base / "live", 30, *settings, *saves, *replans, world=world)
        if code or not live.get("replaced"):
            print(f"{name}: exit code {code}, no switch\n{words[-2000:]}", flush=True)
            wrong += 1
            continue
        switch, at = live["replaced"][0]["switch"], live["replaced"][0]["first"] - 1
        later = [f"resume={base}/live/checkpoints/step_{at}", f"plan={base}/live/job/plan.json"]
        code, words, resumed = slowed(base / "resumed", None, *settings, *saves, *later, world=world)
        losses = live["loss"][at:] == resumed.get("loss")
        mine, theirs = (load_final(base / part) for part in ("live", "resumed"))
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        wrong += not (losses and same and not code)
        print(
            f"{name}: step {at}, {', '.join(str(Moved(**one)) for one in switch['moved'])}; {switch['bytes']} bytes "
            f"({switch['predicted_bytes']} predicted); pause {switch['pause_s']:.3f} s "
            f"({switch['predicted_pause_s']:.3f} s predicted); "
            f"losses of the {len(live['loss']) - at} steps after it {'equal' if losses else 'DIFFER'}, weights "
            f"{'equal' if same else 'DIFFER'}{'' if not code else words[-2000:]}",
            flush=True,
        )
    return wrong


def check_kills(folder: Path, count: int) -> int:
    """Workers killed at random instants from the announcement of a plan on; each run is resumed. Returns how many went wrong."""
    wrong, rng = 0, random.Random(0)
    settings = [*REAL["digits, a chain"], *BY_SIZE, "steps=400", "checkpoint.every=20", "strategy.replan.every=20"]
    for number in range(count):
        run_dir, late_s = folder / f"kill_{number}", rng.uniform(0.0, 0.4)
        process = run(run_dir, *settings)
        threading.Thread(target=slow_down, args=(run_dir, 2, 1, 30, partial(ended, process)), daemon=True).start()
        while not ended(process) and not announced(run_dir, 0).is_dir():
            time.sleep(0.002)
        while not ended(process) and steps_of(run_dir) % 20 < 19:  # the boundary comes
            time.sleep(0.0005)
        time.sleep(late_s)
        with suppress(ProcessLookupError):
            os.kill(said_pids(run_dir / "ranks", 2)[rng.randrange(2)], signal.SIGKILL)
        words, _ = process.communicate(timeout=600)
        told = process.returncode != 0 and "killed by SIGKILL" in words
        code, words, result = slowed(run_dir, None, *settings, f"resume={run_dir}")
        good = (told or process.returncode == 0) and code == 0 and result["status"] == "ok"
        wrong += not good
        print(f"kill {number}, {late_s:.3f} s after the boundary: {'fine' if good else 'WRONG ' + words[-1500:]}", flush=True)
    return wrong


def show_speed(folder: Path, steps: int, *overrides: str) -> None:
    """The rates of a run whose second worker is slowed to half, with and without replanning."""
    settings = ["cluster.num_devices=2", f"steps={steps}", *overrides]
    after, lines = steps // 4, list[str]()
    for every in (0, steps // 10):
        run_dir = folder / f"every_{every}"
        code, words, result = slowed(run_dir, after, *settings, f"strategy.replan.every={every}", "strategy.replan.slower=0.2")
        if code:
            print(words[-2000:])
            return
        records = [json.loads(line) for line in (run_dir / "ranks" / "rank_0.jsonl").read_text().splitlines()]
        end = {record["step"]: record["end"] for record in records if "switched" not in record and "step" in record}
        took = {step: end[step] - end[step - 1] for step in end if step > 2}
        moves = result.get("replaced", [])
        change = moves[0]["first"] - 1 if moves else after + (steps - after) // 2
        last = moves[-1]["first"] + 1 if moves else change
        size = json.loads((run_dir / "job" / "settings.json").read_text())["minibatch_size"]
        spans = {"before": (3, after), "slowed": (after + 2, change), "after": (last + 2, steps - 1)}
        rates = list[str]()
        for name, (lo, hi) in spans.items():
            if known := [took[step] for step in range(lo, hi) if step in took]:
                rates.append(f"{name} {size * len(known) / sum(known):.0f} samples/s in {len(known)} steps")
        lines.append(f"every={every}: {', '.join(rates)}; {sum(took.values()):.1f} s in all")
        for one in moves:
            switch = one["switch"]
            lines.append(
                f"  step {one['first'] - 1}: {', '.join(str(Moved(**m)) for m in switch['moved'])}, "
                f"{switch['bytes'] / 1e6:.2f} MB, "
                f"pause {switch['pause_s'] * 1e3:.0f} ms ({switch['predicted_pause_s'] * 1e3:.0f} ms predicted), samples/s times "
                f"{switch['samples_per_s'][1] / switch['samples_per_s'][0]:.2f} "
                f"({switch['predicted_step_s'][0] / switch['predicted_step_s'][1]:.2f} predicted)"
            )
    print("\n".join(lines))


def main() -> None:
    asked = options(__doc__, equal=0, seed=0, real=False, kills=0, speed=0, names=[])
    wrong = check_equal(asked.equal, asked.seed) if asked.equal else 0
    with tempfile.TemporaryDirectory() as folder:
        wrong += check_real(Path(folder)) if asked.real else 0
        wrong += check_kills(Path(folder), asked.kills) if asked.kills else 0
        if asked.speed:
            show_speed(Path(folder), asked.speed, *asked.names)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
