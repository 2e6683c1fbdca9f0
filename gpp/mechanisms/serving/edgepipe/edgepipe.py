"""EdgePipe: stages for inference on unequal devices, of which not all have to be used.

Objective (reported in the plan's explanation): the slowest stage or message for one micro-batch,

    the longest forward of a stage or the longest message, whichever is longer,

since a device computes and sends at the same time. Micro-batches per second are one over it.

Constraints:
1. Memory: a stage's weights, the buffers of its messages and what a pass takes fit its device (`ForwardProblem.held_bytes`).
2. One device a stage, no replicas. All stages use the same b; b is swept, and the best prediction wins.
3. Stages of a chain are intervals; of a graph, any partition whose stages form no cycle.

Chains are solved exactly by `typed_chain`, on types of devices that no plan can tell apart (`Kinds`);
graphs with few downsets exactly by `typed_stages`. For other graphs it takes the better of chains over two linear orders, on
which messages are overrated, and of graphpipe's stages, whose devices are assigned anew; from there it changes boundaries and
devices as long as that helps (`assign.improve`). Where devices have so many types that the tables grow too large, those
that are most alike count as one, by the slowest of them. The plan says which of these it was.

With `compatible` the published tool's own dynamic program plans in its units, index error included; `corrected` leaves the
index error out. It plans chains alone.

Complexity: of a chain of L operators on T types of n_t devices, 30 bottlenecks times T * L * prod(n_t + 1) operations on
integers of L bits.

Departures: PipeEdge plans chains on types that differ in one rate each; here each pair of types has its link, and a message its
latency. Memory is that of the bill, not of PipeEdge's formula, which it equals for layers whose memory was measured.
Source: Hu et al., "PipeEdge: Pipeline Parallelism for Large-Scale Model Inference on Heterogeneous Edge Devices", DSD 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.serving.edgepipe.assign import assigned, improve
from gpp.mechanisms.serving.edgepipe.forward import Assigned, ForwardProblem, Kinds
from gpp.mechanisms.serving.edgepipe.typed_chain import PlacedStage
from gpp.mechanisms.serving.edgepipe.typed_stages import TooManyStates, TypedStages
from gpp.plan.build import make_plan
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, AbstractReleased, Predict, check_released
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.infeasible import explain
from gpp.planners.common.linear_orders import branch_first_order, depth_first_order
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.settings import Count, settings

MOST_STATES_OF_A_CHAIN = 40_000
"""States of devices up to which a chain's tables are made exactly: 16 devices of four types have 2,500."""

Told = tuple[Assigned, tuple[str, ...]]
"""Stages and devices, and words about how they were found."""


