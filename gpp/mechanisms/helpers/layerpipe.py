"""LayerPipe's planner: forwards, input gradients and weight gradients as tasks of their own, dealt out over neighbours.

Objective (reported in the plan's explanation): seconds of the slowest processor for one micro-batch,

    max over processors of the sum of F, W and parts of I that it has,

with F a forward, I the gradients of a layer's inputs and W those of its weights, as the bill of a stage of that layer alone has
them. A layer is an operator that trains weights, together with those behind it that do not, in the graph's depth-first order. They
are dealt out anywhere, or by intervals of the line of work, for which the result is the least there is:

    F1 W1 | I2 | F2 W2 | I3 | F3 W3 | ...        nobody needs I1

Constraints:
1. Processors hold intervals of the line (`intra: neighbour`), so a neighbour helps with an I, or takes the W of the layer on the
   border. F and W are whole; an I may be cut anywhere, but is whole, beside its F, with `divide: false` and where the workers that
   are to run the plan cannot divide it.
2. Memory: as the plan's bills have it; micro-batch sizes whose plan does not fit are left out.
3. No replicas. All stages use the same b; b is swept, and the best prediction wins.
4. The pipeline does not drain: a helper makes its half one period later.

Layers that follow each other are one stage where one device has all of them. Messages are not in the objective; they are in the
prediction (`gpp.mechanisms.helpers.prediction`).

Complexity: O(layers) for each of 100 halvings and each b.

Departures: the paper (LayerPipe, arXiv 2108.06629) says that the two gradients of a layer are made side by side (intra-layer), and
that the gradients of the inputs are divided between two layers that follow each other (inter-layer). Its body is not public, so
line, bisection and both forms of `intra` are ours. A heterogeneous cluster is searched as if all devices were its first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final, Literal, NamedTuple, final

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.helpers.stage import Helpers, delays, helpers_of
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.plan.build import make_plan
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.infeasible import explain_marked
from gpp.planners.common.linear_orders import depth_first_order
from gpp.program.kinds import FORWARD, PASS, pass_seconds
from gpp.quantities import seconds
from gpp.settings import settings
from gpp.stage import Stage


@final
@settings("strategy.planner")
class LayerPipe(AbstractPlanner):
    """LayerPipe: halves of backwards on neighbours, or anywhere.

    Args:
        intra: where half of a backward may go: `neighbour` (the next processor) or `anywhere` (any, longest first).
        divide: whether a processor may have parts of the input gradients of another's layer. Workers can divide those of linear
            layers; where a plan is to run, others stay whole.
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
        for layers_s, placed, plan in self._plans(problem, layers):
            try:
                replace(plan, minibatch_size=minibatch).validate(run)
            except Infeasible as error:
                too_large = too_large or error
                continue
            found = predict(plan).metrics.iteration_s
            if found < best_s * MARGIN:
                busy = loads(layers_s, placed, problem.cluster.num_devices)
                best, best_s, slowest, balanced = plan, found, max(busy), sum(busy) / len(busy)
        if best is None and too_large:
            raise explain_marked(run, self._that_fits, too_large, too_large.constraint)
        if best is None:
            raise Infeasible("no plan of LayerPipe's can run", "another strategy")
        objective = Objective(value_s=slowest, scope="a micro-batch for the slowest processor")
        helped = sum(bool(stage.adding) for stage in best.stages)
        divided = sum(bool(helpers_of(stage).input_share) for stage in best.stages)
        lines = (
            f"own objective: {objective}; {seconds(balanced)} if all had equally much to do",
            f"{len(layers)} layers in {len(best.stages)} stages; helpers make the gradients of the weights of {helped}, and "
            f"those of the inputs of {divided}, whole or in part",
        )
        return replace(best, objective=objective, explanation=lines)

    def _plans(
        self, problem: Problem, layers: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[Sequence[Layer], Sequence[Placed], Plan]]:
        """Seconds and processors of the layers, and the plan of it, for every micro-batch size."""
        for b in problem.microbatch_sizes():
            layers_s = [_seconds(problem, layer, b) for layer in layers]
            yield layers_s, *self._dealt(problem, layers, layers_s, b)

    def _that_fits(self, problem: Problem) -> Plan:
        """The first plan that fits, of a problem of one mini-batch.

        Raises:
            Infeasible: none does.
        """
        for *_, plan in self._plans(problem, layers_of(problem.graph)):
            with suppress(Infeasible):
                plan.validate(problem)
                return plan
        raise Infeasible("no plan of LayerPipe's fits", "more memory")

    def _dealt(
        self, problem: Problem, layers: Sequence[tuple[int, ...]], seconds: Sequence[Layer], microbatch_size: int
    ) -> tuple[list[Placed], Plan]:
        """The processors of the layers, and the plan of it; an I that the engine cannot divide is beside its F."""
        count, undivided = problem.cluster.num_devices, set[int]() if self.divide else set(range(len(layers)))
        while True:
            placed = dealt(seconds, count, self.intra, undivided)
            plan = staged(problem, layers, placed, microbatch_size)
            if plan.shares_devices and not plan.periodic:
                # Layers went to processors as wholes and in no order, which only helpers would be worth: stages of one device
                # would have to interleave their updates.
                placed = dealt(seconds, count, "neighbour", undivided)
                plan = staged(problem, layers, placed, microbatch_size)
            refused = {layers.index(ops) for ops in _refused(problem, plan)}
            if not refused:
                return placed, plan
            undivided |= refused


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


