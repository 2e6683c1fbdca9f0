"""A plan as the chain that other systems run: every boundary carries all tensors that later stages still need.

    stages   0: a ──► 1: b (reads a) ──► 2: c (reads a and b)
    boundaries  0|1: a       1|2: a, b

Those systems hand a stage the output of the one before it and nothing else, so the output of a finished branch travels
through the stages of the others. Stages in a DAG do not have this cost; `as_chain` puts it on the bill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.cost.problem import Problem
from gpp.errors import UnsupportedPlan
from gpp.graph.op_graph import Op, OpGraph, Tensor, mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan

RELAY = "relay"
"""The kind of an operator that hands a tensor on and computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChain:
    """The tensors that cross the boundaries of a plan run as a chain, and the places of its stages.

    Args:
        carried: boundary s, between stages s and s + 1 -> names of the tensors that cross it, in the order of the
            graph.
        devices: rank -> device, in the order of the devices' first stages.
        stages: rank -> its stages, ascending.
    """

    carried: tuple[tuple[str, ...], ...]
    devices: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan, graph: OpGraph) -> PlanChain:
        """The chain of the plan's stages in their topological order."""
        reach = reaches(plan, graph)
        boundaries = range(len(plan.stages) - 1)
        devices = device_order(plan)
        return cls(
            carried=tuple(tuple(name for name, (s, t) in reach.items() if s <= boundary < t) for boundary in boundaries),
            devices=devices,
            stages=tuple(plan.stages_of_device[device] for device in devices),
        )

    @property
    def num_stages(self) -> int:
        return len(self.carried) + 1

    @property
    def rank_of(self) -> dict[int, int]:
        """Stage -> rank."""
        return {stage: rank for rank, stages in enumerate(self.stages) for stage in stages}

    def incoming(self, stage: int) -> tuple[str, ...]:
        """Tensors that stage `stage` receives from the one before it."""
        return self.carried[stage - 1] if stage else ()

    def outgoing(self, stage: int) -> tuple[str, ...]:
        """Tensors that stage `stage` hands to the next one."""
        return self.carried[stage] if stage + 1 < self.num_stages else ()


def refuse_unequal_microbatches(plan: Plan, runner: str, instead: str = "") -> None:
    """Refuse micro-batches of several sizes, which no engine of chains runs.

    Args:
        runner: the setting that chooses the engine, as `export=torch`; here and below.
        instead: what runs the plan, as `engine=distributed`; here and below.

    Raises:
        UnsupportedPlan: names the stage.
    """
    size = plan.stages[0].microbatch_size
    if plan.minibatch_size % size:
        raise UnsupportedPlan(
            f"micro-batches of {size} samples leave a smaller one over from {plan.minibatch_size}, and {runner} has one size for "
            "all. Fix: a microbatch_size that divides minibatch_size"
        )
    for s, stage in enumerate(plan.stages):
        if stage.microbatch_size != size:
            raise UnsupportedPlan(
                f"stage {s} runs micro-batches of {stage.microbatch_size} samples and stage 0 of {size}: {runner} has one size for "
                f"all. Fix: strategy.planner.per_stage=false and loss.scope=microbatch{instead and f', or {instead}'}"
            )


def refuse_replicas(plan: Plan, runner: str, instead: str = "") -> None:
    """Refuse stages of several devices.

    Raises:
        UnsupportedPlan: names the stage.
    """
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise UnsupportedPlan(
                f"stage {s} has {len(stage.devices)} devices, and {runner} gives a stage one device. "
                f"Fix: strategy.planner.replication=false{instead and f', or {instead}'}"
            )


def refuse_early_loss(plan: Plan, losses: Mapping[str, int], runner: str, instead: str = "") -> None:
    """Refuse a loss before the last stage: engines of chains begin their backward there.

    Args:
        losses: name -> the operator that makes it.

    Raises:
        UnsupportedPlan: another stage makes a loss; names both.
    """
    owner, last = plan.stage_of_op, len(plan.stages) - 1
    for name, op in sorted(losses.items()):
        if owner[op] != last:
            raise UnsupportedPlan(
                f"stage {owner[op]} makes {name}, but stage {last} is the chain's last, and {runner} takes the loss from there"
                f"{instead and f'. Fix: {instead}'}"
            )


def device_order(plan: Plan) -> tuple[int, ...]:
    """Devices by their first stages: the ranks of a chain."""
    return tuple(dict.fromkeys(stage.devices[0] for stage in plan.stages))


def reaches(plan: Plan, graph: OpGraph) -> dict[str, tuple[int, int]]:
    """Name of each tensor that leaves its stage -> that stage and the last one that reads it, in the graph's order."""
    owner, out = plan.stage_of_op, {}
    for tensor in graph.tensors:
        source, last = owner[tensor.producer], max(owner[reader] for reader in tensor.consumers)
        if last > source:
            out[tensor.name] = source, last
    return out


