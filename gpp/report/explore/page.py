"""The page to explore, and its data: one file, in which the reader changes settings and sees plan and timeline follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpp.analysis.comparison import Attempt
from gpp.analysis.explore import Explored, peak_bytes
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.report.draw import text
from gpp.report.draw.charts import PAGE_WIDTH
from gpp.report.draw.packed import pack_timelines, squeeze
from gpp.report.draw.palette import branch_of, tone
from gpp.report.draw.stage_graph import branch_swatches, draw_stage_graph, module_names
from gpp.report.draw.svg import Swatch
from gpp.report.draw.timelines import TimelineRows, event_swatches, rows_of
from gpp.report.run.problem_page import problem_page
from gpp.report.run.record import RunRecord
from gpp.timeline import Timeline


class Control(NamedTuple):
    """A setting that the reader changes.

    Args:
        key: its name in the page's address.
        words: what the page shows for each of its values.
        new, old: each value in a sentence: with NEW in place of OLD.
        ordered: whether the values have an order, so that a slider suits them.
    """

    key: str
    label: str
    values: Sequence[str]
    words: Sequence[str]
    new: Sequence[str]
    old: Sequence[str]
    ordered: bool


def controls(found: Explored) -> tuple[Control, ...]:
    """The settings in the order of `GridPoint`'s fields."""
    numbers, of_samples = [str(n) for n in found.devices], [str(b) for b in found.sizes]
    counts = [f"{n} device{'s' * (n != 1)}" for n in found.devices]
    sizes = [
        f"{b} sample{'s' * (b != 1)}: {found.minibatch_size // b} in a mini-batch of {found.minibatch_size}" for b in found.sizes
    ]
    of_sizes = [f"micro-batches of {b}" for b in found.sizes]
    limits = [text.num_bytes(limit) for limit in found.limits]
    schedules = [f"schedule {name}" for name in found.schedules]
    return (
        Control("devices", "Devices", numbers, counts, counts, numbers, True),
        Control("microbatch", "Micro-batch", of_samples, sizes, of_sizes, of_samples, True),
        Control("memory", "Memory limit of a device", [words.replace(" ", "") for words in limits], limits, limits, limits, True),
        Control("strategy", "Strategy", found.strategies, found.strategies, found.strategies, found.strategies, False),
        Control("schedule", "Schedule", found.schedules, found.schedules, schedules, found.schedules, False),
    )


def page_data(found: Explored, graph: OpGraph, branches: Sequence[int | None]) -> dict[str, Any]:
    """What the page's script reads.

    Returns:
        `meanings` of names; `controls`; `start`: the position of each control's value when the page opens; `points`: for every
        combination of their values, the last one fastest, a number of `entries`. An entry has its `status` and the `reason`, or
        numbers of `plans` and of `timelines` (`pack_timelines`), `step_s`, `bubble`, `peak_bytes`, `samples_per_s`, and words.
    """
    plans, timelines, entries = DistinctValues(), DistinctValues(), DistinctValues()
    known = tuple(branches) or (None,) * graph.num_ops
    numbers: dict[int, int] = {}
    for attempt in found.attempts:
        value = figures(attempt)
        if attempt.plan is not None and attempt.predicted is not None:
            cut = attempt.plan.stages, attempt.plan.edges
            plan = plans.number(cut, partial(plan_view, attempt.plan, graph, known))
            drawn = partial(timeline_view, attempt.plan, attempt.predicted, graph, known)
            value |= {"plan": plan, "timeline": timelines.number((cut, attempt.predicted.events), drawn)}
        numbers[id(attempt)] = entries.number(tuple(value.values()), lambda value=value: value)
    return {
        "meanings": found.meanings,
        "controls": [control._asdict() for control in controls(found)],
        "start": found.start,
        "points": [numbers[id(found.points[setting])] for setting in found.settings],
        "entries": entries.values,
        "plans": plans.values,
        "timelines": timelines.values,
    }


def figures(attempt: Attempt) -> dict[str, Any]:
    """What a page says of an attempt beside its drawings: `status`, and the `reason` or its numbers, bare and in words."""
    if attempt.plan is None or attempt.predicted is None:
        return {"status": attempt.status, "reason": attempt.reason}
    metrics = attempt.predicted.metrics
    return {
        "status": attempt.status,
        "step": text.seconds(metrics.iteration_s),
        "idle": text.percent(metrics.bubble_fraction),
        "peak": text.num_bytes(peak_bytes(attempt)),
        "step_s": metrics.iteration_s,
        "bubble": metrics.bubble_fraction,
        "peak_bytes": peak_bytes(attempt),
        "samples_per_s": metrics.throughput_samples_per_s,
    }


class DistinctValues:
    """Values in the order in which they came, equal ones once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, make: Callable[[], Any]) -> int:
        """The place of the value of a key, which is made if it is new."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(make())
        return self._numbers[key]


def plan_view(plan: Plan, graph: OpGraph, branches: tuple[int | None, ...]) -> dict[str, Any]:
    """A plan: its drawing, its size, and the words of its planner."""
    return {
        "drawing": draw_stage_graph(plan, graph, branches, PAGE_WIDTH),
        "stages": len(plan.stages),
        "depth": plan.depth,
        "words": list(plan.explanation),
    }


def timeline_view(plan: Plan, predicted: Timeline, graph: OpGraph, branches: tuple[int | None, ...]) -> dict[str, Any]:
    """A predicted step, as `timeline` of the page's scripts draws it."""
    tones = {s: tone(branch_of(stage, graph, branches)) for s, stage in enumerate(plan.stages)}
    names = {s: ", ".join(module_names(plan, graph, s)) for s in range(len(plan.stages))}
    return pack_timelines([("", predicted)], rows_of(plan.stages_of_device, tones, [predicted]), names=names)


def explore_report(run: RunRecord, found: Explored) -> str:
    """The page of a grid of settings; self-contained HTML.

    Raises:
        ValueError: the run has no graph.
    """
    graph, branches = run.graph, run.branches
    if graph is None:
        raise ValueError("a page to explore needs the graph that was planned")
    known = tuple(branches) or (None,) * graph.num_ops
    plans = {id(each.plan): each.plan for each in found.attempts if each.plan is not None}.values()
    swatches: dict[str, Swatch] = {}
    for plan in plans:
        swatches |= {swatch.words: swatch for swatch in branch_swatches(plan, graph, known)}
    tones = dict(enumerate(dict.fromkeys(tone(branch_of(stage, graph, known)) for plan in plans for stage in plan.stages)))
    rows = TimelineRows(devices=(0,), stages_of={0: tuple(tones)}, tones=tones)
    data = page_data(found, graph, branches)
    return problem_page(
        "explore.html",
        run,
        title=f"{run.result.get('model')} · explore · {run.result.get('cluster')}",
        facts=[("cluster", run.asked.cluster), ("operators", graph.num_ops), ("settings", len(found.points))],
        reason="",
        files=[("result.json", "figures of the fastest plans"), ("plans/", "these plans; run one with plan=PATH")],
        scripts=("explore",),
        controls=controls(found),
        data=squeeze(json.dumps(data, separators=(",", ":")).encode()),
        branch_swatches=[swatches[words] for words in sorted(swatches, key=lambda w: (w.startswith("branch"), len(w), w))],
        event_swatches=event_swatches([each.predicted for each in found.attempts if each.predicted], rows),
    )
