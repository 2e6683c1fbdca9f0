"""`graphpipe` beside a search at random, on 36 problems of 7 to 14 operators on 4 devices.

`yardstick.json` has the best plan that is known of each, whoever found it, so that the planner can be compared without searching.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from gpp.cost.problem import Problem
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from tests.quality.driver import experiment
from tests.quality.problems import PLANNERS, Question
from tests.quality.random_search import RandomSearch

KNOWN = Path(__file__).with_name("yardstick.json")

Best = dict[str, Any]
"""The best plan known of a problem: `step_s`, `microbatch_size`, and for each stage its operators and devices."""

_WORDS = (
    "experiment=paper engine=simulate model=random model.kind=series_parallel model.num_ops={n} graph.max_ops={n} "
    "model.graph_seed={seed} cluster=summit_8x4 cluster.num_nodes=1 minibatch_size=32"
)


def questions() -> list[Question]:
    """The 36 problems."""
    return [Question(f"{n} operators, seed {seed}", _WORDS.format(n=n, seed=seed)) for n in (7, 9, 11, 14) for seed in range(1, 10)]


def best_of(plan: Plan, step_s: float) -> Best:
    """A plan whose stages have one micro-batch size, as the file has it."""
    stages = [{"ops": list(stage.ops), "devices": list(stage.devices)} for stage in plan.stages]
    return {"step_s": step_s, "microbatch_size": plan.stages[0].microbatch_size, "stages": stages}


def plan_of(best: Best, problem: Problem) -> Plan:
    """The plan of an entry of the file."""
    parts = [(mask_of(stage["ops"]), len(stage["devices"])) for stage in best["stages"]]
    placement = [tuple(stage["devices"]) for stage in best["stages"]]
    return make_plan(problem, "known", parts, best["microbatch_size"], ordered=True, placement=placement)


def summary(ratios: Iterable[float]) -> str:
    """graphpipe / best known of all problems in a line."""
    every = list(ratios)
    within = ", ".join(f"{sum(ratio <= 1 + share for ratio in every)} within {share:.0%}" for share in (0.01, 0.05, 0.10))
    return f"{len(every)} problems: {within}; median {median(every):.4f}, worst {max(every):.4f}, best {min(every):.4f}"


def main(cpu_s: float, only: str, out: Path | None) -> int:
    """Plans, searches and compares.

    Args:
        cpu_s: seconds of search for each problem; 0: the best known plans alone.
        out: the file of the best plans known; those that are better are written to it.
    """
    known: dict[str, Best] = json.loads((out if out and out.exists() else KNOWN).read_text())
    ratios = []
    print(f"{'':<24} {'graphpipe ms':>12} {'CPU s':>6} {'search ms':>10} {'plans':>6} {'known ms':>9} {'graphpipe / best':>16}")
    for question in (each for each in questions() if only in each.name):
        one = experiment([*question.words.split(), *PLANNERS["graphpipe"].split()])
        captured = one.captured()
        problem = one.problem(captured, one.op_graph(captured))
        start = time.process_time()
        plan = one.strategy.plan(problem)
        took_s, step_s = time.process_time() - start, one.strategy.predict(plan, problem).metrics.iteration_s
        words = f"{question.name:<24} {1e3 * step_s:>12.4f} {took_s:>6.2f}"
        candidates = [known[question.name]] if question.name in known else []
        if cpu_s:
            # The planner's cached tables are no part of the search: it has a problem of its own.
            found = RandomSearch(replace(problem), one.strategy, random.Random(f"{question.name} {cpu_s}")).run(cpu_s)
            candidates.append(best_of(found.plan, found.seconds))
            words += f" {1e3 * found.seconds:>10.4f} {found.predicted:>6}"
        else:
            words += f" {'':>10} {'':>6}"
        best = min(candidates, key=lambda each: each["step_s"])
        ratios.append(step_s / best["step_s"])
        print(f"{words} {1e3 * best['step_s']:>9.4f} {ratios[-1]:>16.4f}", flush=True)
        sizes = {stage.microbatch_size for stage in plan.stages}
        if step_s < best["step_s"] and len(sizes) == 1:
            best = best_of(plan, step_s)
        known[question.name] = best
        if out is not None:
            out.write_text("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(best)}" for name, best in known.items()) + "\n}\n")
    print(summary(ratios))
    return 0