def as_chain(plan: Plan, problem: Problem) -> tuple[Plan, Problem]:
    """The plan with edges between neighbours alone, and the problem in which stages hand on what only later ones read.

    Each such stage gets an operator for each tensor that it hands on: it computes nothing, and receives, holds and sends the
    tensor, and its gradient on the way back. So every prediction has what carrying costs.

    Raises:
        UnsupportedPlan: a tensor passes a stage, and mechanisms say something of stages: they name operators by number.
    """
    relays = _relays(plan, problem.graph)
    chained = tuple((s, s + 1) for s in range(len(plan.stages) - 1))
    if not any(relays) and set(plan.edges) == set(chained):
        return plan, problem
    if plan.mechanisms:
        raise UnsupportedPlan(
            f"a tensor passes a stage that does not read it, and stages have {', '.join(sorted(plan.mechanisms))}: it cannot be "
            "carried there. Fix: plan without it, or a plan whose edges join neighbours"
        )
    graph, origin, parts = _with_relays(plan, problem.graph, relays)
    cost = RelayCost(problem.cost, problem.graph, origin)
    apart = mask_of(i for i, op in enumerate(origin) if op is not None and problem.minibatch_ops >> op & 1)
    longer = replace(problem, graph=graph, cost=cost, minibatch_ops=apart)
    made = make_plan(
        longer,
        plan.planner,
        [(mask, len(stage.devices)) for mask, stage in zip(parts, plan.stages, strict=True)],
        [stage.microbatch_size for stage in plan.stages],
        k=[stage.k for stage in plan.stages],
        chain=True,
        ordered=True,
        placement=[stage.devices for stage in plan.stages],
    )
    # A stage whose tensors only later ones read has an edge to those; the way there is the chain's own.
    return replace(made, edges=chained, search_s=plan.search_s, explanation=plan.explanation), longer


def _relays(plan: Plan, graph: OpGraph) -> list[list[str]]:
    """For each stage the tensors that it is handed for later ones and hands on."""
    out: list[list[str]] = [[] for _ in plan.stages]
    for name, (source, last) in reaches(plan, graph).items():
        for s in range(source + 1, last):
            out[s].append(name)
    return out


def _with_relays(plan: Plan, graph: OpGraph, relays: list[list[str]]) -> tuple[OpGraph, tuple[int | None, ...], list[int]]:
    """The graph, stage by stage; for each of its operators its number before, None of one that hands on; the stages' masks."""
    origin: list[int | None] = []
    relay_of: dict[tuple[str, int], int] = {}
    parts = []
    for s, stage in enumerate(plan.stages):
        first = len(origin)
        origin += stage.ops
        for name in relays[s]:
            relay_of[name, s] = len(origin)
            origin.append(None)
        parts.append(mask_of(range(first, len(origin))))
    number = {op: i for i, op in enumerate(origin) if op is not None}
    names = {i: f"{RELAY}.{name}.{s}" for (name, s), i in relay_of.items()}
    ops = [graph.ops[op] if op is not None else Op(name=names[i], kind=RELAY, num_kernels=0) for i, op in enumerate(origin)]
    tensors: list[Tensor] = []
    for tensor in graph.tensors:
        source, readers = plan.stage_of_op[tensor.producer], defaultdict[int, list[int]](list)
        for reader in tensor.consumers:
            readers[plan.stage_of_op[reader]].append(number[reader])
        last, producer = max(readers), number[tensor.producer]
        own = [*readers.pop(source, ()), *readers.pop(source + 1, ())]
        for s in range(source + 1, max(last, source + 1) + 1):
            relay = relay_of.get((tensor.name, s))
            taken = tuple(sorted([*own, *([] if relay is None else [relay])]))
            called = tensor.name if s == source + 1 else f"{tensor.name}.{s - 1}"
            tensors.append(replace(tensor, name=called, producer=producer, consumers=taken))
            if relay is None:
                break
            producer, own = relay, readers.pop(s + 1, [])
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors)), tuple(origin), parts


@dataclass(frozen=True, slots=True)
class RelayCost(AbstractDerived):
    """The times of operators among which some hand on a tensor, which takes no time beside its messages.

    Args:
        known: the graph without them.
        origin: for each operator its number there; None of one that hands on.
    """

    known: OpGraph
    origin: tuple[int | None, ...]

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        found = self.cost.op_times(self.known, samples, device, degree)
        return OpTimes(
            forward_s=self._spread(found.forward_s),
            backward_s=self._spread(found.backward_s),
            weight_s=self._spread(found.weight_s),
        )

    def whole_ops(self, graph: OpGraph, device: Device) -> tuple[int, ...]:
        whole = set(self.cost.whole_ops(self.known, device))
        return tuple(i for i, op in enumerate(self.origin) if op in whole)

    def _spread(self, seconds: np.ndarray) -> np.ndarray:
        return np.array([0.0 if op is None else seconds[op] for op in self.origin])
