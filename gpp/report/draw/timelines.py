"""Timelines: one row a device, predicted above measured on the same time scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program import kinds
from gpp.program.kinds import BESIDE, COMPUTE, COPIES, KINDS, TRANSFERS, Kind, Resource
from gpp.report.draw import palette, text
from gpp.report.draw.palette import FETCH, IDLE, INK, MUTED, OTHER, REDUCE, RULE, TRANSFER, TRUNK, UPDATE, Shade, Tone, text_on
from gpp.report.draw.stage_graph import HATCH, HATCH_DARK, module_names
from gpp.report.draw.svg import Drawing, Swatch, element, escape, label, line, number, picture, rect, swatch, tick_label, ticks
from gpp.timeline import Event, Timeline

DETAIL_LIMIT = 3000  # up to this many events of both timelines, each has its own rectangle with a tooltip
DRAINING = 0.05
"""Where devices idle by so much more than in the steady state, of the whole drawing, it shows how the pipeline drains."""
LEFT, RIGHT, TOP = 76.0, 62.0, 8.0
COPY_FILLS = {Resource.COPY_OUT: palette.COPY_OUT, Resource.COPY_IN: FETCH}
COPY_TRACK = 3.0
"""Pixels of each of the two tracks under a row that copies to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRows:
    """The rows of a timeline: devices in the order of the page, their stages; and the colours and modules of each stage."""

    devices: tuple[int, ...]
    stages_of: dict[int, tuple[int, ...]]
    tones: dict[int, Tone]
    names: dict[int, str]

    def tone(self, stage: int) -> Tone:
        return self.tones.get(stage, TRUNK)


def rows_of(
    plan: Plan | None, graph: OpGraph | None, branches: Sequence[int | None], timelines: Iterable[Timeline]
) -> TimelineRows:
    """Rows for the devices of a plan, or, without a plan, for the devices that have events.

    Args:
        branches: for each operator, its branch; () where unknown.
    """
    stages_of = stages_by_device(plan, timelines)
    tones, names = dict[int, Tone](), dict[int, str]()
    if plan is not None and graph is not None:
        for s, stage in enumerate(plan.stages):
            tones[s] = palette.tone(palette.branch_of(stage, graph, branches))
            names[s] = ", ".join(module_names(plan, graph, s))
    return TimelineRows(devices=tuple(stages_of), stages_of=stages_of, tones=tones, names=names)


def stages_by_device(plan: Plan | None, timelines: Iterable[Timeline]) -> dict[int, tuple[int, ...]]:
    """The stages of every device, ascending: the plan's, or the events' for a device that is not in the plan."""
    planned: Mapping[int, tuple[int, ...]] = plan.stages_of_device if plan else {}
    seen: dict[int, set[int]] = {device: set(stages) for device, stages in planned.items()}
    for timeline in timelines:
        for event in timeline.events:
            if event.device not in planned:
                seen.setdefault(event.device, set()).add(event.stage)
    return {device: tuple(sorted(stages)) for device, stages in sorted(seen.items())}


def colour(event: Event, tone: Tone) -> tuple[str, str]:
    """Fill and text colour of an event."""
    fill = shade_of(event.kind, tone)
    return fill, text_on(fill)


def pass_shade(row: Kind) -> Shade:
    """The shade of a pass: forwards are soft, what makes the gradients of inputs is strong, and the weights' are between."""
    return "soft" if row.holds else "strong" if row.returns else "mid"


def shade_of(kind: str, tone: Tone) -> str:
    """The fill of events of a kind."""
    row = KINDS[kind]
    if row.computes:
        return tone.shade(pass_shade(row))
    return {kinds.REDUCE: REDUCE, kinds.UPDATE: UPDATE}.get(row.text, OTHER)


def device_bubbles(timeline: Timeline, devices: Sequence[int]) -> dict[int, float]:
    """Share of the step in which each device does not compute."""
    busy: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in COMPUTE:
            busy[event.device] += event.end_s - event.start_s
    step = timeline.length_s
    return {d: max(0.0, 1 - busy[d] / step) if step > 0 else 0.0 for d in devices}


def span_s(timelines: Iterable[Timeline]) -> float:
    """Seconds that the common scale must cover."""
    return max((max(t.length_s, max((e.end_s for e in t.events), default=0.0)) for t in timelines), default=0.0)


