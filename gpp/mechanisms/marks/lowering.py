"""Copies to the host and back, in the program of a plan and in its step's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.copies import copy_costs
from gpp.mechanisms.marks.kinds import COPY_IN, COPY_OUT
from gpp.mechanisms.marks.stage import marks_of
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.added import AbstractLowering, CopyCosts
from gpp.program.kinds import KINDS, SENDS
from gpp.program.program import Program, Task


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
        return copy_costs(plan, graph, cluster, bills)


LOWERING = MarksLowering()


def _copying(plan: Plan, program: Program) -> set[int]:
    """The stages that copy: none in an evaluation, which holds nothing for a backward."""
    trains = any(KINDS[action.kind].finishes for own in program.actions.values() for action in own)
    return {s for s, stage in enumerate(plan.stages) if marks_of(stage).offload} if trains else set()


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
