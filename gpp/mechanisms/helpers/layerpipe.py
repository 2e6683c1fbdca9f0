"""LayerPipe's planner: forwards, input gradients and weight gradients as tasks of their own, dealt out over neighbours.

Objective (reported in the plan's explanation): seconds of the slowest processor for one micro-batch,

    max over processors of the sum of F, W and parts of I that it has,

with F, I and W of each layer as the bill of a stage of that layer alone has them. A layer is an operator that trains weights,
together with those behind it that do not, in the graph's depth-first order. `gpp.mechanisms.helpers.layer_line` deals them out, by
intervals of the line F1 W1 | I2 | F2 W2 | I3 | ... or anywhere; for intervals the result is the least there is.

Constraints:
1. Processors hold intervals of the line (`intra: neighbour`); F and W are whole, and so is I, beside its F, with `divide: false`.
2. Memory: as the plan's bills have it; micro-batch sizes whose plan does not fit are left out.
3. No replicas. All stages use the same b; b is swept, and the best prediction wins.
4. The pipeline does not drain: a helper has its half a period later.

Layers that follow each other are one stage where one device has all of them. Messages are not in the objective; they are in the
prediction (`gpp.mechanisms.helpers.prediction`).

Complexity: O(layers) for each of 100 halvings and each b.

Departures: the paper's body is not public; see `layer_line`. A heterogeneous cluster is searched as if all devices were its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, final

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.helpers.layer_line import Intra, Layer, Placed, dealt, loads
from gpp.mechanisms.helpers.stage import Helpers, delays, helpers_of
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.plan.build import make_plan
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.linear_orders import depth_first_order
from gpp.program.kinds import FORWARD, PASS
from gpp.program.passes import pass_seconds
from gpp.settings import settings
from gpp.stage import Stage


@final
@settings("strategy.planner")
class LayerPipe(AbstractPlanner):
    """LayerPipe: halves of backwards on neighbours, or anywhere.

    Args:
        intra: where half of a backward may go: `neighbour` (the next processor) or `anywhere` (any, longest first).
        divide: whether a processor may have parts of the input gradients of another's layer. Linear layers can run so.
    """

    mechanisms: ClassVar[tuple[str, ...]] = (Helpers.name,)
    keeps: ClassVar[bool] = True

    intra: Intra = "neighbour"
    divide: bool = True

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        if problem.regime.weights.flushes:
            raise InvalidConfig(
                "strategy.planner",
                "layerpipe",
                "puts half of a backward a period later, and a pipeline that drains before every update would wait for it",
                "set strategy/schedule=no_flush strategy/weights=stash, as strategy=layerpipe does",
            )
        layers, best, best_s, slowest, balanced = layers_of(problem.graph), None, float("inf"), 0.0, 0.0
        # Planners are asked for many mini-batches at once; memory is that of one.
        minibatch = problem.minibatch_size // problem.regime.minibatches
        run, too_large = replace(problem, minibatch_size=minibatch, regime=replace(problem.regime, minibatches=1)), None
        for b in problem.microbatch_sizes():
            seconds = [_seconds(problem, layer, b) for layer in layers]
            placed, plan = self._dealt(problem, layers, seconds, b)
            try:
                replace(plan, minibatch_size=minibatch).validate(run)
            except Infeasible as error:
                too_large = too_large or error
                continue
            found = predict(plan).metrics.iteration_s
            if found < best_s * MARGIN:
                busy = loads(seconds, placed, problem.cluster.num_devices)
                best, best_s, slowest, balanced = plan, found, max(busy), sum(busy) / len(busy)
        if best is None:
            raise too_large or Infeasible("no plan of LayerPipe's can run", "another strategy")
        objective = Objective(value_s=slowest, scope="a micro-batch for the slowest processor")
        helped = sum(bool(stage.adding) for stage in best.stages)
        divided = sum(bool(helpers_of(stage).input_share) for stage in best.stages)
        lines = (
            f"own objective: {objective}; {balanced:.6g} s if all had equally much to do",
            f"{len(layers)} layers in {len(best.stages)} stages; helpers make the gradients of the weights of {helped}, and "
            f"those of the inputs of {divided}, whole or in part",
        )
        return replace(best, objective=objective, explanation=lines)

    def _dealt(
        self, problem: Problem, layers: Sequence[tuple[int, ...]], seconds: Sequence[Layer], microbatch_size: int
    ) -> tuple[list[Placed], Plan]:
        """The processors of the layers, and the plan of it."""
        placed = dealt(seconds, problem.cluster.num_devices, self.intra, divide=self.divide)
        plan = staged(problem, layers, placed, microbatch_size)
        if plan.shares_devices and not plan.periodic:
            # Layers went to processors as wholes and in no order, which only helpers would be worth: stages of one device would
            # have to interleave their updates.
            placed = dealt(seconds, problem.cluster.num_devices, "neighbour", divide=self.divide)
            plan = staged(problem, layers, placed, microbatch_size)
        return placed, plan


def layers_of(graph: OpGraph) -> list[tuple[int, ...]]:
    """The operators of each layer, ascending: an operator that trains weights, and those behind it that do not.

    Those before the first one belong to the first layer. Without any trained weights the graph is one layer.
    """
    out, trains = list[list[int]](), False
    for op in depth_first_order(graph):
        if not out or (trains and graph.trained_by[op]):
            out.append([])
            trains = False
        trains = trains or bool(graph.trained_by[op])
        out[-1].append(op)
    return [tuple(sorted(layer)) for layer in out]


def staged(problem: Problem, layers: Sequence[tuple[int, ...]], placed: Sequence[Placed], microbatch_size: int) -> Plan:
    """The plan of layers that are dealt out: each a stage, or several in a row that one device has whole."""
    whole = [where.weight == where.forward and all(processor == where.forward for processor, _ in where.inputs) for where in placed]
    parts, first = list[int](), list[int]()
    for number, layer in enumerate(layers):
        joins = number and whole[number] and whole[number - 1] and placed[number].forward == placed[number - 1].forward
        if joins:
            parts[-1] |= mask_of(layer)
        else:
            parts.append(mask_of(layer))
            first.append(number)
    sized = [(mask, 1) for mask in parts]
    devices = [(placed[number].forward,) for number in first]
    plan = make_plan(problem, "layerpipe", sized, microbatch_size, ordered=True, placement=devices)
    stages = tuple(_with_helpers(stage, placed[number]) for stage, number in zip(plan.stages, first, strict=True))
    plan = replace(plan, stages=stages)
    if not plan.periodic:
        return plan
    return replace(
        plan,
        stages=tuple(
            replace(stage, in_flight=(delay + 1) * microbatch_size)
            for stage, delay in zip(stages, delays(stages, plan.edges), strict=True)
        ),
    )


def _with_helpers(stage: Stage, where: Placed) -> Stage:
    others = tuple((processor, share) for processor, share in where.inputs if processor != where.forward)
    value = Helpers(weight_device=where.weight if where.weight != where.forward else None, input_share=others)
    return stage.having(value) if value.beside else stage


def _seconds(problem: Problem, layer: tuple[int, ...], microbatch_size: int) -> Layer:
    alone = Stage(ops=layer, devices=(0,), microbatch_size=microbatch_size, in_flight=microbatch_size)
    took = pass_seconds(StageCost.of(problem, alone))
    return Layer(took[PASS[FORWARD]], took[INPUT_GRADIENTS], took[WEIGHT_GRADIENTS])