def drawn_words(timeline: Timeline) -> str:
    """The words under a drawing of a timeline, beside the time that one more step adds: steps may overlap."""
    metrics, events = timeline.metrics, timeline.events
    unit = metrics.one
    bubble = f"bubble {text.percent(metrics.bubble_fraction)}"
    if timeline.steps > 1:
        many = metrics.course.many if metrics.course else "mini-batches"
        own = device_bubbles(timeline, sorted({event.device for event in events}))
        drains = bool(own) and sum(own.values()) / len(own) > metrics.bubble_fraction + DRAINING
        shown = f"the last {timeline.steps} {many}, until the pipeline is empty" if drains else f"{timeline.steps} {many}"
        each, length = text.seconds(metrics.iteration_s), text.seconds(timeline.length_s)
        return f"{shown}, {length}; in the steady state one takes {each}, {bubble}"
    if not events:
        return f"{text.seconds(metrics.iteration_s)} per {unit}, {bubble}"
    first, last = min(events, key=lambda e: e.start_s), max(events, key=lambda e: e.end_s)
    ends = f"from its first {KINDS[first.kind].meaning} to its last {KINDS[last.kind].meaning}"
    drawn = text.seconds(last.end_s - first.start_s)
    return f"one {unit}, {drawn} {ends}; one more {unit} adds {text.seconds(metrics.iteration_s)}; {bubble}"


def draw_timelines(
    named: Sequence[tuple[str, Timeline]], rows: TimelineRows, width: float = 1320.0, scale_s: float | None = None
) -> Drawing:
    """All timelines in one drawing with one scale.

    Args:
        named: heading and timeline, from top to bottom.
        width: in pixels.
        scale_s: seconds that fill the width; None: those of the longest timeline.
    """
    span = scale_s or span_s(t for _, t in named) or 1.0
    height = 22.0 if len(rows.devices) <= 16 else 16.0 if len(rows.devices) <= 40 else 10.0
    scale = (width - LEFT - RIGHT) / span
    detailed = sum(len(t.events) for _, t in named) <= DETAIL_LIMIT
    copies = any(event.kind in COPIES for _, timeline in named for event in timeline.events)
    pitch = height + 3 + (2 * COPY_TRACK + 2) * copies
    body, y = [], TOP
    for heading, timeline in named:
        body.append(label(0, y + 13, f"{heading}: {drawn_words(timeline)}", 13, INK, font_weight="600"))
        body.append(label(width, y + 13, "idle", 10.5, MUTED, "end"))
        y += 20
        body += _rows(timeline, rows, y, height, pitch, scale, width, detailed)
        y += len(rows.devices) * pitch + 16
        body += _axis(span, scale, y - 14, 20.0 + len(rows.devices) * pitch)
        y += 22
    return picture(width, y, body, "Timelines")


def _axis(span: float, scale: float, y: float, height: float) -> list[str]:
    marks = ticks(0.0, span * 1e3, 10)
    step = marks[1] - marks[0] if len(marks) > 1 else span * 1e3
    out = [line(LEFT, y, LEFT + span * scale, y, RULE)]
    for mark in marks:
        x = LEFT + mark * 1e-3 * scale
        out.append(line(x, y, x, y + 4, MUTED))
        suffix = " ms" if mark == marks[-1] else ""
        out.append(label(x, y + 15, tick_label(mark, step) + suffix, 10.5, MUTED, "middle"))
    return out


def _rows(
    timeline: Timeline, rows: TimelineRows, top: float, height: float, pitch: float, scale: float, width: float, detailed: bool
) -> list[str]:
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        by_device[event.device].append(event)
    bubbles = device_bubbles(timeline, rows.devices)
    drawn = span_s([timeline])
    out, size = [], min(11.0, height + 0.5)
    for n, device in enumerate(rows.devices):
        y = top + n * pitch
        stages = rows.stages_of[device]
        out.append(rect(LEFT, y, drawn * scale, height, IDLE))
        out.append(rect(LEFT - 10, y, 5, height, rows.tone(stages[0]).strong))
        out.append(label(LEFT - 14, y + height / 2 + size * 0.36, f"s{'+'.join(map(str, stages))}  d{device}", size, INK, "end"))
        out.append(label(width, y + height / 2 + size * 0.36, text.percent(bubbles[device]), size, INK, "end"))
        events = sorted(by_device[device], key=lambda e: (e.start_s, e.end_s))
        slices = [e for e in events if e.kind not in BESIDE]
        out.append(_detailed(slices, rows, y, height, scale) if detailed else _merged(slices, rows, y, height, scale))
        # Transfers are thin marks along the foot of the row.
        path = _dashes([e for e in events if e.kind in TRANSFERS], y + height + 0.5, scale, 0.6)
        out.append(element("path", d=path, stroke=TRANSFER, stroke_width=1.6, fill="none") if path else "")
        for track, (way, fill) in enumerate(COPY_FILLS.items()):
            at = y + height + 2 + COPY_TRACK * (track + 0.5)
            path = _dashes([e for e in events if KINDS[e.kind].occupies is way], at, scale, 0.6)
            out.append(element("path", d=path, stroke=fill, stroke_width=COPY_TRACK, fill="none") if path else "")
    return out


