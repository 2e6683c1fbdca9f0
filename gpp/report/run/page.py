"""report.html of one run, with the plans that were replaced while it went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpp.replan import Moved
from gpp.report.draw import text
from gpp.report.draw.charts import grouped_bars, line_chart
from gpp.report.draw.memory import memory_swatches
from gpp.report.draw.page import Column, Kind, PageTable
from gpp.report.draw.palette import MEASURED, PREDICTED, tone
from gpp.report.draw.stage_graph import microbatch_words
from gpp.report.draw.svg import Drawing
from gpp.report.run.explain_page import explanation_view
from gpp.report.run.gain_words import gain_lines
from gpp.report.run.key_figures import emulation_words, run_figures, worth_words
from gpp.report.run.problem_page import plan_drawings, problem_page
from gpp.report.run.record import RunRecord
from gpp.report.run.result import peak_memory
from gpp.report.run.stages import stage_lines

FILES = (("result.json", "figures"),)
TIMELINE_FILES = (("trace.json", "open in ui.perfetto.dev"), ("timeline.json", "events"))
STEP_FILES = (("metrics.jsonl", "one line per step"),)
PLAN_FILES = (
    ("job/plan.json", "the plan: run it again with plan=PATH"),
    ("job/program.txt", "actions of every device"),
)

STAGE_KINDS: dict[str, Kind] = {"stage": "", "modules": "c", "devices": "", "next stages": "", "operators": ""}
"""Kinds of the columns of the stages' table; the others hold numbers."""


def run_report(run: RunRecord) -> str:
    """The page of one run, whatever its end; self-contained HTML."""
    result, course = run.result, run.predicted.metrics.course if run.predicted else None
    proof = worth_words(run, run.judged.bound)
    return problem_page(
        "run.html",
        run,
        title=f"{result.get('model')} · {result.get('strategy')} · {result.get('cluster')}",
        facts=_facts(run),
        reason=str(result.get("reason") or ""),
        files=[
            *FILES,
            *(TIMELINE_FILES if run.predicted or run.measured else ()),
            *(STEP_FILES if run.measured else ()),
            *(PLAN_FILES if run.plan else ()),
        ],
        cards=_cards(run),
        certificate=proof and (f"By the prediction, {proof}." if run.judged.bound else f"{text.sentence(proof)}."),
        emulation=emulation_words(run),
        gains=gain_lines(run.judged.gains) if run.judged.gains and run.status == "ok" else (),
        **plan_drawings(
            run.plan,
            run.graph,
            run.branches,
            [("Predicted", run.predicted), (run.source.capitalize(), run.measured)],
            limits={d: device.memory_bytes for d, device in enumerate(run.cluster.devices)} if run.cluster else {},
        ),
        explanation=explanation_view(run.judged.explanation, run) if run.judged.explanation else None,
        memory=_memory(run),
        memory_swatches=memory_swatches() if run.predicted and run.predicted.memory else (),
        what_was_done=course.made.capitalize() if course else "Training",
        judged_on=f"Of the {course.made}" if course else "On held-out data at the end",
        training_charts=_training_charts(run),
        final_metrics=[(name, text.significant(value, 4)) for name, value in result.get("final_metric", {}).items()],
        versions=_versions(run),
        replaced=replaced_table(run),
        stages=_stages(run),
        baselines=_baselines(run),
        planner_words=run.plan.explanation if run.plan else (),
    )


def _facts(run: RunRecord) -> list[tuple[str, object]]:
    plan = run.plan
    facts: list[tuple[str, object]] = [(name, run.result.get(name)) for name in ("strategy", "cluster", "engine", "seed")]
    if plan is not None:
        asked = run.asked
        parts = {"planner": plan.planner, "schedule": asked.schedule, "weights": asked.weights, "cost model": asked.cost}
        facts += [(name, word) for name, word in parts.items() if word]
        facts += [("stages", len(plan.stages)), ("depth", plan.depth), ("devices", plan.num_devices)]
        facts += [("mini-batch", plan.minibatch_size), ("micro-batch", microbatch_words(plan))]
        facts.append(("planned in", text.seconds(plan.search_s)))
    return facts


def _cards(run: RunRecord) -> list[dict[str, Any]]:
    if run.predicted is None and run.measured is None:
        return []
    out = []
    for figure in run_figures(run):
        rows = [("predicted", figure.show(figure.predicted))]
        rows += [(run.source, figure.show(figure.measured)), ("ratio", text.ratio(figure.ratio))] if run.measured else []
        out.append({"name": figure.name, "rows": rows})
    return out


def _memory(run: RunRecord) -> Drawing | None:
    both = [
        (name, fill, t.metrics.peak_memory_bytes)
        for name, fill, t in (("predicted", PREDICTED, run.predicted), (run.source, MEASURED, run.measured))
        if t is not None and t.metrics.peak_memory_bytes
    ]
    if not both:
        return None
    devices = sorted({d for _, _, peaks in both for d in peaks})
    memory = [run.cluster.devices[d].memory_bytes if run.cluster and d < run.cluster.num_devices else None for d in devices]
    return grouped_bars(
        [f"d{d}" for d in devices],
        [(name, fill, [peaks.get(d) for d in devices]) for name, fill, peaks in both],
        text.num_bytes,
        title="Peak memory per device",
        limits=("limit", memory),
        stages=[" ".join(map(str, run.plan.stages_of_device.get(d, ()))) for d in devices] if run.plan else (),
    )


def _over_steps(values: Sequence[float | None], first: int) -> list[tuple[float, float]]:
    return [(float(i), float("nan") if value is None else value) for i, value in enumerate(values, first)]


