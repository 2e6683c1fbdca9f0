"""Plan a model with branches as a graph of pipeline stages, run it, and show measured beside predicted.

python run.py                                   the default model on this machine
python run.py --help                            what there is to choose from

model ──► OpGraph ──┐
cluster ────────────┼──► Planner ──► Plan ──► Schedule ──► Program ──► Engine ──► Timeline ──► report, loggers
cost ───────────────┘
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

from typing import TYPE_CHECKING

from gpp.app.cli import main

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.recording import Recorder


def story(experiment: Experiment, recorder: Recorder) -> None:
    """Compose → plan → lower → execute → record."""
    from gpp.analysis.gains import predicted_gains
    from gpp.app import judging  # a refused command needs none of these
    from gpp.app.several import SEVERAL

    experiment.check()
    recorder.claim()
    captured = experiment.captured()
    recorder.know(checked=captured.checked)
    recorder.warn(*captured.warnings)

    graph = experiment.op_graph(captured)
    problem = experiment.problem(captured, graph)
    bound = judging.bound_of(experiment, problem)
    unbounded = judging.unbounded(experiment.strategy, problem, compares=experiment.mode == "compare")
    recorder.know(graph=graph, bound=bound, unbounded=unbounded)
    if experiment.mode in SEVERAL:
        from gpp.app.surveys import SURVEYS

        SURVEYS[experiment.mode](experiment, captured, problem, recorder)
        return

    if experiment.mode == "plan" and experiment.export is not None:
        from gpp.app.exporting import under_rules

        experiment, problem = under_rules(experiment, captured, problem)
        recorder.know(graph=problem.graph, schedule=experiment.strategy.schedule.name)
    plan = experiment.make_plan(problem)
    problem, plan = experiment.in_place(captured, problem, plan, recorder.aside)
    recorder.know(bound=(bound := judging.bound_of(experiment, problem)))
    predicted = experiment.strategy.predict(plan, problem)
    baseline = judging.baseline_of(experiment, problem)
    recorder.planned(plan, predicted, baseline, judging.one_stage_of(experiment, problem, plan, predicted))
    recorder.warn(*experiment.warnings(captured, plan))
    if experiment.mode == "profile":
        recorder.profiled(problem, plan)
        return
    if experiment.mode == "export":
        from gpp.app.exporting import export

        export(experiment, captured, problem, plan, bound, recorder)
        return
    if experiment.mode == "plan":
        recorder.explained(judging.explanation_of(experiment, problem, plan, predicted, bound, baseline))
    rivals = judging.rivals_of(experiment, captured, problem, plan, baseline)
    recorder.know(gains=predicted_gains(rivals, plan, predicted.metrics))

    if plan.predicted_only and not experiment.runs:
        # Whether an engine could run it is asked by a run alone.
        recorder.predicted_only(plan)
        return

    job = experiment.job(captured, problem, plan)
    weights = experiment.weights(captured) if experiment.computes else None
    recorder.begin()
    job.save(recorder.run_dir, weights)
    if experiment.runs:
        from gpp.app.replanning import execute

        recorder.measured(execute(experiment, problem, job, recorder))
        recorder.answered(experiment.judged(job, recorder.run_dir))
        recorder.know(gains=judging.gains_of(experiment, problem, job, predicted, rivals, recorder.aside))


if __name__ == "__main__":
    main(story)
