"""The program: for every device a static list of actions, with a reversible text form (`gpp.program.kinds`).

A receive is a posting: the wait happens at the pass that needs the message. Sends do not block. A message from a device to itself
is a tensor handed from one of its stages to another. So a program deadlocks only if a pass waits for a message whose sender waits
for it: `gpp.program.waits` has the graph of who waits for whom.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.channels import Channel
from gpp.program.kinds import KINDS, NUMBER, OWNERS, REDUCE, SENDS, Action, read
from gpp.program.waits import Waits
from gpp.stage import Stage

NORM_BYTES = 8
"""The payload of the sum over all devices that clipping needs: one float64."""


class Task(NamedTuple):
    """A pass of a stage, without its device."""

    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """Actions of every device, for `num_samples` samples.

    Args:
        minibatches: how many those are; above 1, the pipeline does not drain between their updates (`gpp.program.steady_state`).

    >>> waits = program.waits
    >>> [waits.text(node) for node in waits.needs[waits.first[1] + 2]]  # what the first pass of device 1 waits for
    ['s0.SF0>s1.d1[0:1]@d0']
    """

    num_samples: int
    actions: dict[int, tuple[Action, ...]]
    minibatches: int = 1

    @cached_property
    def waits(self) -> Waits:
        """The graph of who waits for whom.

        Raises:
            MalformedProgram: the program cannot run to its end.
        """
        return Waits(self.actions)

    @cached_property
    def trains(self) -> bool:
        """Whether it has backwards; an evaluation has none."""
        return any(KINDS[action.kind].finishes for own in self.actions.values() for action in own)

    @cached_property
    def mechanisms(self) -> frozenset[str]:
        """The names of the mechanisms whose kinds of actions the program has."""
        return frozenset(OWNERS[action.kind] for own in self.actions.values() for action in own if action.kind in OWNERS)

    def to_text(self) -> str:
        """The program as text, one line a device. `from_text` reads it back equal.

        >>> passes = (Action("F", 0, 0), Action("B", 0, 0))
        >>> print(Program(num_samples=1, actions={0: passes, 1: ()}).to_text(), end="")
        samples 1 minibatches 1
        s0.F0@d0 s0.B0@d0
        idle@d1
        """
        lines = [f"samples {self.num_samples} minibatches {self.minibatches}"]
        lines += [
            " ".join(a.text(device) for a in actions) or f"idle@d{device}" for device, actions in sorted(self.actions.items())
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Program:
        """The program that `to_text` wrote.

        Raises:
            MalformedProgram: a word that is no action, actions of several devices in a line, or two lines of one device; names the
                line.

        >>> Program.from_text("samples 1 minibatches 1\\ns0.F0@d0 s0.B0@d0 s0.U0@d0\\n").actions[0][1]
        Action(kind='B', stage=0, microbatch=0, peer_stage=-1, peer_device=-1, lo=0, hi=0)
        >>> Program.from_text(program.to_text()) == program
        True
        """
        first, *lines = text.rstrip("\n").split("\n")
        head = _HEAD.fullmatch(first)
        if head is None:
            raise MalformedProgram(f"line 1: must read as in 'samples 8 minibatches 1', not {first[:80]!r}")
        actions: dict[int, tuple[Action, ...]] = {}
        for number, line in enumerate(lines, start=2):
            try:
                device, own = _read_line(line)
            except MalformedProgram as error:
                raise MalformedProgram(f"line {number}: {error}") from None
            if device in actions:
                raise MalformedProgram(f"line {number}: device {device} has another line above")
            actions[device] = own
        if not actions:
            raise MalformedProgram("line 2: a program has a line for each device, and one device at least")
        return cls(num_samples=int(head[1]), actions=actions, minibatches=int(head[2]))


_HEAD = re.compile(f"samples {NUMBER} minibatches {NUMBER}")
_IDLE = re.compile(f"idle@d{NUMBER}")


def _read_line(line: str) -> tuple[int, tuple[Action, ...]]:
    """The device of a line, and its actions."""
    if idle := _IDLE.fullmatch(line):
        return int(idle[1]), ()
    parsed = [read(word) for word in line.split(" ")]
    if len({device for device, _ in parsed}) != 1:
        raise MalformedProgram(f"a line holds the actions of one device, not {line[:80]!r}")
    return parsed[0][0], tuple(Action(*action) for _, action in parsed)


class ReduceGroup(NamedTuple):
    """Parameters whose gradients are summed over the same devices (replicas, tied weights, or both)."""

    devices: tuple[int, ...]
    params: tuple[str, ...]
    share: float = 1.0
    """The share of the parameters' bytes that a member holds: below 1 where the devices of a replica split them."""

    def num_bytes(self, graph: OpGraph) -> float:
        """Bytes that each member holds."""
        return self.share * sum(graph.param_of[name].num_bytes for name in self.params)


