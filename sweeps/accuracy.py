"""What asynchronous methods cost in accuracy, each at its own best rate: makes sweeps/accuracy.csv, and prints its tables.

    python -m sweeps.accuracy digits_deep translator      runs what is missing of these tasks, one core; may be stopped at any time
    python -m sweeps.accuracy                             the tables, from sweeps/accuracy.csv

A run is one of `sweeps/pipeoptim_accuracy.yaml`, in float64 and in this process. A method's rate is that with the best mean
accuracy over `TUNING`, seeds that are not reported; a run that diverges counts as 0 there. Reported are runs at that rate with the
seeds of `SEEDS`, and the difference to PipeDream (`stash`) seed by seed: weights, data and their order are the same in a seed.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

import argparse
import csv
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from statistics import mean, stdev

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from baselines.reference.pipeline import Pipeline
from gpp.app.experiment import Experiment
from gpp.errors import NonFinite
from gpp.runtime.job import Job
from sweeps.fit_v100 import ROOT

KEPT = ROOT / "sweeps" / "accuracy.csv"
OPTIMIZERS = ("sgd", "adamw", "nadam")
ACCURACY = "metric:accuracy"
SEEDS = (0, 1, 2, 3, 4)
BASIS = "stash"
"""The method that the others are compared with, seed by seed."""

ACTUAL = ("sync", "stash", "naive", "vertical_sync", "double_buffer")
PREDICTING = ("pipeoptim", "spectrain")
CORRECTED = ("stash_less_momentum", "stash_rescheduled", "stash_gap_aware", "pipemare")
TEXT = ("stash", "sync", "pipeoptim", "double_buffer", "stash_no_momentum", "stash_rescheduled", "stash_less_momentum")
NADAM = ("stash", "asyncpp")
WHOLE = {
    "sync": ("cluster.num_devices=1", "microbatch_size=${minibatch_size}"),
    "double_buffer": ("cluster.num_devices=1", "strategy.weights.accumulation=1"),
}
"""Methods with one version for all stages and micro-batches of a mini-batch: one stage with one micro-batch computes the same but
for the order of sums, and sooner."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What is run of a task.

    Args:
        rates: optimizer -> rates that are tried.
        methods: optimizer -> methods.
        tuning: seeds that rates are chosen by.
        words: settings of the task beyond sweeps/task.
    """

    rates: dict[str, tuple[float, ...]]
    methods: dict[str, tuple[str, ...]]
    tuning: tuple[int, ...] = (10, 11)
    words: tuple[str, ...] = ()


GRIDS = {
    "digits_deep": Grid(
        rates={"sgd": (0.005, 0.01, 0.02, 0.04), "adamw": (0.0005, 0.001, 0.002, 0.004), "nadam": (0.0005, 0.001, 0.002, 0.004)},
        methods={
            "sgd": (*ACTUAL, *PREDICTING, "stash_spike", *CORRECTED),
            "adamw": (*ACTUAL, *PREDICTING, *CORRECTED),
            "nadam": NADAM,
        },
    ),
    "translator": Grid(
        rates={"adamw": (0.001, 0.002, 0.004), "nadam": (0.001, 0.002, 0.004), "sgd": (0.02, 0.04, 0.08)},
        methods={"adamw": TEXT, "nadam": (*NADAM, "pipeoptim"), "sgd": ("stash", "sync", "pipeoptim", "stash_spike")},
        tuning=(10,),
        words=("minibatch_size=32", "steps=200"),
    ),
    "lstm": Grid(
        rates={"adamw": (0.001, 0.002, 0.004), "nadam": (0.001, 0.002, 0.004), "sgd": (0.02, 0.04, 0.08)},
        methods={"adamw": TEXT, "nadam": (*NADAM, "pipeoptim"), "sgd": ("stash", "sync", "pipeoptim", "stash_spike")},
        tuning=(10,),
        words=("minibatch_size=32", "steps=200"),
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One run by its settings."""

    task: str
    optimizer: str
    method: str
    rate: float
    seed: int

    def words(self) -> list[str]:
        """Its settings, for `pipeoptim_accuracy`."""
        first = min(path.stem for path in (ROOT / "sweeps" / "rate").glob(f"{self.optimizer}_*.yaml"))
        own = [f"task={self.task}", f"method={self.method}", f"rate={first}", f"optimizer.lr={self.rate}", f"seed={self.seed}"]
        return [*own, *WHOLE.get(self.method, ()), "dtype=float64", *GRIDS[self.task].words]


FIELDS = ("task", "optimizer", "method", "rate", "seed", "accuracy", "loss", "cpu_s")


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to: on held-out samples, NaN where it diverged.

    Args:
        accuracy: share of the samples (of their tokens, for texts).
        loss: their mean loss.
        cpu_s: seconds of the processor.
    """

    accuracy: float
    loss: float
    cpu_s: float


def experiment(run: Run) -> Experiment:
    """A run as the sweep composes it."""
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        words = [f"hydra.searchpath=[file://{ROOT / 'conf'}]", *run.words(), "strategies=[]", "name=accuracy"]
        return instantiate(compose("pipeoptim_accuracy", overrides=words), _convert_="all")


def job(run: Run) -> tuple[Job, dict]:
    """A run's job and initial weights."""
    one = experiment(run)
    one.check()
    captured = one.captured()
    problem = one.problem(captured, one.op_graph(captured))
    return one.job(captured, problem, one.make_plan(problem)), one.weights(captured)


