"""Times of a program whose stages copy to the host, by walking its text: without the simulator and the graph of waits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

WORD = re.compile(r"s(\d+)\.([A-Z]+)(\d+)(?:[<>]s(\d+)\.d(\d+)\[(\d+):(\d+)\])?@d(\d+)")


class Did(NamedTuple):
    """An action of a step."""

    step: int
    device: int
    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


class Costs(NamedTuple):
    """Functions that give seconds.

    Args:
        own: of (kind, stage, micro-batch) for passes, updates and copies.
        message: on the wire and from there to the arrival, of (kind, stage, peer stage, device, peer device, samples).
        summed: of (kind, group).
    """

    own: Callable[[str, int, int], float]
    message: Callable[[str, int, int, int, int, int], tuple[float, float]]
    summed: Callable[[str, int], float]


def walk(text: str, members: dict[int, set[int]], costs: Costs, steps: int) -> list[Did]:
    """Everything that happens in so many steps of the program, one right after the other.

    Args:
        members: gradient group -> its devices; -1: all.
    """
    lists: dict[int, list[tuple[int, tuple]]] = defaultdict(list)
    for step in range(steps):
        for line in text.splitlines()[1:]:
            for found in map(WORD.fullmatch, line.split()):
                if found:  # a device may be idle
                    stage, kind, number, peer, there, lo, hi, device = found.groups()
                    at = tuple(int(x) if x else -1 for x in (stage, number, peer, there, lo, hi))
                    lists[int(device)].append((step, (kind, *at)))
    now: dict[int, float] = defaultdict(float)
    free: dict[tuple, float] = defaultdict(float)
    sent: dict[tuple, list[float]] = defaultdict(list)
    taken: dict[tuple, int] = defaultdict(int)
    wanted: dict[tuple, list[tuple]] = defaultdict(list)
    copied: dict[tuple, float] = {}
    goes: dict[tuple, float] = defaultdict(float)
    """(device, stage) -> when the last copy to the host is over."""
    coming: dict[tuple, int] = defaultdict(int)
    here: dict[tuple, dict[int, float]] = defaultdict(dict)
    nth: dict[tuple, int] = defaultdict(int)
    out: list[Did] = []
    while any(lists.values()):
        before = sum(map(len, lists.values()))
        for d, own in lists.items():
            while own:
                step, (kind, s, m, peer, there, lo, hi) = own[0]
                key = (step, d, s, m)
                if kind in ("SF", "SB"):
                    wire, late = costs.message(kind, s, peer, d, there, hi - lo)
                    channel = (kind[1], s, peer, d, there)
                    begin = max(now[d], free[channel])
                    free[channel] = begin + wire
                    sent[channel].append(begin + wire + late)
                elif kind in ("RF", "RB"):
                    channel = (kind[1], peer, s, there, d)
                    wanted[(kind[1], *key)].append((channel, taken[channel]))
                    taken[channel] += 1
                elif kind in ("F", "B"):
                    messages = wanted[(kind, *key)]
                    if any(len(sent[channel]) <= place for channel, place in messages):
                        break
                    ready = [sent[channel][place] for channel, place in messages]
                    ready.append(goes[d, s] if kind == "F" else copied.get(("P", *key), 0.0))
                    begin = max([now[d], *ready])
                    now[d] = begin + costs.own(kind, s, m)
                    coming[d, s] -= kind == "B" and coming[d, s] > 0
                    out.append(Did(step, d, kind, s, m, begin, now[d]))
                elif kind in ("O", "P"):
                    begin = max(now[d], free[kind, d], copied[("O", *key)] if kind == "P" else 0.0)
                    if kind == "P":
                        # A second one may come while nothing goes.
                        begin = max(begin, goes[d, s] if coming[d, s] else 0.0)
                        coming[d, s] += 1
                    free[kind, d] = copied[(kind, *key)] = begin + costs.own(kind, s, m)
                    if kind == "O":
                        goes[d, s] = free[kind, d]
                    out.append(Did(step, d, kind, s, m, begin, free[kind, d]))
                elif kind in ("R", "N"):
                    group = -1 if kind == "N" else m
                    meeting = here[kind, group, nth[kind, group, d]]
                    meeting[d] = now[d]
                    if set(meeting) != members[group]:
                        break
                    over = max(meeting.values()) + costs.summed(kind, group)
                    for other in meeting:
                        now[other] = over
                        nth[kind, group, other] += 1
                        lists[other].pop(0)
                    continue
                else:
                    begin, now[d] = now[d], now[d] + costs.own(kind, s, m)
                    out.append(Did(step, d, kind, s, m, begin, now[d]))
                own.pop(0)
        assert sum(map(len, lists.values())) < before, "nothing goes on"
    return out


def most_resident(happened: list[Did]) -> int:
    """Most micro-batches whose copied activations a stage holds on a device at a time.

    A micro-batch's are there from the begin of its forward to the end of its copy to the host, and from the begin of its fetch to
    the end of its backward.
    """
    changes: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    copying = {(did.device, did.stage) for did in happened if did.kind == "O"}
    for did in happened:
        if (did.device, did.stage) in copying and did.kind in "FOPB":
            if did.kind in "FP":
                changes[did.device, did.stage].append((did.begin_s, 1))
            else:
                changes[did.device, did.stage].append((did.end_s, -1))
    most = 0
    for own in changes.values():
        held = 0
        for _, change in sorted(own):  # what ends at an instant ends before what begins then
            held += change
            most = max(most, held)
    return most
