"""Timelines as a Chrome trace, for ui.perfetto.dev.

A process for every device of every source, threads for compute, communication and copies to the host, arrows from
producers to consumers, a counter of samples in flight for every stage. Times are microseconds.

Format: Perfetto, "Visualizing external trace formats"; Chrome, "Trace Event Format".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gpp.plan.plan import Plan
from gpp.program.kinds import COPIES, FORWARD, KINDS, PASS, TRANSFERS, Resource
from gpp.report.draw.timelines import stages_by_device
from gpp.routing import messages
from gpp.timeline import Event, Timeline

COMPUTE_TID, COMMUNICATION_TID = 1, 100
COPY_TIDS = {Resource.COPY_OUT: 200, Resource.COPY_IN: 300}
SOURCE_STRIDE = 100_000  # between the process ids of two sources
MAX_FLOWS = 40_000
Slice = dict[str, Any]


def build_trace(named: Sequence[tuple[str, Timeline]], plan: Plan | None = None) -> dict[str, Any]:
    """The trace as a dict for `json.dump`.

    Args:
        named: source (`predicted`, `measured`, `emulated`) and its timeline.
        plan: needed for arrows and counters; devices alone are drawn without it.
    """
    out: list[dict[str, Any]] = []
    flow = 0
    for n, (source, timeline) in enumerate(named):
        base = n * SOURCE_STRIDE
        for device, stages in stages_by_device(plan, [timeline]).items():
            process = {"pid": base + device, "tid": 0}
            name = f"{source} d{device} (s{'+'.join(map(str, stages))})"
            out.append({"ph": "M", "name": "process_name", **process, "args": {"name": name}})
            out.append({"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": base + device}})
        slices = _slices(timeline, base, out)
        if plan is not None:
            flows = _flows(plan, slices, flow)
            flow += len(flows) // 2
            out += flows
            out += _counters(plan, timeline, base)
    return {"displayTimeUnit": "ms", "traceEvents": out}


def _slices(timeline: Timeline, base: int, out: list[dict[str, Any]]) -> dict[tuple[str, int, int, int], Slice]:
    """Append a slice for every event; overlapping ones go to threads of their own.

    Returns the compute slices by (kind, stage, micro-batch, device).
    """
    found: dict[tuple[str, int, int, int], Slice] = {}
    lanes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda e: (e.device, e.start_s, e.end_s)):
        start, end = round(event.start_s * 1e9), round(event.end_s * 1e9)
        first = COPY_TIDS.get(KINDS[event.kind].occupies, COMMUNICATION_TID if event.kind in TRANSFERS else COMPUTE_TID)
        ends = lanes[event.device, first]
        lane = next((i for i, busy in enumerate(ends) if busy <= start), len(ends))
        if lane == len(ends):
            ends.append(0)
            word = _THREADS[first]
            thread = {"ph": "M", "pid": base + event.device, "tid": first + lane}
            out.append({**thread, "name": "thread_name", "args": {"name": word if lane == 0 else f"{word} {lane + 1}"}})
            out.append({**thread, "name": "thread_sort_index", "args": {"sort_index": first + lane}})
        ends[lane] = end
        args: dict[str, Any] = {"stage": event.stage, "microbatch": event.microbatch}
        if event.num_bytes:
            args["bytes"] = event.num_bytes
        piece: Slice = {
            "ph": "X",
            "name": _name(event),
            "cat": event.kind,
            "pid": base + event.device,
            "tid": first + lane,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": args,
        }
        out.append(piece)
        if first == COMPUTE_TID:
            found[event.kind, event.stage, event.microbatch, event.device] = piece
    return found


_THREADS = {COMPUTE_TID: "compute", COMMUNICATION_TID: "communication"} | {
    COPY_TIDS[row.occupies]: row.meaning for row in KINDS.values() if row.text in COPIES
}


def _name(event: Event) -> str:
    row = KINDS[event.kind]
    return f"{event.kind}{event.microbatch}" if row.computes else row.meaning


def _flows(plan: Plan, slices: dict[tuple[str, int, int, int], Slice], first_id: int) -> list[dict[str, Any]]:
    """Arrows: forward from producer to consumer; the other way between the passes that return gradients."""
    forward = PASS[FORWARD]
    back = {stage: kind for kind, stage, _, _ in slices if KINDS[kind].returns}
    cut = {s: stage.pieces(plan.minibatch_size) for s, stage in enumerate(plan.stages)}
    out: list[dict[str, Any]] = []
    for a, b in plan.edges:
        for message in messages(cut[a], cut[b]):
            producer, consumer = (
                (a, message.src_microbatch, message.src_device),
                (b, message.dst_microbatch, message.dst_device),
            )
            for name, source, target in (
                ("activations", (forward, *producer), (forward, *consumer)),
                ("gradients", (back.get(b, ""), *consumer), (back.get(a, ""), *producer)),
            ):
                tail, head = slices.get(source), slices.get(target)
                if tail is None or head is None or len(out) >= 2 * MAX_FLOWS:
                    continue
                common = {"cat": "flow", "name": name, "id": first_id + len(out) // 2}
                out.append({"ph": "s", **common, "pid": tail["pid"], "tid": tail["tid"], "ts": _inside(tail, 0.999)})
                out.append({"ph": "f", "bp": "e", **common, "pid": head["pid"], "tid": head["tid"], "ts": _inside(head, 0.001)})
    return out


def _inside(piece: Slice, share: float) -> float:
    return round(piece["ts"] + piece["dur"] * share, 4)


def _counters(plan: Plan, timeline: Timeline, base: int) -> list[dict[str, Any]]:
    """Samples in flight: up where a pass that holds them starts, down where the one that uses them ends; and those that wait late,
    for the gradients of the weights."""
    freeing = {event.stage for event in timeline.events if KINDS[event.kind].frees}
    samples = {
        (s, piece.microbatch, piece.device): piece.hi - piece.lo
        for s, stage in enumerate(plan.stages)
        for piece in stage.pieces(plan.minibatch_size)
    }
    # Of each stage, by instant: how many samples more there are in flight, and how many more that wait late.
    changes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    splits = set[int]()
    for event in timeline.events:
        row = KINDS[event.kind]
        size = samples.get((event.stage, event.microbatch, event.device))
        if size is None or event.stage not in freeing or not row.computes:
            continue
        change = changes[event.stage][round((event.start_s if row.holds else event.end_s) * 1e9)]
        change[0] += size * (row.holds - row.returns)
        change[1] += size * (row.returns - row.finishes)
        if row.returns != row.finishes:
            splits.add(event.stage)
    out = []
    for stage, at in sorted(changes.items()):
        full = late = 0
        for when, (more, more_late) in sorted(at.items()):
            full, late = full + more, late + more_late
            held = {"samples": full, "late": late} if stage in splits else {"samples": full}
            out.append(
                {
                    "ph": "C",
                    "name": f"s{stage} samples in flight",
                    "pid": base + plan.stages[stage].devices[0],
                    "ts": when / 1e3,
                    "args": held,
                }
            )
    return out
