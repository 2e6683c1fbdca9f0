"""Faults of a trace for ui.perfetto.dev."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def check_trace(trace: dict[str, Any]) -> list[str]:
    """Faults of a trace, in words; empty for a good one.

    Checks that slices of one thread nest or are apart, that both ends of every arrow lie inside slices, and that
    every process and thread has a name.
    """
    problems = []
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named, flows = set(), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e4)
            threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1e4)))
            if event["dur"] < 0:
                problems.append(f"{event['name']} ends before it starts")
        elif event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for (pid, tid), spans in threads.items():
        problems += _partial_overlaps(pid, tid, spans)
        if ("process_name", pid, 0) not in named or ("thread_name", pid, tid) not in named:
            problems.append(f"process {pid} or its thread {tid} has no name")
    for number, ends in flows.items():
        if [e["ph"] for e in ends] != ["s", "f"] or ends[1].get("bp") != "e":
            problems.append(f"flow {number} is not one start and one finish")
        for end in ends:
            when = round(end["ts"] * 1e4)
            if not any(a <= when <= b for a, b in threads[end["pid"], end["tid"]]):
                problems.append(f"flow {number}: its {end['ph']} at {end['ts']} lies in no slice")
    return problems


def _partial_overlaps(pid: int, tid: int, spans: list[tuple[int, int]]) -> list[str]:
    problems, open_ends = [], []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            problems.append(f"process {pid} thread {tid}: a slice at {start / 1e4} µs partly overlaps another")
        open_ends.append(end)
    return problems
