"""mode=export: the plan in the words of another engine, in a folder of the run's directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible, InvalidConfig, UnsupportedPlan
from gpp.export.base import AbstractExporter, Exported, ToExport, ToPlanFor
from gpp.export.nearest import nearest
from gpp.export.page import plan_page
from gpp.files import write_text
from gpp.graph.captured import Captured
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.report.draw import text
from gpp.runtime.job import Job
from gpp.serialization import write_value
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.recording import Recorder


def settled(e: ToExport, exporter: AbstractExporter) -> tuple[ToExport, Exported, str | None]:
    """The plan to write and its files, and why it is another one: the nearest one where the user asked for it, and where the engine
    cannot run the plan, or runs that one faster.

    Raises:
        UnsupportedPlan: the engine cannot run it; says which can be run, and what that costs.
    """
    own, why = None, ""
    try:
        own = exporter.exported(e)
        lost = next((each for each in own.lost if each.seconds), None)
        if lost is None or not exporter.nearest:
            return e, own, None
        why = f"the engine runs it otherwise ({lost.what})"
    except UnsupportedPlan as error:
        why = str(error)
    other = nearest(e, exporter)
    if own is not None:  # it can be run, and another plan may be faster there
        better = exporter.exported(other) if other else None
        faster = better is not None and better.ran.step_s() < own.ran.step_s()
        return (other, better, why) if faster and other and better else (e, own, None)
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


def export_plan(
    asked: ToExport,
    exporter: AbstractExporter,
    folder: Path,
    save: Callable[[ToExport, Path], None],
    begin: Callable[[], None] = lambda: None,
) -> tuple[ToExport, Exported]:
    """Write a plan, or the nearest one, into a folder; which one, and its files.

    Args:
        save: writes the job of a plan below a folder, for engines that read it.
        begin: called when nothing is refused any more, before a file is written.

    Raises:
        UnsupportedPlan: the engine cannot run it; says which can be run, and what that costs.
    """
    e, made, why = settled(asked, exporter)
    begin()
    if made.job:
        save(e, folder)
    for name, content in made.files.items():
        write_text(folder / name, content, exact=True)
    write_text(folder / "PLAN.md", plan_page(exporter, asked, e, made, why))
    return e, made


def export(
    experiment: Experiment, captured: Captured, problem: Problem, plan: Plan, bound: Bound | None, recorder: Recorder
) -> None:
    """Write the folder of a run.

    Raises:
        UnsupportedPlan: as `export_plan`.
    """
    exporter = experiment.export
    assert exporter is not None  # refused before
    asked = replace(to_plan_for(experiment, captured, problem), bound=bound).having(plan)

    def save(e: ToExport, folder: Path) -> None:
        weights = experiment.weights(captured) if exporter.weights else None
        experiment.job(captured, e.problem, e.plan).save(folder, weights)

    folder = recorder.run_dir / "export" / exporter.name
    written, made = export_plan(asked, exporter, folder, save, recorder.begin)
    recorder.know(schedule=written.strategy.schedule.name)
    # What `gpp ui` opens with; no worker of ours runs the plan.
    problem = written.problem
    described = {"plan": written.plan, "graph": problem.graph, "cluster": problem.cluster, "model": captured}
    for name, value in described.items():
        write_value(recorder.run_dir / "job" / f"{name}.json", value)
    recorder.exported(exporter.engine, folder, made.command)


def under_rules(experiment: Experiment, captured: Captured, problem: Problem) -> tuple[Experiment, Problem]:
    """The run whose plan is the best one that was found under the rules of its engine of others, and the problem that it solves;
    both as they are where a plan is given.

    Raises:
        Infeasible: none was found.
    """
    exporter = experiment.export
    if exporter is None or experiment.plan is not None:
        return experiment, problem
    found = nearest(to_plan_for(experiment, captured, problem), exporter)
    if found is None:
        rule = f"no plan was found that {exporter.engine} can run"
        raise Infeasible(rule, f"mode=export export={exporter.name}, which says what {exporter.engine} refuses")
    said = f"Planned for {exporter.engine}, under its rules."
    if experiment.explain_s:
        with suppress(GppError):
            free = found.having(experiment.strategy.plan(problem), problem, experiment.strategy)
            said += f" Without them the plan of {experiment.strategy.name} takes {text.seconds(free.step_s())} a step."
    chosen = replace(experiment, strategy=found.strategy)
    chosen.made.plan = replace(found.plan, explanation=(said,))
    return chosen, found.problem


def to_plan_for(experiment: Experiment, captured: Captured, problem: Problem, strategy: Strategy | None = None) -> ToPlanFor:
    """What a plan of a run for an engine follows from; `strategy` in place of the run's own."""
    return ToPlanFor(
        model=experiment.model.name,
        captured=captured,
        problem=problem,
        strategy=strategy or experiment.strategy,
        clips=experiment.optimizer.clip_norm is not None,
    )


def of_pipeline(job: Job, problem: Problem, strategy: Strategy, exporter: AbstractExporter, folder: Path) -> Path:
    """Write the plan of a model in memory; the path of its PLAN.md.

    Raises:
        UnsupportedPlan: as `export_plan`.
        InvalidConfig: the engine's files would hold the model and its data, which are in memory alone.
    """
    if exporter.weights:
        rule = "writes a script that reads the model's data by its settings, and the data of a loop of one's own has none"
        raise InvalidConfig("exporter", exporter.name, rule, "use python run.py mode=export export=torch with model=imported")
    clips = job.settings.optimizer.get("clip_norm") is not None
    found = {"model": job.captured.name, "captured": job.captured, "problem": problem, "strategy": strategy, "plan": job.plan}
    export_plan(ToExport(**found, clips=clips), exporter, folder, lambda e, where: None)
    return folder / "PLAN.md"
