"""Train with operators discarded and moved to the host at random, and compare with the same training that keeps everything.

    python -m tests.checks.markings --count 500

Every model in turn, under every policy that keeps the forward's weights, with random plans (replicas, schedules, sizes). Losses,
all gradients and final weights and buffers must be equal bit for bit. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from gpp.errors import InvalidConfig
from gpp.mechanisms.marks.stage import marks_of
from tests.support.markings import NAMED, POLICIES, SMALL, keep, random_case, random_ways, train


def main(count: int, first: int, models: list[str]) -> int:
    names = models or [*SMALL, *NAMED]
    bad, done = 0, Counter[str]()
    for seed in range(first, first + count):
        rng, name = random.Random(seed), names[seed % len(names)]
        policy = POLICIES[seed // len(names) % len(POLICIES)] if seed % 2 else rng.choice(POLICIES)
        try:
            try:
                case = random_case(name, policy, rng)
            except InvalidConfig:  # stages that share a weight need a policy that keeps it one
                case = random_case(name, policy := POLICIES[0], rng)
            kept, job = case.job(keep), case.job(random_ways(rng))
            ways = [(marks_of(stage).recompute, marks_of(stage).offload, marks_of(stage).boundaries) for stage in job.plan.stages]
            with tempfile.TemporaryDirectory() as folder:
                wrong = train(kept, case.weights, Path(folder, "a")).differences(train(job, case.weights, Path(folder, "b")))
        except Exception:
            wrong, ways = [traceback.format_exc()], []
        done[policy.name] += 1
        done["discarded operators"] += sum(len(again) for again, *_ in ways)
        done["moved operators"] += sum(len(moved) for _, moved, _ in ways)
        done["boundaries"] += sum(len(ends) for *_, ends in ways)
        if wrong:
            bad += 1
            print(f"seed {seed}: {name}, {policy.name}, {ways}: {', '.join(wrong)}", flush=True)
    print(f"{count} markings, {bad} of them change something; {dict(done)}")
    return bool(bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--models", nargs="*", default=[])
    options = parser.parse_args()
    sys.exit(main(options.count, options.first, options.models))
