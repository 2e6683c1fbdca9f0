"""report.html of several strategies on one problem."""

from __future__ import annotations

from html import escape

from gpp.analysis.comparison import Attempt
from gpp.report import text
from gpp.report.charts import grouped_bars
from gpp.report.comparison import Line, certificate, columns, lines, reason_lines
from gpp.report.page import Column, Html, bullets, link, page, scroll, section, status_mark, table
from gpp.report.palette import PREDICTED, branch_of, tone
from gpp.report.record import RunRecord
from gpp.report.stage_graph import draw_stage_graph, hatch_definition, legend
from gpp.report.timelines import draw_timelines, key, rows_of, span_s

WORDS = ("strategy", "status")


def compare_report(run: RunRecord) -> str:
    """The page of a comparison; self-contained HTML."""
    result, found = run.result, lines(run.compared, run.bound)
    span = span_s(a.predicted for a in run.compared if a.predicted)
    parts = [hatch_definition(), _heading(run), _reason(run)]
    parts.append(section("Strategies", _table(found) + _certificate(found, run)))
    parts.append(section("Predicted iteration time", _bars(found, run)))
    parts += [section(_title(line), _strategy(line, run, span)) for line in found]
    parts.append(section("Warnings", bullets(run.warnings)))
    parts.append(section("How to reproduce", _reproduce(run)))
    return page(f"{result.get('model')} · {len(found)} strategies · {result.get('cluster')}", "\n".join(p for p in parts if p))


def _heading(run: RunRecord) -> str:
    result, status = run.result, str(run.result.get("status"))
    facts: list[tuple[str, object]] = [("cluster", result.get("cluster")), ("strategies", len(run.compared))]
    if run.graph is not None and run.cluster is not None:
        facts += [("operators", run.graph.num_ops), ("devices", run.cluster.num_devices)]
    if run.plan is not None:
        facts += [("mini-batch", run.plan.minibatch_size), ("best", result.get("strategy"))]
    words = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span> " for name, value in facts)
    kind = status if status in ("ok", "infeasible") else "failed"
    mark = f'<span class="status {kind}">{escape(status)}</span>'
    return f'<h1>{escape(str(result.get("model")))}{mark}</h1><p class="sub">{words}</p>'


def _reason(run: RunRecord) -> str:
    reasons = reason_lines(run.compared) or [str(run.result.get("reason") or "")]
    return f'<div class="note"><pre>{escape(chr(10).join(reasons))}</pre></div>' if any(reasons) else ""


def _table(found: list[Line]) -> str:
    names = columns(found)
    heads = [Column(name=name, kind="" if name in (*WORDS, "own objective") else "n") for name in names]
    rows = []
    for line in found:
        cells = line.cells()
        row = [cells[name] for name in names]
        row[names.index("status")] = status_mark(line.attempt.status)
        if line.is_best:
            row[0] = Html(f"<b>{escape(row[0])}</b> (best)")
        rows.append(row)
    return table(heads, rows)


def _certificate(found: list[Line], run: RunRecord) -> str:
    best = next((line for line in found if line.is_best), None)
    words = certificate(best.attempt.plan, best.metrics, best.bound) if best else ""
    note = (
        "× best: time over the best strategy's. b: micro-batch size. Gap: from optimal, at most. Stale: updates between "
        "the weights of a forward and the update that applies its gradient; 0 is what one device computes. "
        "Own objective: what the planner itself minimises; all other figures come from one simulator for all."
    )
    proof = f"<p>{escape(best.attempt.strategy)}: {escape(words)}.</p>" if words and best else ""
    return f'{proof}<p class="sub">{note}</p>'


def _bars(found: list[Line], run: RunRecord) -> str:
    values = [line.attempt.iteration_s if line.attempt.plan else None for line in found]
    if not any(values):
        return ""
    names = [line.attempt.strategy for line in found]
    bound = run.bound
    covered = [line.attempt.plan is None or bound is None or bound.covers(line.attempt.plan) for line in found]
    which = " that drains" * (not all(line.attempt.drains for line in found)) + " that keeps all activations" * (not all(covered))
    limits = [line.bound and (line.bound.iteration_s if holds else None) for line, holds in zip(found, covered, strict=True)]
    return scroll(
        grouped_bars(
            names,
            [("iteration time", PREDICTED, values)],
            text.seconds,
            title="Predicted iteration time of every strategy",
            limits=limits if bound else (),
            limit_name=f"no plan{which} is faster than",
            notes=[line.attempt.status for line in found],
        )
    )


def _title(line: Line) -> str:
    cells = line.cells()
    if line.attempt.plan is None:
        return f"{line.attempt.strategy}: {line.attempt.status}"
    what = f"{cells['stages']} stages of depth {cells['depth']}, micro-batch {cells['b']}"
    return f"{line.attempt.strategy}: {cells['predicted']}, {what}"


def _strategy(line: Line, run: RunRecord, span: float) -> str:
    """One strategy's plan and timeline, on the scale of all."""
    attempt = line.attempt
    if attempt.plan is None or run.graph is None:
        return f"<pre>{escape(attempt.reason or 'no reason given')}</pre>"
    branches = run.branches or (None,) * run.graph.num_ops
    drawing = scroll(draw_stage_graph(attempt.plan, run.graph, branches))
    return legend(attempt.plan, run.graph, branches) + drawing + _timeline(attempt, run, branches, span) + _words(attempt)


def _timeline(attempt: Attempt, run: RunRecord, branches: tuple[int | None, ...], span: float) -> str:
    plan, predicted, graph = attempt.plan, attempt.predicted, run.graph
    if plan is None or graph is None or predicted is None or not predicted.events:
        return ""
    tones = {s: tone(branch_of(stage, graph, branches)) for s, stage in enumerate(plan.stages)}
    rows = rows_of(plan.stages_of_device, tones, [predicted])
    return key() + scroll(draw_timelines([("Predicted", predicted)], rows, scale_s=span))


def _words(attempt: Attempt) -> str:
    return bullets(attempt.plan.explanation) if attempt.plan else ""


def _reproduce(run: RunRecord) -> str:
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    plans = [(f"plans/{a.strategy}.json", f"run it with plan=PATH strategy={a.strategy}") for a in run.compared if a.plan]
    files = [("result.json", "figures"), ("trace.json", "the best one's, for ui.perfetto.dev"), *plans]
    return f'{command}<p class="sub">Beside this page: {" · ".join(f"{link(p, p)} ({escape(w)})" for p, w in files)}</p>'
