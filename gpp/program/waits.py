"""The graph of waits: who waits for whom in a program. Two stages, two micro-batches, all forwards first:

    d0         F0 ---> F1 ---> B0 ---> B1 ---> U0      Nodes are actions, numbered device by device.
               |       |       ^       ^
    channels   SF0 --> SF1     SB0 --> SB1             An arrow goes from what must be over to what waits for it.
               v       v       |       |
    d1         F0 ---> F1 ---> B0 ---> B1 ---> U0      A receive takes no time: it says at which pass a message's arrow ends.

What a row of the table of kinds says is turned into waits here and nowhere else:

* Along a row: an action waits for the one before it on the same resource (`gpp.program.kinds.Resource`).
* Into a channel: a send waits for the pass before it on its device, which has made the message or runs after the one that did.
* Out of a channel: a pass waits for the messages whose receives were posted for it. The n-th receive pairs with the n-th send.
* An action waits for what its kind needs of the same stage, which stands before it on its device (`gpp.program.kinds.Need`): so a
  backward waits for its forward, and a pass for copies (`gpp.program.copies`).
* A copy begins when the device has come to it, and the device goes on at once. The members of a sum wait for each other.

So a program runs to its end if and only if the graph has a topological order, and its times are a longest path in that order:
validation, simulation and hang diagnosis all ask this graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, product
from typing import final

from gpp.errors import MalformedProgram
from gpp.program.channels import Channel, Ends, both_ends, check_channels
from gpp.program.copies import Copies
from gpp.program.kinds import COMPUTE, COPIES, DIRECTIONS, KINDS, SUMS, TOGETHER, Action, Direction, Resource, Role

EVERYONE = -1
"""In place of the group of a sum over all devices."""

OCCUPY, TRANSFER, MEET, COPY = 0, 1, 2, 3
"""What a step does: it occupies its device, a channel, the devices of all members of a sum, or a channel to or from the host."""

Step = tuple[int, int, int, int, tuple[int, ...], int]
"""An action in the topological order; a meeting has one step for all its members.

