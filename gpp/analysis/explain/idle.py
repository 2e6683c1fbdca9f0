"""The use of each device's time in one step, read off the timeline; the idle reasons add up to the bubble.

Every instant of a device that is not a forward or backward has exactly one reason, the first of these that holds:

* `runtime`: right after a pass, for what the runtime takes for it and its messages.
* `host`: before a pass whose copy to the host, or from it, is over last.
* `fill`: before its first backward, while the pipeline fills; deeper pipelines and larger micro-batches take longer.
* `data`: later, before a forward; a predecessor, or the link from it, is slower.
* `gradient`: later, before a backward; a successor, or the link from it, is slower.
* `drain`: idle after its last forward, and from its own end to the end of the step; where steps overlap, a device's
  step is a period that ends no earlier than its own last action.
* `peers`: waiting at an all-reduce for the other devices of its group.
* `all_reduce`: the all-reduce itself.
* `update`: the optimizer's step, and everything else that is no pass.

A device that runs all forwards before its first backward (GPipe, few micro-batches) only fills and drains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from gpp.program.kinds import BACKWARD, BESIDE, COMPUTE, COPIES, FORWARD, KINDS, REDUCE
from gpp.timeline import Event, Timeline

Reason = Literal["runtime", "host", "fill", "data", "gradient", "drain", "peers", "all_reduce", "update"]
REASONS: tuple[Reason, ...] = get_args(Reason)

Beside = Sequence[tuple[float, float]]
"""Of every stage, seconds of a forward and of a backward that are none of its operators' (`Plan.beside_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """One device's step: `compute_s` and the `idle_s` of every reason add up to the step."""

    device: int
    stage: int
    compute_s: float
    idle_s: dict[Reason, float]


def device_times(timeline: Timeline, stage_of_device: Mapping[int, int], beside: Beside) -> tuple[DeviceTime, ...]:
    """The time of every device of a plan in the step, in the order of the devices."""
    own: dict[int, list[Event]] = {device: [] for device in sorted(stage_of_device)}
    reached: dict[int, float] = defaultdict(float)  # gradient group -> when its last member arrives
    copied: Copied = defaultdict(set)
    for event in timeline.events:
        if event.kind in COPIES:
            copied[event.device, event.stage, event.kind].add(_instant(event.end_s))
        if event.kind not in BESIDE and event.device in own:
            own[event.device].append(event)
            if event.kind == REDUCE:
                reached[event.microbatch] = max(reached[event.microbatch], event.start_s)
    for events in own.values():
        events.sort(key=lambda e: (e.start_s, e.end_s))
    time_of = partial(_device_time, reached=reached, step=timeline.metrics.iteration_s)
    if timeline.steps > 1:
        time_of = partial(_steady_time, length_s=timeline.length_s, steps=timeline.steps)
    return tuple(time_of(device, stage_of_device[device], events, copied, beside) for device, events in own.items())


Copied = dict[tuple[int, int, str], set[float]]
"""(device, stage, kind of copy) -> the instants at which one ends."""


def _instant(seconds: float) -> float:
    """A time without the rounding of a sum."""
    return float(f"{seconds:.9e}")


def _on_host(event: Event, copied: Copied) -> bool:
    """Whether a pass begins when a copy ends that it needs."""
    needed = (need.kind for need in KINDS[event.kind].needs if need.kind in COPIES)
    return any(_instant(event.start_s) in copied[event.device, event.stage, kind] for kind in needed) if copied else False


def behind_s(event: Event, beside: Beside) -> float:
    """Seconds that the runtime takes for a pass and its messages; 0 for all else."""
    if event.kind not in COMPUTE:
        return 0.0
    return {FORWARD: beside[event.stage][0], BACKWARD: beside[event.stage][1]}.get(KINDS[event.kind].direction, 0.0)


def _steady_time(
    device: int, stage: int, events: list[Event], copied: Copied, beside: Beside, length_s: float, steps: int
) -> DeviceTime:
    """The mean step of a continuous pipeline; an event across the end of the view stands for one across its start."""
    idle: dict[Reason, float] = dict.fromkeys(REASONS, 0.0)
    compute, now = 0.0, events[-1].end_s - length_s if events else 0.0
    behind = behind_s(events[-1], beside) if events else 0.0
    for event in events:
        why: Reason = "host" if _on_host(event, copied) else "gradient" if KINDS[event.kind].returns else "data"
        gap = max(0.0, event.start_s - now)
        idle["runtime"] += min(gap, behind) / steps
        idle[why] += max(0.0, gap - behind) / steps
        behind = behind_s(event, beside)
        took = (event.end_s - event.start_s) / steps
        if event.kind in COMPUTE:
            compute += took
        else:
            idle["all_reduce" if event.kind == REDUCE else "update"] += took
        now = max(now, event.end_s)
    if not events:
        idle["data"] = length_s / steps
    return DeviceTime(device=device, stage=stage, compute_s=compute, idle_s=idle)


def _device_time(
    device: int, stage: int, events: list[Event], copied: Copied, beside: Beside, reached: Mapping[int, float], step: float
) -> DeviceTime:
    backwards = [e.start_s for e in events if KINDS[e.kind].returns]
    forwards = [e for e in events if KINDS[e.kind].holds]
    full = backwards[0] if backwards else forwards[0].start_s if forwards else step
    last = forwards[-1].end_s if forwards else 0.0
    idle: dict[Reason, float] = dict.fromkeys(REASONS, 0.0)
    # Successive steps overlap: this device begins its next one a period after this one, whenever the others do.
    now = min(events[0].start_s, max(0.0, events[-1].end_s - step)) if events else 0.0
    end_s, compute, behind = now + step, 0.0, 0.0
    for event in events:
        if event.start_s > now:
            why = "host" if _on_host(event, copied) else _reason(event, now, full, last)
            gap = event.start_s - now
            idle["runtime"] += min(gap, behind)
            idle[why] += max(0.0, gap - behind)
        start, end = max(now, event.start_s), max(now, event.end_s)
        if event.kind in COMPUTE:
            compute += end - start
        elif event.kind == REDUCE:
            ready = min(end, max(start, reached[event.microbatch]))
            idle["peers"] += ready - start
            idle["all_reduce"] += end - ready
        else:
            idle["update"] += end - start
        now, behind = end, behind_s(event, beside)
    gap = max(0.0, end_s - now)
    idle["runtime"] += min(gap, behind)
    idle["drain"] += max(0.0, gap - behind)
    return DeviceTime(device=device, stage=stage, compute_s=compute, idle_s=idle)


def _reason(event: Event, now: float, full: float, last: float) -> Reason:
    """The reason why a device idles from `now` until `event` starts."""
    if event.start_s <= full:
        return "fill"
    if now >= last:
        return "drain"
    return "data" if KINDS[event.kind].holds else "gradient"


def idle_shares(devices: tuple[DeviceTime, ...], step_s: float) -> dict[Reason, float]:
    """The bubble by reason, as shares of all device time, which add up to `bubble_fraction`."""
    total = len(devices) * step_s
    return {reason: sum(d.idle_s[reason] for d in devices) / total if total > 0 else 0.0 for reason in REASONS}
