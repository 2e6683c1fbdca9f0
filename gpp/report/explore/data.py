"""What a page to explore holds: every point of the grid, and each plan and each timeline once.

A timeline is stored as whole numbers. `shapes` are the events that differ: kind, stage, ticks. A row is a device with, for each of
its events, shape, micro-batch and the ticks since the begin of the event before. `TICKS` of them are the length of the timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import Any, NamedTuple

from gpp.analysis.explore import Explored, Setting, peak_bytes
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import BESIDE, KINDS
from gpp.report.draw import text
from gpp.report.draw.palette import IDLE, OTHER, branch_of, tone
from gpp.report.draw.stage_graph import draw_stage_graph
from gpp.timeline import Event, Timeline

TICKS = 20_000
"""Ten for each pixel of a wide drawing."""


class Control(NamedTuple):
    """A setting that the reader changes.

    Args:
        key: its name in the page's address.
        words: what the page shows for each of its values.
        short: each value in a sentence: with ... in place of ...
        ordered: whether the values have an order, so that a slider suits them.
    """

    key: str
    label: str
    values: Sequence[str]
    words: Sequence[str]
    short: Sequence[str]
    ordered: bool


def controls(found: Explored) -> tuple[Control, ...]:
    """The settings in the order of `Setting`'s fields."""
    counts = [f"{n} device{'s' * (n != 1)}" for n in found.devices]
    sizes = [
        f"{b} sample{'s' * (b != 1)}: {found.minibatch_size // b} in a mini-batch of {found.minibatch_size}" for b in found.sizes
    ]
    of_sizes = [f"micro-batches of {b}" for b in found.sizes]
    limits = [text.num_bytes(limit) for limit in found.limits]
    schedules = [f"schedule {name}" for name in found.schedules]
    return (
        Control("devices", "Devices", [str(n) for n in found.devices], counts, counts, True),
        Control("microbatch", "Micro-batch", [str(b) for b in found.sizes], sizes, of_sizes, True),
        Control("memory", "Memory limit of a device", [words.replace(" ", "") for words in limits], limits, limits, True),
        Control("strategy", "Strategy", found.strategies, found.strategies, found.strategies, False),
        Control("schedule", "Schedule", found.schedules, found.schedules, schedules, False),
    )


def page_data(found: Explored, graph: OpGraph, branches: Sequence[int | None]) -> dict[str, Any]:
    """What the page's script reads.

    Returns:
        `controls`; `points`: for every combination of their values, the last one fastest, a number of `entries`; `entries`:
        `status`, then `plan` and `timeline` (numbers), `step_s`, `bubble`, `peak_bytes`, `samples_per_s`, or `reason`; `plans` and
        `timelines`, each once.
    """
    plans, timelines, entries = Once(), Once(), Once()
    known = tuple(branches) or (None,) * graph.num_ops
    numbers: dict[int, int] = {}
    for attempt in found.attempts:
        value: dict[str, Any] = {"status": attempt.status, "reason": attempt.reason}
        if attempt.plan is not None and attempt.predicted is not None:
            metrics, plan = attempt.predicted.metrics, attempt.plan
            value = {
                "status": attempt.status,
                "plan": plans.number((plan.stages, plan.edges), lambda plan=plan: _plan(plan, graph, known)),
                "timeline": timelines.number(attempt.predicted.events, lambda line=attempt.predicted: _timeline(line)),
                "step": text.seconds(metrics.iteration_s),
                "idle": text.percent(metrics.bubble_fraction),
                "peak": text.num_bytes(peak_bytes(attempt)),
                "step_s": metrics.iteration_s,
                "bubble": metrics.bubble_fraction,
                "peak_bytes": peak_bytes(attempt),
                "samples_per_s": metrics.throughput_samples_per_s,
            }
        numbers[id(attempt)] = entries.number(tuple(value.values()), lambda value=value: value)
    axes = (found.devices, found.sizes, range(len(found.limits)), found.strategies, found.schedules)
    return {
        "meanings": found.meanings,
        "controls": [control._asdict() for control in controls(found)],
        "points": [numbers[id(found.points[Setting(*point)])] for point in product(*axes)],
        "entries": entries.values,
        "plans": plans.values,
        "timelines": timelines.values,
        "start": _start(found),
        "ticks": TICKS,
        "kinds": {kind: _look(kind) for kind in sorted({shape[0] for line in timelines.values for shape in line["shapes"]})},
        "tones": {"idle": IDLE},
    }


def _start(found: Explored) -> list[int]:
    """The positions of the fastest point's values, on the most devices and with the most memory that any plan has."""
    most = max(found.points, key=lambda s: (found.points[s].status == "ok", s.devices, s.memory, -found.points[s].iteration_s))
    axes = (found.devices, found.sizes, range(len(found.limits)), found.strategies, found.schedules)
    return [list(axis).index(value) for axis, value in zip(axes, most, strict=True)]


def _look(kind: str) -> dict[str, Any]:
    """How events of a kind are drawn: `tone` is a place in a stage's colours, or None where `fill` is the colour."""
    row = KINDS[kind]
    place = 0 if row.holds else 2 if row.returns else 1 if row.computes else None
    return {
        "meaning": row.meaning,
        "tone": place,
        "fill": None if place is not None else OTHER,
        "beside": kind in BESIDE,
    }


class Once:
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


def _plan(plan: Plan, graph: OpGraph, branches: tuple[int | None, ...]) -> dict[str, Any]:
    """A plan: its drawing, its stages' colours, what each device has, and the words of its planner."""
    tones = [tone(branch_of(stage, graph, branches)) for stage in plan.stages]
    return {
        "drawing": draw_stage_graph(plan, graph, branches),
        "tones": [[each.light, each.mid, each.dark] for each in tones],
        "stages": len(plan.stages),
        "depth": plan.depth,
        "devices": [[device, list(stages)] for device, stages in sorted(plan.stages_of_device.items())],
        "words": list(plan.explanation),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """A timeline in whole numbers (see the module)."""
    unit = timeline.length_s / TICKS
    shapes, rows = Once(), defaultdict[int, list[Event]](list)
    for event in timeline.events:
        rows[event.device].append(event)
    out: dict[int, list[int]] = {}
    for device, events in sorted(rows.items()):
        before = 0
        for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
            begin, ticks = round(event.start_s / unit), max(1, round((event.end_s - event.start_s) / unit))
            shape = event.kind, event.stage, ticks
            out.setdefault(device, []).extend((shapes.number(shape, lambda shape=shape: shape), event.microbatch, begin - before))
            before = begin
    return {"length_s": timeline.length_s, "shapes": shapes.values, "rows": out}
