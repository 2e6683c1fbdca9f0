"""Trainings that go on under other plans: equal to resumed ones bit for bit, and how fast they are where a worker is slowed.

    python -m tests.check_replanning --equal 200      random models, plans, schedules, weight policies and optimizers, in threads
    python -m tests.check_replanning --real           real workers: three models, one with replicas, one without drains; kills
    python -m tests.check_replanning --speed          a worker is slowed to half in the middle of a run, with and without replanning

`--equal`: a training of three plans takes the second and the third one at a boundary, and is compared with three runs of which each
goes on from the last one's checkpoint on disk. Losses, weights and buffers must be equal. Exit code 1 if anything is not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

from gpp.errors import GppError
from gpp.optimizers import SGD, AbstractOptimizer, Adam, LearningRate, Muon, NAdam, RMSprop
from gpp.runtime.job import Job, assemble
from gpp.weights.base import AbstractWeights
from gpp.weights.pipemare import PipeMare
from gpp.weights.pipeoptim import PipeOptim
from gpp.weights.spectrain import SpecTrain
from tests.support import inprocess, switches
from tests.support.markings import NAMED, POLICIES, SMALL, Case, random_case, random_ways

EVERY, STEPS = 2, 5


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
    marked = case.job(random_ways(ways)) if ways else None
    plan, data = marked.plan if marked else case.plan, inprocess.data_of(case.model)
    return assemble(
        *(case.found, case.problem, plan, case.strategy),
        optimizer=optimizer,
        data=data,
        model=case.model,
        steps=STEPS,
        dtype=dtype,
        seed=0,
        train_samples=len(data.load("train", case.model, seed=0, dtype=dtype)),
        replan_every=EVERY,
    )


def random_jobs(name: str, policy: AbstractWeights, dtype: str, rng: random.Random) -> tuple[list[Job], dict[str, object]]:
    """Three jobs of one training, whose plans use the same devices; and the initial weights.

    Raises:
        GppError: some plan cannot be trained so.
    """
    optimizer, jobs, weights = random_optimizer(rng), list[Job](), {}
    while len(jobs) < 3:
        case = random_case(name, policy, rng, dtype=dtype)
        if not jobs or case.plan.devices == jobs[0].plan.devices:
            ways = rng if policy.flushes and rng.random() < 0.3 else None
            jobs.append(job_of(case, optimizer, dtype, ways))
            weights = dict(case.weights)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sys.exit(bool(check_equal(asked.equal, asked.seed)))


if __name__ == "__main__":
    main()
