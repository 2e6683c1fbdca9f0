"""What the engines of chains refuse, and how a run of theirs is measured (`gpp.plan.chain` has the chain itself)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.errors import UnsupportedPlan
from gpp.plan.chain import refuse_replicas, refuse_unequal_microbatches
from gpp.plan.plan import Plan
from gpp.program.kinds import KINDS
from gpp.runtime.engine import refuse_policies, refuse_split_operators
from gpp.runtime.job import Job
from gpp.timeline import Event, Outcome

if TYPE_CHECKING:
    from gpp.runtime.controller.controller import Follower

INSTEAD = "engine=distributed"
"""What runs every plan."""


def refuse_what_is_no_chain(plan: Plan, engine: str) -> None:
    """Refuse replicas, micro-batches that differ and kFkB, which an engine of chains cannot run.

    Raises:
        UnsupportedPlan: the plan has one of them; the message names the stage.
    """
    refuse_policies(plan)
    refuse_split_operators(plan, "this engine")
    refuse_unequal_microbatches(plan, f"engine={engine}", INSTEAD)
    refuse_replicas(plan, f"engine={engine}", INSTEAD)
    for s, stage in enumerate(plan.stages):
        if stage.k > 1:
            raise UnsupportedPlan(
                f"stage {s} runs {stage.k} forwards in a row, engine={engine} has no such schedule. "
                "Fix: strategy.planner.per_stage=false"
            )


def refuse_shared_devices(plan: Plan, engine: str) -> None:
    """Refuse several stages on one device, which most schedules cannot run.

    Raises:
        UnsupportedPlan: a device has several stages; the message names it.
    """
    for device, stages in sorted(plan.stages_of_device.items()):
        if len(stages) > 1:
            raise UnsupportedPlan(
                f"device {device} runs stages {', '.join(map(str, stages))}, {engine} runs one stage a device. "
                "Fix: engine=distributed, or engine=torch_pipelining engine.schedule=Interleaved1F1B"
            )


def measured_by_events(job: Job, run_dir: Path, logs: Follower) -> Outcome:
    """The ranks' measurements, with the samples in flight of the engine's own schedule, not of the program."""
    from gpp.runtime.controller.collected import collect

    outcome = collect(job, run_dir, logs)
    assert outcome.measured is not None
    metrics = replace(outcome.measured.metrics, max_in_flight_samples=_in_flight(outcome.measured.events, job.plan))
    return replace(outcome, measured=replace(outcome.measured, metrics=metrics))


def _in_flight(events: tuple[Event, ...], plan: Plan) -> dict[int, int]:
    """Stage -> the most samples between a forward's start and the end of its whole backward."""
    held, most = dict.fromkeys(range(len(plan.stages)), 0), dict.fromkeys(range(len(plan.stages)), 0)
    moments = [(event.start_s, 1, event) for event in events if KINDS[event.kind].holds]
    moments += [(event.end_s, -1, event) for event in events if KINDS[event.kind].frees]
    for _, change, event in sorted(moments, key=lambda moment: moment[:2]):
        held[event.stage] += change
        most[event.stage] = max(most[event.stage], held[event.stage])
    return {s: count * plan.stages[s].microbatch_size for s, count in most.items()}
