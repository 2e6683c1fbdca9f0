"""mode=export: the plan in the words of another engine, in a folder of the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpp.cost.problem import Problem
from gpp.errors import UnsupportedPlan
from gpp.export.base import AbstractExporter, Exported, ToExport
from gpp.export.nearest import nearest
from gpp.export.page import plan_page
from gpp.files import write_text
from gpp.graph.captured import Captured
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.report.draw import text

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.recording import Recorder


def settled(e: ToExport, exporter: AbstractExporter) -> tuple[ToExport, Exported, str | None]:
    """The plan to write and its files: the plan itself, or the nearest one where the user asked for it; and why.

    Raises:
        UnsupportedPlan: the engine cannot run it; says which can be run, and what that costs.
    """
    try:
        return e, exporter.exported(e), None
    except UnsupportedPlan as error:
        why = str(error)
    other = nearest(e, exporter)
    if other is None:
        raise UnsupportedPlan(f"{why} (no plan was found that export={exporter.name} could run)")
    made = exporter.exported(other)
    if exporter.nearest:
        return other, made, why
    step_s, before = made.ran.step_s(), e.step_s()
    raise UnsupportedPlan(
        f"{why}. The nearest plan that it can run has {len(other.plan.stages)} stages and is predicted to take "
        f"{text.seconds(step_s)} a step, {text.percent(step_s / before - 1)} more than {text.seconds(before)}; "
        "export.nearest=true writes it"
    )


def export(
    experiment: Experiment, captured: Captured, problem: Problem, plan: Plan, bound: Bound | None, recorder: Recorder
) -> None:
    """Write the folder.

    Raises:
        UnsupportedPlan: the engine cannot run the plan.
    """
    exporter = experiment.export
    assert exporter is not None  # refused before
    clips = experiment.optimizer.clip_norm is not None
    asked = ToExport(
        model=experiment.model.name,
        captured=captured,
        problem=problem,
        strategy=experiment.strategy,
        plan=plan,
        clips=clips,
        bound=bound,
    )
    e, made, why = settled(asked, exporter)
    weights = experiment.weights(captured) if made.job and getattr(exporter, "weights", False) else None
    job = experiment.job(captured, e.problem, e.plan) if made.job else None
    recorder.begin()
    folder = recorder.run_dir / "export" / exporter.name
    if job is not None:
        job.save(folder, weights)
    write_export(folder, exporter, asked, e, made, why)
    recorder.exported(exporter.engine, folder, made.command)


def write_export(folder: Path, exporter: AbstractExporter, asked: ToExport, e: ToExport, made: Exported, why: str | None) -> None:
    """Write PLAN.md, the engine's files and the plan itself."""
    for name, content in made.files.items():
        write_text(folder / name, content, exact=True)
    write_text(folder / "PLAN.md", plan_page(exporter, asked, e, made, why))
