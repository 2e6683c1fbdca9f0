"""`strategy.replicas=round_robin`: the stages of a plan whose replicas take turns, and problems in which none could."""

from __future__ import annotations

from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.mechanisms.round_robin.stage import IN_TURN, RoundRobin
from gpp.plan.choice import AbstractSharing
from gpp.plan.in_flight import in_flight_samples
from gpp.plan.plan import Plan


class RoundRobinSharing(AbstractSharing):
    """Turns where the number of replicas divides a mini-batch's micro-batches; nowhere if whole ones do not fit the memory."""

    def check(self, problem: Problem, size: int | None) -> None:
        if size != problem.minibatch_size:
            return
        half = max(problem.minibatch_size // 2, 1)
        fix = "strategy.weights.accumulation=2" if problem.microbatch_size is None else f"microbatch_size={half}"
        rule = "one micro-batch a mini-batch leaves nothing to take in turn"
        fix = f"set {fix}, so that the replicas divide the micro-batches of a mini-batch, or {RoundRobin.without}"
        raise InvalidConfig("strategy.replicas", RoundRobin.name, rule, fix)

    def chosen(self, plan: Plan, problem: Problem) -> Plan:
        turned, split = [], []
        for s, stage in enumerate(plan.stages):
            count, replicas = -(-plan.minibatch_size // stage.microbatch_size), len(stage.replicas)
            turned.append(stage.having(IN_TURN) if replicas > 1 and count % replicas == 0 else stage.without(RoundRobin))
            split += [s] if count % replicas else []
        if all(stage.stride == 1 for stage in turned):
            return _noted(plan, split)
        shapes = [(stage.microbatch_size, stage.k, stage.stride) for stage in turned]
        drained = plan.minibatch_size if problem.regime.weights.flushes else None
        held = in_flight_samples(shapes, plan.edges, drained, problem.regime.holds)
        stages = tuple(replace(stage, in_flight=samples) for stage, samples in zip(turned, held, strict=True))
        found = replace(plan, stages=stages)
        needs = found.device_memory(problem, dict(enumerate(held)))
        if any(need > problem.cluster.devices[device].memory_bytes for device, need in needs.items()):
            line = "replicas split every micro-batch: whole ones in turn would need more memory than a device has"
            return replace(plan, explanation=(*plan.explanation, line))
        return _noted(found, split)


SHARING = RoundRobinSharing()


def _noted(plan: Plan, split: list[int]) -> Plan:
    if not split:
        return plan
    which = f"stage{'s' * (len(split) > 1)} {', '.join(map(str, split))}"
    line = f"{which}: replicas split every micro-batch, as their number does not divide those of a mini-batch"
    return replace(plan, explanation=(*plan.explanation, line))
