"""When the operations of cards run, by queues alone: a way to run a program that shares nothing with the proof, and has times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from gpp.program.program import Program

Queue = tuple[int, Hashable]
"""A device, and a queue of it."""


def end_s(
    program: Program, stream_of: Callable[[int, int], Hashable], took_s: Callable[[int, int], float], *, one_queue: bool = False
) -> float | None:
    """When the last operation ends; None if nothing can go on.

    Args:
        program: without sums.
        stream_of: the queue of messages from a device to another, on both; a queue per card for everything with `one_queue`.
        took_s: seconds that an action (device, position) takes; of a message, its send's.
    """
    queues: dict[Queue, deque[Hashable]] = defaultdict(deque)
    where: dict[Hashable, list[Queue]] = defaultdict(list)
    after: dict[Hashable, list[Hashable]] = defaultdict(list)
    seconds: dict[Hashable, float] = {}
    for device, own in program.actions.items():
        posted: dict[tuple, list[Hashable]] = defaultdict(list)
        latest: Hashable = None
        count: dict[tuple, int] = defaultdict(int)
        for i, a in enumerate(own):
            op: Hashable = (device, i)
            name: Hashable = "compute"
            if a.peer_stage >= 0:
                if a.peer_device == device:
                    continue
                sends = a.kind in ("SF", "SB")
                pair = (device, a.peer_device) if sends else (a.peer_device, device)
                count[pair] += 1
                op, name = ("message", *pair, count[pair]), stream_of(*pair)
                if sends:
                    seconds[op] = took_s(device, i)
                    after[op].append(latest)
                else:
                    posted[a.kind[1], a.stage, a.microbatch].append(op)
            else:
                assert a.kind in ("F", "B", "U")
                seconds[op] = took_s(device, i)
                after[op] += posted.pop((a.kind, a.stage, a.microbatch), [])
                latest = op
            queue = device, None if one_queue else name
            queues[queue].append(op)
            where[op].append(queue)
    ends: dict[Hashable, float] = {}
    free: dict[Queue, float] = defaultdict(float)
    moved = True
    while moved:
        moved = False
        for own in queues.values():
            while own:
                op = own[0]
                both = 2 if isinstance(op, tuple) and op[0] == "message" else 1
                if len(where[op]) < both or any(queues[queue][0] != op for queue in where[op]):
                    break
                if any(before not in ends for before in after[op]):
                    break
                start = max([free[queue] for queue in where[op]] + [ends[before] for before in after[op]])
                ends[op] = start + seconds[op]
                for queue in where[op]:
                    free[queue] = ends[op]
                    queues[queue].popleft()
                moved = True
    return None if any(queues.values()) else max(ends.values(), default=0.0)