def _detailed(events: list[Event], rows: TimelineRows, y: float, height: float, scale: float) -> str:
    """Every event as its own rectangle, with its micro-batch where the number fits."""
    out, numbers = [], []
    size = min(10.5, height - 4)
    for event in events:
        tone = rows.tone(event.stage)
        fill, ink = colour(event, tone)
        x, w = LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
        shown = max(0.4, w - (0.6 if w > 3 else 0.0))
        tip = (
            f"stage {event.stage} {event.kind}{event.microbatch}, device {event.device}: "
            f"{text.seconds(event.end_s - event.start_s)}, {text.seconds(event.start_s)} to {text.seconds(event.end_s)}"
        )
        out.append(rect(x, y, shown, height, fill, tip))
        if tone.hatched and event.kind in COMPUTE:
            out.append(
                rect(x, y, shown, height, f"url(#{HATCH if KINDS[event.kind].holds else HATCH_DARK})", pointer_events="none")
            )
        digits = event.kind if event.kind in (kinds.REDUCE, kinds.UPDATE) else str(event.microbatch)
        if w >= size * 0.62 * len(digits) + 3:
            numbers.append(
                f'<text x="{number(x + shown / 2)}" y="{number(y + height / 2 + size * 0.36)}" fill="{ink}">{escape(digits)}</text>'
            )
    group = element("g", "".join(numbers), text_anchor="middle", font_size=size, pointer_events="none") if numbers else ""
    return "".join(out) + group


def _merged(events: list[Event], rows: TimelineRows, y: float, height: float, scale: float) -> str:
    """One thick dashed line per colour, so that a page with many events stays small."""
    runs: dict[tuple[str, bool], list[Event]] = defaultdict(list)
    known: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        found = known.get((event.stage, event.kind))
        if found is None:
            tone = rows.tone(event.stage)
            found = runs[colour(event, tone)[0], tone.hatched and event.kind in COMPUTE]
            known[event.stage, event.kind] = found
        found.append(event)
    out = []
    for (fill, hatched), same in runs.items():
        path = _dashes(same, y + height / 2, scale, 0.4)
        out.append(element("path", d=path, stroke=fill, stroke_width=height))
        if hatched:
            out.append(element("path", d=path, stroke=f"url(#{HATCH})", stroke_width=height))
    return "".join(out)


def _dashes(events: list[Event], y: float, scale: float, least: float) -> str:
    """A path with a stroke of at least `least` pixels for each event; those closer than half a pixel run together."""
    spans: list[tuple[float, float]] = []
    begin = end = -1.0
    for event in events:
        x, to = LEFT + event.start_s * scale, LEFT + event.end_s * scale
        if x - end < 0.5:
            end = max(end, to)
            continue
        if end >= 0:
            spans.append((begin, end))
        begin, end = x, to
    if end >= 0:
        spans.append((begin, end))
    at = number(y)
    return "".join([f"M{a:.1f} {at}h{b - a if b - a > least else least:.1f}" for a, b in spans])


INSET = {"soft": (2.5, 0.0), "mid": (0.0, 2.5), "strong": (0.0, 0.0)}
"""Pixels that a shade's patch in a legend leaves free, above and below, as blocks do: shape says what colour says."""


def event_swatches(timelines: Sequence[Timeline], rows: TimelineRows) -> list[Swatch]:
    """The legend of events: of the kinds that the timelines have, each in all the colours that it has there."""
    found = {event.kind for timeline in timelines for event in timeline.events}
    tones = list(dict.fromkeys(rows.tone(stage) for stages in rows.stages_of.values() for stage in stages)) or [TRUNK]
    passes: dict[Shade, tuple[str, bool]] = {
        "soft": ("forward", any(KINDS[kind].holds for kind in found)),
        "strong": ("backward", any(KINDS[kind].returns for kind in found)),
        "mid": ("weight gradient", any(KINDS[kind].finishes and not KINDS[kind].returns for kind in found)),
    }
    out = [_pass_swatch(name, tones, shade) for shade, (name, shown) in passes.items() if shown]
    out += [
        swatch(name, rect(0, 0, 26, 12, fill))
        for name, kind, fill in (("reduce gradients", kinds.REDUCE, REDUCE), ("update", kinds.UPDATE, UPDATE))
        if kind in found
    ]
    out.append(swatch("idle", rect(0.5, 0.5, 25, 11, IDLE, stroke=RULE)))
    if found & TRANSFERS:
        out.append(swatch("transfer", line(0, 8, 26, 8, TRANSFER, 1.6)))
    if found & COPIES:
        copies = [kind for kind in KINDS.values() if kind.text in COPIES]
        out += [swatch(kind.meaning, line(0, 8, 26, 8, COPY_FILLS[kind.occupies], COPY_TRACK)) for kind in copies]
    return out


def _pass_swatch(name: str, tones: Sequence[Tone], shade: Shade) -> Swatch:
    above, below = INSET[shade]
    width = max(26.0 / len(tones), 6.0)
    shapes = []
    for n, tone in enumerate(tones):
        box = (n * width, above, width, 12 - above - below)
        shapes.append(rect(*box, tone.shade(shade)))
        if tone.hatched:
            shapes.append(rect(*box, f"url(#{HATCH})"))
    return swatch(name, *shapes, width=width * len(tones))
