"""Deterministic checks of all planners on many random problems; a small sample of each runs in the ordinary tests.

    python -m tests.checks.planners --what validate --count 2000
    python -m tests.checks.planners --what oracle --count 300
    python -m tests.checks.planners --what dags --count 500
    python -m tests.checks.planners --what chains --count 60
    python -m tests.checks.planners --what models --count 105
    python -m tests.checks.planners --what placements --count 120
    python -m tests.checks.planners --what unequal --count 400
    python -m tests.checks.planners --what determinism --count 20

Prints a summary and ends with 1 if anything was violated. The same numbers give the same problems everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from gpp import DataParallel, Even, GraphPipe, Keep, Link, Plan, Sequential, Single, Strategy
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.cost.stage import pass_times
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.serialization import to_json
from tests.checks.planning_speed import experiment
from tests.oracle.all_placements import optimum_s
from tests.oracle.exhaustive import Exhaustive
from tests.support.conf import CONF, SWEEPS, option, options
from tests.support.mixed import linked, mixed_problem
from tests.support.problems import Rate, cluster, random_problem, run, uneven

SAME, NEAR = 1 + 1e-9, 1 + 1e-6


@dataclass(slots=True)
class Outcome:
    """Of one problem: what was violated, what was counted, and figures to summarise."""

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)


@cache
def strategies() -> dict[str, Strategy]:
    """All of conf/strategy; what is optional if it is installed, and shortly."""
    without = {"base"} if importlib.util.find_spec("ortools") else {"base", "optimal"}
    found = options("strategy", sorted({path.stem for path in (CONF / "strategy").glob("*.yaml")} - without))
    short = {name: replace(found[name], planner=replace(found[name].planner, limit=1)) for name in {"optimal"} - without}
    return {**found, **short}


def any_problem(seed: int) -> Problem:
    """Series-parallel or not, frozen parameters, one node or two, unequal devices, scarce memory, odd mini-batches."""
    rng = random.Random(f"any {seed}")
    num_ops = rng.randint(1, 12)
    devices = rng.randint(1, min(num_ops, 6))
    make = random_series_parallel if rng.random() < 0.5 else random_dag
    graph = make(num_ops, seed, skew=rng.choice([0.0, 0.5, 1.0]))
    if rng.random() < 0.5:
        graph = _partly_frozen(graph, rng)
    nodes = 2 if devices % 2 == 0 and rng.random() < 0.3 else 1
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))
    problem = Problem(
        graph=graph,
        cost=Rate(),
        minibatch_size=rng.choice([1, 3, 6, 8, 9, 12, 15, 16, 20]),
        optimizer_state_factor=rng.choice([0.0, 1.0, 2.0]),
        cluster=cluster(devices, 10 ** rng.uniform(6.3, 8.3), link, Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9), nodes),
        max_replicas=rng.choice([None, None, None, 1]),
    )
    return uneven(problem, seed) if rng.random() < 0.3 else problem


def _partly_frozen(graph: OpGraph, rng: random.Random) -> OpGraph:
    """Some parameters do not train, and some tensors carry no gradient."""
    params = tuple(replace(param, trainable=param.trainable and rng.random() < 0.6) for param in graph.params)
    tensors = tuple(replace(tensor, differentiable=rng.random() < 0.8, saved=rng.random() < 0.8) for tensor in graph.tensors)
    return OpGraph(name=f"{graph.name}_frozen", ops=graph.ops, tensors=tensors, params=params)


def seconds(strategy: Strategy, plan: Plan, problem: Problem) -> float:
    return strategy.predict(plan, problem, record=False).metrics.iteration_s


def validate(seed: int) -> Outcome:
    """Every plan is valid and above the lower bound; what does not fit is given a remedy that does."""
    problem, out = any_problem(seed), Outcome()
    for name, strategy in strategies().items():
        try:
            plan = strategy.plan(problem)
            strategy.check(plan, problem)
        except InvalidConfig:
            out.counts[f"{name}: not for this planner"] += 1
            continue
        except Infeasible as error:
            out.counts[f"{name}: infeasible"] += 1
            if violation := _remedy_fails(strategy, problem, error):
                out.violations.append(f"problem {seed}, {name}: {violation}")
            continue
        except Exception as error:  # A crash is what this looks for.
            out.violations.append(f"problem {seed}, {name}: {type(error).__name__}: {error}")
            continue
        out.counts[f"{name}: plans"] += 1
        took = seconds(strategy, plan, problem)
        bounded = not strategy.schedule.unbounded and not plan.shares_devices
        least = _bound(replace(problem, regime=Regime(holds=strategy.schedule.holds))) if bounded else _work(plan, problem)
        if not took * SAME >= least:
            out.violations.append(f"problem {seed}, {name}: predicted {took} is below the lower bound {least}")
    return out


def _work(plan: Plan, problem: Problem) -> float:
    """Seconds in which the devices can do a mini-batch's passes, if none ever waits."""
    took = 0.0
    for stage in plan.stages:
        once = sum(pass_times(problem, stage, stage.microbatch_size)[:2])
        took += plan.minibatch_size // stage.microbatch_size * once * len(stage.devices)
    return took / problem.cluster.num_devices