What it does; its node; the resource of its device; its place in `Waits.labels`; the sends and copies that it waits for, or the
nodes of all members of a meeting; the resource that it occupies, which is a channel's for a send or a copy.
"""

_Pass = tuple[Direction, int, int]
"""Direction, stage, micro-batch."""


@final
class Waits:
    """The graph of a program, in an order in which it can run.

    Args:
        actions: device -> its actions.

    Raises:
        MalformedProgram: both sides of a channel disagree, or actions wait for each other or for what never comes: names the
            blocked ones and prints the grid around them.
    """

    def __init__(self, actions: Mapping[int, Sequence[Action]]) -> None:
        self.actions = actions
        self.devices: tuple[int, ...] = tuple(sorted(actions))
        """Resources 0, 1, ... are these devices; the channels follow, to other devices and to the host."""
        self._firsts = [0, *accumulate(len(actions[device]) for device in self.devices)]
        self.first: dict[int, int] = dict(zip(self.devices, self._firsts, strict=False))
        """Device -> the number of its first action; the node of an action is `first[device]` and its position."""
        self.channels: dict[Channel, Ends] = {}
        """What is sent and received over each channel, and its resource."""
        self.to_host: dict[tuple[Resource, int], Ends] = {}
        """Channel to or from the host, and device -> its copies, and its resource."""
        self.labels: list[tuple[int, Action]] = []
        """A device and an action for each group of actions that take equally long, whatever the costs: of one kind and stage, or of
        one channel and number of samples. The last micro-batch of a stage, which may be smaller, has groups of its own."""
        self.updates: list[tuple[int, int, int]] = []
        """Node, stage and device of every update."""
        self.order: list[Step] = []
        """A topological order; receives, which take no time, are left out."""
        self._copies: list[Copies | None] = []
        self.meetings: dict[int, tuple[int, ...]] = self._survey()
        """Node of a sum -> the nodes of its meeting, in the order of their devices: the n-th of every member."""
        self._label_of: dict[tuple[object, ...], int] = {}
        self._posted: list[dict[_Pass, list[tuple[Ends, int]]]] = [{} for _ in self.devices]
        self._passes: list[dict[_Pass, int]] = [{} for _ in self.devices]  # -> place in `order`
        self._run()
        self._label_last()

    @property
    def num_resources(self) -> int:
        return len(self.devices) + len(self.channels) + len(self.to_host)

    @property
    def num_nodes(self) -> int:
        return self._firsts[-1]

    @cached_property
    def counts(self) -> Counter[int]:
        """Label -> the number of its actions."""
        out = Counter([step[3] for step in self.order])
        for does, _, _, label, needs, _ in self.order if self.meetings else ():
            if does == MEET:
                out[label] += len(needs) - 1
        return out

    @cached_property
    def label_of(self) -> list[int]:
        """Node -> its place in `labels`; -1 for receives."""
        out = [-1] * self.num_nodes
        for does, first, _, label, needs, _ in self.order:
            for node in needs if does == MEET else (first,):
                out[node] = label
        return out

    @cached_property
    def needs(self) -> dict[int, tuple[int, ...]]:
        """Node of a pass or a copy -> the sends and copies that it waits for; those that wait for none are left out."""
        return {node: needs for does, node, _, _, needs, _ in self.order if needs and does != MEET}

    @cached_property
    def reader(self) -> dict[int, int]:
        """Node of a send -> the pass that waits for it; of a copy, the last that does."""
        return {send: node for node, sends in self.needs.items() for send in sends}

    def resource(self, node: int) -> int:
        """The resource of a node's device."""
        return bisect_right(self._firsts, node) - 1

    def place(self, node: int) -> tuple[int, int]:
        """Device and position of a node."""
        device = self.devices[self.resource(node)]
        return device, node - self.first[device]

    def action(self, node: int) -> Action:
        device, position = self.place(node)
        return self.actions[device][position]

    def text(self, node: int) -> str:
        """The action of a node, as in the program."""
        return self.action(node).text(self.place(node)[0])

    def _survey(self) -> dict[int, tuple[int, ...]]:
        """Find the devices that copy, and the meetings."""
        meetings: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(dict)
        for device in self.devices:
            copied: list[Action] = []
            for node, action in enumerate(self.actions[device], start=self.first[device]):
                if action[0] in _SUMS_AND_COPIES:
                    if action[0] in COPIES:
                        copied.append(action)
                        continue
                    group = EVERYONE if KINDS[action.kind].everyone else action.microbatch
                    meetings[action.kind, group].setdefault(device, []).append(node)
            self._copies.append(Copies(device, {action.stage for action in copied}) if copied else None)
        out: dict[int, tuple[int, ...]] = {}
        for (_, group), nodes in meetings.items():
            members = self.devices if group == EVERYONE else tuple(nodes)
            times = {device: len(nodes.get(device, ())) for device in members}
            early, late = max(members, key=lambda device: times[device]), min(members, key=lambda device: times[device])
            if times[early] > times[late]:
                what = self.text(nodes[early][times[late]])
                raise MalformedProgram(f"{what}: device {early} waits in a reduction that device {late} never reaches")
            for meeting in zip(*(nodes[device] for device in members), strict=True):
                out.update(dict.fromkeys(meeting, meeting))
        return out

    def _run(self) -> None:
        """Find the order: run each device as far as it goes, then those that waited for it.

        Raises:
            MalformedProgram: a device does not come to its end.
        """
        at, reached = self._firsts[:-1], set()
        ready = list(reversed(range(len(self.devices))))
        while ready:
            resource = ready.pop()
            node = at[resource] = self._advance(resource, at[resource], ready)
            if node in self.meetings and node < self._firsts[resource + 1]:
                reached.add(node)
                meeting = self.meetings[node]
                if reached.issuperset(meeting):
                    label = self._label((self.action(node).kind, *meeting), *self.place(meeting[0]))
                    self.order.append((MEET, node, resource, label, meeting, resource))
                    for member in meeting:
                        other = self.resource(member)
                        at[other] = member + 1
                        ready.append(other)
        if any(node < end for node, end in zip(at, self._firsts[1:], strict=True)):
            check_channels(*both_ends(self.actions))
            raise MalformedProgram(self._blocked(at))
        check_channels(
            {channel: ends.sent for channel, ends in self.channels.items()},
            {channel: ends.received for channel, ends in self.channels.items()},
        )
        for device, posted in zip(self.devices, self._posted, strict=True):
            if posted:
                direction, stage, microbatch = next(iter(posted))
                own = ((a, KINDS[a.kind]) for a in self.actions[device] if (a.stage, a.microbatch) == (stage, microbatch))
                found = next(a for a, row in own if row.role is Role.RECEIVE and row.direction == direction)
                raise MalformedProgram(f"{found.text(device)} is posted for a pass that does not come after it on its device")
        for copies in filter(None, self._copies):
            copies.check()
        for device in self.devices:
            check_parts(device, self.actions[device])

    def _advance(self, resource: int, node: int, ready: list[int]) -> int:
        """Run one device until it waits, and add to `ready` those that waited for it; returns the node it waits at, or its end."""
        device = self.devices[resource]
        passes, posted, channels, order = self._passes[resource], self._posted[resource], self.channels, self.order
        rows, labels, base, copies = _ROWS, self._label_of, self.first[device], self._copies[resource]
        actions, end = self.actions[device], self._firsts[resource + 1]
        latest: _Pass | None = None
        while node < end:
            kind, stage, microbatch, peer_stage, peer_device, lo, hi = actions[node - base]
            role, direction, needed = rows[kind]
            what = (direction, stage, microbatch)
            if role == _RECEIVE:
                channel = (direction, peer_stage, stage, peer_device, device)
                ends = channels.get(channel) or self._open(channel)
                received = ends.received
                wanted = posted.get(what)
                if wanted is None:
                    posted[what] = [(ends, len(received))]
                else:
                    wanted.append((ends, len(received)))
                received.append((lo, hi))
            elif role == _COMPUTE:
                wanted, needs = posted.get(what), ()
                if wanted is not None:
                    for ends, place in wanted:
                        if place >= len(ends.sends):
                            ends.waiting = resource
                            return node
                    needs = tuple([ends.sends[place] for ends, place in wanted])
                    del posted[what]
                if needed is not None and (needed, stage, microbatch) not in passes:
                    return node
                if copies is not None and stage in copies.stages:
                    copied = copies.take(kind, stage, microbatch, node)
                    if copied is None:
                        return node
                    needs += copied
                if passes.setdefault(what, len(order)) != len(order):
                    return node  # it has run already
                latest = what
                label = labels.get((kind, stage))
                if label is None:
                    label = self._label((kind, stage), device, node - base)
                order.append((OCCUPY, node, resource, label, needs, resource))
            elif role == _SEND:
                if (made := what if needed is None else (needed, stage, microbatch)) != latest and made not in passes:
                    return node  # nothing has made it yet
                channel = (direction, stage, peer_stage, device, peer_device)
                ends = channels.get(channel) or self._open(channel)
                at = ends.resource
                ends.sends.append(node)
                ends.sent.append((lo, hi))
                if ends.waiting is not None:
                    ready.append(ends.waiting)
                    ends.waiting = None
                label = labels.get((at, hi - lo))
                if label is None:
                    label = self._label((at, hi - lo), device, node - base)
                order.append((TRANSFER, node, resource, label, (), at))
            elif role == _UPDATE:
                self.updates.append((node, stage, device))
                order.append((OCCUPY, node, resource, self._label((kind, stage), device, node - base), (), resource))
            elif role == _COPY and copies is not None:
                needs = copies.take(kind, stage, microbatch, node)
                if needs is None:
                    return node
                copies.steps[kind, stage, microbatch] = len(order)
                at = self._to_host(KINDS[kind].occupies, device, node)
                order.append((COPY, node, resource, self._label((kind, stage), device, node - base), needs, at))
            else:
                return node  # a sum: everybody meets in `_run`
            node += 1
        return node

    def _open(self, channel: Channel) -> Ends:
        ends = self.channels[channel] = Ends(self.num_resources)
        return ends

    def _to_host(self, resource: Resource, device: int, node: int) -> int:
        """The resource of a copy's channel."""
        ends = self.to_host.get((resource, device))
        if ends is None:
            ends = self.to_host[resource, device] = Ends(self.num_resources)
        ends.sends.append(node)
        return ends.resource

    def _label(self, key: tuple[object, ...], device: int, position: int) -> int:
        label = self._label_of.setdefault(key, len(self.labels))
        if label == len(self.labels):
            self.labels.append((device, self.actions[device][position]))
        return label

    def _label_last(self) -> None:
        """Give the last micro-batch of each stage labels of its own."""
        last: dict[int, int] = {}
        for own in self._passes:
            for _, stage, microbatch in own:
                if microbatch > last.get(stage, -1):
                    last[stage] = microbatch
        for own, copies in zip(self._passes, self._copies, strict=True):
            stages = {stage for _, stage, _ in own}
            places = [own.get((direction, s, last[s])) for s, direction in product(stages, (*DIRECTIONS, ""))]
            if copies is not None:
                places += [copies.steps.get((kind, s, last[s])) for s, kind in product(sorted(copies.stages), sorted(COPIES))]
            for at in places:
                if at is not None:
                    does, node, resource, _, needs, occupied = self.order[at]
                    action = self.action(node)
                    label = self._label(("last", action.kind, action.stage), *self.place(node))
                    self.order[at] = (does, node, resource, label, needs, occupied)

    def _blocked(self, at: Sequence[int]) -> str:
        """The blocked actions, and the grid around them."""
        stuck = [node for node, end in zip(at, self._firsts[1:], strict=True) if node < end]
        lines = ["the program cannot run to its end; blocked: " + ", ".join(map(self.text, stuck))]
        met = [self.place(node)[0] for node in stuck if node in self.meetings]
        lines += [f"device {device} waits in a reduction that others never reach" for device in met]
        copies = [self._copies[self.resource(node)] for node in stuck]
        lines += [why for own, node in zip(copies, stuck, strict=True) if own and (why := own.why(self.action(node)))]
        for node in stuck:
            device, position = self.place(node)
            around = [action.text(device) for action in self.actions[device][max(0, position - 3) : position + 3]]
            around[min(3, position)] = f">>{self.text(node)}<<"
            lines.append(f"  d{device}: " + "  ".join(around))
        return "\n".join(lines)


