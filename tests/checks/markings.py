"""Train with operators discarded and moved to the host at random, and compare with the same training that keeps everything.

    python -m tests.checks.markings --count 500

Every model in turn, under every policy that keeps the forward's weights, with random plans (replicas, schedules, sizes). Losses,
all gradients and final weights and buffers must be equal bit for bit. Exit code 1 if anything differs.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gpp.errors import InvalidConfig
from gpp.mechanisms.marks.stage import marks_of
from tests.support.markings import NAMED, POLICIES, SMALL, keep, random_case, random_trainings, random_ways, train
from tests.support.options import options


def differences(seed: int, name: str, rng: random.Random, done: Counter[str]) -> tuple[list[str], str]:
    """What is not equal bit for bit of a training with random marks, and which one it is."""
    policy = POLICIES[seed // len([*SMALL, *NAMED]) % len(POLICIES)] if seed % 2 else rng.choice(POLICIES)
    try:
        case = random_case(name, policy, rng)
    except InvalidConfig:  # stages that share a weight need a policy that keeps it one
        case = random_case(name, policy := POLICIES[0], rng)
    kept, job = case.job(keep), case.job(random_ways(rng))
    ways = [(marks_of(stage).recompute, marks_of(stage).offload, marks_of(stage).boundaries) for stage in job.plan.stages]
    with tempfile.TemporaryDirectory() as folder:
        wrong = train(kept, case.weights, Path(folder, "a")).differences(train(job, case.weights, Path(folder, "b")))
    done[policy.name] += 1
    for kind, marked in zip(("discarded operators", "moved operators", "boundaries"), zip(*ways, strict=True), strict=True):
        done[kind] += sum(map(len, marked))
    return wrong, f"{policy.name}, {ways}"


if __name__ == "__main__":
    sys.exit(random_trainings(options(__doc__, count=500, first=0, models=[]), differences))
