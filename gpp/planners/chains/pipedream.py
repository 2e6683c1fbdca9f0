"""PipeDream's planner: the chain of replicated stages whose slowest stage is fastest (Narayanan et al., SOSP '19).

Objective (reported in the plan's explanation): seconds of the slowest stage for one micro-batch of b samples,

    A[j][m] = min over the cut k before the last stage, and its replicas r, of max(A[k][m - r], T(k..j, r))
    T(k..j, r) = max(compute(b / r) + finish(r) / N,   bytes over cut k / (bandwidth r),   bytes over cut j / (bandwidth r))

with N the micro-batches of a mini-batch, and finish the gradients' all-reduce and the update as the bill of a stage has
them. Cuts are the graph's downsets, which are its antichains (`states: antichain`), or the prefixes of one depth-first
order (`states: linear`); `auto` takes the first where they are few. Where links inside a node differ from those between
nodes, the program runs twice: every stretch on the devices of one node, then on nodes, of which a stretch takes whole
ones. For every micro-batch size the best chain is found so; the best prediction wins.

Constraints:
1. Stages are differences of nested cuts: `StateFamily`. They run as a chain.
2. Memory: the stage at position p from the end keeps min(p, N) micro-batches, and the versions of its weights that the policy has
   there: `FlatSearch._bytes`, `_rows`. Over nodes the position inside the recursion is not known: all stages are held to the
   length of the chain that comes out, in rounds (`Servers`), with as many versions as are assumed.
3. r divides b. All stages use the same b; b is swept.

Complexity: O(devices x replicas x pairs of nested cuts) numpy operations for each b, less what `bottleneck` cuts
off; over nodes O(cuts^3 x devices of a node^2).

Departures from the released optimizer, which `compatible: true` asks:
* the all-reduce is priced as everywhere in this project, not as 4 (r - 1) w / (r bandwidth), since a planner's costs
  must be those that it is judged by; the update counts too. Over nodes it is the ring over all of a stage's devices,
  where the paper adds one inside a node and one between nodes;
* gradients are synchronised once a mini-batch, as a synchronous pipeline does: 1/N of the cost falls on a micro-batch, not 1/r;
* memory is this project's, not a version for each stage behind, which lets the last stage have any size;
* a tensor counts for a cut if a reader is behind it; every source is searched; devices may stay idle;
* times are those of b / r samples, not 1/r of b's.
A heterogeneous cluster is searched as if all devices were its slowest and smallest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, final

import numpy as np

from gpp.cost.amounts import Amounts, StageBytes
from gpp.cost.problem import Problem
from gpp.cost.stage import FinishLines
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, AbstractReleased, Predict, check_released
from gpp.planners.chains.bottleneck import Room, Way
from gpp.planners.chains.chain_tables import AUTO_STATES, AbstractChainSearch, Best, Part, first_that_fits
from gpp.planners.chains.downsets import Budget
from gpp.planners.chains.hierarchical import Servers, even_servers
from gpp.planners.common.infeasible import explain
from gpp.settings import Count, Positive, settings
from gpp.weights.base import PipelinePosition

HIERARCHY_STATES = 150
"""Cuts up to which the search over nodes takes all of the graph's by itself: its work grows with their third power."""


@final
@settings("strategy.planner")
class PipeDream(AbstractPlanner):
    """PipeDream's dynamic program.

    Args:
        states: `antichain` (all cuts of the graph), `linear` (of one order), `auto` (antichain while they are few).
        replication: whether a stage may be replicated.
        hierarchical: search inside nodes first where their links differ from those between nodes.
        compatible: repeat the released optimizer, with its formulas and traps, for one sample a micro-batch.
        activation_compression: of `compatible`: the tool's --activation_compression_ratio; null leaves transfers out, as the
            tool does by default.
        released: the optimizer that `compatible` asks.
        max_states: cuts above which `antichain` is refused; `auto` turns to `linear` at five hundred at most.
        prune: leave out what cannot win: stages slower than a cap that is raised step by step, micro-batch sizes whose ideal time
            is behind the best prediction. Same result; false is the program as published, for search times.
        time_limit_s, memory_limit_bytes: of the search.
    """

    states: Literal["auto", "antichain", "linear"] = "auto"
    replication: bool = True
    hierarchical: bool = True
    compatible: bool = False
    activation_compression: Positive | None = 1.0
    released: AbstractReleased | None = None
    max_states: Count = 40_000
    prune: bool = True
    time_limit_s: Positive = 600.0
    memory_limit_bytes: Positive = 8e9

    def __post_init__(self) -> None:
        check_released(self.compatible, self.released)

    def knows_versions(self, problem: Problem) -> bool:
        over_nodes = self.hierarchical and even_servers(problem.cluster) is not None
        return not (over_nodes or self.compatible) and problem.regime.weights.follows_position(problem.cluster.num_devices)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """The chain whose slowest stage or message takes the least time.

        >>> str(PipeDream().plan(problem, predict).objective)
        '3.00 s a micro-batch for the slowest stage'
        """
        if self.compatible and self.released is not None:
            return self.released.plan(self, problem, predict)
        budget = Budget("pipedream", self.time_limit_s, self.memory_limit_bytes)
        best = Best(problem, "pipedream", predict, self.replication)
        flat = FlatSearch(problem, self, budget)
        best.sweep(flat.ideal_s(), flat.best, prune=self.prune)
        if flat.servers is not None and (best.plan is None or problem.regime.minibatches > 1):
            # Inside the recursion every stage is held to the longest chain's memory: a search over devices may still fit. Where
            # nothing drains a micro-batch is a whole mini-batch and memory is scarce, so that a better chain may be among them.
            over_devices = FlatSearch(problem, replace(self, hierarchical=False), budget)
            before = best.plan
            best.sweep(over_devices.ideal_s(), over_devices.best, prune=self.prune)
            flat = flat if best.plan is before else over_devices
        if best.plan is None:
            uncapped = replace(self, prune=False)
            raise explain(problem, lambda other: first_that_fits(other, FlatSearch(other, uncapped, budget).best))
        objective = Objective(value_s=best.value_s, scope="a micro-batch for the slowest stage")
        lines = (
            f"own objective: {objective}, {flat.links}, over {flat.text}",
            f"best prediction of {best.num_tried} chains over the micro-batch sizes; gradients are charged once a mini-batch, "
            "memory is this project's (compatible=true repeats the released tool)",
        )
        return replace(best.plan, objective=objective, explanation=lines)


