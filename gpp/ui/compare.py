"""Two runs side by side: figures, settings that differ, plans, and timelines on one scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpp.errors import counted, written
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import branches
from gpp.plan.plan import Plan
from gpp.report.draw import text
from gpp.report.draw.page import Column, PageTable
from gpp.report.draw.stage_graph import device_words, module_names
from gpp.report.draw.timelines import span_s
from gpp.report.run.key_figures import key_figures
from gpp.report.run.problem_page import plan_drawings
from gpp.report.sweep.jobs import EMULATE
from gpp.ui.runs import RunFiles

ASIDE = ("cache_dir", "cost.cache_dir", "logger.")
"""The beginnings of settings that say where, not what."""


def comparison(first: RunFiles, second: RunFiles) -> dict[str, Any]:
    """What the page of a comparison shows."""
    both = {"A": first, "B": second}
    plans = {name: (run.read(Plan, "job/plan.json"), run.read(OpGraph, "job/graph.json")) for name, run in both.items()}
    lines = {name: run.timelines for name, run in both.items()}
    scale = span_s(line for each in lines.values() for line in (each.predicted, each.measured) if line is not None)
    drawn = []
    for name, run in both.items():
        plan, graph = plans[name]
        source = "Emulated" if run.result.get("engine") == EMULATE else "Measured"
        named = [("Predicted", lines[name].predicted), (source, lines[name].measured)]
        known = branches(graph) if graph else ()
        drawn.append({"name": name, "run": run.name, **plan_drawings(plan, graph, known, named, scale)})
    (old, graph), (new, other) = plans.values()
    same = graph is not None and other is not None and graph.fingerprint == other.fingerprint
    return {
        "runs": [(name, run.name, run.link("run")) for name, run in both.items()],
        "figures": _figures(both),
        "settings": _settings(first, second),
        "plans": _plans(old, new, graph) if same and old and new and graph else None,
        "why_not": ""
        if same
        else "The runs have no plans of the same operators, so no operator can be followed from one to the other.",
        "drawn": drawn,
    }


def _figures(both: Mapping[str, RunFiles]) -> PageTable:
    """The key figures of both, and the second over the first."""
    rows = []
    for what in ("predicted", "measured"):
        a, b = (getattr(run.timelines, what) for run in both.values())
        of_a, of_b = (key_figures(line.metrics if line else None, None) for line in (a, b))
        for one, other in zip(of_a, of_b, strict=False):
            if one.predicted is not None or other.predicted is not None:
                ratio = text.ratio(text.quotient(other.predicted, one.predicted))
                rows.append([f"{one.name}, {what}", one.show(one.predicted), other.show(other.predicted), ratio])
    columns = [Column(name="figure"), *(Column(name=name, kind="n") for name in (*both, "B / A"))]
    return PageTable(columns=columns, rows=rows, sortable=False)


def _settings(first: RunFiles, second: RunFiles) -> PageTable:
    """The settings in which they differ."""
    a, b = first.settings, second.settings
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name) and not name.startswith(ASIDE)]
    rows = [[name, _word(a, name), _word(b, name)] for name in names]
    return PageTable(columns=[Column(name=name, kind="c") for name in ("setting", "A", "B")], rows=rows)


def _word(settings: Mapping[str, Any], name: str) -> str:
    return text.shorten_end(written(settings[name]), 80) if name in settings else "–"


def _plans(old: Plan, new: Plan, graph: OpGraph) -> PageTable:
    """The stages of the second plan, and from which of the first one their operators come."""
    rows = []
    for s, stage in enumerate(new.stages):
        came = Counter(old.stage_of_op[op] for op in stage.ops)
        whole = len(came) == 1 and len(old.stages[next(iter(came))].ops) == len(stage.ops)
        parts = (f"s{t}" if whole else f"{counted(count, 'operator')} of s{t}" for t, count in sorted(came.items()))
        before = old.stages[min(came)]
        rows.append(
            [
                f"s{s}",
                ", ".join(module_names(new, graph, s)),
                ", ".join(parts),
                _change(device_words(before), device_words(stage), whole),
                _change(str(before.microbatch_size), str(stage.microbatch_size), whole),
                _change(str(before.in_flight), str(stage.in_flight), whole),
            ]
        )
    names = ("stage of B", "modules", "in A", "devices", "micro-batch", "in flight")
    return PageTable(columns=[Column(name=name, kind="c" if name == "modules" else "") for name in names], rows=rows)


def _change(before: str, now: str, whole: bool) -> str:
    """A stage's value, and what it was where the stage has the same operators and another value."""
    return f"{before} → {now}" if whole and before != now else now
