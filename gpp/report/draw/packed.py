"""Timelines and memory as compact data, from which a page draws them (`templates/timeline.js`).

A page of 32 devices and 512 micro-batches has some hundred thousand events. Each is a start, a length, a micro-batch and
an entry of a table (stage, kind, bytes), written as differences from the event before in as few bytes as the number
needs (LEB128); all of it is deflated (RFC 1951), which browsers undo by themselves. Times are whole ticks of
2^-24 of what is drawn, so a length of a thousandth of it has four digits.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpp.program.kinds import COPIES, KINDS, TRANSFERS, Resource
from gpp.report.draw import text
from gpp.report.draw.memory import FILLS, fullest, memory_levels
from gpp.report.draw.palette import TRANSFER, TRUNK, token_name
from gpp.report.draw.timelines import COPY_FILLS, TimelineRows, device_bubbles, drawn_words, pass_shade, shade_of, span_s
from gpp.timeline import Event, Timeline

TICKS = 1 << 24
BESIDE_PASSES = TRANSFERS | COPIES
MOST_NAMES = 300
"""Characters of the modules of a stage, beside an event."""
MOST_EVENTS = 400_000
"""Events of one drawing: beyond it, passes and sums alone are drawn. It keeps a page below some megabytes."""


def pack_timelines(
    named: Sequence[tuple[str, Timeline]],
    rows: TimelineRows,
    *,
    scale_s: float | None = None,
    limits: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Timelines on one scale as the data of `gpp.timeline`, ready for `json.dumps`.

    Args:
        named: heading and timeline, from top to bottom.
        rows: devices, and the stages, colours and modules of each.
        scale_s: seconds that the whole width stands for; None for the longest timeline here.
        limits: device -> bytes that it has; None leaves out memory over time.
    """
    span = scale_s or span_s(timeline for _, timeline in named) or 1.0
    tick = span / TICKS
    kinds = sorted({event.kind for _, timeline in named for event in timeline.events}, key=list(KINDS).index)
    whole = sum(len(timeline.events) for _, timeline in named) <= MOST_EVENTS
    return {
        "tick_s": tick,
        "span_s": span,
        "kinds": [_kind(kind) for kind in kinds],
        "rows": [{"device": device, "stages": rows.stages_of[device]} for device in rows.devices],
        "stages": {
            stage: {"tone": tone.name, "hatched": tone.hatched, "names": text.shorten(rows.names.get(stage, ""), MOST_NAMES)}
            for stage in sorted({stage for stages in rows.stages_of.values() for stage in stages})
            for tone in [rows.tone(stage)]
        },
        "panels": [_panel(heading, timeline, rows, kinds, tick, whole) for heading, timeline in named],
        "memory": _memory(named[0][1], rows, limits, tick) if named and limits is not None else None,
        "left_out": "" if whole else f"More than {MOST_EVENTS:,} events: transfers and copies are in trace.json alone.",
    }


def pack_operators(names: Sequence[Sequence[str]]) -> dict[str, str]:
    """The operators of every stage, for a search in the page: a line for each, those of a stage behind an empty one."""
    return {"packed": squeeze("\n\n".join("\n".join(own) for own in names).encode())}


def _kind(kind: str) -> dict[str, str]:
    """How a kind is drawn: on which track, and its fill: a token, or of passes a shade of the stage's tone."""
    row = KINDS[kind]
    track = {Resource.COPY_OUT: "out", Resource.COPY_IN: "in"}.get(row.occupies, "message" if kind in TRANSFERS else "pass")
    on_device = pass_shade(row) if row.computes else shade_of(kind, TRUNK)
    fill = on_device if track == "pass" else COPY_FILLS.get(row.occupies, TRANSFER)
    return {"text": kind, "meaning": row.meaning, "track": track, "fill": token_name(fill)}


def _panel(heading: str, timeline: Timeline, rows: TimelineRows, kinds: Sequence[str], tick: float, whole: bool) -> dict[str, Any]:
    table: dict[tuple[int, int, int], int] = {}
    number = {kind: n for n, kind in enumerate(kinds)}
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if whole or event.kind not in BESIDE_PASSES:
            by_device[event.device].append(event)
    stream = bytearray()
    for device in rows.devices:
        own = sorted(by_device[device], key=lambda event: (event.start_s, event.end_s))
        codes = [table.setdefault((e.stage, number[e.kind], e.num_bytes), len(table)) for e in own]
        starts = [max(0, round(e.start_s / tick)) for e in own]
        lengths = [max(0, round((e.end_s - e.start_s) / tick)) for e in own]
        _put(stream, [len(own)])
        # Differences of micro-batches may be negative: 0, -1, 1, -2 become 0, 1, 2, 3.
        zigzag = [2 * step if step >= 0 else -2 * step - 1 for step in _steps([e.microbatch for e in own])]
        for column in (_steps(starts), lengths, codes, zigzag):
            _put(stream, column)
    bubbles = device_bubbles(timeline, rows.devices)
    return {
        "name": heading,
        "words": drawn_words(timeline),
        "period_s": timeline.length_s,
        "bubbles": [text.percent(bubbles[device]) for device in rows.devices],
        "table": list(table),
        "packed": squeeze(stream),
    }


def _memory(timeline: Timeline, rows: TimelineRows, limits: Mapping[int, float], tick: float) -> dict[str, Any] | None:
    """The bytes that each device holds over time, the fullest devices where there are many; None where nobody has computed it."""
    levels = memory_levels(timeline, rows.stages_of)
    shown, words = fullest(levels, limits)
    if not shown:
        return None
    table: dict[tuple[int, int, int], int] = {}
    stream = bytearray()
    for device in shown:
        # Tick and whole bytes (always, in flight, during a pass) of every change; what follows within a tick replaces it.
        own = {
            max(0, round(level.at_s / tick)): (round(level.static), round(level.kept), round(level.transient))
            for level in levels[device]
        }
        _put(stream, [len(own)])
        _put(stream, _steps(list(own)))
        _put(stream, [table.setdefault(amounts, len(table)) for amounts in own.values()])
    return {
        "name": "Memory over the same time, as predicted",
        "words": words,
        "fills": {name: token_name(fill) for name, fill in FILLS.items()},
        "rows": [
            {"device": d, "stages": rows.stages_of[d], "limit": limits.get(d), "most": max(level.total for level in levels[d])}
            for d in shown
        ],
        "table": list(table),
        "packed": squeeze(stream),
    }


def _steps(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _put(stream: bytearray, values: Iterable[int]) -> None:
    """Append numbers, seven bits a byte, the lowest first; the high bit says that another byte follows."""
    for value in values:
        while value > 0x7F:
            stream.append(value & 0x7F | 0x80)
            value >>= 7
        stream.append(value)


def squeeze(stream: bytes | bytearray) -> str:
    """Bytes, deflated and in base64, as a page's script reads them (`templates/unpack.js`)."""
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(squeezer.compress(bytes(stream)) + squeezer.flush()).decode()
