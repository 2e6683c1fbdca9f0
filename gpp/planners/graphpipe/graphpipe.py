"""GraphPipe (Jeon et al., ASPLOS '25): stages that form a DAG, so that branches run side by side.

The mode that the paper evaluates: one micro-batch size b for all stages, swept; k = 1 (1F1B). `per_stage` adds sizes and k by
stage (`vary`).

Objective: the predicted iteration time: bubbles, transfers, gradient all-reduce and update included. The paper minimises the
slowest stage's time per sample and prefers less memory; here that search makes candidate partitions, and the prediction decides.

Constraints (paper, section 3):
1. C1, C2: stages are convex and partition the operators, their edges are the tensors between them: `Assessor.assess`.
2. C3: stages hold disjoint devices, inside one node first: `placement`.
3. A stage has r replicas, r a divisor of b: `StageCosts.replicas`.
4. Eq. 2: memory, with as many micro-batches in flight as the stage's depth, capped at the mini-batch: `PartitionSearch` by
   depth, `Assessor` for the finished partition on its own devices.
5. Bottleneck: no stage takes longer than a limit for a micro-batch: compute or its transfers, which overlap, and its share of
   the all-reduce and update at the end of the mini-batch (`PartitionSearch._stages`).

Steps of `GraphPipe.plan`:
1. the best chains of `sequential`, and in small problems (operators times devices) those of `pipedream` and `piper`, as they are
   and with the data's edges only. Whatever follows, the plan is never predicted slower than `sequential`'s, nor than the whole
   model on one device or on all of them;
2. candidate partitions (`candidate_partitions`, `partition_search`): a dynamic program finds the fewest devices for each depth
   below a limit, for many limits and micro-batch sizes at once, over the series-parallel structure (`sp_structure`) and over
   linear orders of operators; limits narrow down on the attainable bottlenecks. They are simulated in the order of a lower bound
   on their iteration time until none can win;
3. a local search from the best plans (`common.local_search`), and on unequal devices moves of devices and boundaries (`rebalance`);
4. walks from the best plans (`colocate`): operators, devices and whole stages move, on unequal devices and links as on equal ones.

Complexity: step 2 takes O(P R) array operations, P pieces to cut between and R numbers of replicas, of size limits x depths;
branches of equal signature count once, and P is at most 256 however many operators there are. Step 4 times a number of passes that
follows from the number of operators.

Departures from the paper:
* the score is the prediction, not the bottleneck; the two agree when the bubble does not matter;
* all limits run together instead of a bisection, and only bottlenecks that some stage has are tried;
* replicas: any divisor of b, not only powers of two; devices may stay idle; stages get devices, not counts;
* small joins and forks are absorbed by merging light stages after the dynamic program, branches by packing them;
* graphs that are not series-parallel get added dependencies for the search only, in two ways (the shortest critical path;
  whole towers), and are cut along linear orders of operators too; the plan keeps the graph's own edges;
* the depth counts the stage that holds the join, which the paper's case study does not.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.series_parallel import Dependency, Order, branch_barrier, critical_path, series_parallel_order
from gpp.mechanism import found
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, AbstractSearch, Predict
from gpp.planners.chains.pipedream import PipeDream
from gpp.planners.chains.piper import Piper
from gpp.planners.chains.sequential import best_chains, chain_candidates
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.infeasible import explain
from gpp.planners.common.linear_orders import branch_first_order, depth_first_order
from gpp.planners.common.local_search import EqualMicrobatches, climb_best, in_vain, is_large
from gpp.planners.common.moves import is_chain
from gpp.planners.common.rebalance import rebalance
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.candidate_partitions import any_that_fits, candidate_partitions
from gpp.planners.graphpipe.colocate import Colocate, colocate
from gpp.planners.graphpipe.partition_search import PartitionSearch
from gpp.planners.graphpipe.sp_structure import SPStructure
from gpp.settings import Count, Natural, settings

SMALL = 1000
"""Operators times devices up to which chains are searched by two more objectives."""

CUTS_OF_A_LINE = (4.0, 2.0)
"""Places to cut a line, for each device: without depths, which is a quick search, and with them."""

STARTS = 2
"""Climbs of the local search: from the best plans of so many micro-batch sizes."""

DEPTH_SCALES = (0.0, 0.5, 1.0)
"""Depths of a line that memory is reckoned with, in units of its stages: none, half of them, all."""


@dataclass(frozen=True, slots=True)
class _GraphShape:
    """The shapes in which the graph is taken apart: its own structure, or those of two conversions; and lines of operators."""

    orders: tuple[Order, ...]
    added: tuple[Dependency, ...]
    lines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, costs: StageCosts) -> _GraphShape:
        graph, weights = costs.graph, costs.op_seconds()
        _, added, order = series_parallel_order(graph, weights)
        line = depth_first_order(graph)
        if not added:
            return cls((order,), added, (line,))
        return cls((order, series_parallel_order(graph, weights, branch_barrier)[2]), added, (line, branch_first_order(graph)))


@final
@settings("strategy.planner")
class GraphPipe(AbstractPlanner):
    """Best DAG of stages along the structure of the graph.

    Args:
        replication: whether a stage may be replicated.
        max_replicas: of a stage; None for as many as there are devices. Fewer than devices ask for a pipeline where copies of the
            whole model would win.
        patience: simulations without a better plan after which a step of the search goes on to the next.
        per_stage: whether stages may differ in micro-batch size and in k of kFkB; gains are rare, and every one simulated.
        colocate: whether devices may hold several stages (`colocate`): `auto` searches such plans within a budget, `always` however
            long it takes, `never` leaves every stage devices of its own, as in the paper.
        rounds: of the walks (`colocate`); None for as many as go with `colocate`. A search without any (0) is quick: a draft.
        tensor_parallel: whether plans are tried too in which every operator is split over 2 or 4 devices, as the model declares.
            The paper's operators are whole.
    """

    replication: bool = True
    max_replicas: Count | None = None
    patience: Count = 6
    per_stage: bool = False
    colocate: Colocate = "auto"
    rounds: Natural | None = None
    tensor_parallel: bool = False

    @property
    def varies_k(self) -> bool:
        return self.per_stage

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """The best plan of all searches.

        >>> [(stage.ops, stage.devices) for stage in GraphPipe().plan(problem, predict).stages]
        [((0,), (0,)), ((1,), (1,))]
        """
        if self.colocate == "always" and not problem.regime.weights.flushes:
            rule = "a pipeline that does not drain before its updates has one stage a device"
            raise InvalidConfig("strategy.planner.colocate", "always", rule, "set strategy.planner.colocate=auto")
        if self.tensor_parallel:
            search = found("searching", "SEARCH", AbstractSearch)["tensor_parallel"]
            return search.plan(replace(self, tensor_parallel=False), problem, predict)
        if self.max_replicas is not None:
            problem = replace(problem, max_replicas=min(self.max_replicas, problem.max_replicas or self.max_replicas))
        costs = StageCosts(problem, replication=self.replication)
        shape, incumbent = _GraphShape.of(costs), Incumbent(Assessor(costs), "graphpipe", predict)
        self._chains(incumbent)
        self._partitions(incumbent, shape)
        climb_best(incumbent, in_vain(problem, self.patience), starts=1 if is_large(problem) else STARTS)
        if not problem.cluster.homogeneous:
            rebalance(incumbent)
        if self.per_stage:
            from gpp.planners.graphpipe.vary import vary

            vary(incumbent)
        shared = colocate(incumbent, shape.orders, shape.lines, self.colocate, self.rounds)
        if incumbent.best is None:
            raise explain(problem, self._attempt)
        return replace(incumbent.best, explanation=_explanation(incumbent, shape, shared))

    def _chains(self, incumbent: Incumbent) -> None:
        """The best chains by several objectives, as they are and with the data's edges only."""
        problem, predict, chains = incumbent.assessor.problem, incumbent.predict, list[Candidate]()
        patience = in_vain(problem, self.patience)
        for own, candidates in best_chains(incumbent.assessor, predict, "graphpipe", patience):
            incumbent.absorb(own)
            chains += candidates
        if problem.graph.num_ops * problem.cluster.num_devices <= SMALL:
            # What runs: stages keep what they save and are not split.
            piper = Piper(replication=self.replication, tensor_parallel=False)
            for planner in (PipeDream(replication=self.replication), piper):
                with contextlib.suppress(Infeasible):
                    plan = planner.plan(problem, predict)
                    incumbent.offer(plan)
                    chains.append(EqualMicrobatches(incumbent=incumbent).start(plan))
        found = (incumbent.assessor.assess(chain.parts, chain.microbatch_size) for chain in chains)
        incumbent.simulate_all([one for one in found if isinstance(one, Candidate)], patience)

    def _partitions(self, incumbent: Incumbent, shape: _GraphShape) -> None:
        """Simulate the candidate partitions of the dynamic program."""
        for searches in _searches(incumbent.assessor.costs, shape):
            for search in searches:
                # Estimates are those of the slowest device: where devices differ, none tells what cannot win.
                known_s = incumbent.best_s if incumbent.assessor.cluster.homogeneous else float("inf")
                found = candidate_partitions(search, incumbent.assessor, known_s)
                incumbent.simulate_all(found.fitting, in_vain(incumbent.assessor.problem, self.patience))
                if found.lacking_s >= incumbent.best_s:
                    break

    def _attempt(self, problem: Problem) -> Candidate | None:
        """Any candidate that fits, for the explanation of an infeasible problem."""
        costs = StageCosts(problem, replication=self.replication)
        assessor = Assessor(costs)
        for part in itertools.chain.from_iterable(_searches(costs, _GraphShape.of(costs))):
            found = any_that_fits(part, assessor)
            if found is not None:
                return found
        return next(iter(chain_candidates(assessor, any_one=True)), None)


