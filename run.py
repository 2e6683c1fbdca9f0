"""Plan a model with branches as a graph of pipeline stages, run it, and show measured beside predicted.

python run.py                                   the default model on this machine
python run.py --help                            what there is to choose from

model ──► OpGraph ──┐
cluster ────────────┼──► Planner ──► Plan ──► Schedule ──► Program ──► Engine ──► Timeline ──► report, loggers
cost ───────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpp.app.cli import main

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.recording import Recorder


def story(experiment: Experiment, recorder: Recorder) -> None:
    """Compose → plan → lower → execute → record."""
    from gpp.app.replanning import execute  # a refused command needs none of these
    from gpp.app.surveys import SURVEYS

    experiment.check()
    recorder.claim()
    captured = experiment.captured()
    recorder.warn(*captured.warnings)

    graph = experiment.op_graph(captured)
    problem = experiment.problem(captured, graph)
    bound = experiment.bound(problem)
    recorder.posed(graph, bound)
    if survey := SURVEYS.get(experiment.mode):
        survey(experiment, captured, problem, recorder)
        return

    plan = experiment.make_plan(problem)
    problem, plan = experiment.in_place(captured, problem, plan, recorder.pass_by, recorder.warn)
    recorder.posed(graph, experiment.bound(problem))
    predicted = experiment.strategy.predict(plan, problem)
    baseline = experiment.baseline(problem)
    recorder.planned(plan, predicted, baseline)
    recorder.warn(*experiment.warnings(captured, plan))
    if experiment.mode == "profile":
        recorder.profiled(problem, plan)
        return
    if experiment.mode == "plan":
        recorder.explained(experiment.explain(problem, plan, predicted, bound, baseline))

    if plan.divided and not experiment.runs:
        # Whether an engine could divide these input gradients is asked by a run alone.
        recorder.predicted_only(plan)
        return

    job = experiment.job(captured, problem, plan)
    weights = experiment.weights(captured) if experiment.computes else None
    recorder.begin()
    job.save(recorder.run_dir, weights)
    if experiment.runs:
        recorder.outcome = execute(experiment, captured, problem, plan, job, recorder)
        recorder.answered(experiment.judged(job, recorder.run_dir))


if __name__ == "__main__":
    main(story)