def _bound(problem: Problem) -> float:
    try:
        return lower_bound(problem).iteration_s
    except Infeasible:
        return float("inf")


def _remedy_fails(strategy: Strategy, problem: Problem, error: Infeasible) -> str | None:
    """What is wrong with the remedy: every change that it names must give a plan."""
    memory = re.search(r"memory_bytes=([0-9.e+]+)", error.remedy)
    size = re.search(r"microbatch_size=(\d+)", error.remedy)
    if isinstance(strategy.planner, DataParallel | Single) and not memory:
        return None  # one plan, refused for one reason at a time: shards, replicas, memory
    if not memory and not size:
        return f"the remedy names no change: {error}"
    changed = []
    if memory:
        devices = tuple(
            replace(device, memory_bytes=max(device.memory_bytes, float(memory[1]))) for device in problem.cluster.devices
        )
        changed.append(replace(problem, cluster=replace(problem.cluster, devices=devices)))
    if size:
        changed.append(replace(problem, microbatch_size=int(size[1])))
    for other in changed:
        try:
            strategy.plan(other)
        except Infeasible as again:
            return f"the remedy does not fit: {error.remedy}; then {again}"
    return None


def oracle(seed: int) -> Outcome:
    """graphpipe against the optimum over all convex partitions, up to 8 operators and 6 devices."""
    problem, out = random_problem(seed, max_ops=8, max_devices=6), Outcome()
    ours, every = run(GraphPipe(colocate="never"), problem), run(Exhaustive(), problem)
    if ours is None or every is None:
        out.counts["infeasible"] += 1
        if ours is not every:
            out.violations.append(f"problem {seed}: graphpipe finds {ours}, the oracle {every}")
        return out
    took, best = ours[1], every[1]
    out.figures["graphpipe / optimum"] = took / best
    out.figures["optimum / bound"] = best / _bound(problem)
    out.counts["equal" if took <= best * (1 + 1e-6) else "worse"] += 1
    if took > best * 1.05:
        out.violations.append(f"problem {seed}: graphpipe takes {took / best:.3f} times the optimum")
    return out


def dags(seed: int) -> Outcome:
    """graphpipe is at most as slow as every other planner under 1F1B, on random graphs of 10 to 60 operators, 4 to 16 devices.

    Under one memory policy: everybody keeps everything.
    """
    rng, out = random.Random(f"dag {seed}"), Outcome()
    devices = rng.choice([4, 8, 16])
    problem = Problem(
        graph=random_dag(rng.randint(max(10, devices), 60), seed, skew=rng.choice([0.5, 1.0])),
        cost=Rate(),
        minibatch_size=rng.choice([4, 8]) * devices,
        optimizer_state_factor=2.0,
        cluster=cluster(devices, 10 ** rng.uniform(7.7, 8.7), Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))),
    )
    took: dict[str, float] = {}
    plans: dict[str, Plan] = {}
    for name, strategy in strategies().items():
        if strategy.schedule.unbounded:
            continue  # Another task, or split backwards: it may be faster.
        if strategy.planner.marks:
            continue  # It may find a plan where nobody does who keeps everything.
        if name == "optimal":
            continue  # Starts from graphpipe's plan, and takes its time.
        strategy = replace(strategy, memory=Keep())
        try:
            start = time.perf_counter()
            plan = plans[name] = strategy.plan(problem)
            out.figures[f"{name}: seconds of search"] = time.perf_counter() - start
            took[name] = seconds(strategy, plan, problem)
        except (Infeasible, InvalidConfig):
            out.counts[f"{name}: no plan"] += 1
    ours = took.pop("graphpipe", float("inf"))
    for name, other in took.items():
        out.figures[f"{name} / graphpipe"] = other / ours
        if not strategies()[name].schedule.holds.everything and ours > other * SAME:
            out.violations.append(f"graph {seed}: graphpipe takes {ours:.6g} s, {name} {other:.6g} s")
    if ours < float("inf") and not plans["graphpipe"].shares_devices:
        out.figures["graphpipe / bound"] = ours / _bound(problem)
    return out


