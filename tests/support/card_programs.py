"""Random programs for cards: every schedule, shape and way to share devices; and small changes of the order of their messages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from gpp import GPipe, NoFlush, OneFOneB, Plan, Stash
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph, Variant
from gpp.mechanisms.marks.stage import marks_of
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.program.global_order import in_global_order
from gpp.program.program import Program, ReduceGroup, check_program, reduce_groups
from gpp.program.steady_state import of_length, window
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.forward_only import ForwardOnly
from gpp.simulate.simulator import Costs
from tests.support.graphs import graph, with_weights
from tests.support.host import on_host
from tests.support.problems import Rate, cluster, uneven
from tests.support.programs import lower

RECEIVES, SENDS = ("RF", "RB"), ("SF", "SB")
AHEAD = 2


class Case(NamedTuple):
    """A program for gloo, and what it was made from."""

    program: Program
    plan: Plan
    problem: Problem
    groups: tuple[ReduceGroup, ...]
    words: tuple[str, ...]

    def ordered(self, program: Program | None = None) -> Program:
        """The program (another one of this plan) in the order that cards need."""
        found = self.program if program is None else program
        costs = Costs.of(found, self.plan, self.problem)
        return in_global_order(found, self.plan, costs.seconds)


def case(seed: int) -> Case:
    """Any program: of training, of a pipeline that does not drain, or of an evaluation."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    schedule = rng.choice([OneFOneB(), OneFOneB(), GPipe(), NoFlush()])
    net = _graph(rng, count)
    batch = rng.choice([6, 8, 12, 24] if schedule.drains else [4, 6])
    regime = Regime(holds=schedule.holds) if schedule.drains else Regime(weights=Stash(accumulation=None))
    norm = schedule.drains and rng.random() < 0.3
    prob = Problem(
        graph=net,
        cluster=cluster(6 * count),
        cost=Rate(flop_per_s=rng.choice([1.0, 3.0, 1e4]), fixed_s=rng.choice([0.0, 2e-4])),
        minibatch_size=batch,
        regime=regime,
        global_norm=norm,
    )
    prob = uneven(prob, seed) if rng.random() < 0.3 else prob
    plan = _plan(rng, prob, schedule, count)
    if seed % 3 == 2:
        prob, plan = on_host(random.Random(seed), prob, plan)
    words = [type(schedule).__name__, *("norm" for _ in range(norm)), *("shared devices" for _ in range(plan.shares_devices))]
    words += ["round robin"] if any(s.stride > 1 for s in plan.stages) else []
    words += ["split"] if any(s.stride == 1 and len(s.devices) > 1 for s in plan.stages) else []
    words += ["tensor parallel"] if any(s.devices_per_replica > 1 for s in plan.stages) else []
    words += ["unequal"] if len({s.microbatch_size for s in plan.stages}) > 1 else []
    words += ["skips"] if any(t - s > 1 for s, t in plan.edges) else []
    words += ["frozen"] if any(not plan.runs_backward(s, net) for s in range(count)) else []
    words += ["copies"] if any(marks_of(s).offload for s in plan.stages) else []
    groups = reduce_groups(plan, net)
    if rng.random() < 0.2:
        evaluation = lower(plan, net, ForwardOnly(), rng.randint(1, 3 * batch))
        return Case(evaluation, plan, prob, groups, ("evaluation", *words[1:]))
    minibatches = 1 if schedule.drains else window(plan, AHEAD)
    return Case(lower(plan, net, schedule, minibatches=minibatches, global_norm=norm), plan, prob, groups, tuple(words))


def _graph(rng: random.Random, count: int) -> OpGraph:
    if rng.random() < 0.35:
        edges = [(i, i + 1) for i in range(count - 1)]
    else:
        edges = [(a, b) for b in range(1, count) for a in rng.sample(range(b), k=min(b, rng.randint(1, 3)))]
    net = graph(count, edges, forward=rng.choice([0.1, 1.0, 5.0]))
    net = with_weights(net) if rng.random() < 0.7 else net
    if rng.random() < 0.25:
        net = replace(net, ops=tuple(replace(op, variants=(Variant(degree=2, forward=0.2, backward=0.4),)) for op in net.ops))
    if net.params and count > 1 and rng.random() < 0.2:
        net = _frozen(net, rng.randint(1, count - 1))
    if net.params and count > 1 and rng.random() < 0.2:
        # A weight that two stages read.
        a, b = sorted(rng.sample(range(count), 2))
        ops = [replace(op, params=(*op.params, f"w{a}")) if i == b else op for i, op in enumerate(net.ops)]
        net = replace(net, ops=tuple(ops))
    return net


