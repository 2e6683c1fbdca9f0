"""The program: for every device a static list of actions, with a reversible text form.

    s2.F0@d1                 forward of micro-batch 0 of stage 2 on device 1
    s2.B0@d1                 backward
    s2.SF0>s3.d4[0:4]@d1     send the outputs of samples 0..3 to stage 3 on device 4
    s3.RF0<s2.d1[0:4]@d4     receive them for micro-batch 0 of stage 3
    s3.SB0>s2.d1[0:4]@d4     send the gradients of those outputs back
    s2.RB0<s3.d4[0:4]@d1     receive them
    s2.R0@d1                 all-reduce of gradient group 0 (see `reduce_groups`)
    s2.N0@d1                 all devices add up the squares of their gradients (clipping by the global norm)
    s2.U0@d1                 optimizer step of mini-batch 0 of the pass

A receive is a posting: the wait happens at the compute action that needs it. Sends do not block.
A message from a device to itself is a tensor handed from one of its stages to another.
So a program deadlocks only if a compute action waits for a message whose sender waits for it, which
`check_program` excludes by running the program without time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.plan.stage import Stage

COMPUTE = ("F", "B")
SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")

WORLD = -1
"""The number of the group of all devices, which N sums over; the others are those of `reduce_groups`."""

NORM_BYTES = 8
"""What N sums: one float64."""


class Action(NamedTuple):
    """One thing that a device does. `microbatch` is the stage's own; of R, the gradient group; of U, the mini-batch."""

    kind: str
    stage: int
    microbatch: int
    peer_stage: int = -1
    peer_device: int = -1
    lo: int = 0
    hi: int = 0

    def text(self, device: int) -> str:
        head = f"s{self.stage}.{self.kind}{self.microbatch}"
        if self.peer_stage >= 0:
            arrow = ">" if self.kind[0] == "S" else "<"
            head += f"{arrow}s{self.peer_stage}.d{self.peer_device}[{self.lo}:{self.hi}]"
        return f"{head}@d{device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Actions of every device, for one pass over `num_samples` samples.

    Args:
        minibatches: how many those are; above 1, the pipeline does not drain between their updates (`gpp.program.steady_state`).
    """

    num_samples: int
    actions: dict[int, tuple[Action, ...]]
    minibatches: int = 1

    def to_text(self) -> str:
        """One line a device; `from_text` reads it back equal."""
        lines = [f"samples {self.num_samples} minibatches {self.minibatches}"]
        lines += [
            " ".join(a.text(device) for a in actions) or f"idle@d{device}" for device, actions in sorted(self.actions.items())
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Program:
        """The program that `to_text` wrote.

        Raises:
            MalformedProgram: a word that is no action; names it.
        """
        first, *lines = text.strip().split("\n")
        actions: dict[int, tuple[Action, ...]] = {}
        for line in lines:
            if line.startswith("idle@d"):
                actions[int(line[6:])] = ()
                continue
            parsed = [_parse(word) for word in line.split()]
            actions[parsed[0][0]] = tuple(action for _, action in parsed)
        _, samples, _, minibatches = first.split()
        return cls(num_samples=int(samples), actions=actions, minibatches=int(minibatches))


_ACTION = re.compile(r"s(\d+)\.(F|B|R|N|U|[SR][FB])(\d+)(?:[<>]s(\d+)\.d(\d+)\[(\d+):(\d+)\])?@d(\d+)$")


def _parse(word: str) -> tuple[int, Action]:
    match = _ACTION.match(word)
    if not match:
        raise MalformedProgram(f"{word!r} is not an action")
    stage, kind, microbatch, peer_stage, peer_device, lo, hi, device = match.groups()
    peer = (int(peer_stage), int(peer_device), int(lo), int(hi)) if peer_stage else (-1, -1, 0, 0)
    return int(device), Action(kind, int(stage), int(microbatch), *peer)


class ReduceGroup(NamedTuple):
    """Parameters whose gradients are summed over the same devices (replicas, tied weights, or both)."""

    devices: tuple[int, ...]
    params: tuple[str, ...]
    share: float = 1.0
    """Of each parameter's bytes: below 1 where a tensor-parallel stage splits them."""

    def num_bytes(self, graph: OpGraph) -> float:
        """Bytes that each member holds."""
        return self.share * sum(graph.param_of[name].num_bytes for name in self.params)


def reduce_groups(plan: Plan, graph: OpGraph) -> tuple[ReduceGroup, ...]:
    """Who sums which gradients: trainable parameters by the set of devices that hold them, if several."""
    holders: dict[str, set[int]] = defaultdict(set)
    split: list[ReduceGroup] = []
    for stage in plan.stages:
        if stage.tensor_parallel > 1:
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