def chains(seed: int) -> Outcome:
    """graphpipe is at most as slow as the best chain and as the model in one piece, also under a memory policy and on unequal
    devices: random graphs of 32 to 64 operators on 32 devices, above the size up to which it starts from chains.
    """
    rng = random.Random(f"chains {seed}")
    make, memory = rng.choice([random_dag, random_series_parallel]), rng.choice(["keep", "keep", "recompute", "auto"])
    bandwidth = rng.choice([1e9, 4e10])
    problem = Problem(
        graph=make(rng.randint(32, 64), seed, skew=rng.choice([0.0, 0.5, 1.0])),
        cost=Rate(),
        minibatch_size=rng.choice([64, 128, 512]),
        optimizer_state_factor=2.0,
        cluster=cluster(32, 10 ** rng.uniform(8.0, 9.0), Link(latency_s=1e-5, bandwidth_bytes_per_s=bandwidth), num_nodes=8),
    )
    problem = uneven(problem, seed) if rng.random() < 0.2 else problem
    return _beside_chains(f"problem {seed}, memory={memory}", problem, memory)


def models(number: int) -> Outcome:
    """The same for models of conf/model and sweeps/model on 32 V100s, on 16 H100s and on 8 devices of two types."""
    names = sorted(path.stem for folder in (CONF, CONF.parent / "sweeps") for path in (folder / "model").glob("*.yaml"))
    small = (
        "base",
        "profile",
        "pipeedge",
        "imported",
        "clip_imported",
        "random",
        "case_study",
        "digits",
        "digits_deep",
        "digits_tasks",
    )
    chosen = [name for name in names if name not in small and not name.endswith("_small")]
    clusters = (("summit_8x4",), ("dgx_h100", "cluster.num_nodes=2"), ("mixed_2x4",))
    model, (kind, *more) = chosen[number % len(chosen)], clusters[number // len(chosen) % len(clusters)]
    one = experiment((SWEEPS, f"model={model}", f"cluster={kind}", *more, "minibatch_size=512"))
    return _beside_chains(f"{model} on {kind}", one.problem(captured := one.captured(), one.op_graph(captured)), "keep")


def _beside_chains(name: str, problem: Problem, memory: str) -> Outcome:
    """graphpipe's predicted time beside those of the planners that it promises never to be behind, all under one policy."""
    took, out = dict[str, float](), Outcome()
    for planner in ("graphpipe", "sequential", "data_parallel", "single"):
        strategy = replace(
            strategies()[planner], memory=option("strategy", "sequential", "name=test", f"strategy/memory={memory}").memory
        )
        with suppress(Infeasible):
            start = time.process_time()
            took[planner] = seconds(strategy, strategy.plan(problem), problem)
            out.figures[f"{planner}: seconds of search"] = time.process_time() - start
    ours = took.pop("graphpipe", float("inf"))
    for planner, other in took.items():
        out.figures[f"{planner} / graphpipe"] = other / ours
        if ours > other * SAME:
            out.violations.append(f"{name}: graphpipe takes {ours:.6g} s, {planner} {other:.6g} s")
    return out


def placements(number: int) -> Outcome:
    """graphpipe against all partitions on all devices, of clusters of 2 to 4 unequal devices and up to 5 operators."""
    problem = _unequal(number, ops=(3, 5), devices=(2, 4))
    return _behind(number, problem, optimum_s(problem), exact=True)


def unequal(number: int) -> Outcome:
    """graphpipe against the chains of sequential and even, on larger clusters of unequal devices."""
    problem = _unequal(number)
    took = [found[1] for planner in (Sequential(), Even()) if (found := run(planner, problem)) is not None]
    return _behind(number, problem, min(took, default=None), exact=False)


def _unequal(number: int, **sizes: tuple[int, int]) -> Problem:
    """Links go by node in problems of even numbers, by device and by pair in those of odd ones."""
    problem = mixed_problem(number // 2, **sizes)
    return linked(problem, number // 2) if number % 2 else problem


def _behind(number: int, problem: Problem, other: float | None, *, exact: bool) -> Outcome:
    """graphpipe beside the seconds of another plan, which is the best of all if `exact`; and beside the lower bound."""
    out, start = Outcome(), time.process_time()
    found = run(GraphPipe(colocate="never"), problem)
    out.figures["CPU seconds of search"] = time.process_time() - start
    if found is None or other is None:
        out.counts["infeasible"] += 1
        wrong = (found is None and other is not None) or (exact and found is not None)
    else:
        out.figures["graphpipe / other"] = found[1] / other
        wrong = found[1] > other * NEAR or _bound(problem) > found[1] * NEAR
    if wrong:
        out.violations.append(f"problem {number}: graphpipe finds {found}, the other {other}; bound {_bound(problem)}")
    return out


def determinism(seed: int) -> Outcome:
    """The same plan text from two processes with different hash seeds."""
    command = [sys.executable, "-m", "tests.checks.planners", "--what", "plans", "--start", str(seed), "--count", "1"]
    texts = []
    for value in ("0", "4242"):
        run = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": value}, capture_output=True, text=True, check=False)
        texts.append(run.stdout + run.stderr if run.returncode else run.stdout)
    out = Outcome(counts=Counter({"characters compared": len(texts[0])}))
    if texts[0] != texts[1] or not texts[0]:
        out.violations.append(f"problem {seed}: the texts differ")
    return out


def plan_texts(seed: int) -> str:
    """The plans of all strategies for one problem, as text."""
    problem = any_problem(seed)
    lines = []
    for name, strategy in strategies().items():
        try:
            lines.append(f"{name} {to_json(replace(strategy.plan(problem), search_s=0.0))}")
        except (Infeasible, InvalidConfig) as error:
            lines.append(f"{name} {error}")
    return "\n".join(lines)


CHECKS: dict[str, Callable[[int], Outcome]] = {
    "validate": validate,
    "oracle": oracle,
    "dags": dags,
    "chains": chains,
    "models": models,
    "placements": placements,
    "unequal": unequal,
    "determinism": determinism,
}


def check(what: str, count: int, *, start: int = 0, jobs: int = 1) -> tuple[list[str], str]:
    """Violations, and a summary as text, of `count` problems from number `start` on."""
    seeds = range(start, start + count)
    if jobs > 1:
        with multiprocessing.Pool(jobs) as pool:
            outcomes = pool.map(CHECKS[what], seeds, chunksize=4)
    else:
        outcomes = [CHECKS[what](seed) for seed in seeds]
    violations = [violation for outcome in outcomes for violation in outcome.violations]
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    lines = [f"{what}: {count} problems from {start}, {len(violations)} violations"]
    lines += [f"  {name}: {number}" for name, number in sorted(counts.items())]
    for name in sorted({name for outcome in outcomes for name in outcome.figures}):
        values = sorted(outcome.figures[name] for outcome in outcomes if name in outcome.figures)
        lines.append(
            f"  {name}: least {values[0]:.4g}, median {values[len(values) // 2]:.4g}, "
            f"95 % {values[int(0.95 * (len(values) - 1))]:.4g}, largest {values[-1]:.4g}, of {len(values)}"
        )
    return violations, "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*CHECKS, "plans"], required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.what == "plans":
        print("\n".join(plan_texts(seed) for seed in range(args.start, args.start + args.count)))
        return
    violations, summary = check(args.what, args.count, start=args.start, jobs=args.jobs)
    print("\n".join([*violations[:50], summary]))
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
