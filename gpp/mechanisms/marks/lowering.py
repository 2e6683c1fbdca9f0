"""Copies to the host and back, in the program of a plan and in its step's time.

Messages of a link that runs over the host's (`Link.over_host`) go first, so their own times stay as they are, and the copies of the
same direction are charged with their bytes: each with an equal part of what its device sends, or receives, in a mini-batch. A link
is full duplex: what goes out does not slow down what comes in.

Source: vPipe gives activations between hosts priority over swapped ones on the link that they share (IEEE TPDS 33(3), 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.kinds import COPY_IN, COPY_OUT
from gpp.mechanisms.marks.stage import marks_of
from gpp.plan.plan import Plan
from gpp.program.added import AbstractLowering, CopyCost, CopyCosts
from gpp.program.kinds import KINDS, SENDS, Action, Resource
from gpp.program.lower import communication
from gpp.program.program import Program, Task
from gpp.simulate.messages import message_rates


class MarksLowering(AbstractLowering):
    """Behind each forward what it made goes to the host; before each backward it comes back."""

    def lower(self, plan: Plan, graph: OpGraph, program: Program) -> Program:
        copying = _copying(plan, program)
        if not copying:
            return program
        actions = dict(program.actions)
        for device, stages in plan.stages_of_device.items():
            if own := copying.intersection(stages):
                actions[device] = _with_copies(actions[device], own, drains=program.minibatches == 1)
        return replace(program, actions=actions)

    def due(self, plan: Plan, graph: OpGraph, program: Program) -> Mapping[int, Sequence[Action]]:
        out: dict[int, list[Action]] = defaultdict(list)
        for s in _copying(plan, program):
            stage = plan.stages[s]
            for m in range(-(-program.num_samples // stage.microbatch_size)):
                for device in stage.takers(m):
                    out[device] += [Action(COPY_OUT, s, m), Action(COPY_IN, s, m)]
        return out

    def copies(self, plan: Plan, graph: OpGraph, cluster: Cluster, bills: Sequence[StageCost]) -> CopyCosts:
        # A copy takes `Device.host_copy_s` of its bytes: latency, then bytes at the link's bandwidth over those who share it.
        copying = [s for s, stage in enumerate(plan.stages) if marks_of(stage).offload]
        if not copying:
            return {}
        beside = _beside(plan, graph, cluster, copying)
        out: dict[tuple[Resource, int], CopyCost] = {}
        for s in copying:
            for way in (Resource.COPY_OUT, Resource.COPY_IN):
                seconds = [
                    max(cluster.devices[d].host_copy_s(moved + beside.get((way, d), 0.0)) for d in plan.stages[s].devices)
                    for moved in (bills[s].moved_bytes, bills[s].last_moved_bytes)
                ]
                out[way, s] = CopyCost(seconds[0], bills[s].moved_bytes, seconds[1], bills[s].last_moved_bytes)
        return out


LOWERING = MarksLowering()


def _beside(plan: Plan, graph: OpGraph, cluster: Cluster, copying: Sequence[int]) -> Mapping[tuple[Resource, int], float]:
    """(Channel, device) -> bytes of messages over the same link and in the same direction, for each of its copies."""
    if not any(link.over_host for link in cluster.wiring.every):
        return {}
    rates = message_rates(plan, graph)
    moved: dict[tuple[Resource, int], float] = defaultdict(float)
    _, sends = communication(plan, graph, plan.minibatch_size)
    for (device, _), messages in sends.items():
        for kind, stage, _, peer_stage, peer, lo, hi in messages:
            if peer != device and cluster.link(device, peer).over_host:
                per_sample, fixed = rates[KINDS[kind].direction, stage, peer_stage]
                moved[Resource.COPY_OUT, device] += per_sample * (hi - lo) + fixed
                moved[Resource.COPY_IN, peer] += per_sample * (hi - lo) + fixed
    copies: dict[int, int] = defaultdict(int)
    for s in copying:
        stage = plan.stages[s]
        for device in stage.devices:
            copies[device] += -(-plan.minibatch_size // stage.microbatch_size) // stage.stride
    return {(way, device): total / copies[device] for (way, device), total in moved.items() if copies.get(device)}


def _copying(plan: Plan, program: Program) -> set[int]:
    """The stages that copy: none in an evaluation, which holds nothing for a backward."""
    return {s for s, stage in enumerate(plan.stages) if marks_of(stage).offload} if program.trains else set()


def _with_copies(actions: Sequence[Action], copying: AbstractSet[int], *, drains: bool) -> tuple[Action, ...]:
    """A device's actions with copies behind its passes, and behind what these send."""
    passes = [a for a in actions if KINDS[a.kind].computes and not KINDS[a.kind].of_minibatch]
    copies = _copies([Task(a.stage, a.kind, a.microbatch) for a in passes], copying, drains=drains)
    out, waiting = list[Action](), list[Action]()
    for action in actions:
        if action.kind not in SENDS:
            out += waiting
            waiting = []
        out.append(action)
        waiting += copies.get(Task(action.stage, action.kind, action.microbatch), ())
    return (*out, *waiting)


def _copies(order: Sequence[Task], copying: AbstractSet[int], *, drains: bool) -> dict[Task, list[Action]]:
    """The copies to start behind each pass.

    What a forward made goes at once. It comes back while the pass in front of its backward runs, as far as two micro-batches'
    copies at a time allow it (`gpp.program.copies`): a fetch stands behind the last backward of its stage and behind its own copy
    out, or, for the first backward, in front of the pass before it. Where backwards follow each other nothing goes, so from the
    third on a fetch stands in front of the backward before its own.

    Args:
        order: the passes of a device.
        copying: the stages whose copies are meant.
        drains: whether backwards follow each other before the end; else every mini-batch has the order of the steady state, also
            where the pipeline drains at last, as stretches of other lengths are made of it.
    """
    out: dict[Task, list[Action]] = defaultdict(list)
    gone: dict[tuple[int, int], int] = {}
    """Stage and micro-batch -> the place of its forward."""
    latest: dict[int, int] = {}
    """Stage -> the place of its last forward."""
    used: dict[int, list[int]] = defaultdict(list)
    """Stage -> the places of its passes that use what came back: backwards, or their first parts."""
    for place, task in enumerate(order):
        stage, kind, microbatch = task
        if stage in copying and KINDS[kind].holds:
            out[task].append(Action(COPY_OUT, stage, microbatch))
            gone[stage, microbatch] = latest[stage] = place
        if stage in copying and KINDS[kind].returns:
            before = used[stage][-2 if drains else -1 :] or [place - 2]
            free = before[0] if latest[stage] < before[0] else before[-1]
            out[order[max(free, gone[stage, microbatch])]].append(Action(COPY_IN, stage, microbatch))
            used[stage].append(place)
    return out
