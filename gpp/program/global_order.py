"""One order of all messages in which every card can issue them, for backends that block.

On a card a receive is an operation that occupies its queue until the sender comes to it (NCCL). A receive that stands in front of a
message which must go first is a deadlock, so `POSTED_AHEAD` of `gpp.program.lower`, which is right for gloo, is wrong there. Here
every receive stands where one run of the whole program has it. A run is a total order of all passes, sums, updates and messages.
It agrees with the order of every device, and every message comes after the pass that makes it and before the pass that needs it.
Even if each card has a single queue and each send blocks until it is received, the earliest message of the run that is not over is
at the head of both queues, so something always moves.

In this run everything happens as late as the last pass allows: a stage that is faster than its reader makes its messages just in
time, and no buffer waits for longer than it must. A message goes as soon as the pass that makes it is over.

Two stages under 1F1B. Posted two passes ahead, RB0 would stand at the head of d0 and RF0 at the head of d1, and nobody would ever
send. In the run from left to right both ends of a message have one place:

    d0   F0  SF0      F1      SF1  RB0  B0      F2  SF2  RB1  B1      F3  SF3  RB2  B2
              |                |    ^                |    ^                |    ^
              v                v    |                v    |                v    |
    d1       RF0  F0      B0  RF1  SB0  F1      B1  RF2  SB1  F2      B2  RF3  SB2  F3

A pipeline that does not drain repeats the run of one mini-batch. A class is an action of any mini-batch, and its time moves on by
the period with every mini-batch. The times of all classes solve a system of difference constraints, one for each wait. It has a
solution for every period that is at least the largest ratio of seconds to mini-batches on a cycle of waits (Reiter, "Scheduling
parallel computations", 1968). So stretches of every length have the same order, without the actions that they leave out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import COMPUTE, COPIES, KINDS, RECEIVES, REDUCE, SENDS, SUMS, UPDATES, Action
from gpp.program.program import Program, ReduceGroup, adding_stages, channel_of
from gpp.program.steady_state import accumulation, of_length
from gpp.program.waits import MEET, OCCUPY, Waits

TICK_S = 1e-9
"""Times are whole numbers of these, so that rounding cannot order two actions differently in another mini-batch."""

_Wait = tuple[int, int, int]
"""A class that waits, the mini-batches by which it is later, and the least ticks between both beginnings."""

_Entry = tuple[int, int, int, int, Action]
"""Where an action stands in the run: half ticks (a message goes just before the end of its pass), class of the pass, sum or update
that it belongs to, number of the send and its device."""

_LAST = 1 << 60
"""What a device hands to itself is taken over behind all sends of the pass."""


class _IssueBlock(NamedTuple):
    """A pass, a sum, an update or a copy to or from the host, and the sends that follow it."""

    node: int
    sends: list[int]


def in_global_order(program: Program, plan: Plan, seconds: Sequence[float]) -> Program:
    """The program with every receive where one run of the whole program has it.

    Passes, sends, sums and updates of a device keep their order; receives of one channel do, too. A program of several mini-batches
    repeats its middle as before (`gpp.program.steady_state.of_length`).

    Args:
        program: a program of `gpp.program.lower.lower`.
        seconds: for which each action of a label occupies its resource, as `gpp.simulate.longest_path` has it. They decide
            which run it is, not whether it is one. Messages take no time here: a stage that nothing holds back (a frozen tower's)
            would issue those of a slow link any number of mini-batches ahead.

    Raises:
        MalformedProgram: the program cannot run to its end, or holds too few mini-batches to repeat itself.
    """
    waits = program.waits
    took = _ticks(waits, seconds)
    blocks = {device: _blocks(program.actions[device], waits.first[device]) for device in waits.devices}
    class_of, minibatch_of = _classes(program, plan, blocks)
    body = {device: _body(program, own) for device, own in blocks.items()}
    after: list[list[_Wait]] = [[] for _ in range(max(class_of, default=-1) + 1)]
    ticks = [0] * len(after)
    reader = waits.reader
    for device, (start, stop) in body.items():
        own = blocks[device]
        for i in range(start, stop):
            node, sends = own[i]
            ticks[class_of[node]] = took[node]
            users = [reader[send] for send in sends]
            users += [own[i + 1].node] if i + 1 < len(own) else []
            after[class_of[node]] += [(class_of[user], minibatch_of[user] - minibatch_of[node], took[node]) for user in users]
    busy = max((sum(took[block.node] for block in blocks[d][slice(*body[d])]) for d in body), default=0)
    if not all(ticks):
        raise MalformedProgram("the middle of the program does not hold every micro-batch once: it holds too few mini-batches")
    latest, period = _latest(after, _sweep(waits, class_of), busy)

    sent: dict[int, tuple[int, int, int, int]] = {}
    entries: dict[int, list[_Entry]] = {}
    for device, own in blocks.items():
        first, listed = waits.first[device], program.actions[device]
        entries[device] = found = []
        for node, sends in own:
            of = class_of[node]
            begin = 2 * (latest[of] + minibatch_of[node] * period)
            found.append((begin, of, -1, device, listed[node - first]))
            for number, send in enumerate(sends):
                sent[send] = place = begin + 2 * ticks[of] - 1, of, number, device
                found.append((*place, listed[send - first]))
    actions: dict[int, tuple[Action, ...]] = {}
    for device, found in entries.items():
        for _, send, action in _received(waits, device, program.actions[device]):
            half, of, number, maker = sent[send]
            found.append((half, of, number + _LAST if maker == device else number, maker, action))
        found.sort()  # no two of a device have all numbers alike
        actions[device] = tuple([entry[4] for entry in found])
    return replace(program, actions=actions)


def check_any_length(program: Program, plan: Plan) -> None:
    """Prove that stretches of every length (`gpp.program.steady_state.of_length`) have one order on all cards, one queue a card.

    The lists of the steady state, repeated without end, must agree with one order that repeats itself, too. Such an order is a time
    for each class, later than the times of all that stands before it on any device; both ends of a message have one time. What
    fills and drains the pipeline must be in this order.

    Raises:
        MalformedProgram: they do not; names two actions.
    """
    waits = program.waits
    for device in waits.devices:
        next(of_length(program, plan, device, program.minibatches + 1), None)  # refuses a middle that does not repeat itself
    blocks = {device: _blocks(program.actions[device], waits.first[device]) for device in waits.devices}
    class_of, minibatch_of = _classes(program, plan, blocks)
    numbers: dict[tuple[int, int, int], int] = {}
    step_of = [-1] * waits.num_nodes
    for device, own in blocks.items():
        for node, sends in own:
            for number, step in enumerate([node, *sends]):
                # Several devices may share a pass or a sum, but not a send.
                step_of[step] = numbers.setdefault((class_of[node], number, device if number else -1), len(numbers))
                minibatch_of[step] = minibatch_of[node]
    after: list[list[_Wait]] = [[] for _ in numbers]
    lists: list[list[tuple[int, int, int]]] = []
    for device in waits.devices:
        listed, first = program.actions[device], waits.first[device]
        sender = {node: send for node, send, action in _received(waits, device, listed) if action.peer_device != device}
        whole = [(node, sender.get(node, node)) for node in range(first, first + len(listed))]
        own = [(node, step_of[step], minibatch_of[step]) for node, step in whole if step_of[step] >= 0]
        lists.append(own)
        ends = [i + 1 for i, (node, _, _) in enumerate(own) if listed[node - first].kind in UPDATES]
        middle = program.minibatches // 2
        if len(ends) < middle + 2:
            raise MalformedProgram("the program holds fewer updates than mini-batches")
        for i in range(ends[middle], ends[middle + 1]):
            (_, this, before), (_, user, later) = own[i], own[(i + 1) % len(own)]
            if i + 1 < len(own):
                after[this].append((user, later - before, 1))
    latest, period = _latest(after, _sweep(waits, step_of), len(numbers) + 1)
    for own in lists:
        for (a, this, before), (b, user, later) in pairwise(own):
            if latest[this] + before * period >= latest[user] + later * period:
                raise MalformedProgram(
                    f"{waits.text(a)} stands before {waits.text(b)}, and the steady state has their like the other way round: "
                    "cards could wait for each other in a longer stretch"
                )


def _ticks(waits: Waits, seconds: Sequence[float]) -> list[int]:
    """Node -> the ticks for which it occupies its device, at least one."""
    ticks = [round(took / TICK_S) for took in seconds]
    took = [1] * waits.num_nodes
    for does, node, _, label, needs, _ in waits.order:
        if does in (OCCUPY, MEET):
            for member in needs if does == MEET else (node,):
                took[member] += ticks[label]
    return took


def _blocks(actions: Sequence[Action], first: int) -> list[_IssueBlock]:
    out: list[_IssueBlock] = []
    for node, action in enumerate(actions, start=first):
        if action.kind in SENDS:
            out[-1].sends.append(node)
        elif action.kind not in RECEIVES:
            out.append(_IssueBlock(node, []))
    return out


def _classes(program: Program, plan: Plan, blocks: dict[int, list[_IssueBlock]]) -> tuple[list[int], list[int]]:
    """Node of a block -> its class; and -> its mini-batch (0 in a program that drains).

    All members of a sum are one class. So are the devices of a replica that share its passes: they meet in the midst of each.
    """
    waits = program.waits
    class_of, minibatch_of = [-1] * waits.num_nodes, [0] * waits.num_nodes
    numbers: dict[tuple[object, ...], int] = {}
    streams = program.minibatches > 1
    counts = {s: accumulation(plan, s) if streams else program.num_samples + 1 for s in range(len(plan.stages))}
    split = {s: replicas for s, stage in enumerate(plan.stages) if len((replicas := stage.replicas)[0]) > 1}
    first_of = {(s, device): replica[0] for s, replicas in split.items() for replica in replicas for device in replica}
    for device, own in blocks.items():
        listed, first = program.actions[device], waits.first[device]
        updates = 0
        for block in own:
            kind, stage, microbatch = listed[block.node - first][:3]
            leader = waits.meetings.get(block.node, (block.node,))[0]
            what: tuple[object, ...] = (leader,)
            if streams and kind in SUMS:
                # A sum belongs to the update that follows it.
                what, minibatch_of[block.node] = (kind, microbatch, waits.place(leader)[0]), updates
            elif streams and kind in UPDATES:
                what, minibatch_of[block.node] = (device, kind, stage), microbatch
                updates = microbatch + 1
            elif (streams or first_of) and (kind in COMPUTE or kind in COPIES):
                minibatch_of[block.node], rest = divmod(microbatch, counts[stage])
                what = first_of.get((stage, device), device) if kind in COMPUTE else device, kind, stage, rest
            class_of[block.node] = numbers.setdefault(what, len(numbers))
    return class_of, minibatch_of


def _body(program: Program, own: Sequence[_IssueBlock]) -> tuple[int, int]:
    """The range of a device's blocks that every mini-batch of the steady state repeats. A program that drains repeats all."""
    if program.minibatches == 1:
        return 0, len(own)
    ends = [i + 1 for i, block in enumerate(own) if program.waits.action(block.node).kind in UPDATES]
    middle = program.minibatches // 2
    if len(ends) < middle + 2:
        raise MalformedProgram("the program holds fewer updates than mini-batches")
    return ends[middle], ends[middle + 1]


def _sweep(waits: Waits, class_of: Sequence[int]) -> list[int]:
    """Classes from the last of the program to the first, so that most come after those that wait for them."""
    return [number for number in dict.fromkeys(class_of[step[1]] for step in reversed(waits.order)) if number >= 0]


def _latest(after: Sequence[Sequence[_Wait]], sweep: Sequence[int], period: int) -> tuple[list[int], int]:
    """The latest ticks, at most 0, at which the classes of mini-batch 0 can begin, and the period.

    Args:
        after: by class, who waits for it.
        sweep: all classes, those first that others do not wait for.
        period: a lower bound on the ticks between two mini-batches.

    Raises:
        MalformedProgram: no period is long enough.
    """
    while True:
        latest, through = [0] * len(after), [-1] * len(after)
        cycle: list[int] = []
        changed = True
        while changed and not cycle:
            changed = False
            for this in sweep:
                now = latest[this]
                for user, later, ticks in after[this]:
                    if latest[user] + later * period - ticks < now:
                        now = latest[user] + later * period - ticks
                        through[this] = user
                if now < latest[this]:
                    latest[this] = now
                    changed = True
            cycle = _cycle(through) if changed else []
        if not cycle:
            return latest, period
        ticks = minibatches = 0
        for this, user in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            later, least = min(
                ((later, least) for to, later, least in after[this] if to == user), key=lambda w: w[0] * period - w[1]
            )
            ticks, minibatches = ticks + least, minibatches + later
        if minibatches < 1:
            raise MalformedProgram("the actions of a mini-batch wait for each other")
        period = max(-(-ticks // minibatches), period + 1)


def _cycle(through: Sequence[int]) -> list[int]:
    """A cycle of the graph in which every class points to one other, or to none (-1)."""
    state = [0] * len(through)
    for start in range(len(through)):
        path, at = [], start
        while at >= 0 and not state[at]:
            state[at] = start + 1
            path.append(at)
            at = through[at]
        if at >= 0 and state[at] == start + 1 and path:
            return path[path.index(at) :]
    return []


def _received(waits: Waits, device: int, listed: Sequence[Action]) -> list[tuple[int, int, Action]]:
    """Node and action of each receive of a device, and the node of its send."""
    out: list[tuple[int, int, Action]] = []
    count: dict[object, int] = {}
    for node, action in enumerate(listed, start=waits.first[device]):
        if action.kind in RECEIVES:
            channel = channel_of(action, device)
            place = count.get(channel, 0)
            count[channel] = place + 1
            out.append((node, waits.channels[channel].sends[place], action))
    return out


def sums_early(program: Program, plan: Plan, groups: Sequence[ReduceGroup], graph: OpGraph) -> Program:
    """The program with each sum of gradients directly behind the last backward on its device that adds to them.

    On a card a sum goes on while its device computes. So it is begun before the sends of that backward, and before the
    backwards of the device's other stages. Nothing says that this order runs to its end: it has to be proved.
    """
    actions = {}
    for device, own in program.actions.items():
        ends = {action.stage: at for at, action in enumerate(own) if KINDS[action.kind].finishes}
        adding = {g: adding_stages(plan, graph, group, device) for g, group in enumerate(groups) if device in group.devices}
        last = {g: max(ends.get(s, -1) for s in stages) for g, stages in adding.items()}
        behind: dict[int, list[Action]] = defaultdict(list)
        for action in own:
            if action.kind == REDUCE and last.get(action.microbatch, -1) >= 0:
                behind[last[action.microbatch]].append(action)
        moved = {action for found in behind.values() for action in found}
        out: list[Action] = []
        for at, action in enumerate(own):
            if action not in moved:
                out.append(action)
            out += behind.get(at, ())
        actions[device] = tuple(out)
    return replace(program, actions=actions)
