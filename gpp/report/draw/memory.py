"""Memory over a step: a strip for each device with what it holds always, for micro-batches in flight, and while a pass runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpp.program.kinds import COMPUTE, COPY_IN, COPY_OUT, KINDS
from gpp.report.draw import text
from gpp.report.draw.charts import LIMIT_IN_SIGHT
from gpp.report.draw.palette import INK, LIMIT, MUTED, TRUNK
from gpp.report.draw.svg import Drawing, Swatch, element, label, line, number, picture, rect, swatch
from gpp.timeline import Event, StageMemory, Timeline

MOST_DEVICES = 16
"""Strips of a picture: those of the fullest devices."""

LEFT, RIGHT, HEIGHT, GAP = 76.0, 150.0, 34.0, 8.0
FILLS = {"always": TRUNK.dark, "in flight": TRUNK.mid, "during a pass": TRUNK.light}


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
        if event.device in own and (event.kind in COMPUTE or event.kind in (COPY_OUT, COPY_IN)):
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
    """When a micro-batch takes and gives back how many bytes.

    Args:
        events: its passes and copies on a device.
        frees: whether its stage has backwards.
    """
    out: list[tuple[float, float]] = []
    kept, moved, late = memory.microbatch_bytes, memory.moved_bytes, memory.late_bytes
    first = KINDS[events[0].kind]
    if not first.holds:
        before = late if first.finishes and not first.returns else kept + moved
        out.append((0.0, kept if first.text == COPY_IN else before))
    for event in events:
        row = KINDS[event.kind]
        if row.holds:
            out.append((event.start_s, kept + moved))
        if event.kind == COPY_IN:
            out.append((event.start_s, moved))
        if event.kind == COPY_OUT:
            out.append((event.end_s, -moved))
        if row.returns or not frees:
            out.append((event.end_s, -kept - moved))
        if row.returns != row.finishes:
            out.append((event.end_s, late if row.returns else -late))
    return out


def draw_memory(
    timeline: Timeline, stages_of_device: Mapping[int, Sequence[int]], limits: Mapping[int, float], width: float = 1320.0
) -> Drawing:
    """A strip for each device, the fullest ones where there are many; empty for a timeline that does not say what stages hold.

    A strip is as tall as its limit; where all limits are out of sight (`LIMIT_IN_SIGHT`), as tall as the fullest one.

    Args:
        limits: device -> bytes that it has.
    """
    levels = memory_levels(timeline, stages_of_device)
    most = {device: max(level.total for level in own) for device, own in levels.items()}
    share = {device: most[device] / limits[device] if limits.get(device) else 0.0 for device in levels}
    shown = sorted(sorted(levels, key=lambda device: (-share[device], device))[:MOST_DEVICES])
    span = max((own[-1].at_s for own in levels.values()), default=0.0)
    if not shown or span <= 0:
        return Drawing()
    out, y, scale = [], 4.0, (width - LEFT - RIGHT) / span
    fullest = max(most.values()) or 1.0
    sight = any(share[device] * LIMIT_IN_SIGHT > 1 for device in shown)
    for device in shown:
        high = max(most[device], limits.get(device, 0.0) if sight else fullest) or 1.0
        stages = "+".join(map(str, stages_of_device[device]))
        out.append(label(LEFT - 8, y + HEIGHT / 2 + 4, f"s{stages}  d{device}", 11, INK, "end"))
        parts = [
            ("during a pass", [(level.at_s, level.total) for level in levels[device]]),
            ("in flight", [(level.at_s, level.static + level.kept) for level in levels[device]]),
            ("always", [(level.at_s, level.static) for level in levels[device]]),
        ]
        for name, steps in parts:
            out.append(element("path", d=_steps(steps, scale, y + HEIGHT, HEIGHT / high, span), fill=FILLS[name]))
        words, limit = text.num_bytes(most[device]), limits.get(device)
        if limit and sight:
            at = y + HEIGHT - limit * HEIGHT / high
            out.append(line(LEFT, at, width - RIGHT, at, LIMIT, 1.4, stroke_dasharray="5 3"))
            words += f", {text.percent(share[device])}"
        elif limit:
            words += f" of {text.num_bytes(limit)}"
        out.append(label(width - RIGHT + 8, y + HEIGHT / 2 + 4, words, 11, INK))
        y += HEIGHT + GAP
    if len(levels) > len(shown):
        out.append(label(LEFT, y + 8, f"the {len(shown)} fullest of {len(levels)} devices", 10.5, MUTED))
        y += 16
    return picture(width, y, out, "Memory over a step, as predicted", min_width=min(width, 1000.0))


def _steps(steps: Sequence[tuple[float, float]], scale: float, base: float, tall: float, end_s: float) -> str:
    """A filled staircase; of what happens within a pixel, the most is drawn."""
    columns: dict[int, tuple[float, float]] = {}
    """Pixel -> most bytes in it, and those at its end."""
    for at, value in steps:
        column = int(at * scale)
        most, _ = columns.get(column, (0.0, 0.0))
        columns[column] = max(most, value), value
    path = f"M{number(LEFT)} {number(base)}"
    for column, (most, last) in sorted(columns.items()):
        path += f"H{number(LEFT + column)}V{number(base - most * tall)}"
        path += f"h1V{number(base - last * tall)}" if last < most else ""
    return path + f"H{number(LEFT + end_s * scale)}V{number(base)}Z"


def memory_swatches() -> list[Swatch]:
    """The legend of the strips."""
    out = [swatch(name, rect(0, 0, 26, 12, fill)) for name, fill in FILLS.items()]
    out.append(swatch("limit", line(0, 6, 26, 6, LIMIT, 1.4, stroke_dasharray="5 3")))
    return out
