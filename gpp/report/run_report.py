"""report.html of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gpp.program.kinds import BACKWARD, FORWARD
from gpp.report import text
from gpp.report.charts import grouped_bars, line_chart
from gpp.report.comparison import certificate
from gpp.report.explain_page import explanation_section
from gpp.report.figures import emulation_words, pass_seconds, run_figures, stage_memory
from gpp.report.page import Column, bullets, link, page, scroll, section, table
from gpp.report.palette import MEASURED, PREDICTED, branch_of, tone
from gpp.report.record import RunRecord
from gpp.report.stage_graph import device_words, draw_stage_graph, hatch_definition, legend, module_names, run_words
from gpp.report.timelines import draw_timelines, key, rows_of

FILES = (
    ("result.json", "figures"),
    ("trace.json", "open in ui.perfetto.dev"),
    ("timeline.json", "events"),
    ("metrics.jsonl", "one line per step"),
    ("job/plan.json", "the plan: run it again with plan=PATH"),
    ("job/program.txt", "actions of every device"),
)


def run_report(run: RunRecord) -> str:
    """The page of one run, whatever its end; self-contained HTML."""
    result = run.result
    title = f"{result.get('model')} · {result.get('strategy')} · {result.get('cluster')}"
    parts = [hatch_definition(), _heading(run), _reason(run), _cards(run)]
    parts.append(section("Stage graph", _graph(run)))
    parts.append(section("Timelines", _timelines(run)))
    if run.explanation is not None:
        parts.append(section("Why it takes this long", explanation_section(run.explanation, run)))
    parts.append(section("Memory per device", _memory(run)))
    parts.append(section("Training", _training(run)))
    parts.append(section("Versions of the weights", _versions(run)))
    parts.append(section("Stages", _stage_table(run)))
    parts.append(section("Beside other strategies", _baselines(run)))
    parts.append(section("What the planner did", bullets(run.plan.explanation) if run.plan else ""))
    parts.append(section("Warnings", bullets(run.warnings)))
    parts.append(section("How to reproduce", _reproduce(run)))
    return page(title, "\n".join(part for part in parts if part))


def _heading(run: RunRecord) -> str:
    result, status = run.result, str(run.result.get("status"))
    kind = status if status in ("ok", "infeasible") else "failed"
    plan = run.plan
    facts = [
        ("strategy", result.get("strategy")),
        ("cluster", result.get("cluster")),
        ("engine", result.get("engine")),
        ("seed", result.get("seed")),
    ]
    if plan is not None:
        sizes = sorted({stage.microbatch_size for stage in plan.stages})
        facts += [
            ("stages", len(plan.stages)),
            ("depth", plan.depth),
            ("devices", plan.num_devices),
            ("mini-batch", plan.minibatch_size),
            ("micro-batch", ", ".join(map(str, sizes))),
            ("search", text.seconds(plan.search_s)),
        ]
    words = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span> " for name, value in facts)
    return (
        f'<h1>{escape(str(result.get("model")))}<span class="status {kind}">{escape(status)}</span></h1><p class="sub">{words}</p>'
    )


def _reason(run: RunRecord) -> str:
    reason = run.result.get("reason")
    if not reason:
        return ""
    return f'<div class="note{" bad" if run.result.get("status") == "failed" else ""}"><pre>{escape(str(reason))}</pre></div>'


def _cards(run: RunRecord) -> str:
    if run.predicted is None and run.measured is None:
        return ""
    out = []
    for figure in run_figures(run):
        rows = [("predicted", figure.show(figure.predicted))]
        rows += [("measured", figure.show(figure.measured)), ("ratio", text.ratio(figure.ratio))] if run.measured else []
        lines = "".join(
            f"<dt>{name}</dt><dd{' class=big' if name != 'ratio' else ''}>{escape(value)}</dd>".replace("class=big", 'class="big"')
            for name, value in rows
        )
        out.append(f'<div class="card"><h3>{escape(figure.name)}</h3><dl>{lines}</dl></div>')
    words = certificate(run.plan, run.predicted.metrics if run.predicted else None, run.bound)
    line = f'<p class="sub">As predicted, {escape(words)}.</p>' if words else ""
    emulated = emulation_words(run)
    line += f'<p class="sub">{escape(emulated)}</p>' if emulated else ""
    return f'<div class="cards">{"".join(out)}</div>{line}'


def _branches(run: RunRecord) -> tuple[int | None, ...]:
    return run.branches or (None,) * (run.graph.num_ops if run.graph else 0)


def _graph(run: RunRecord) -> str:
    if run.plan is None or run.graph is None:
        return ""
    branches = _branches(run)
    drawing = scroll(draw_stage_graph(run.plan, run.graph, branches))
    words = (
        '<p class="sub">Arrows carry the bytes of one of the producer\'s micro-batches; dashed arrows are an order without data. '
        "b: micro-batch size; i, in flight: samples whose activations the stage may hold.</p>"
    )
    return legend(run.plan, run.graph, branches) + drawing + words


def _timelines(run: RunRecord) -> str:
    named = [(name, t) for name, t in (("Predicted", run.predicted), ("Measured", run.measured)) if t is not None and t.events]
    if not named:
        return ""
    tones = {}
    if run.plan is not None and run.graph is not None:
        tones = {s: tone(branch_of(stage, run.graph, _branches(run))) for s, stage in enumerate(run.plan.stages)}
    rows = rows_of(run.plan.stages_of_device if run.plan else {}, tones, [t for _, t in named])
    return key() + scroll(draw_timelines(named, rows))


def _memory(run: RunRecord) -> str:
    both = [
        (name, fill, t.metrics.peak_memory_bytes)
        for name, fill, t in (("predicted", PREDICTED, run.predicted), ("measured", MEASURED, run.measured))
        if t is not None and t.metrics.peak_memory_bytes
    ]
    if not both:
        return ""
    devices = sorted({d for _, _, peaks in both for d in peaks})
    limits = [run.cluster.devices[d].memory_bytes if run.cluster and d < run.cluster.num_devices else None for d in devices]
    chart = grouped_bars(
        [f"d{d}" for d in devices],
        [(name, fill, [peaks.get(d) for d in devices]) for name, fill, peaks in both],
        text.num_bytes,
        title="Peak memory per device",
        limits=limits,
    )
    return scroll(chart)


def _over_steps(values: Sequence[float | None], first: int) -> list[tuple[float, float]]:
    return [(float(i), float("nan") if value is None else value) for i, value in enumerate(values, first)]


def _training(run: RunRecord) -> str:
    charts = []
    if run.losses:
        lines = [("training loss", MEASURED, _over_steps(run.losses, run.first_step))]
        for i, (name, values) in enumerate(run.result.get("loss_terms", {}).items()):
            lines.append((name, tone(i + 1).dark, _over_steps(values, run.first_step)))
        charts.append(line_chart(lines, title="Training loss over steps"))
        charts.append(_over_time(run))
    names = sorted({name for entry in run.evals for name in entry if name != "step"})
    for name in names:
        pairs = [(float(entry["step"]), float(entry[name])) for entry in run.evals if entry.get(name) is not None]
        shown = name.removeprefix("metric:")
        charts.append(line_chart([(shown, tone(2).dark, pairs)], title=f"{shown} over steps", points=True))
    charts = [chart for chart in charts if chart]
    final = ", ".join(
        f"{escape(name)} <b>{text.significant(value, 4)}</b>" for name, value in run.result.get("final_metric", {}).items()
    )
    pair = f'<div class="pair">{"".join(f"<div>{scroll(chart)}</div>" for chart in charts)}</div>' if charts else ""
    return pair + (f'<p class="sub">At the end: {final}</p>' if final else "")


def _over_time(run: RunRecord) -> str:
    """The loss by the time that the steps take: measured, or on the cluster described if nothing else is known."""
    timeline, whose = (run.measured, "measured") if run.measured else (run.predicted, "predicted")
    step_s = timeline.metrics.iteration_s if timeline else 0.0
    if not step_s > 0:
        return ""
    pairs = [(i * step_s, loss) for i, loss in _over_steps(run.losses, run.first_step)]
    words = f"Training loss over time ({whose} step of {text.seconds(step_s)})"
    return line_chart([(f"training loss over time, {whose}", MEASURED, pairs)], title=words, x_name="time", x_show=text.seconds)


def _versions(run: RunRecord) -> str:
    """Copies of the weights and staleness, stage by stage; nothing for a pipeline that drains."""
    both = [
        (f"{what}, {whose}", fill, found)
        for what, name, fills in (
            ("copies", "weight_versions", (PREDICTED, MEASURED)),
            ("staleness", "staleness", (tone(1).light, tone(1).dark)),
        )
        for (whose, t), fill in zip((("predicted", run.predicted), ("measured", run.measured)), fills, strict=True)
        if t is not None and (found := getattr(t.metrics, name))
    ]
    stages = sorted({s for _, _, found in both for s in found})
    if not any(count > 1 for name, _, found in both if "copies" in name for count in found.values()) and not any(
        found[s] for name, _, found in both if "staleness" in name for s in found
    ):
        return ""
    chart = grouped_bars(
        [f"s{s}" for s in stages],
        [(name, fill, [found.get(s) for s in stages]) for name, fill, found in both],
        lambda count: "–" if count is None else f"{count:.0f}",
        title="Copies of the weights and staleness per stage",
    )
    words = (
        '<p class="sub">Staleness: updates that a stage makes between the weights that a forward starts from and the update that '
        "applies its gradient, at most.</p>"
    )
    return scroll(chart) + words


def _stage_table(run: RunRecord) -> str:
    if run.plan is None or run.graph is None:
        return ""
    passes = pass_seconds(run.predicted)
    columns = [
        Column(name="stage"),
        Column(name="modules", kind="c"),
        Column(name="devices"),
        Column(name="micro-batch", kind="n"),
        Column(name="in flight", kind="n"),
        Column(name="forward", kind="n"),
        Column(name="backward", kind="n"),
        Column(name="peak memory", kind="n"),
        Column(name="of limit", kind="n"),
        Column(name="next stages"),
    ]
    special = any(run_words(stage) for stage in run.plan.stages)
    columns += [Column(name="operators")] if special else []
    rows = []
    for s, stage in enumerate(run.plan.stages):
        used, limit = stage_memory(run, s, run.predicted)
        rows.append(
            [
                f"s{s}",
                ", ".join(module_names(run.plan, run.graph, s)),
                device_words(stage),
                str(stage.microbatch_size),
                str(stage.in_flight),
                text.seconds(passes.get((s, FORWARD))),
                text.seconds(passes.get((s, BACKWARD))),
                text.num_bytes(used),
                text.percent(text.quotient(used, limit)),
                text.ranges(run.plan.successors[s], "s") or "–",
                *([run_words(stage)] if special else []),
            ]
        )
    return table(columns, rows) + '<p class="sub">Times of one micro-batch and memory as predicted.</p>'


def _baselines(run: RunRecord) -> str:
    if not run.baseline_predicted or run.predicted is None:
        return ""
    own = run.predicted.metrics
    columns = [
        Column(name="strategy"),
        Column(name="iteration time", kind="n"),
        Column(name="throughput", kind="n"),
        Column(name="bubble", kind="n"),
        Column(name="peak memory", kind="n"),
        Column(name="communication", kind="n"),
        Column(name="this run's speed-up", kind="n"),
    ]
    rows = []
    for name, metrics in [(f"{run.result.get('strategy')} (this run)", own), *run.baseline_predicted.items()]:
        speedup = text.quotient(metrics.iteration_s, own.iteration_s)
        rows.append(
            [
                name,
                text.seconds(metrics.iteration_s),
                f"{text.significant(metrics.throughput_samples_per_s)} /s",
                text.percent(metrics.bubble_fraction),
                text.num_bytes(max(metrics.peak_memory_bytes.values(), default=math.nan)),
                text.num_bytes(metrics.communication_bytes),
                "" if metrics is own else text.ratio(speedup),
            ]
        )
    return table(columns, rows) + '<p class="sub">All as predicted, for the same model, cluster and mini-batch.</p>'


def _reproduce(run: RunRecord) -> str:
    command = f"<pre>{escape(run.command)}</pre>" if run.command else ""
    files = " · ".join(f"{link(path, path)} ({escape(what)})" for path, what in FILES)
    return f'{command}<p class="sub">Beside this page: {files}</p>'