def _frozen(net: OpGraph, first: int) -> OpGraph:
    """Nothing before operator `first` is trained or differentiated."""
    ops = tuple(replace(op, backward_flops=0.0) if i < first else op for i, op in enumerate(net.ops))
    params = tuple(replace(param, trainable=i >= first) for i, param in enumerate(net.params))
    tensors = tuple(replace(t, differentiable=t.producer >= first) for t in net.tensors)
    return replace(net, ops=ops, params=params, tensors=tensors)


def _plan(rng: random.Random, prob: Problem, schedule: AbstractSchedule, count: int) -> Plan:
    batch = prob.minibatch_size
    whole = [b for b in range(1, batch + 1) if batch % b == 0]
    sizes = [rng.choice(whole if not schedule.drains or rng.random() < 0.8 else range(1, batch + 1)) for _ in range(count)]
    sizes = [sizes[0]] * count if rng.random() < 0.4 else sizes
    counts = [rng.choice([r for r in (1, 1, 2, 3) if r <= b or (batch % b == 0 and batch // b % r == 0)]) for b in sizes]
    turns = [
        r > 1 and batch % b == 0 and batch // b % r == 0 and (r > b or rng.random() < 0.5)
        for r, b in zip(counts, sizes, strict=True)
    ]
    parts, sharing = [(1 << op, r) for op, r in enumerate(counts)], [IN_TURN if turn else None for turn in turns]
    if prob.graph.ops[0].variants and not any(readers.bit_count() > 1 for readers in prob.graph.readers.values()):
        return _split(make_plan(prob, "random", [(op, 2 * r) for op, r in parts], sizes, ordered=True), rng)
    if not schedule.drains:
        return make_plan(prob, "random", parts, sizes, sharing=sharing, ordered=True)
    placement = None
    if count > 1 and not any(turns) and rng.random() < 0.4:
        devices = range(max(*counts, rng.randint(1, count - 1)))
        placement = [tuple(sorted(rng.sample(devices, r))) for r in counts]
        used = sorted({device for own in placement for device in own})
        placement = [tuple(used.index(device) for device in own) for own in placement]
    k = rng.choice([1, 1, 1, 2])
    return make_plan(
        prob, "random", parts, sizes, k=k, ordered=True, chain=rng.random() < 0.3, placement=placement, sharing=sharing
    )


def _split(plan: Plan, rng: random.Random) -> Plan:
    """The same devices, some stages with replicas of two that share each pass."""
    stages = []
    for stage in plan.stages:
        degree = 2 if rng.random() < 0.7 else 1
        devices = stage.devices if degree == 2 or len(stage.devices) <= stage.microbatch_size else stage.devices[:1]
        placed = replace(stage, devices=devices)
        stages.append(placed.having(TensorParallel(degree=degree)) if degree > 1 else placed)
    used = sorted({device for stage in stages for device in stage.devices})
    stages = [replace(stage, devices=tuple(used.index(device) for device in stage.devices)) for stage in stages]
    return replace(plan, stages=tuple(stages))


def stretch(program: Program, plan: Plan, minibatches: int) -> Program:
    """So many mini-batches of a pipeline that does not drain, as one list a device."""
    actions = {device: tuple(of_length(program, plan, device, minibatches)) for device in program.actions}
    return Program(num_samples=plan.minibatch_size * minibatches, actions=actions)


def perturbed(case: Case, program: Program, rng: random.Random) -> Program | None:
    """The program with some messages issued elsewhere, still one that runs where nothing blocks; None if none was found."""
    for _ in range(8):
        actions = {device: list(own) for device, own in program.actions.items()}
        for _ in range(rng.choice([1, 2, 4, 8])):
            own = actions[rng.choice(sorted(actions))]
            places = [i for i, a in enumerate(own) if a.kind in (*RECEIVES, *SENDS)]
            if places:
                at = rng.choice(places)
                distance = rng.choice([1, 1, 2, 4, 16, 64])
                to = max(0, at - distance) if own[at].kind in RECEIVES and rng.random() < 0.7 else at + distance
                own.insert(to, own.pop(at))
        found = replace(program, actions={device: tuple(own) for device, own in actions.items()})
        try:
            check_program(found, case.groups)
        except MalformedProgram:
            continue
        if found.actions != program.actions:
            return found
    return None
