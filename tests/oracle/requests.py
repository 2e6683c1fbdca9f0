"""A stream of requests by ticks of a clock: slots, queues and devices as things that are full or empty. It shares no rule with
`gpp.mechanisms.serving.planning`: nothing here knows when anything will be over."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Edge:
    """From one stage's device to another's: messages that wait to leave, one on the wire, those in the reader's slots."""

    src: int
    dst: int
    wire: int
    latency: int
    waiting: list[int] = field(default_factory=list)
    wire_left: int = 0
    moving: int | None = None
    flying: list[list[int]] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    taken_slots: int = 0


def ends(seconds: list[int], edges: list[Edge], buffers: int, arrivals: list[int], per_request: int) -> list[tuple[int, int]]:
    """(begin of the first pass, end of the last) of every request, in ticks.

    Args:
        seconds: of a pass, by stage; a device each.
        arrivals: when each request comes.
        per_request: micro-batches of a request.
    """
    count = len(arrivals) * per_request
    inputs = [[e for e in edges if e.dst == s] for s in range(len(seconds))]
    outputs = [[e for e in edges if e.src == s] for s in range(len(seconds))]
    done, left, begun = [0] * len(seconds), [0] * len(seconds), [0] * len(seconds)
    began = [[0] * count for _ in seconds]
    ended = [[0] * count for _ in seconds]
    tick = 0
    while min(done) < count:
        moved = True
        while moved:
            moved = False
            for s, took in enumerate(seconds):
                if begun[s] > done[s] and left[s] == 0:
                    ended[s][done[s]] = tick
                    for edge in outputs[s]:
                        edge.waiting.append(done[s])
                    done[s] += 1
                    moved = True
                m = begun[s]
                if begun[s] > done[s] or m == count:
                    continue
                # What this device has made and not yet got rid of, apart from the pass that it would begin.
                kept = {own for e in outputs[s] for own in (*e.waiting, *([] if e.moving is None else [e.moving]))}
                here = all(m in e.arrived for e in inputs[s]) and (inputs[s] or arrivals[m // per_request] <= tick)
                if here and len(kept) <= buffers:
                    for edge in inputs[s]:
                        edge.arrived.remove(m)
                        edge.taken_slots -= 1
                    began[s][m], left[s] = tick, took
                    begun[s] += 1
                    moved = True
            for edge in edges:
                if edge.moving is not None and edge.wire_left == 0:
                    edge.flying.append([edge.moving, edge.latency])
                    edge.moving = None
                    moved = True
                for message in [own for own in edge.flying if own[1] == 0]:
                    edge.flying.remove(message)
                    edge.arrived.add(message[0])
                    moved = True
                if edge.moving is None and edge.waiting and edge.taken_slots < buffers:
                    edge.moving, edge.wire_left = edge.waiting.pop(0), edge.wire
                    edge.taken_slots += 1
                    moved = True
        tick += 1
        left = [max(0, own - 1) for own in left]
        for edge in edges:
            edge.wire_left = max(0, edge.wire_left - 1)
            for message in edge.flying:
                message[1] = max(0, message[1] - 1)
    requests = [range(r * per_request, (r + 1) * per_request) for r in range(len(arrivals))]
    return [(min(own[m] for own in began for m in of), max(own[m] for own in ended for m in of)) for of in requests]
