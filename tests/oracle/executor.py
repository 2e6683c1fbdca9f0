"""An executor of programs by queues alone, which shares nothing with the graph of waits that it checks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from gpp.program.program import Program

PASSES, SENDS, RECEIVES = ("F", "B"), ("SF", "SB"), ("RF", "RB")


def runs(program: Program, members: dict[int, set[int]]) -> bool:
    """Whether every device comes to its end, by queues alone: sends need their data, passes all messages posted for them."""
    at = dict.fromkeys(program.actions, 0)
    queues: dict[tuple, deque] = defaultdict(deque)
    expected: dict[tuple, list] = defaultdict(list)  # (device, direction, stage, micro-batch) -> messages posted for it
    done: dict[int, set] = defaultdict(set)
    meets: dict[tuple, set[int]] = defaultdict(set)
    seen: Counter = Counter()
    moved = True
    while moved:
        moved = False
        for device, actions in program.actions.items():
            while at[device] < len(actions):
                a = actions[at[device]]
                if a.kind in SENDS:
                    if (a.kind[1], a.stage, a.microbatch) not in done[device]:
                        return False  # it would send what is not there
                    queues[a.kind[1], a.stage, a.peer_stage, device, a.peer_device].append((a.lo, a.hi))
                elif a.kind in RECEIVES:
                    if (a.kind[1], a.stage, a.microbatch) in done[device]:
                        return False  # too late
                    channel = (a.kind[1], a.peer_stage, a.stage, a.peer_device, device)
                    expected[device, a.kind[1], a.stage, a.microbatch].append((channel, seen[channel], (a.lo, a.hi)))
                    seen[channel] += 1
                elif a.kind in PASSES:
                    what = (a.kind, a.stage, a.microbatch)
                    if what in done[device] or (a.kind == "B" and ("F", *what[1:]) not in done[device]):
                        return False
                    wanted = expected[device, *what]
                    if any(len(queues[channel]) <= place for channel, place, _ in wanted):
                        break
                    if any(queues[channel][place] != samples for channel, place, samples in wanted):
                        return False  # other samples than it has room for
                    del expected[device, *what]
                    done[device].add(what)
                elif a.kind in ("R", "N"):
                    group = -1 if a.kind == "N" else a.microbatch
                    if group not in members or device not in members[group]:
                        return False
                    key = (a.kind, group, sum((b.kind, b.microbatch) == (a.kind, a.microbatch) for b in actions[: at[device]]))
                    meets[key].add(device)
                    if meets[key] != members[group]:
                        break
                at[device] += 1
                moved = True
    ended = all(at[device] == len(actions) for device, actions in program.actions.items())
    read = all(len(queue) == seen[channel] for channel, queue in queues.items())
    return ended and read and not any(expected.values())