def reduce_groups(plan: Plan, graph: OpGraph) -> tuple[ReduceGroup, ...]:
    """The groups of devices that sum gradients, each with the trainable parameters that all of its devices hold.

    >>> replicated = make_plan(problem, "mine", [(0b11, 2)], microbatch_size=2)
    >>> reduce_groups(replicated, graph)[0][:2], reduce_groups(plan, graph)
    (((0, 1), ('op0.weight', 'op1.weight')), ())
    """
    if plan.periodic:
        # The gradients of a stage, parts of which its own device makes, and parts others.
        summed = [(stage, {name for op in stage.ops for name in graph.trained_by[op]}) for stage in plan.stages if stage.adding]
        return tuple(ReduceGroup(tuple(sorted((*s.devices, *s.adding))), tuple(sorted(names))) for s, names in summed)
    holders: dict[str, set[int]] = defaultdict(set)
    split: list[ReduceGroup] = []
    for stage in plan.stages:
        if stage.devices_per_replica > 1:
            split += _split_groups(stage, graph)
            continue
        for op in stage.ops:
            # One device needs nobody, unless another stage reads the parameter too.
            for name in graph.trained_by[op] if len(stage.devices) > 1 else graph.shared_by[op]:
                holders[name].update(stage.devices)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(holders):
        if len(holders[name]) > 1:
            groups[tuple(sorted(holders[name]))].append(name)
    whole = [ReduceGroup(devices, tuple(params)) for devices, params in sorted(groups.items())]
    return tuple(sorted([*whole, *split]) if split else whole)


def summed_stages(plan: Plan) -> tuple[int, ...]:
    """The stages to whose gradients other devices add, ascending: where devices run in periods each is a gradient group."""
    return tuple(s for s, stage in enumerate(plan.stages) if stage.adding)


def adding_stages(plan: Plan, graph: OpGraph, group: ReduceGroup, device: int) -> tuple[int, ...]:
    """The stages of a device whose backwards add to the gradients of a group."""
    params = set(group.params)
    return tuple(
        s for s in plan.work_of_device[device] if any(not params.isdisjoint(graph.ops[op].params) for op in plan.stages[s].ops)
    )


def _split_groups(stage: Stage, graph: OpGraph) -> list[ReduceGroup]:
    """The groups of a stage whose replicas are teams: the n-th devices of all replicas sum the n-th part of each gradient."""
    if len(stage.replicas) < 2:
        return []
    held: dict[str, float] = {}
    for op in stage.ops:
        variants = graph.ops[op].variants
        share = next((v.params for v in variants if v.degree == stage.devices_per_replica), 1.0)
        held |= {name: graph.param_of[name].num_bytes * share for name in graph.trained_by[op] if name not in held}
    whole = sum(graph.param_of[name].num_bytes for name in held)
    share = sum(held.values()) / whole if whole else 1.0
    return [ReduceGroup(devices, tuple(sorted(held)), share) for devices in zip(*stage.replicas, strict=True) if held]


def teams(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The devices of each replica that is several devices, in one order on all devices."""
    return tuple(sorted({replica for stage in plan.stages if stage.devices_per_replica > 1 for replica in stage.replicas}))


def channel_of(action: Action, device: int) -> Channel:
    """The channel of a send or a receive: direction, both stages, both devices. Both ends of a message have the same."""
    row = KINDS[action.kind]
    if action.kind in SENDS:
        return row.direction, action.stage, action.peer_stage, device, action.peer_device
    return row.direction, action.peer_stage, action.stage, action.peer_device, device


def check_program(program: Program, groups: Iterable[ReduceGroup] = ()) -> None:
    """Prove that the program runs to its end.

    Every message has one sender and one receiver, both sides of a channel list its messages in one order (so first-in first-out
    transports agree), a send comes after the pass that makes its message and a receive before the one that needs it, every
    reduction has the members that its gradient group has, and no device waits for ever.

    Raises:
        MalformedProgram: names the blocked actions and prints the grid around them.

    >>> check_program(program, reduce_groups(plan, graph))
    >>> check_program(Program.from_text("samples 1 minibatches 1\\ns0.B0@d0 s0.F0@d0\\n"))
    Traceback (most recent call last):
        ...
    gpp.errors.MalformedProgram: the program cannot run to its end; blocked: s0.B0@d0
      d0: >>s0.B0@d0<<  s0.F0@d0
    """
    waits = program.waits
    members = {g: group.devices for g, group in enumerate(groups)}
    for meeting in set(waits.meetings.values()):
        kind, _, group = waits.action(meeting[0])[:3]
        devices = tuple(waits.place(node)[0] for node in meeting)
        if kind == REDUCE and devices != members.get(group):
            raise MalformedProgram(
                f"{waits.text(meeting[0])}: devices {list(devices)} sum gradient group {group}, whose members are "
                f"{list(members.get(group, ()))}: they would wait in a reduction that others never reach"
            )
