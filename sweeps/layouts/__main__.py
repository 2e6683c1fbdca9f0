"""Layouts that people chose by hand: predicted, bounded, beside the best plan found, with the single changes that help most.

    python -m sweeps.layouts                     all twelve (sweeps/layouts/published.py has their sources)
    python -m sweeps.layouts --only 'GPT 1.5B$'  those in whose name the pattern is found

Each change is applied: the changed plan is written as a list of modules, read back as anybody's layout, and predicted. The command
ends with 1 where that differs from what was told. A rank that has several cards in the source is one device with their speed,
memory and links: what dividing a stage's work over them costs is left out. Layers are computed again where the source says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.analysis.explain.explanation import stage_loads
from gpp.analysis.explain.single import single_changes
from gpp.analysis.explain.what_if import WhatIf
from gpp.app.experiment import Experiment
from gpp.cluster import Cluster, Link
from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible
from gpp.export.imports import layout_of
from gpp.export.layout import GivenLayout
from gpp.export.modules import Modules
from gpp.mechanisms.marks.policies import Recompute
from gpp.mechanisms.marks.stage import Marks
from gpp.memory import Keep
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.planners.chains.sequential import Sequential
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from sweeps.layouts.published import LAYOUTS, Published

CONF = Path(__file__).resolve().parents[2] / "conf"
NODE = 8
"""Cards of a node."""
SAME = 1e-9
"""Relative difference between what was told of a change and what it is predicted to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What is said of a layout, in seconds of a step.

    Args:
        full: peak memory over a device's own, of the fullest.
        bound_s: what no plan of its kind beats; None where none is known.
        best_s, best_stages: the best plan that was found for the same modules; None where none was.
        changes: each with what it takes once applied.
    """

    step_s: float
    full: float
    bound_s: float | None
    best_s: float | None
    best_stages: int
    changes: tuple[tuple[WhatIf, float], ...]

    @property
    def off(self) -> float:
        """The largest relative difference between a change as it was told, and as it is."""
        return max((abs(found / (told.iteration_s or 1.0) - 1) for told, found in self.changes), default=0.0)


def posed(one: Published) -> tuple[Problem, Modules]:
    """The problem that a layout solves, with an operator for each module."""
    words = [*one.model, f"cluster={one.cluster}", f"minibatch_size={one.minibatch}", "cost=analytical"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=["strategies=[]", "name=layouts", "logger=none", "mode=plan", *words])
    experiment: Experiment = instantiate(composed, _convert_="all")
    experiment = replace(experiment, cluster=of_ranks(experiment.cluster, one), microbatch_size=one.microbatch)
    captured = experiment.captured()
    modules = Modules.of(captured)
    return experiment.problem(captured, modules.graph), modules


def of_ranks(cluster: Cluster, one: Published) -> Cluster:
    """The cluster whose devices are the ranks, each with all that its cards have."""
    card, cards = cluster.devices[0], one.cards
    device = replace(
        card,
        memory_bytes=(one.card_bytes or card.memory_bytes) * cards,
        peak_flop_per_s={name: speed * cards for name, speed in card.peak_flop_per_s.items()},
        memory_bandwidth_bytes_per_s=card.memory_bandwidth_bytes_per_s * cards,
    )

    def wide(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * cards)

    return replace(
        cluster,
        devices=(device,) * one.ranks,
        nodes=tuple(rank * cards // NODE for rank in range(one.ranks)),
        network_cards=None if cluster.network_cards is None else cluster.network_cards * max(1, cards // NODE),
        intra_node=wide(cluster.intra_node),
        inter_node=wide(cluster.inter_node),
    )


def judged(one: Published) -> Judged:
    """What is said of it.

    Raises:
        Infeasible: it does not fit the memory.
    """
    problem, modules = posed(one)
    layout = layout_of(one.text)
    assert layout is not None
    plan = as_trained(replace(layout, degree=one.ranks).plan(problem, modules), one)
    # Where a stage is empty, as that of a layer which predicts tokens, ranks have not equally many, and Megatron's order is none.
    even = all(len(stages) == one.chunks for stages in plan.stages_of_device.values())
    schedule = Interleaved1F1B(k=one.chunks) if one.chunks > 1 and even else OneFOneB()
    strategy = Strategy(name="by hand", planner=Sequential(replication=False), schedule=schedule)
    strategy.check(plan, problem)
    predicted = strategy.predict(plan, problem)
    step_s = predicted.metrics.iteration_s
    loads = [load.seconds for load in stage_loads(plan, predicted, problem, strategy)]
    found = single_changes(plan, step_s, problem, strategy, loads)
    plain = replace(strategy, schedule=OneFOneB(), memory=Recompute() if one.recomputed else Keep())
    try:
        best = plain.plan(problem)
        best_s, stages = plain.predict(best, problem, record=False).metrics.iteration_s, len(best.stages)
    except GppError:
        best_s, stages = None, 0
    bound = lower_bound(problem, spares=one.recomputed).of(plan)
    return Judged(
        step_s=step_s,
        full=max(b / problem.cluster.devices[d].memory_bytes for d, b in predicted.metrics.peak_memory_bytes.items()),
        bound_s=bound and bound.iteration_s,
        best_s=best_s,
        best_stages=stages,
        changes=tuple((told, applied(changed, one, problem, modules, strategy)) for told, changed in found),
    )


def as_trained(plan: Plan, one: Published) -> Plan:
    """The plan whose layers are computed again, where those of the source are."""
    if not one.recomputed:
        return plan
    return replace(plan, stages=tuple(s.having(Marks(recompute=s.ops, boundaries=s.ops)) for s in plan.stages))


def applied(changed: Plan, one: Published, problem: Problem, modules: Modules, strategy: Strategy) -> float:
    """Seconds of a changed plan as its user would apply it: as a layout in a file, of which nothing is known but the names."""
    names = {op.name for op in problem.graph.ops} & set(modules.names)
    rows: list[list[str]] = []
    for stage in changed.stages:
        while len(rows) % one.ranks != stage.devices[0]:
            rows.append([])  # an empty stage keeps its place among the ranks
        rows.append([problem.graph.ops[op].name for op in stage.ops if problem.graph.ops[op].name in names])
    text = f"[parallelism]\npipeline_parallel_degree = {one.ranks}\nmodule_fqns_per_model_part = {json.dumps(rows)}\n"
    read: GivenLayout | None = layout_of(text)
    assert read is not None
    size = changed.stages[0].microbatch_size
    plan = as_trained(read.plan(replace(problem, microbatch_size=size), modules), one)
    return strategy.predict(plan, replace(problem, microbatch_size=size), record=False).metrics.iteration_s


def seconds(value: float | None) -> str:
    """Seconds in words; a dash where there are none."""
    return "–" if value is None else f"{value:.4g} s"


def main(only: str) -> int:
    """Prints a section for each layout; 1 where a change is not what was told, or nothing is chosen."""
    chosen: Sequence[Published] = [one for one in LAYOUTS if re.search(only, one.name)]
    worst, fits = 0.0, 0
    for one in chosen:
        shown = one.text if len(one.text) < 60 else f"list of {len(layout_of(one.text).parts)} stages"  # type: ignore[union-attr]
        print(
            f"\n{one.name}: {shown}, {one.ranks} ranks of {one.cards}, {one.minibatch // one.microbatch} micro-batches", flush=True
        )
        print(f"    {one.source}", flush=True)
        try:
            found = judged(one)
        except Infeasible as error:
            print(f"    does not fit: {error}", flush=True)
            continue
        fits, worst = fits + 1, max(worst, found.off)
        best = f"best found {seconds(found.best_s)} ({found.best_stages} stages)"
        gap = "" if found.bound_s is None else f", at most {found.step_s / found.bound_s - 1:.1%} from the best"
        print(f"    {seconds(found.step_s)} a step, {found.full:.0%} full, bound {seconds(found.bound_s)}{gap}; {best}")
        for told, is_s in found.changes:
            less = 1 - (told.iteration_s or 0.0) / found.step_s
            print(f"    {told.change}: {seconds(told.iteration_s)} ({less:.1%} less); applied {seconds(is_s)}")
    print(f"\n{len(chosen)} layouts, {fits} fit; a change that was applied differs by {worst:.1e} at most from what was told")
    return int(worst > SAME or not chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN")
    sys.exit(main(parser.parse_args().only))
