"""The reasons for a plan's time, and changes that would reduce it.

Every number follows from the simulated timeline, from simulating a changed plan, or from planning a changed
problem again; no number follows from a rule of thumb.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from gpp.analysis.explain.idle import DeviceTime, Reason, behind_s, device_times, idle_shares
from gpp.analysis.explain.order import OrderGap, order_gap
from gpp.analysis.explain.single import single_changes
from gpp.analysis.explain.what_if import MORE_MEMORY, PlanShape, WhatIf, reliefs, replanned
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.program.kinds import COMPUTE, KINDS
from gpp.program.lower import communication
from gpp.simulate.messages import message_rates
from gpp.strategy import Strategy
from gpp.timeline import Timeline

AS_SLOW = 0.98
"""Stages whose load is at least this share of the largest load are bottlenecks."""

LIMITING = 1.02
"""Memory limits a plan if planning with twice the memory gives more than this speed-up."""

ORDER_S = 1.0
"""Deterministic seconds that the search for a better order may take."""

Kind = Literal["compute", "communication", "all-reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The load of a device of a stage in one step, in seconds.

    Args:
        compute_s: time of all its forwards and backwards.
        runtime_s: time that the runtime takes for them and their messages.
        transfer_s: time of its busiest link for all micro-batches; it runs beside the compute.
        all_reduce_s: time of gradient all-reduce and update, which come after.
        memory_share: used share of the fullest device's memory.
    """

    stage: int
    compute_s: float
    transfer_s: float
    all_reduce_s: float
    memory_share: float
    runtime_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The load as a lower bound: no step is shorter than the load of any stage."""
        return max(self.busy_s, self.transfer_s) + self.all_reduce_s

    @property
    def busy_s(self) -> float:
        """Seconds that its passes take the device."""
        return self.compute_s + self.runtime_s

    @property
    def kind(self) -> Kind:
        """The kind of the largest part of the load."""
        if self.all_reduce_s > max(self.busy_s, self.transfer_s):
            return "all-reduce"
        return "communication" if self.transfer_s > self.busy_s else "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """explanation.json: the reasons for `iteration_s`, and changes that would reduce it.

    Args:
        iteration_s, bubble_fraction: predicted values.
        bound: a time that no plan for this problem can beat; None where it is not known.
        loads: loads of every stage, in the plan's order.
        bottlenecks: the stages with the largest load, and those within 2 % of it, largest first.
        devices: the time of each device in the step, by use.
        idle: share of all device time by reason; adds up to the bubble.
        order: the distance of the schedule from the best order of its passes; None for a pipeline that does not drain.
        reliefs: of a plan that was given, the single changes that help most; then plans with changed bottlenecks; simulated, each
            best first.
        alternatives: other plans for the same problem, best first.
        sensitivities: the best plans for changed clusters.
        left_out: changes that were not planned again, and why.
        replanning_s: seconds spent on planning again.
    """

    iteration_s: float
    bubble_fraction: float
    bound: Bound | None
    loads: tuple[StageLoad, ...]
    bottlenecks: tuple[int, ...]
    devices: tuple[DeviceTime, ...]
    idle: dict[Reason, float]
    order: OrderGap | None = None
    reliefs: tuple[WhatIf, ...] = ()
    alternatives: tuple[WhatIf, ...] = ()
    sensitivities: tuple[WhatIf, ...] = ()
    left_out: tuple[str, ...] = ()
    replanning_s: float = 0.0

    @property
    def bottleneck(self) -> StageLoad:
        """The largest load."""
        return self.loads[self.bottlenecks[0]]

    @property
    def idle_s(self) -> dict[str, float]:
        """Seconds of a step for which a device waits, a mean over the devices: by reason, and what filling and draining take."""
        seconds: dict[str, float] = {reason: share * self.iteration_s for reason, share in self.idle.items()}
        return {**seconds, "fill_and_drain": seconds["fill"] + seconds["drain"]}

    @property
    def memory_speedup(self) -> float | None:
        """The speed-up from twice the memory, if it is above 2 %, so that memory limits the plan; else None."""
        found = next((what.speedup for what in self.sensitivities if what.change == MORE_MEMORY), None)
        return found if found is not None and found > LIMITING else None


def explain(
    plan: Plan,
    predicted: Timeline,
    problem: Problem,
    strategy: Strategy,
    *,
    bound: Bound | None,
    known: tuple[WhatIf, ...] = (),
    budget_s: float = 5.0,
    replan: bool = True,
) -> Explanation:
    """The explanation of a plan.

    Args:
        predicted: the prediction, with events.
        known: other strategies' plans for the problem, to be listed among the alternatives.
        budget_s: seconds after which nothing is planned again.
        replan: False for a plan that the strategy did not make: its reliefs are simulated, and nothing is planned.
    """
    devices = device_times(predicted, plan.stage_of_device, plan.beside_s(strategy.posed(problem)))
    loads = stage_loads(plan, predicted, problem, strategy)
    most = max(load.seconds for load in loads)
    bottlenecks = sorted((load.stage for load in loads if load.seconds >= AS_SLOW * most), key=lambda s: (-loads[s].seconds, s))
    metrics = predicted.metrics
    again = replanned(plan, metrics.iteration_s, problem, strategy, budget_s=budget_s if replan else 0.0)
    # A planner has tried such changes to its own plan.
    seconds = [load.seconds for load in loads]
    single = () if replan else tuple(w for w, _ in single_changes(plan, metrics.iteration_s, problem, strategy, seconds))
    known_shapes = {one.shape.digest for one in single if one.shape is not None}
    relieved = reliefs(plan, metrics.iteration_s, problem, strategy, bottlenecks)
    left_out = again.left_out if replan else ("everything that needs planning: this plan was given, or planned for another engine",)
    return Explanation(
        iteration_s=metrics.iteration_s,
        bubble_fraction=metrics.bubble_fraction,
        bound=bound,
        loads=loads,
        bottlenecks=tuple(bottlenecks),
        devices=devices,
        idle=idle_shares(devices, metrics.iteration_s),
        order=order_gap(plan, problem, strategy, metrics.iteration_s, min(budget_s, ORDER_S)),
        reliefs=(*single, *(one for one in relieved if one.shape is None or one.shape.digest not in known_shapes)),
        alternatives=_distinct([*known, *again.alternatives], PlanShape.of(plan).digest),
        sensitivities=again.sensitivities,
        left_out=left_out,
        replanning_s=again.took_s,
    )


def stage_loads(plan: Plan, predicted: Timeline, problem: Problem, strategy: Strategy) -> tuple[StageLoad, ...]:
    """The load of every stage, on its busiest device and link."""
    # Events are summed by stage, not by device: a device may run several stages.
    compute: dict[tuple[int, int], float] = defaultdict(float)
    runtime: dict[tuple[int, int], float] = defaultdict(float)
    beside = plan.beside_s(strategy.posed(problem))
    for event in predicted.events:
        if event.kind in COMPUTE:
            compute[event.stage, event.device] += (event.end_s - event.start_s) / predicted.steps
            runtime[event.stage, event.device] += behind_s(event, beside) / predicted.steps
    after = {
        device.device: device.idle_s["all_reduce"] + device.idle_s["update"]
        for device in device_times(predicted, plan.stage_of_device, beside)
    }
    wire = _wire_seconds(plan, problem)
    out = []
    for s, stage in enumerate(plan.stages):
        peaks = [predicted.metrics.peak_memory_bytes.get(d, 0) / problem.cluster.devices[d].memory_bytes for d in stage.devices]
        out.append(
            StageLoad(
                stage=s,
                compute_s=max(compute[s, d] for d in stage.devices),
                runtime_s=max(runtime[s, d] for d in stage.devices),
                transfer_s=wire[s],
                all_reduce_s=max(after[d] for d in stage.devices),
                memory_share=max(peaks),
            )
        )
    return tuple(out)


def _wire_seconds(plan: Plan, problem: Problem) -> dict[int, float]:
    """Seconds that the busiest channel into or out of each stage is taken, over a whole step."""
    rates = message_rates(plan, problem.graph)
    channels: dict[tuple[str, int, int, int, int], float] = defaultdict(float)
    _, sends = communication(plan, problem.graph, plan.minibatch_size)
    for (device, _), messages in sends.items():
        for kind, stage, _, peer_stage, peer_device, lo, hi in messages:
            per_sample, fixed = rates[KINDS[kind].direction, stage, peer_stage]
            link = problem.cluster.link(device, peer_device)
            seconds = (per_sample * (hi - lo) + fixed) / link.bandwidth_bytes_per_s
            channels[kind, stage, peer_stage, device, peer_device] += seconds
    out: dict[int, float] = defaultdict(float)
    for (_, stage, peer_stage, _, _), seconds in channels.items():
        out[stage] = max(out[stage], seconds)
        out[peer_stage] = max(out[peer_stage], seconds)
    return out


def _distinct(found: list[WhatIf], own: str) -> tuple[WhatIf, ...]:
    """Distinct plans other than the explained one, best first; those without a plan come last."""
    seen: set[str | None] = {own}
    out = []
    for each in sorted(found, key=lambda w: float("inf") if w.iteration_s is None else w.iteration_s):
        if each.shape is None or each.shape.digest not in seen:
            out.append(each)
            seen.add(each.shape.digest if each.shape else None)
    return tuple(out)