def _training_charts(run: RunRecord) -> list[Drawing]:
    charts: list[Drawing | None] = []
    if run.predicted is not None and run.predicted.metrics.course is not None:
        return []
    if len(run.outcome.losses) > 1:
        lines = [("training loss", MEASURED, _over_steps(run.outcome.losses, run.first_step))]
        for i, (name, values) in enumerate(run.result.get("loss_terms", {}).items()):
            lines.append((name, tone(i + 1).strong, _over_steps(values, run.first_step)))
        charts += [line_chart(lines, title="Training loss over steps"), _loss_over_time(run)]
    for name in sorted({name for entry in run.outcome.evaluations for name in entry if name != "step"}):
        pairs = [(float(entry["step"]), float(entry[name])) for entry in run.outcome.evaluations if entry.get(name) is not None]
        shown = name.removeprefix("metric:")
        # One value is no course: the line below the charts says it.
        if len(pairs) > 1:
            charts.append(line_chart([(shown, tone(2).strong, pairs)], title=f"{shown} over steps", points=True))
    return [chart for chart in charts if chart]


def _loss_over_time(run: RunRecord) -> Drawing | None:
    """The loss over the time of the steps: measured, or predicted where nothing was measured."""
    timeline, whose = (run.measured, run.source) if run.measured else (run.predicted, "predicted")
    step_s = timeline.metrics.iteration_s if timeline else 0.0
    if not step_s > 0:
        return None
    pairs = [(i * step_s, loss) for i, loss in _over_steps(run.outcome.losses, run.first_step)]
    words = f"Training loss over time ({whose} step of {text.seconds(step_s)})"
    return line_chart([(f"training loss over time, {whose}", MEASURED, pairs)], title=words, x_name="time", x_show=text.seconds)


def _versions(run: RunRecord) -> Drawing | None:
    """Copies of the weights and staleness, stage by stage; nothing for a pipeline that drains."""
    both = [
        (f"{what}, {whose}", fill, found)
        for what, name, fills in (
            ("copies", "weight_versions", (PREDICTED, MEASURED)),
            ("staleness", "staleness", (tone(1).soft, tone(1).strong)),
        )
        for (whose, t), fill in zip((("predicted", run.predicted), (run.source, run.measured)), fills, strict=True)
        if t is not None and (found := getattr(t.metrics, name))
    ]
    ordinary = {True: 1, False: 0}  # a pipeline that drains has one copy and no staleness
    if all(count <= ordinary[name.startswith("copies")] for name, _, found in both for count in found.values()):
        return None
    stages = sorted({s for _, _, found in both for s in found})
    return grouped_bars(
        [f"s{s}" for s in stages],
        [(name, fill, [found.get(s) for s in stages]) for name, fill, found in both],
        lambda count: "–" if count is None else f"{count:.0f}",
        title="Copies of the weights and staleness per stage",
        stages=[str(s) for s in stages],
    )


def _stages(run: RunRecord) -> PageTable | None:
    lines = stage_lines(run)
    if not lines:
        return None
    shown = [name for name in lines[0].cells() if name != "operators" or any(line.operators for line in lines)]
    columns = [Column(name=name, kind=STAGE_KINDS.get(name, "n")) for name in shown]
    return PageTable(columns=columns, rows=[[line.cells()[name] for name in shown] for line in lines], stages=range(len(lines)))


def _baselines(run: RunRecord) -> PageTable | None:
    if not run.judged.baseline or run.predicted is None:
        return None
    own = run.predicted.metrics
    numbers = ("iteration time", "throughput", "bubble", "peak memory", "communication", "this run's speed-up")
    columns = [Column(name="strategy"), *(Column(name=name, kind="n") for name in numbers)]
    rows = []
    for name, metrics in [(f"{run.result.get('strategy')} (this run)", own), *run.judged.baseline.items()]:
        speedup = text.quotient(metrics.iteration_s, own.iteration_s)
        rows.append(
            [
                name,
                text.seconds(metrics.iteration_s),
                f"{text.significant(metrics.throughput_samples_per_s)} /s",
                text.percent(metrics.bubble_fraction),
                text.num_bytes(peak_memory(metrics)),
                text.num_bytes(metrics.communication_bytes),
                "" if metrics is own else text.ratio(speedup),
            ]
        )
    return PageTable(columns=columns, rows=rows)


def replaced_table(run: RunRecord) -> PageTable | None:
    """A row for each switch to another plan; None for a run under one plan."""
    rows = list[list[str]]()
    for one in run.result.get("replaced", ()):
        why = [f"device {device} lost" for device in one["lost"]]
        why += [f"device {device} {factor:.2f} times as long as planned" for device, factor in sorted(one["slow"].items())]
        row, switch = [str(one["first"]), "; ".join(why)], one["switch"]
        if switch is None:
            row += ["new workers", *["–"] * 6]
        else:
            row += ["; ".join(str(Moved(**moved)) for moved in switch["moved"]), text.num_bytes(switch["bytes"])]
            row += [text.seconds(switch[name]) for name in ("predicted_pause_s", "pause_s")]
            before_s, after_s = switch["predicted_step_s"]
            row += [*(text.significant(rate) for rate in switch["samples_per_s"]), f"{before_s / after_s:.2f}×"]
        rows.append(row)
    if not rows:
        return None
    words, numbers = (
        ("why", "moved"),
        ("sent", "pause, predicted", "pause, measured", "samples/s before", "samples/s after", "faster, predicted"),
    )
    columns = [Column(name="from step", kind="n"), *(Column(name=name) for name in words)]
    return PageTable(columns=[*columns, *(Column(name=name, kind="n") for name in numbers)], rows=rows)