class _KindRows(dict[str, tuple[int, Direction, Direction | None]]):
    """Role, as a small number, direction, and the direction of the pass that it needs, of each kind; an unknown one is refused."""

    def __missing__(self, kind: str) -> tuple[int, Direction, Direction | None]:
        row = KINDS[kind]
        passes = [KINDS[need.kind].direction for need in row.needs if need.kind in COMPUTE and not need.previous]
        self[kind] = _CODES[row.role], row.direction, next(iter(passes), None)
        return self[kind]


_CODES = {role: code for code, role in enumerate(Role)}
_COMPUTE, _SEND, _RECEIVE, _SUM, _UPDATE, _COPY = range(len(Role))
_ROWS = _KindRows()
_SUMS_AND_COPIES = SUMS | COPIES


def check_parts(device: int, actions: Sequence[Action]) -> None:
    """Refuse a part without the others of its pass, and a stage that has whole passes beside passes in parts.

    That a part comes in time, the graph of waits says (`gpp.program.waits`).

    Raises:
        MalformedProgram: names the action.
    """
    if TOGETHER.keys().isdisjoint({action.kind for action in actions}):
        return
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for kind, stage, microbatch, *_ in actions:
        found[stage, kind].add(microbatch)
    for stage, kind in [key for key in found if key[1] in TOGETHER]:
        if whole := found[stage, KINDS[kind].instead_of]:
            text = Action(KINDS[kind].instead_of, stage, min(whole)).text(device)
            raise MalformedProgram(f"{text}: stage {stage} has others of these in parts; it must have all of them so, or none")
        for other in TOGETHER[kind]:
            if alone := found[stage, kind] - found[stage, other]:
                text, lacks = (Action(part, stage, min(alone)).text(device) for part in (kind, other))
                raise MalformedProgram(f"{text} is part of a pass, of which {lacks} is missing")