def _searches(costs: StageCosts, shape: _GraphShape) -> Iterator[list[PartitionSearch]]:
    """Every way to take the graph apart.

    A line is deeper than the plan that it becomes, by how much is not known beforehand: memory is reckoned with more and
    more of its depth until everything that is found fits.
    """
    for order in shape.orders:
        yield [PartitionSearch(SPStructure(costs, order))]
    for line in shape.lines:
        structures = [SPStructure(costs, None, line, cuts_per_device=cuts) for cuts in CUTS_OF_A_LINE]
        yield [PartitionSearch(structures[scale > 0], depth_scale=scale) for scale in DEPTH_SCALES]


def _sizes(plan: Plan) -> str:
    """Micro-batch sizes and ks in words."""
    sizes, ks = sorted({stage.microbatch_size for stage in plan.stages}), sorted({stage.k for stage in plan.stages})
    text = f"micro-batch {', '.join(map(str, sizes))}" + " by stage" * (len(sizes) > 1)
    return text if ks == [1] else f"{text}, k {', '.join(map(str, ks))}"


def _explanation(incumbent: Incumbent, shape: _GraphShape, shared: str) -> tuple[str, ...]:
    """Words for what was searched.

    Args:
        shared: what is known of plans whose devices hold several stages.
    """
    graph, best, added = incumbent.assessor.graph, incumbent.best, shape.added
    assert best is not None
    lines = [f"dynamic programming, then local search; {shared}; best of {incumbent.num_simulated} simulated"]
    if len({(stage.microbatch_size, stage.k) for stage in best.stages}) > 1 or best.stages[0].k > 1:
        lines.append(_sizes(best))
    if added:
        weights = incumbent.assessor.costs.op_seconds()
        before, after = (critical_path(o, graph.all_mask, weights) for o in (Order.of(graph), shape.orders[0]))
        names = ", ".join(f"{graph.ops[d.before].name} before {graph.ops[d.after].name}" for d in added[:2])
        longer = 100 * (after / before - 1) if before else 0.0
        cost = f"lengthen the critical path by {longer:.1f} %" if longer >= 0.05 else "do not lengthen the critical path"
        lines.append(
            f"the graph is not series-parallel: the search adds {len(added)} dependencies ({names}"
            f"{', ...' if len(added) > 2 else ''}), which {cost}; the plan has the graph's own alone. "
            "What that may have cost is within the gap to the bound"
        )
    if is_chain(best, graph):
        lines.append("the best plan is a chain")
    return tuple(lines)
