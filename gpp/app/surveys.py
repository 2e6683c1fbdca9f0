"""Modes that plan with several strategies and train none for its own sake: `compare` and `max_batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpp.analysis.comparison import beside, chain_beside, compare
from gpp.analysis.gains import predicted_gains
from gpp.analysis.max_batch import Confirmed, LargestMicrobatch, at_size, largest
from gpp.app import judging
from gpp.app.experiment import Experiment
from gpp.app.recording import Recorder
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, WorkerFailed
from gpp.graph.captured import Captured
from gpp.plan.plan import Plan
from gpp.runtime.engine import Progress
from gpp.strategy import Strategy
from gpp.timeline import Outcome

Survey = Callable[[Experiment, Captured, Problem, Recorder], None]

BEYOND = 1.05
"""The next size that is run is at least so much larger: a prediction of memory is not good for less."""
STEPS = 3
"""Steps of a run that confirms a boundary: in the second the state of the optimizer is there, the third is as every later one."""


def compare_strategies(experiment: Experiment, captured: Captured, problem: Problem, recorder: Recorder) -> None:
    """The plan of each strategy for one problem, and what the best one gains."""
    attempts = compare(experiment.strategies, problem, lambda name: recorder.console.pass_by(f"planning with {name} ..."))
    best = recorder.compared(attempts)
    if best is None or best.plan is None or best.predicted is None:
        return
    strategy = next(one for one in experiment.strategies if one.name == best.strategy)
    chain = chain_beside(strategy)
    made = [attempt for one, attempt in zip(experiment.strategies, attempts, strict=True) if one == chain]
    # The best chain may have been one of those compared.
    found = tuple(made) if made else beside(strategy, problem)
    rivals = judging.rivals_of(replace(experiment, strategy=strategy), captured, problem, best.plan, found)
    recorder.know(gains=predicted_gains(rivals, best.plan, best.predicted.metrics))


def largest_batches(experiment: Experiment, captured: Captured, problem: Problem, recorder: Recorder) -> None:
    """The largest micro-batch of each strategy, and with `confirm` what real workers say to it."""

    def trying(name: str, size: int) -> None:
        recorder.console.pass_by(f"planning with {name}, micro-batch {size} ...")

    found = list[LargestMicrobatch]()
    for strategy in experiment.strategies:
        boundary = largest(strategy, problem, trying)
        if experiment.confirm and boundary.beyond is not None and boundary.best.plan is not None:
            recorder.begin()
            try:
                confirmed = _confirm(experiment, captured, problem, strategy, boundary, recorder)
                boundary = replace(boundary, confirmed=confirmed)
            except InvalidConfig as error:
                recorder.warn(f"the boundary of {strategy.name} has not been run: {error}")
        found.append(boundary)
    recorder.compared(tuple(boundary.best for boundary in found), tuple(found))


SURVEYS: Mapping[str, Survey] = {"compare": compare_strategies, "max_batch": largest_batches}
"""Mode -> what it does once the problem is posed."""


def _confirm(
    experiment: Experiment,
    captured: Captured,
    problem: Problem,
    strategy: Strategy,
    boundary: LargestMicrobatch,
    recorder: Recorder,
) -> Confirmed:
    """Run the plan of a boundary, then the same stages with a larger micro-batch, which is refused.

    Raises:
        InvalidConfig: the data or the machine does not do for it.
    """
    plan = boundary.best.plan
    assert plan is not None and boundary.beyond is not None
    beyond = max(boundary.beyond, math.ceil(boundary.microbatch_size * BEYOND))
    folder = recorder.run_dir / "confirmed" / strategy.name

    def end_of(size: int, own: Plan) -> tuple[str, Outcome]:
        recorder.console.pass_by(f"running {strategy.name}, micro-batch {size} ...")
        return _end(experiment, captured, at_size(problem, size, boundary.microbatches), strategy, own, folder / str(size))

    at, outcome = end_of(boundary.microbatch_size, plan)
    after, _ = end_of(beyond, scaled(plan, boundary.microbatch_size, beyond))
    peaks = outcome.measured.metrics.peak_memory_bytes if outcome.measured else {}
    shares = [peak / problem.cluster.devices[device].memory_bytes for device, peak in peaks.items()]
    return Confirmed(at=at, size=beyond, beyond=after, peak_share=max(shares, default=None))


def _end(
    experiment: Experiment, captured: Captured, problem: Problem, strategy: Strategy, plan: Plan, folder: Path
) -> tuple[str, Outcome]:
    """How a run of a plan ends whose workers have the memory of their devices and no more: `ok`, or why not; and its outcome."""
    engine: Any = experiment.engine
    run = replace(
        experiment,
        mode="train",
        confirm=False,
        strategies=(),
        strategy=strategy,
        minibatch_size=problem.minibatch_size,
        microbatch_size=problem.microbatch_size,
        engine=replace(engine, enforce_memory=True),
        steps=STEPS,
        final_weights=False,
    )
    run.check()
    job = run.job(captured, problem, plan)
    # An evaluation would take other memory, of which no plan speaks.
    job = replace(job, evaluation=None, settings=replace(job.settings, evaluation_samples=0))
    job.save(folder, experiment.weights(captured))
    try:
        return "ok", run.engine.execute(job, folder, Progress())
    except WorkerFailed as error:
        return error.reason, Outcome()


def scaled(plan: Plan, size: int, other: int) -> Plan:
    """The plan with every micro-batch, and the samples in flight, in proportion.

    Args:
        size, other: micro-batch now and then.
    """

    def times(samples: int) -> int:
        return -(-samples * other // size)

    stages = tuple(
        replace(stage, microbatch_size=(b := times(stage.microbatch_size)), in_flight=stage.in_flight // stage.microbatch_size * b)
        for stage in plan.stages
    )
    return replace(plan, stages=stages, minibatch_size=times(plan.minibatch_size))
