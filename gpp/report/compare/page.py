"""report.html of several strategies on one problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpp.errors import counted
from gpp.report.compare.boundaries import LEGEND, boundary_table, ends
from gpp.report.draw import text
from gpp.report.draw.charts import grouped_bars
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.draw.palette import PREDICTED
from gpp.report.draw.svg import Drawing
from gpp.report.draw.timelines import span_s
from gpp.report.run.gain_words import gain_lines
from gpp.report.run.key_figures import line_worth_words
from gpp.report.run.problem_page import plan_drawings, problem_page
from gpp.report.run.record import RunRecord
from gpp.report.run.strategies import WORDS, StrategyLine, best_lines, columns, legend, reason_lines, same_plans, strategy_lines


def compare_report(run: RunRecord) -> str:
    """The page of a comparison; self-contained HTML."""
    result, found = run.result, strategy_lines(run.attempts, run.judged.bound)
    groups = same_plans(found)
    best = []  # a sentence on the best plan of each kind
    for kind, line in best_lines(found):
        proof = line_worth_words(run, line)
        words = text.sentence(f"{kind}: {line.attempt.strategy}, {text.seconds(line.attempt.iteration_s)}")
        best.append(f"{words}{', ' + proof if proof else ''}.")
    plans = [(f"plans/{a.strategy}.json", f"run it with plan=PATH strategy={a.strategy}") for a in run.attempts if a.plan]
    span = span_s(a.predicted for a in run.attempts if a.predicted)
    return problem_page(
        "strategies.html",
        run,
        title=f"{result.get('model')} · {counted(len(found), 'strategy')} · {result.get('cluster')}",
        facts=_facts(run),
        reason="\n".join(reason_lines(run.attempts)) or str(result.get("reason") or ""),
        files=[("result.json", "figures"), ("trace.json", "the best one's, for ui.perfetto.dev"), *plans],
        boundaries=boundary_table(run.boundaries),
        ends=ends(run.boundaries),
        boundary_legend=LEGEND,
        strategies=_table(found, groups),
        legend=legend(columns(found)),
        best=[
            *best,
            *(gain_lines(run.judged.gains) if run.judged.gains else ()),
        ],
        # Steps of different mini-batches are not to be compared.
        bars=None if run.boundaries else _bars(groups, run),
        attempts=[_attempt(group, run, span) for group in groups],
    )


def _facts(run: RunRecord) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [("cluster", run.asked.cluster), ("strategies", len(run.attempts))]
    if run.graph is not None and run.cluster is not None:
        facts += [("operators", run.graph.num_ops), ("devices", run.cluster.num_devices)]
    if run.plan is not None:
        facts += [("mini-batch", run.plan.minibatch_size)]
        facts += [(kind, line.attempt.strategy) for kind, line in best_lines(strategy_lines(run.attempts, run.judged.bound))]
    return facts


def _names(group: Sequence[StrategyLine]) -> str:
    """The names of strategies with the same plan."""
    return ", ".join(line.attempt.strategy for line in group)


def _table(found: Sequence[StrategyLine], groups: Sequence[Sequence[StrategyLine]]) -> PageTable:
    names = columns(found)
    alike = {line.attempt.strategy: group[0].attempt.strategy for group in groups for line in group[1:]}
    rows = []
    for line in found:
        cells: dict[str, str | Cell] = {**line.cells(), "status": Cell(text=line.attempt.status, look="status")}
        same = alike.get(line.attempt.strategy)
        small = f"the plan of {same}" if same else ""
        cells["strategy"] = Cell(text=line.attempt.strategy, look="best" if line.is_best else "", small=small)
        rows.append([cells[name] for name in names])
    return PageTable(columns=[Column(name=name, kind="" if name in WORDS else "n") for name in names], rows=rows)


def _bars(groups: Sequence[Sequence[StrategyLine]], run: RunRecord) -> Drawing | None:
    """A bar for each plan that differs from the others."""
    found = [group[0] for group in groups]
    values = [line.attempt.iteration_s if line.attempt.plan else None for line in found]
    if not any(values):
        return None
    bound = run.judged.bound
    limits_of = [bound.of(line.attempt.plan) if bound and line.attempt.plan else bound for line in found]
    covered = [bound is None or own is not None for own in limits_of]
    which = " that drains" * (not all(line.attempt.drains for line in found)) + " that keeps all activations" * (not all(covered))
    limits = [line.bound and own and own.iteration_s for line, own in zip(found, limits_of, strict=True)]
    # The bound of plans that have several stages on a device holds for all; that of the others may be higher.
    which = " of its kind" * (len(set(filter(None, limits))) > 1) + which
    return grouped_bars(
        [_names(group) for group in groups],
        [("iteration time", PREDICTED, values)],
        text.seconds,
        title="Predicted iteration time of every strategy",
        limits=(f"no plan{which} is faster than", limits if bound else ()),
        notes=[line.attempt.status for line in found],
    )


def _attempt(group: Sequence[StrategyLine], run: RunRecord, span: float) -> dict[str, Any]:
    """The plan and timeline of the strategies that share them, on the scale of all."""
    attempt, cells, names = group[0].attempt, group[0].cells(), _names(group)
    title = f"{names}: {attempt.status}"
    if attempt.plan is not None:
        what = f"{cells['stages']} stages of depth {cells['depth']}, micro-batch {cells['b']}"
        title = f"{names}: {cells['predicted']}, {what}"
    return {
        "title": title,
        "reason": attempt.reason or "no reason given",
        # With each planner's name where several have found the same plan.
        "planner_words": [
            f"{line.attempt.strategy}: {words}" if len(group) > 1 else words
            for line in group
            if line.attempt.plan is not None
            for words in line.attempt.plan.explanation
        ],
        **plan_drawings(attempt.plan, run.graph, run.branches, [("Predicted", attempt.predicted)], span),
    }
