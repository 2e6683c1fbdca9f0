"""Which communicators the cards make: few, and no message stands in line behind another pair's.

A communicator runs its operations one by one, in the order of their issue, and has buffers on every card that is in it. So each
ordered pair of devices that exchange messages has a communicator on which neither of the two talks to anybody else, and pairs that
have no device in common share one: an edge colouring of the graph of the pairs. Sums have communicators of their own, one for each
set of devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpp.program.kinds import KINDS, SENDS, SUMS
from gpp.program.program import Program, ReduceGroup
from gpp.program.waits import EVERYONE

Pair = tuple[int, int]
"""The device that sends, and the one that receives."""


class Communicator(NamedTuple):
    """A group of devices that talk to each other.

    Args:
        name: for people; no two are alike.
        devices: its members, ascending.
        pairs: who sends to whom on it. No device is in two of them.
        groups: the gradient groups whose sums it carries; `EVERYONE` for the norm.
        replica: whether the group carries the sums within passes of one replica that is several devices.
    """

    name: str
    devices: tuple[int, ...]
    pairs: tuple[Pair, ...] = ()
    groups: tuple[int, ...] = ()
    replica: bool = False


def communicators(
    groups: Sequence[ReduceGroup], *programs: Program, replicas: Sequence[tuple[int, ...]] = ()
) -> tuple[Communicator, ...]:
    """The communicators of all these programs, in the order in which every card makes them.

    Args:
        groups: the gradient groups of the plan (`gpp.program.program.reduce_groups`).
        programs: the training's program, and the evaluation's if there is one.
        replicas: the replicas that are several devices (`gpp.program.program.teams`).
    """
    pairs = {pair: None for program in programs for pair in _pairs(program)}
    out = []
    for number, colour in enumerate(_colours(sorted(pairs))):
        members = tuple(sorted({device for pair in colour for device in pair}))
        out.append(Communicator(f"messages {number}", members, pairs=tuple(colour)))
    summed: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        summed[group.devices].append(number)
    for devices, numbers in summed.items():
        out.append(Communicator(f"gradients {', '.join(map(str, numbers))}", devices, groups=tuple(numbers)))
    if any(a.kind in SUMS and KINDS[a.kind].everyone for program in programs for own in program.actions.values() for a in own):
        everyone = tuple(sorted({device for program in programs for device in program.actions}))
        out.append(Communicator("norm", everyone, groups=(EVERYONE,)))
    out += [Communicator(f"replica {', '.join(map(str, devices))}", devices, replica=True) for devices in replicas]
    return tuple(out)


def first_messages(made: Sequence[Communicator]) -> Iterator[tuple[Communicator, Pair]]:
    """Every connection once, in the order in which all cards send the first message over it, one after the other.

    The first message between two devices of a communicator is a meeting of their hosts. Hosts that walk through one list, and pass
    over what is not theirs, cannot wait for each other in a circle: both ends of the first meeting that is not over come to it.
    """
    for communicator in made:
        for pair in communicator.pairs:
            yield communicator, pair


def _pairs(program: Program) -> set[Pair]:
    return {
        (device, action.peer_device)
        for device, own in program.actions.items()
        for action in own
        if action.kind in SENDS and action.peer_device != device
    }


def _colours(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs in groups, no device twice in a group. Groups are at most twice as many as a device's pairs, mostly just as many.

    The pair with the fewest colours left is coloured next, with the first that is free (DSATUR, Brélaz 1979).
    """
    taken: dict[int, set[int]] = defaultdict(set)
    degree: dict[int, int] = defaultdict(int)
    for pair in pairs:
        for device in pair:
            degree[device] += 1
    left = list(pairs)
    out: list[list[Pair]] = []
    while left:
        pair = min(left, key=lambda p: (-len(taken[p[0]] | taken[p[1]]), -degree[p[0]] - degree[p[1]], p))
        left.remove(pair)
        used = taken[pair[0]] | taken[pair[1]]
        colour = next(number for number in range(len(out) + 1) if number not in used)
        if colour == len(out):
            out.append([])
        out[colour].append(pair)
        for device in pair:
            taken[device].add(colour)
    return [sorted(colour) for colour in out]
