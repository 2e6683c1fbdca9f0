"""What planning costs: CPU seconds of one core and the peak of memory, each point in a process of its own.

    python -m tests.checks.planning_speed                        all points; a table, and 1 if a limit is broken
    python -m tests.checks.planning_speed --only figure6         the points in whose line this is found
    python -m tests.checks.planning_speed --only mmt --profile   and which functions the planner's seconds are spent in

`plan` is `Strategy.plan`, `bound` the certificate of `mode=plan`; `graph` is what comes before both: coarsening, and the tables
that a problem makes. Capture and imports are left out. The limits are those that the project has set itself: a small graph in
0.3 s, Figure 6 with `graphpipe` in no more than `piper` takes, 1,000 operators on 1,024 devices in 10 s, 2,000 on 4,096 in 60 s;
`dawnpiper`, where most stages lack memory, 500 operators on 8 devices in 10 s and 2,000 on 32 in 60 s.
CPU seconds depend on the machine, so no test of the suite runs this.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from gpp.app.experiment import Experiment
from gpp.planners.bounds.lower_bound import lower_bound
from tests.support.conf import CONF

PHASES = ("graph", "plan", "bound")

APART = "strategy.planner.colocate=never"
"""Every stage has devices of its own, as in the paper and in its sweeps."""

PER_DEVICE = {"mmt": 16, "dlrm": 32, "candle_uno": 256}
"""Samples a device, as in `sweeps/figure6.yaml`."""


@dataclass(frozen=True, slots=True)
class Point:
    """One problem.

    Args:
        limit_s: CPU seconds that `plan` and `bound` together may take; None where another point is the limit.
        no_slower_than: the name of that point.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float | None = None
    no_slower_than: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a point took: CPU seconds by phase, and the most bytes that its process held until each phase was over."""

    seconds: dict[str, float]
    peak_bytes: dict[str, int]
    iteration_s: float
    bound_s: float
    num_ops: int
    num_devices: int

    @property
    def planning_s(self) -> float:
        return self.seconds["plan"] + self.seconds["bound"]


def points() -> list[Point]:
    """All points, those that others are compared with first."""
    out = []
    for kind in ("series_parallel", "dag", "towers"):
        for seed in (0, 1):
            words = ("model.num_ops=64", f"model.graph_seed={seed}")
            out.append(_random(f"small {kind} {seed}", kind, 13, 32, 0.3, *words, APART))
            out.append(_random(f"small {kind} {seed} colocated", kind, 13, 32, 0.3, *words))
    for model, samples in PER_DEVICE.items():
        for nodes in (1, 2, 4, 8):
            size, cluster = 4 * nodes * samples, f"cluster=summit_{nodes}x4"
            for strategy, limit in (("piper", None), ("graphpipe", f"figure6 {model} {4 * nodes} piper")):
                apart = (APART,) if strategy == "graphpipe" else ()
                words = (f"model={model}", cluster, f"strategy={strategy}", f"minibatch_size={size}", *apart)
                out.append(Point(f"figure6 {model} {4 * nodes} {strategy}", words, None, limit))
    for kind in ("series_parallel", "dag", "towers"):
        out.append(_random(f"large {kind}", kind, 1000, 1024, 10.0))
    for kind in ("series_parallel", "dag", "towers"):
        out.append(_random(f"largest {kind}", kind, 2000, 4096, 60.0))
    for layers, nodes, limit in ((48, 2, 10.0), (200, 8, 60.0)):
        batch = ("minibatch_size=128", "microbatch_size=8", "graph.max_ops=null", f"model.num_layers={layers}")
        words = ("model=gpt", f"cluster=summit_{nodes}x4", "strategy=dawnpiper", *batch)
        out.append(Point(f"dawnpiper gpt {layers} layers", words, limit))
    return out


def _random(name: str, kind: str, num_ops: int, num_devices: int, limit_s: float, *more: str) -> Point:
    words = (
        "model=random",
        f"model.kind={kind}",
        f"model.num_ops={num_ops}",
        f"graph.max_ops={num_ops}",
        "cluster=summit_8x4",
        f"cluster.num_nodes={num_devices // 4}",
        f"minibatch_size={max(num_devices, 512)}",
        *more,
    )
    return Point(name, words, limit_s)


def experiment(words: tuple[str, ...]) -> Experiment:
    """The experiment of a command line, under the conditions of the paper."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return instantiate(
            compose("config", overrides=["experiment=paper", "name=speed", "strategies=[]", *words]), _convert_="all"
        )


