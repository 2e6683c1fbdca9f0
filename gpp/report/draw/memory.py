"""Memory over a step: a strip for each device with what it holds always, for micro-batches in flight, and while a pass runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpp.program.kinds import COMPUTE, COPIES, KINDS, Resource
from gpp.report.draw.palette import LIMIT, TRUNK
from gpp.report.draw.svg import Swatch, line, rect, swatch
from gpp.timeline import Event, StageMemory, Timeline

MOST_DEVICES = 16
"""Strips of a picture: those of the fullest devices."""

FILLS = {"always": TRUNK.strong, "in flight": TRUNK.mid, "during a pass": TRUNK.soft}


class Level(NamedTuple):
    """Bytes on a device from an instant on."""

    at_s: float
    static: float
    kept: float
    transient: float

    @property
    def total(self) -> float:
        return self.static + self.kept + self.transient


def memory_levels(timeline: Timeline, stages_of_device: Mapping[int, Sequence[int]]) -> dict[int, list[Level]]:
    """Device -> what it holds, at every change of the timeline; nothing for a timeline that does not say what stages hold.

    What a timeline begins in the midst of (a pipeline that does not drain) is held from its begin on.
    """
    if not timeline.memory:
        return {}
    own: dict[int, dict[tuple[int, int], list[Event]]] = {device: defaultdict(list) for device in stages_of_device}
    for event in timeline.events:
        if event.device in own and (event.kind in COMPUTE or event.kind in COPIES):
            own[event.device][event.stage, event.microbatch].append(event)
    freeing = {event.stage for event in timeline.events if KINDS[event.kind].frees}
    out = {}
    for device, stages in stages_of_device.items():
        changes: dict[float, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (stage, _), events in own[device].items():
            memory = timeline.memory[stage]
            events.sort(key=lambda event: event.start_s)
            for at, kept in _changes(events, stage in freeing, memory):
                changes[at][0] += kept
            for event in events:
                if event.kind in COMPUTE:
                    changes[event.start_s][1] += memory.transient_bytes
                    changes[event.end_s][1] -= memory.transient_bytes
        level = Level(0.0, sum(timeline.memory[s].static_bytes for s in stages), 0.0, 0.0)
        out[device] = [level]
        for at, (kept, transient) in sorted(changes.items()):
            level = Level(at, level.static, level.kept + kept, level.transient + transient)
            out[device].append(level)
    return out


def _changes(events: Sequence[Event], frees: bool, memory: StageMemory) -> list[tuple[float, float]]:
    """The times at which a micro-batch takes bytes and gives them back, and how many.

    Args:
        events: its passes and copies on a device.
        frees: whether its stage has backwards.
    """
    out: list[tuple[float, float]] = []
    kept, moved, late = memory.microbatch_bytes, memory.moved_bytes, memory.late_bytes
    first = KINDS[events[0].kind]
    if not first.holds:
        before = late if first.finishes and not first.returns else kept + moved
        out.append((0.0, kept if first.occupies is Resource.COPY_IN else before))
    for event in events:
        row = KINDS[event.kind]
        if row.holds:
            out.append((event.start_s, kept + moved))
        if row.occupies is Resource.COPY_IN:
            out.append((event.start_s, moved))
        if row.occupies is Resource.COPY_OUT:
            out.append((event.end_s, -moved))
        if row.returns or not frees:
            out.append((event.end_s, -kept - moved))
        if row.returns != row.finishes:
            out.append((event.end_s, late if row.returns else -late))
    return out


def fullest(levels: Mapping[int, Sequence[Level]], limits: Mapping[int, float]) -> tuple[list[int], str]:
    """The devices of a picture, and words where there are more: the fullest ones, by the share of what they have."""

    def share(device: int) -> float:
        most = max(level.total for level in levels[device])
        return most / limits[device] if limits.get(device) else 0.0

    shown = sorted(sorted(levels, key=lambda device: (-share(device), device))[:MOST_DEVICES])
    return shown, f"the {len(shown)} fullest of {len(levels)} devices" if len(levels) > len(shown) else ""


def memory_swatches() -> list[Swatch]:
    """The legend of the strips."""
    out = [swatch(name, rect(0, 0, 26, 12, fill)) for name, fill in FILLS.items()]
    out.append(swatch("limit", line(0, 6, 26, 6, LIMIT, 1.4, stroke_dasharray="5 3")))
    return out