def _refused(problem: Problem, plan: Plan) -> Iterator[tuple[int, ...]]:
    """The operators of each stage whose input gradients the engine cannot divide as a plan does."""
    if problem.refuses(plan) is None:
        return
    for s, stage in enumerate(plan.stages):
        alone = replace(plan, stages=tuple(own if t == s else own.without(Helpers) for t, own in enumerate(plan.stages)))
        if helpers_of(stage).input_share and problem.refuses(alone) is not None:
            yield stage.ops


def _with_helpers(stage: Stage, where: Placed) -> Stage:
    others = tuple((processor, share) for processor, share in where.inputs if processor != where.forward)
    value = Helpers(weight_device=where.weight if where.weight != where.forward else None, input_share=others)
    return stage.having(value) if value.beside else stage


def _seconds(problem: Problem, layer: tuple[int, ...], microbatch_size: int) -> Layer:
    alone = Stage(ops=layer, devices=(0,), microbatch_size=microbatch_size, in_flight=microbatch_size)
    took = pass_seconds(StageCost.of(problem, alone))
    return Layer(took[PASS[FORWARD]], took[INPUT_GRADIENTS], took[WEIGHT_GRADIENTS])


Intra = Literal["neighbour", "anywhere"]
"""Where half of a backward may go: to the next processor of the line, or to any."""

HALVINGS: Final = 100
"""Of the interval in which the slowest processor's time lies: more than a float has digits."""

SLIVER: Final = 1e-9
"""Share of a processor's time below which room is none: rounding must not cut an I."""


class Layer(NamedTuple):
    """Seconds of a layer for one micro-batch; 0 for a half that it does not have."""

    forward_s: float
    input_s: float
    weight_s: float


class Placed(NamedTuple):
    """The processors of a layer.

    Args:
        forward, weight: of F and of W.
        inputs: (processor, share of I) in the order of the line; the shares add up to 1. Empty where there is no I.
    """

    forward: int
    weight: int
    inputs: tuple[tuple[int, float], ...]


def dealt(layers: Sequence[Layer], num_processors: int, intra: Intra, undivided: Collection[int] = frozenset()) -> list[Placed]:
    """Each layer's processors, so that the slowest processor is fast.

    Args:
        undivided: numbers of layers whose I is where their F is; other processors may have parts of those of others.
        intra: `neighbour`: intervals of the line, exact; `anywhere`: F, I and W whole on any processor, longest first, each to the
            processor that has least to do yet (Graham 1969: at most 4/3 - 1/(3p) of the best for p processors).
    """
    # Side by side on the line: as one piece of work, which only F's processor can have.
    joined = [
        Layer(layer.input_s + layer.forward_s, 0.0, layer.weight_s) if number in undivided else layer
        for number, layer in enumerate(layers)
    ]
    found = _longest_first(joined, num_processors) if intra == "anywhere" else _intervals(joined, num_processors)
    return [
        where._replace(inputs=((where.forward, 1.0),)) if number in undivided and layer.input_s else where
        for number, (layer, where) in enumerate(zip(layers, found, strict=True))
    ]


def loads(layers: Sequence[Layer], placed: Sequence[Placed], num_processors: int) -> list[float]:
    """Seconds of every processor for one micro-batch of each layer."""
    out = [0.0] * num_processors
    for layer, where in zip(layers, placed, strict=True):
        out[where.forward] += layer.forward_s
        out[where.weight] += layer.weight_s
        for processor, share in where.inputs:
            out[processor] += share * layer.input_s
    return out


def _intervals(layers: Sequence[Layer], num_processors: int) -> list[Placed]:
    """The line in intervals whose longest is shortest.

    If a time does for the slowest processor, filling every processor up to it from the left takes the fewest processors. So the
    interval in which the least time lies is halved until it is as short as rounding.
    """
    total = sum(map(sum, layers))
    longest = max(max(layer.forward_s, layer.weight_s) for layer in layers)
    low, high = max(total / num_processors, longest), total
    best = _filled(layers, num_processors, low)
    if best is not None:
        return best
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _filled(layers, num_processors, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    # One processor can do all of it in `total`, so that is what is left where no halving did.
    return best or [Placed(0, 0, ((0, 1.0),) if layer.input_s else ()) for layer in layers]


def _filled(layers: Sequence[Layer], num_processors: int, limit_s: float) -> list[Placed] | None:
    """The line dealt out from the left, no processor above a limit; None if there are too few processors."""
    at, room, least = 0, limit_s, SLIVER * limit_s
    out = list[Placed]()

    def whole(seconds: float) -> int:
        nonlocal at, room
        if seconds > room + least:
            at, room = at + 1, limit_s
        room -= seconds
        return at

    for layer in layers:
        parts, left = list[tuple[int, float]](), layer.input_s
        while left > 0.0 and at < num_processors:
            if room <= least:
                at, room = at + 1, limit_s
            took = left if left <= room + least else room
            parts.append((at, took / layer.input_s))
            left, room = left - took, room - took
        forward = whole(layer.forward_s)
        # Without gradients of weights there is nothing to send elsewhere.
        out.append(Placed(forward, whole(layer.weight_s) if layer.weight_s else forward, tuple(parts)))
        if at >= num_processors:
            return None
    return out


def _longest_first(layers: Sequence[Layer], num_processors: int) -> list[Placed]:
    tasks = sorted((-seconds, number, half) for number, layer in enumerate(layers) for half, seconds in enumerate(layer))
    busy, where = [0.0] * num_processors, dict[tuple[int, int], int]()
    for less, number, half in tasks:
        processor = min(range(num_processors), key=lambda p: busy[p])
        busy[processor] -= less
        where[number, half] = processor
    return [
        Placed(
            forward := where[number, 0],
            where[number, 2] if layer.weight_s else forward,
            ((where[number, 1], 1.0),) if layer.input_s else (),
        )
        for number, layer in enumerate(layers)
    ]
