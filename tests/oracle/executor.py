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
    copying = {(device, a.stage) for device, own in program.actions.items() for a in own if a.kind in "OP"}
    passed: dict[tuple, list] = defaultdict(list)  # (device, stage) that copies -> its passes and copies so far
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
                    if (device, a.stage) in copying and not follows(passed[device, a.stage], a.kind, a.microbatch):
                        return False
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
                elif a.kind in ("O", "P") and not follows(passed[device, a.stage], a.kind, a.microbatch):
                    return False
                at[device] += 1
                moved = True
    ended = all(at[device] == len(actions) for device, actions in program.actions.items())
    read = all(len(queue) == seen[channel] for channel, queue in queues.items())
    paired = all(Counter(m for _, m in own) == {m: 4 for _, m in own} for own in passed.values())
    return ended and read and paired and not any(expected.values())


def follows(before: list[tuple[str, int]], kind: str, microbatch: int) -> bool:
    """Whether a pass or a copy may come now, in a stage that copies: a pair of slots, one for what goes, one for what comes.

    Args:
        before: (kind, micro-batch) of the stage's passes and copies so far; the new one is added.
    """
    own = [k for k, m in before if m == microbatch]
    going = sum(k == "F" for k, _ in before) - sum(k == "O" for k, _ in before)
    coming = sum(k == "P" for k, _ in before) - sum(k == "B" for k, _ in before)
    before.append((kind, microbatch))
    if own != ["F", "O", "P", "B"][: len(own)] or "FOPB"[len(own) : len(own) + 1] != kind:
        return False
    return not going and coming < 2 if kind == "F" else coming < 2 if kind == "P" else True