class FlatSearch(AbstractChainSearch):
    """The search on links that are all alike; over nodes it hands over to `Servers`."""

    def __init__(self, problem: Problem, settings: PipeDream, budget: Budget) -> None:
        servers = even_servers(problem.cluster) if settings.hierarchical else None
        form = {"auto": "auto", "antichain": "all", "linear": "linear"}[settings.states]
        most = min(settings.max_states, AUTO_STATES if servers is None else HIERARCHY_STATES)
        super().__init__(
            problem,
            budget,
            form,
            most if form == "auto" else settings.max_states,
            called="antichains",
            fix="strategy.planner.states=linear, or a higher strategy.planner.max_states",
            replication=settings.replication,
            prune=settings.prune,
        )
        self.settings, self.servers = settings, None if servers is None else Servers(self, servers)
        self.links = "on one kind of link" if servers is None else f"inside {len(servers)} nodes, then between them"

    def work(self, b: int) -> np.ndarray:
        return self.family.sums(np.min([r * np.sum(self.seconds.of(b // r), axis=0) for r in self.counts(b)], axis=0))

    def best(self, b: int) -> tuple[float, list[Part]] | None:
        """`find`, over nodes where links inside them differ from those between them."""
        return self.find(b) if self.servers is None else self.servers.find(b)

    def part(self, mask: int, way: Way) -> Part:
        return Part(mask, way.devices)

    def ways(self, room: Room, b: int) -> list[Way]:
        family, out, last = self.family, [], self.family.num_states - 1
        count = self.problem.minibatch_size // b
        between_updates = self.problem.accumulation(b)
        for r in self.counts(b):
            pairs = room.pairs(r)
            start, end = family.start[pairs], family.end[pairs]
            sums = family.sums(np.sum(self.seconds.of(b // r), axis=0))
            compute = sums[start] - sums[end]
            pairs, start, end, compute = (a[compute <= room.cap_s] for a in (pairs, start, end, compute))
            amounts = self.tables.of(pairs).amounts
            wire = b // r / self.link.bandwidth_bytes_per_s
            finish = FinishLines.of(self.problem, tuple(range(r)))
            time_s = compute + finish.seconds(amounts.trainable) / between_updates
            time_s = np.maximum(time_s, np.where(start != last, self.tables.live[start], 0.0) * wire)
            time_s = np.maximum(time_s, self.tables.live[end] * wire)
            rows = self._rows(time_s, self._bytes(amounts, b, r), count)
            keep = np.flatnonzero(rows.min(axis=0) <= room.cap_s) if len(pairs) else np.arange(0)
            out.append(Way(r, r, 1, pairs[keep], rows[:, keep]))
        return out

    def _bytes(self, amounts: Amounts, b: int, r: int) -> StageBytes:
        """Bytes of stages of r replicas; the versions of their weights are [positions from the end, stages] where they follow from
        the position."""
        regime = self.problem.regime
        held = amounts.held(b // r, regime.assumed_copies)
        if regime.weights.flushes or not self.settings.knows_versions(self.problem):
            return held
        accumulation, count = max(self.problem.accumulation(b), 1), self.problem.minibatch_size // b
        beyond_one = np.zeros(self.most + 1)
        for position in range(1, self.most + 1):
            warmup = int(regime.held(position, count)) - 1
            at = PipelinePosition(warmup=warmup, depth=position, accumulation=accumulation)
            beyond_one[position] = regime.weights.copies(at) - 1
        return held._replace(versions=amounts.version * beyond_one[:, None])

    def _rows(self, time_s: np.ndarray, memory: StageBytes, count: int) -> np.ndarray:
        """Times by position from the end, infinite where the micro-batches in flight do not fit; one row if all do, or none."""
        regime = self.problem.regime
        if regime.keeps_all:
            return np.where(memory.peak(count) <= self.limit, time_s, np.inf)[None, :]
        held = np.maximum(regime.held(np.arange(self.most + 1), count), 0)[:, None]
        fits = memory.peak(held) <= self.limit
        return time_s[None, :] if fits[-1].all() else np.where(fits, time_s, np.inf)
