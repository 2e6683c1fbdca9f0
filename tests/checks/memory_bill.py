"""Compare the memory that plans predict with the peak of the workers' allocators, for every run of a sweep.

    python run.py -cd sweeps -cn memory_accuracy && python -m tests.checks.memory_bill outputs/sweeps/memory_accuracy

Each row has the signed error of every worker, below zero where the plan says too little. Exit code 1 if the median error is
above 3 %, or if a plan is more than 5 % below the allocator.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

MEDIAN, BELOW = 0.03, 0.05


def errors(result: dict) -> list[float]:
    """Of each worker: predicted / measured, less 1."""
    predicted, measured = (result[side]["peak_memory_bytes"] for side in ("predicted", "measured"))
    return [predicted[device] / measured[device] - 1 for device in sorted(measured, key=int)]


def main(sweep: Path) -> int:
    counted: list[float] = []
    failed = 0
    for job in json.loads((sweep / "jobs.json").read_text()):
        words = dict(word.split("=", 1) for word in job["overrides"])
        result = json.loads((sweep / job["folder"] / "result.json").read_text())
        if result["status"] != "ok":
            print(f"{words}: {result['status']}: {result['reason']}")
            failed += 1
            continue
        found = errors(result)
        counted += found
        what = f"{words['model']:18} {words.get('strategy/memory', 'keep'):10} {words['cluster.num_devices']} devices"
        print(f"{what}  {' '.join(f'{error:+.1%}' for error in found)}")
    if not counted:
        print("no run to compare")
        return 1
    median, lowest = statistics.median(map(abs, counted)), min(counted)
    print(f"median error {median:.1%} (at most {MEDIAN:.0%}), lowest {lowest:+.1%} (at least {-BELOW:.0%}), {len(counted)} workers")
    return int(bool(failed) or median > MEDIAN or lowest < -BELOW)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
