"""The lines that a run's workers wrote, merged into one outcome: losses, evaluations, and the timeline of a typical step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container
from pathlib import Path
from typing import Any

from gpp.graph.captured import LOSS, with_total
from gpp.program.kinds import COMPUTE, REDUCE, SENDS, UPDATES
from gpp.program.steady_state import fill
from gpp.runtime.controller.controller import Follower, clock_offset_s
from gpp.runtime.job import Job
from gpp.runtime.stretches import stretch_at
from gpp.simulate.simulator import SHOWN, max_in_flight, steady_period, update_ends, within
from gpp.timeline import Event, Metrics, Outcome, StepSpread, Timeline, bubble_fraction

SENT = SENDS | {REDUCE}
"""Kinds whose bytes count as communication."""

UNTIMED_STEPS = 2
"""First steps that never count: lazy initialisation, first touch of memory, the memory meter."""


def devices_of(ranks: Path) -> list[dict[str, Any]]:
    """Records that the devices wrote at their end, in the order of the ranks, on rank 0's clock."""
    devices = sorted((json.loads(path.read_text()) for path in ranks.glob("device_*.json")), key=lambda record: record["device"])
    for rank, device in enumerate(devices):
        if offset_s := clock_offset_s(ranks, rank):
            for step in device["steps"]:
                step["events"] = [[*event[:4], event[4] + offset_s, event[5] + offset_s, *event[6:]] for event in step["events"]]
    return devices


def collect(job: Job, run_dir: Path, logs: Follower, *, counted: Container[int] | None = None) -> Outcome:
    """Measurements of all ranks: losses, evaluations, and the timeline of a typical step.

    Args:
        counted: steps that are alike, whose times are told; None for all.
    """
    # A step that follows an evaluation waits for it; from end to end is the period of all others.
    starts, ends, timed = logs.starts, logs.ends, job.settings.first_step + UNTIMED_STEPS
    took = {step: ends[step] - ends[step - 1] for step in sorted(ends) if step >= timed and step not in logs.evaluations}
    if job.streams:
        # Neither while the pipeline fills nor while it drains.
        ahead, whole, stretches = fill(job.plan), took, {step: stretch_at(job, step) for step in took}
        took = {step: whole[step] for step, (first, count) in stretches.items() if ahead < step - first < count - ahead} or whole
    if counted is not None:
        took = {step: seconds for step, seconds in took.items() if step in counted}
    if not took:
        took = {step: ends[step] - starts[step] for step in ends if counted is None or step in counted}
    steps = [with_total(logs.losses[step]) for step in sorted(logs.losses)]
    return Outcome(
        measured=timeline(job, run_dir, took),
        losses=tuple(losses[LOSS] for losses in steps),
        terms={name: tuple(losses[name] for losses in steps) for name in (steps[0] if steps else ()) if name != LOSS},
        evaluations=tuple({"step": done, **with_total(values)} for done, values in sorted(logs.evaluations.items())),
    )


def timeline(job: Job, run_dir: Path, took: dict[int, float], *, seconds: float = 1.0) -> Timeline:
    """The measured timeline of a typical step.

    Args:
        took: step -> seconds of every step that counts.
        seconds: what one second of the workers' clocks stands for.
    """
    median_s = statistics.median(took.values())
    devices = devices_of(run_dir / "ranks")
    kept = {record["step"] for record in devices[0]["steps"]} & set(took) or {devices[0]["steps"][-1]["step"]}
    typical = min(sorted(kept), key=lambda step: abs(took.get(step, 0.0) - median_s))
    period_s, steps = took.get(typical), 1
    if job.streams:
        events, busy_s, sent = _steady_events(job, devices, typical, median_s)
        bubble, steps = max(0.0, 1.0 - busy_s / (len(devices) * median_s)), SHOWN
    else:
        seen = [
            Event(*event)
            for device in devices
            for record in device["steps"]
            if record["step"] == typical
            for event in record["events"]
        ]
        # A stage near the sink starts its step early and waits; the step begins with the first thing done.
        zero = min(event.start_s for event in seen)
        events = [event._replace(start_s=event.start_s - zero, end_s=event.end_s - zero) for event in seen]
        sent = sum(e.num_bytes for e in events if e.kind in SENT)
        bubble = bubble_fraction(tuple(events), [d["device"] for d in devices], period_s or max(e.end_s for e in events))
    events = sorted(
        (event._replace(start_s=event.start_s * seconds, end_s=event.end_s * seconds) for event in events),
        key=lambda e: (e.start_s, e.device),
    )
    iteration_s, uneven = median_s * seconds, job.settings.uneven
    metrics = Metrics(
        iteration_s=iteration_s,
        throughput_samples_per_s=job.settings.minibatch_size / iteration_s,
        bubble_fraction=bubble,
        peak_memory_bytes={device["device"]: device["peak_memory_bytes"] for device in devices},
        communication_bytes=round(sent),
        max_in_flight_samples=max_in_flight(job.program, job.plan),
        weight_versions=_largest(job, devices, "weight_versions", 1),
        staleness=_largest(job, devices, "staleness", 0),
        overhead_s=_overhead_s(devices),
        spread=StepSpread.of([s * seconds for s in took.values()], uneven.quantile) if uneven and uneven.amount else None,
    )
    return Timeline(source="measured", metrics=metrics, events=tuple(events), steps=steps)


def _steady_events(job: Job, devices: list[dict[str, Any]], typical: int, period_s: float) -> tuple[list[Event], float, float]:
    """Events of some periods of a pipeline that does not drain, in which stages are at different steps at a time.

    Args:
        typical: the record to look at, where a record is of several mini-batches (the emulator's), not a step.

    Returns:
        The events; of one mini-batch, over all devices: seconds of computing, and bytes sent.
    """
    several = "virtual_updates" in devices[0]["steps"][0]
    of_device = [[r for r in device["steps"] if not several or r["step"] == typical] for device in devices]
    count = job.program.minibatches if several else len(of_device[0])
    seen = [[Event(*event) for record in records for event in record["events"]] for records in of_device]
    events = [event for found in seen for event in found]
    busy_s = sum(e.end_s - e.start_s for e in events if e.kind in COMPUTE) / count
    sent = sum(e.num_bytes for e in events if e.kind in SENT) / count
    begin, _ = steady_period(update_ends(events, job.plan), job.plan)
    # All devices must have been seen by then.
    begin = max(begin, *(min(event.start_s for event in found) for found in seen if found))
    return within(events, begin, SHOWN * period_s), busy_s, sent


def _largest(job: Job, devices: list[dict[str, Any]], what: str, usual: int) -> dict[int, int]:
    """Weight versions and staleness that the devices of each stage counted."""
    out = dict.fromkeys(range(len(job.plan.stages)), usual)
    for device in devices:
        for stage, count in device.get(what, {}).items():
            out[int(stage)] = max(out[int(stage)], count)
    return out


def _overhead_s(devices: list[dict[str, Any]]) -> float | None:
    """Median, over devices and steps, of the time of a compute action beside computing, messages and waiting.

    None where the engine does not say how long its workers waited.
    """
    found = []
    for device in devices:
        for record in device["steps"]:
            # What reductions take is in the waiting.
            busy = [event for event in record["events"] if event[1] in COMPUTE | UPDATES | SENDS]
            count = sum(event[1] in COMPUTE for event in busy)
            if "waited_s" in record and count:
                wall_s = record["end"] - record["start"] - record["waited_s"]
                found.append((wall_s - sum(event[5] - event[4] for event in busy)) / count)
    return statistics.median(found) if found else None