def _split_groups(stage: Stage, graph: OpGraph) -> list[ReduceGroup]:
    """Of a tensor-parallel stage: its n-th devices in all replicas sum the n-th part of each gradient."""
    if len(stage.replicas) < 2:
        return []
    by_share: dict[float, set[str]] = defaultdict(set)
    for op in stage.ops:
        variants = graph.ops[op].variants
        share = next((v.params for v in variants if v.degree == stage.tensor_parallel), 1.0)
        by_share[share] |= {name for name in graph.ops[op].params if graph.param_of[name].trainable}
    members = tuple(zip(*stage.replicas, strict=True))
    return [ReduceGroup(devices, tuple(sorted(names)), share) for devices in members for share, names in by_share.items() if names]


def message_key(action: Action, device: int) -> tuple[str, int, int, int, int, int]:
    """What a send and its receive have in common: direction, both stages, both devices, first sample."""
    if action.kind[0] == "S":
        return action.kind[1], action.stage, action.peer_stage, device, action.peer_device, action.lo
    return action.kind[1], action.peer_stage, action.stage, action.peer_device, device, action.lo


def check_program(program: Program, groups: Iterable[ReduceGroup] = ()) -> None:
    """Prove that the program runs to its end.

    Every message has one sender and one receiver, both sides of a channel list its messages in one
    order (so first-in first-out transports agree), and no device waits for ever.

    Raises:
        MalformedProgram: names the blocked actions and prints the grid around them.
    """
    _check_channels(program)
    members = {g: set(group.devices) for g, group in enumerate(groups)} | {WORLD: set(program.actions)}
    position = dict.fromkeys(program.actions, 0)
    sent: set[tuple[str, int, int, int, int, int]] = set()
    # A sum happens as often as there are mini-batches: (group, how often its device has been there) -> devices.
    reached: dict[tuple[int, int], set[int]] = defaultdict(set)
    been: dict[tuple[int, int], int] = defaultdict(int)
    needs: dict[tuple[int, str, int, int], list[tuple[str, int, int, int, int, int]]] = defaultdict(list)
    waiting: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    ready = list(program.actions)
    while ready:
        device = ready.pop()
        actions = program.actions[device]
        while position[device] < len(actions):
            action = actions[position[device]]
            kind = action.kind
            if kind in RECEIVES:
                needs[device, kind[1], action.stage, action.microbatch].append(message_key(action, device))
            elif kind in SENDS:
                key = message_key(action, device)
                sent.add(key)
                ready += waiting.pop(key, [])
            elif kind in ("R", "N"):
                group = WORLD if kind == "N" else action.microbatch
                if group not in members:
                    raise MalformedProgram(f"{action.text(device)} sums gradients of a group that does not exist")
                time = been[device, group]
                been[device, group] += 1
                reached[group, time].add(device)
                if reached[group, time] != members[group]:
                    waiting["R", group, time].append(device)
                    position[device] += 1
                    break
                ready += waiting.pop(("R", group, time), [])
            elif kind in COMPUTE:
                missing = next((k for k in needs[device, kind, action.stage, action.microbatch] if k not in sent), None)
                if missing:
                    waiting[missing].append(device)
                    break
            position[device] += 1
    for key, devices in waiting.items():
        if key[0] == "R":
            for device in devices:
                position[device] -= 1  # it stands in the reduction, not behind it
    blocked = {d: actions[position[d]] for d, actions in program.actions.items() if position[d] < len(actions)}
    if blocked:
        raise MalformedProgram(_describe(program, blocked, position))


def _check_channels(program: Program) -> None:
    order: dict[str, dict[tuple[str, int, int, int, int], list[tuple[int, int]]]] = {"S": defaultdict(list), "R": defaultdict(list)}
    for device, actions in program.actions.items():
        for action in actions:
            if action.kind in SENDS or action.kind in RECEIVES:
                key = message_key(action, device)
                order[action.kind[0]][key[:5]].append((action.lo, action.hi))
    for channel in sorted(order["S"].keys() | order["R"].keys()):
        sends, receives = order["S"].get(channel, []), order["R"].get(channel, [])
        if sends != receives:
            direction, src, dst, src_device, dst_device = channel
            bad = next(
                ((a, b) for a, b in zip(sends, receives, strict=False) if a != b),
                (sends[len(receives) :][:1], receives[len(sends) :][:1]),
            )
            raise MalformedProgram(
                f"channel {direction} s{src}.d{src_device} > s{dst}.d{dst_device}: sender and receiver disagree, "
                f"{len(sends)} sends against {len(receives)} receives, first difference {bad[0]} against {bad[1]}"
            )


def _describe(program: Program, blocked: dict[int, Action], position: dict[int, int]) -> str:
    lines = ["the program cannot run to its end; blocked: " + ", ".join(a.text(d) for d, a in sorted(blocked.items()))]
    meeting = [d for d, action in sorted(blocked.items()) if action.kind in ("R", "N")]
    lines += [f"device {d} waits in a reduction that others never reach" for d in meeting]
    for device, action in sorted(blocked.items()):
        at = position[device]
        around = [a.text(device) for a in program.actions[device][max(0, at - 3) : at + 3]]
        around[min(3, at)] = f">>{action.text(device)}<<"
        lines.append(f"  d{device}: " + "  ".join(around))
    return "\n".join(lines)