def measure(point: Point, profiled: bool = False) -> Cost:
    """Plan a point in this process."""
    seconds: dict[str, float] = {}
    peak: dict[str, int] = {}

    def timed(phase: str, step: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = step()
        seconds[phase] = time.process_time() - start
        peak[phase] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return found

    one = experiment(point.words)
    captured = one.captured()
    problem = timed("graph", lambda: one.problem(captured, one.op_graph(captured)))
    with _profile() if profiled else _nothing():
        plan = timed("plan", lambda: one.strategy.plan(problem))
    bound = timed("bound", lambda: lower_bound(problem))
    predicted = one.strategy.predict(plan, problem, record=False).metrics.iteration_s
    return Cost(
        seconds=seconds,
        peak_bytes=peak,
        iteration_s=predicted,
        bound_s=bound.iteration_s,
        num_ops=problem.graph.num_ops,
        num_devices=problem.cluster.num_devices,
    )


@contextmanager
def _profile() -> Iterator[None]:
    # A clock of the processor's: on a machine with other work the wall's says more about that.
    profile = cProfile.Profile(time.process_time)
    with profile:
        yield
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def in_own_process(point: Point, profiled: bool) -> Cost:
    """`measure` in a process of its own, with one thread.

    Raises:
        RuntimeError: the process failed; its words are on the terminal.
    """
    words = [sys.executable, "-m", "tests.checks.planning_speed", "--point", point.name, *["--profile"] * profiled]
    # A model that was not captured yet would bring torch, and its memory, into the process that is measured.
    warm = [sys.executable, "-c", f"from tests.checks.planning_speed import experiment; experiment({point.words!r}).captured()"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    run = partial(subprocess.run, env=env, stdout=subprocess.PIPE, text=True, check=False)
    run(warm)
    found = run(words)
    if found.returncode:
        raise RuntimeError(f"{point.name} ended with {found.returncode}")
    return Cost(**json.loads(found.stdout.splitlines()[-1]))


def broken(point: Point, costs: dict[str, Cost]) -> str | None:
    """Which limit a point breaks; None if it keeps it, or if what it is compared with was left out."""
    took = costs[point.name]
    if point.limit_s is not None and took.planning_s > point.limit_s:
        return f"more than {point.limit_s:g} s"
    other = costs.get(point.no_slower_than or "")
    if other is not None and took.seconds["plan"] > other.seconds["plan"]:
        return f"more than piper's {other.seconds['plan']:.2f} s"
    return None


def line(point: Point, cost: Cost, breaks: str | None) -> str:
    """A row of the table."""
    times = " ".join(f"{cost.seconds[phase]:7.2f}" for phase in PHASES)
    return (
        f"{point.name:<30} {cost.num_ops:5} {cost.num_devices:5} {times} {cost.peak_bytes['plan'] / 1e6:7.0f} "
        f"{cost.peak_bytes['bound'] / 1e6:7.0f} {cost.iteration_s:12.6g} {cost.bound_s:12.6g}  {breaks or ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="of the points, those in whose name this is found")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="say which functions take the seconds of `plan`")
    given = parser.parse_args()
    every = points()
    if given.point:
        print(json.dumps(asdict(measure(next(p for p in every if p.name == given.point), given.profile))))
        return 0
    heads = " ".join(f"{phase + ' s':>7}" for phase in PHASES)
    print(f"{'':<30} {'ops':>5} {'dev.':>5} {heads} {'MB plan':>7} {'MB end':>7} {'iteration s':>12} {'bound s':>12}", flush=True)
    costs: dict[str, Cost] = {}
    failed = 0
    for point in (p for p in every if re.search(given.only, p.name)):
        costs[point.name] = in_own_process(point, given.profile)
        breaks = broken(point, costs)
        failed += breaks is not None
        print(line(point, costs[point.name], breaks), flush=True)
    print(f"{len(costs)} points, {failed} over a limit")
    return int(failed > 0 or not costs)


if __name__ == "__main__":
    sys.exit(main())
