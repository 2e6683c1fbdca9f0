"""Pipelines that do not drain: one program of a few mini-batches stands for a stretch of any length.

Once the pipeline is full, a device does the same for every mini-batch, with other numbers: micro-batches, samples and updates
move on by those of one mini-batch. So a program of some mini-batches (`window`) holds all there is to know: a longer stretch
repeats its middle, a shorter one leaves out what belongs to mini-batches that do not come.

The passes of the first of three stages, with two micro-batches a mini-batch and a window of 12:

             fill             steady                   the middle                       drain
    12       F0 F1 B0 F2 B1 U0 | F3 B2 F4 B3 U1 | ... | F15 B14 F16 B15 U7 | ... U10 | F23 B22 B23 U11

    14       the same up to U7 | F17 B16 F18 B17 U8 | F19 B18 F20 B19 U9 | what follows, 2 mini-batches later: ... U12 | F27 ...
                                 the middle, 1 and 2 mini-batches later

     3       F0 F1 B0 F2 B1 U0 | F3 B2 F4 B3 U1 | F5 B4 B5 U2       F6 is left out: it is of the fourth mini-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpp.errors import InvalidPlan, MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.mechanism import parts
from gpp.plan.plan import Plan
from gpp.program.added import AbstractLowering, lowerings
from gpp.program.kinds import KINDS, SUMS, UPDATES, Action
from gpp.program.program import Program
from gpp.weights.base import AbstractWeights

SETTLE = 8
"""Mini-batches of a program beyond those that fill and empty the pipeline: enough to see its pace, and to show some."""


DEEPEST = 4
"""Micro-batches in flight for each stage, at most. No plan has use for more, and the program of a stretch grows with them."""


def window(plan: Plan, ahead: int) -> int:
    """The least number of mini-batches of a program whose middle repeats.

    Args:
        ahead: compute actions by which receives are posted ahead.
    """
    places = [plan.position(s) for s in range(len(plan.stages))]
    span = max((part.span(plan) for part in lowerings(plan)), default=0)
    longest = max(-(-((span or place.warmup + 1) + ahead) // place.accumulation) for place in places)
    return 2 * longest + SETTLE


def fill(plan: Plan) -> int:
    """Mini-batches that it takes until the pipeline is full, and again until it is empty."""
    places = [plan.position(s) for s in range(len(plan.stages))]
    return max(-(-place.warmup // place.accumulation) for place in places)


def accumulation(plan: Plan, stage: int) -> int:
    """Micro-batches of a stage between two updates, over all its replicas."""
    return -(-plan.minibatch_size // plan.stages[stage].microbatch_size)


def of_length(program: Program, plan: Plan, device: int, minibatches: int) -> Iterator[Action]:
    """A device's actions in a stretch of so many mini-batches.

    Args:
        program: a program of at least `window` mini-batches; or of one, and then every stretch has one.

    Raises:
        MalformedProgram: it does not repeat itself.
    """
    actions, known = program.actions[device], program.minibatches
    counts = {s: accumulation(plan, s) for s in plan.work_of_device[device]}
    if minibatches == known:
        return iter(actions)
    if known == 1:
        raise MalformedProgram(f"a program of one mini-batch has no stretch of {minibatches}")
    if minibatches < known:
        return iter(_shorter(actions, counts, minibatches))
    return _longer(actions, counts, plan.minibatch_size, known, minibatches)


def _shorter(actions: Sequence[Action], counts: Mapping[int, int], minibatches: int) -> list[Action]:
    out: list[Action] = []
    sums: list[int] = []
    """Places of the sums that belong to the next update. Receives may stand between them."""
    for action in actions:
        if action.kind in SUMS:
            sums.append(len(out))
            out.append(action)
        elif KINDS[action.kind].of_minibatch:
            if action.microbatch < minibatches:
                out.append(action)
            elif action.kind in UPDATES:
                for place in reversed(sums):
                    del out[place]
            sums = [] if action.kind in UPDATES else sums
        elif action.microbatch < minibatches * counts[action.stage]:
            out.append(action)
    return out


def _longer(
    actions: Sequence[Action], counts: Mapping[int, int], minibatch_size: int, known: int, minibatches: int
) -> Iterator[Action]:
    middle = known // 2
    updates = [(i + 1, action.stage) for i, action in enumerate(actions) if action.kind in UPDATES]
    # Of several stages, each with updates of its own, one says where a mini-batch ends.
    ends = [i for i, stage in updates if stage == updates[-1][1]]
    before, start, stop, after = ends[middle - 1], ends[middle], ends[middle + 1], ends[middle + 1 :]
    body = actions[start:stop]
    if not after or [moved(a, counts, minibatch_size, 1) for a in actions[before:start]] != list(body):
        raise MalformedProgram("the middle of the program does not repeat itself: it holds too few mini-batches")
    yield from actions[:stop]
    for by in range(1, minibatches - known + 1):
        for action in body:
            yield moved(action, counts, minibatch_size, by)
    for action in actions[stop:]:
        yield moved(action, counts, minibatch_size, minibatches - known)


def moved(action: Action, counts: Mapping[int, int], minibatch_size: int, by: int) -> Action:
    """The action, `by` mini-batches later.

    >>> moved(Action("SF", 0, 1, 1, 1, 2, 4), counts={0: 2}, minibatch_size=4, by=10).text(device=0)
    's0.SF21>s1.d1[42:44]@d0'
    """
    kind, stage, microbatch, peer_stage, peer_device, lo, hi = action
    if kind in SUMS:
        return action
    if KINDS[kind].of_minibatch:
        return Action(kind, stage, microbatch + by, peer_stage, peer_device, lo, hi)
    samples = by * minibatch_size if peer_stage >= 0 else 0
    return Action(kind, stage, microbatch + by * counts[stage], peer_stage, peer_device, lo + samples, hi + samples)


def check_stream(plan: Plan, graph: OpGraph, weights: AbstractWeights) -> None:
    """Refuse a plan that cannot run without drains.

    Raises:
        InvalidPlan: a device holds several stages without periods of their own, or a micro-batch does not divide the mini-batch.
        InvalidConfig: the weight policy cannot hold in it.
    """
    if plan.shares_devices and not plan.periodic:
        raise InvalidPlan(
            "a device holds several stages, whose updates a pipeline without drains would have to interleave. "
            "Fix: one stage a device, or strategy/weights=flush"
        )
    for part in lowerings(plan):
        part.check_stream(plan, graph, weights)
    most = DEEPEST * len(plan.stages) * max(stage.unit for stage in plan.stages)
    for s, stage in enumerate(plan.stages):
        if stage.in_flight > max(most, plan.minibatch_size):
            raise InvalidPlan(
                f"stage {s}: {stage.in_flight} samples in flight are more than a pipeline of {len(plan.stages)} stages can use, "
                f"{max(most, plan.minibatch_size)}; its program would be as long"
            )
        if plan.minibatch_size % stage.microbatch_size:
            raise InvalidPlan(
                f"stage {s}: micro-batch {stage.microbatch_size} must divide the mini-batch, {plan.minibatch_size}, in a pipeline "
                "that does not drain between two of them"
            )
    for part in parts((weights.mechanism,), "lowering", "LOWERING", AbstractLowering):
        part.check_stream(plan, graph, weights)
