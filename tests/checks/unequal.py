"""Planning on unequal devices, with links by node, by device and by pair, on many random problems.

    python -m tests.checks.unequal --what placements --count 60     graphpipe against all partitions on all devices
    python -m tests.checks.unequal --what chains --count 200        graphpipe against sequential, even and its own chains

Each problem is asked twice, with links by node and with its own (`--links node|own|both`). Prints a summary and ends with 1
if graphpipe was behind: by more than rounding the best of all placements, or a chain.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time

from gpp import Even, GraphPipe, Sequential
from gpp.cost.problem import Problem
from gpp.planners.bounds.lower_bound import lower_bound
from tests.oracle.all_placements import optimum_s
from tests.support.mixed import linked, mixed_problem
from tests.support.problems import run

SAME = 1 + 1e-6


def problem(what: str, seed: int, own: bool) -> Problem:
    small = {"ops": (3, 5), "devices": (2, 4)} if what == "placements" else {}
    found = mixed_problem(seed, **small)
    return linked(found, seed) if own else found


def judge(job: tuple[str, int, bool]) -> tuple[tuple[str, int, bool], float | None, float | None, float, float]:
    """The job, seconds of graphpipe's plan and of what it is compared with, the lower bound, and CPU seconds of graphpipe."""
    what, _, _ = job
    asked = problem(*job)
    began = time.process_time()
    ours = run(GraphPipe(colocate="never"), asked)
    took = time.process_time() - began
    if what == "placements":
        other = optimum_s(asked)
    else:
        others = [found[1] for planner in (Sequential(), Even()) if (found := run(planner, asked)) is not None]
        other = min(others, default=None)
    bound = lower_bound(asked).iteration_s if ours else 0.0
    return job, ours and ours[1], other, bound, took


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--what", choices=("placements", "chains"), required=True)
    parser.add_argument("--links", choices=("node", "own", "both"), default="both")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    kinds = {"node": (False,), "own": (True,), "both": (False, True)}[given.links]
    jobs = [(given.what, seed, own) for seed in range(given.first, given.first + given.count) for own in kinds]
    wrong, ratios, seconds, infeasible = 0, {False: list[float](), True: list[float]()}, list[float](), 0
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for (_, seed, own), ours, other, bound, took in pool.imap_unordered(judge, jobs):
            seconds.append(took)
            if ours is None or other is None:
                infeasible += ours is other
                behind = (ours is None and other is not None) or (given.what == "placements" and ours is not other)
            else:
                ratios[own].append(ours / other)
                behind = ours > other * SAME or bound > ours * SAME
            if behind:
                wrong += 1
                links = "own links" if own else "links by node"
                print(f"problem {seed}, {links}: graphpipe {ours}, against {other}; bound {bound}", flush=True)
    for own, found in ratios.items():
        if found:
            print(
                f"{'own links' if own else 'links by node'}: {len(found)} problems, time over the other's: least {min(found):.3f}, "
                f"mean {statistics.mean(found):.3f}, most {max(found):.6f}"
            )
    median = statistics.median(seconds)
    print(f"{infeasible} infeasible; {wrong} wrong; CPU seconds of a search: median {median:.2f}, most {max(seconds):.1f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