@final
@settings("strategy.planner")
class EdgePipe(AbstractPlanner):
    """Stages for inference on unequal devices.

    Args:
        compatible: plan as the published tool does, its index error included.
        corrected: plan as the published tool would without its index error; with `compatible`.
        released: the tool that `compatible` asks.
        most_downsets, most_states: downsets of a graph, and states of the search for all bottlenecks, up to which its stages are
            searched exactly.
    """

    compatible: bool = False
    corrected: bool = False
    released: AbstractReleased | None = None
    most_downsets: Count = 400
    most_states: Count = 100_000

    def __post_init__(self) -> None:
        check_released(self.compatible, self.released)
        if self.corrected and not self.compatible:
            rule = "is about the published tool's index, and strategy.planner.compatible is false"
            raise InvalidConfig("strategy.planner.corrected", True, rule, "set strategy.planner.compatible=true, or leave it out")

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        if problem.graph.differentiated:
            raise InvalidConfig(
                "strategy.planner",
                "edgepipe",
                "plans inference, in which nothing has a backward pass",
                "set mode=inference, or strategy=graphpipe",
            )
        if self.compatible and self.released is not None:
            return self.released.plan(self, problem, predict)
        return self.fastest(problem, predict, lambda forward: self._candidates(forward, predict))

    def fastest(self, problem: Problem, predict: Predict, candidates: Callable[[ForwardProblem], Iterable[Told]]) -> Plan:
        """The plan with the best prediction, over all micro-batch sizes.

        Raises:
            Infeasible: there is no candidate.
        """
        costs, best, best_s = StageCosts(problem, replication=False), None, float("inf")
        for b in problem.microbatch_sizes():
            for stages, how in candidates(forward := ForwardProblem(problem, costs, b)):
                plan = self._made(forward, stages, how)
                found = predict(plan).metrics.iteration_s
                if best is None or found < best_s * MARGIN:
                    best, best_s = plan, found
        if best is None:
            raise explain(problem, self._attempt)
        return best

    def _candidates(self, forward: ForwardProblem, predict: Predict) -> Iterator[Told]:
        graph = forward.problem.graph
        kinds, finest = _kinds(forward)
        if is_line(graph):
            if (stages := _cut(forward, kinds, depth_first_order(graph))) is not None:
                yield (
                    (stages, ("a chain; exact",))
                    if finest
                    else (improve(forward, stages), ("a chain, its types joined; not exact",))
                )
            return
        orders = dict.fromkeys((depth_first_order(graph), branch_first_order(graph)))
        cuts = {order: stages for order in orders if (stages := _cut(forward, kinds, order)) is not None}
        if finest:
            try:
                limits = {"most_downsets": self.most_downsets, "most_states": self.most_states}
                known = min(cuts.values(), key=forward.bottleneck_s, default=None)
                if (stages := TypedStages(forward, kinds, **limits).fastest(known, _least_s(forward, kinds))) is not None:
                    yield stages, ("all partitions of the graph; exact",)
                return
            except TooManyStates:
                pass
        for stages in cuts.values():
            yield improve(forward, stages), ("a chain over a linear order, improved; not exact",)
        if (stages := _regrouped(forward, kinds, predict)) is not None:
            yield improve(forward, stages), ("the stages of graphpipe, their devices assigned anew; not exact",)

    def _made(self, forward: ForwardProblem, stages: Assigned, how: tuple[str, ...]) -> Plan:
        parts = [(mask, 1) for mask, _ in stages]
        placement = [(device,) for _, device in stages]
        plan = make_plan(forward.problem, "edgepipe", parts, forward.microbatch_size, ordered=True, placement=placement)
        value = Objective(value_s=max(forward.times(stages).values()), scope="a micro-batch for the slowest stage or message")
        used = f"{len(stages)} of {forward.problem.cluster.num_devices} devices are used"
        return replace(plan, objective=value, explanation=(f"own objective: {value}", *how, used))

    def _attempt(self, problem: Problem) -> Candidate | None:
        """Some chain that fits, for the explanation of why none does."""
        costs = StageCosts(problem, replication=False)
        kinds, order = _kinds(ForwardProblem(problem, costs, problem.microbatch_sizes()[0]))[0], depth_first_order(problem.graph)
        for b in problem.microbatch_sizes():
            chain = ForwardProblem(problem, costs, b).chain(order, kinds).within(math.inf)
            if chain is not None:
                stages = placed(chain, kinds, order)
                parts = tuple((mask, 1) for mask, _ in stages)
                return Candidate(0.0, len(stages), b, True, parts, tuple((device,) for _, device in stages))
        return None


def _kinds(forward: ForwardProblem) -> tuple[Kinds, bool]:
    """The types of the devices, and whether they are the finest."""
    finest = Kinds.of(forward.problem.cluster)
    if finest.num_states <= MOST_STATES_OF_A_CHAIN:
        return finest, True
    return finest.joined(forward.seconds.sum(axis=1).tolist(), MOST_STATES_OF_A_CHAIN), False


def is_line(graph: OpGraph) -> bool:
    """Whether every operator hands what it makes to the next one alone, and there is no other."""
    return all(mask == (1 << op >> 1) for op, mask in enumerate(graph.predecessors))


def _cut(forward: ForwardProblem, kinds: Kinds, order: tuple[int, ...]) -> Assigned | None:
    """The fastest chain over an order, its devices the first ones of their types."""
    chain = forward.chain(order, kinds).fastest()
    return None if chain is None else placed(chain, kinds, order)


def placed(chain: list[PlacedStage], kinds: Kinds, order: tuple[int, ...]) -> Assigned:
    """A chain over an order as stages on devices, the first ones of their types."""
    return kinds.placed((mask_of(order[start:end]), kind) for kind, start, end in chain)


def _least_s(forward: ForwardProblem, kinds: Kinds) -> float:
    """No stages are faster: a bound for graphs whose operators have one order alone; else 0.

    All stages are intervals of it then, and the stage that ends at a cut sends the next one at least what its last operator hands
    to the operator behind the cut. (What else crosses the cut may go past the next stage.)
    """
    graph = forward.problem.graph
    order = depth_first_order(graph)
    if not all(graph.successors[a] >> b & 1 for a, b in pairwise(order)):
        return 0.0
    chain = forward.chain(order, kinds, least=True)
    found = chain.fastest()
    return 0.0 if found is None else chain.bottleneck_s(found)


def _regrouped(forward: ForwardProblem, kinds: Kinds, predict: Predict) -> Assigned | None:
    """The stages of `graphpipe`, on the best devices for them; None where it finds none."""
    partitioner = GraphPipe(replication=False, colocate="never")
    try:
        plan = partitioner.plan(replace(forward.problem, microbatch_size=forward.microbatch_size), predict)
    except Infeasible:
        return None
    return assigned(forward, kinds, [mask_of(stage.ops) for stage in plan.stages])