def execute(run: Run) -> Result:
    """Train and evaluate, in this process."""
    start = time.process_time()
    found = finish(Pipeline(*job(run)))
    return Result(found[ACCURACY], found["loss"], time.process_time() - start)


def finish(pipeline: Pipeline) -> dict[str, float]:
    """Train to the end; the results on held-out samples, NaN where the run diverges."""
    try:
        for first, count in pipeline.stretches():
            for _ in pipeline.train(first, count):
                pass
        found = pipeline.evaluate()
        pipeline.check_weights()
    except NonFinite:
        return {ACCURACY: math.nan, "loss": math.nan}
    return found


def kept() -> dict[Run, Result]:
    """Runs on file."""
    if not KEPT.exists():
        return {}
    with KEPT.open(newline="") as file:
        return {
            Run(row["task"], row["optimizer"], row["method"], float(row["rate"]), int(row["seed"])): Result(
                float(row["accuracy"]), float(row["loss"]), float(row["cpu_s"])
            )
            for row in csv.DictReader(file)
        }


def keep(run: Run, result: Result) -> None:
    """Add a run to the file."""
    fresh = not KEPT.exists()
    with KEPT.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(FIELDS)
        own = (run.task, run.optimizer, run.method, f"{run.rate:g}", run.seed)
        writer.writerow((*own, f"{result.accuracy:.6f}", f"{result.loss:.6f}", f"{result.cpu_s:.1f}"))


def best(runs: dict[Run, Result], task: str, optimizer: str, method: str) -> float | None:
    """The rate of the best mean accuracy over the seeds for tuning; None before all of them are there."""
    grid, found = GRIDS[task], dict[float, float]()
    for rate in grid.rates[optimizer]:
        tried = [runs.get(Run(task, optimizer, method, rate, seed)) for seed in grid.tuning]
        if None in tried:
            return None
        found[rate] = mean(0.0 if math.isnan(result.accuracy) else result.accuracy for result in tried if result)
    return max(found, key=lambda rate: found[rate])


def wanted(task: str, optimizer: str) -> Iterator[Run]:
    """The runs of a task with an optimizer, in order: each method's rates, then its reported runs."""
    grid = GRIDS[task]
    for method in grid.methods.get(optimizer, ()):
        yield from (Run(task, optimizer, method, rate, seed) for rate in grid.rates[optimizer] for seed in grid.tuning)
        rate = best(kept(), task, optimizer, method)
        assert rate is not None  # those just run
        yield from (Run(task, optimizer, method, rate, seed) for seed in SEEDS)


def table(runs: dict[Run, Result], task: str, optimizer: str) -> list[str]:
    """Markdown: the reported runs of each method at its own rate, best mean first."""
    rows = []
    for method in GRIDS[task].methods.get(optimizer, ()):
        rate = best(runs, task, optimizer, method)
        if rate is None:
            continue
        found, basis = (reported(runs, task, optimizer, name) for name in (method, BASIS))
        if len(found) < 2:
            continue
        values = " ".join(f"{100 * found[seed]:.1f}" for seed in sorted(found))
        own = f"{100 * mean(found.values()):.1f} ± {100 * stdev(found.values()):.1f}"
        both = sorted(found.keys() & basis.keys())
        gaps = [100 * (found[seed] - basis[seed]) for seed in both]
        rows.append(
            (-mean(found.values()), f"| {method} | {rate:g} | {own} | {values} | {'' if method == BASIS else interval(gaps)} |")
        )
    head = ["| method | rate | accuracy | by seed | over PipeDream, points |", "|---|---|---|---|---|"]
    return [f"{task}, {optimizer}", "", *head, *(row for _, row in sorted(rows)), ""] if rows else []


def reported(runs: dict[Run, Result], task: str, optimizer: str, method: str) -> dict[int, float]:
    """Accuracy at the method's rate by seed; 0 where it diverged."""
    rate = best(runs, task, optimizer, method)
    if rate is None:
        return {}
    found = {seed: runs.get(Run(task, optimizer, method, rate, seed)) for seed in SEEDS}
    return {seed: 0.0 if math.isnan(result.accuracy) else result.accuracy for seed, result in found.items() if result}


def interval(gaps: Sequence[float]) -> str:
    """The mean of paired differences with its 95 % interval by Student's t; a star where that leaves out 0."""
    if len(gaps) < 2:
        return ""
    from scipy.stats import t

    half = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))
    return f"{mean(gaps):+.1f} ± {half:.1f}{' *' if abs(mean(gaps)) > half else ''}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[[], *GRIDS], help="tasks to run; none: print the tables")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    words = parser.parse_args()
    for optimizer, task in product(words.optimizers, words.tasks):
        for run in wanted(task, optimizer):
            if run not in kept():
                result = execute(run)
                keep(run, result)
                print(*astuple(run), f"{result.accuracy:.4f}", f"{result.cpu_s:.1f} s", flush=True)
    if not words.tasks:
        for task, optimizer in product(GRIDS, words.optimizers):
            print(*table(kept(), task, optimizer), sep="\n")


if __name__ == "__main__":
    main()
