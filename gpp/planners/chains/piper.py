"""Piper's planner: chains of stages over the graph's downsets, with data and tensor parallelism (Tarnawski et al., NeurIPS '21).

Objective (reported in the plan's explanation): seconds of the slowest stage for one micro-batch of b samples,

    dp[state][k][p] = min over the stage behind which `state'` is left, its tensor-parallel degree t and its replicas r, of
                      max(dp[state'][k - t r][p - 1],
                          compute_t(b / r) + (boundary + 2 sync_t) (b / r) / bandwidth + finish_t(r) / N)

with k devices, p stages to the end, N the micro-batches of a mini-batch, finish the gradients' all-reduce and the
update as the bill of a stage has them; terms are added, both ends of a cut pay, there is one bandwidth, the slowest
link's. For every micro-batch size the best chain is found so; the best prediction wins.

Constraints:
1. States are closed under successors: all of the graph's, or those of one depth-first order (`linearize`). Stages run as a chain.
2. Memory: the stage at position p from the end keeps min(p, N) micro-batches.
3. Tensor-parallel degrees are those that every operator of the stage declares (a profile's, or as captured); one t
   and one r for a stage. The sums inside its passes count as its operators' time.
4. r divides b. All stages use the same b; b is swept.

Complexity: O(devices x ways x pairs of nested states x positions) numpy operations for each b, less what
`gpp.planners.chains.bottleneck` cuts off.

Departures from the released planner, which `compatible: true` asks:
* a tensor with several readers outside crosses a stage's boundary once, not once for each edge;
* micro-batches in flight are those of a synchronous 1F1B chain, not the sum of data-parallel degrees over the stage's own;
* the all-reduce is priced as everywhere in this project, not as 4 (r - 1) w / (r bandwidth), since a planner's costs
  must be those that it is judged by; the update counts too;
* memory is this project's: optimizer state, the boundary's tensors and their gradients count;
* what is recomputed is the memory policy's choice, here as for every planner, not a greedy one inside the search,
  which `compatible` keeps;
* where the graph has too many downsets the operators are linearised, where the released planner stops (`linearize: never` does).
A heterogeneous cluster is searched as if all devices were its slowest and smallest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, final

import numpy as np

from gpp.cost.amounts import Amounts, Params, StageBytes
from gpp.cost.problem import Problem
from gpp.cost.stage import FinishLines
from gpp.cost.variants import running, sums_s
from gpp.graph.op_graph import Variant
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, AbstractReleased, Predict, check_released
from gpp.planners.chains.bottleneck import Room, Way
from gpp.planners.chains.chain_tables import AUTO_STATES, AbstractChainSearch, Best, Part, first_that_fits
from gpp.planners.chains.downsets import Budget, Stages
from gpp.planners.common.infeasible import explain
from gpp.settings import Count, Positive, settings
from gpp.stage import value_of

MOST_STATES = 40_000
"""What the released tool refuses to exceed."""

REMEMBERED = 1 << 16
"""Pairs of states up to which times by depth are kept from cap to cap."""


@final
@settings("strategy.planner")
class Piper(AbstractPlanner):
    """Piper's dynamic program.

    Args:
        replication: whether a stage may be replicated (data parallelism).
        tensor_parallel: whether declared tensor-parallel degrees may be used.
        linearize: `auto`: one order's cuts where the graph has more than five hundred; `never`: refuse above `max_states`;
            `always`.
        compatible: repeat the released planner, with its formulas and traps, for one sample a micro-batch.
        released: the planner that `compatible` asks.
        max_states: downsets above which `never` refuses; 40,000 as published.
        prune: leave out what cannot win: stages slower than a cap that is raised step by step, micro-batch sizes whose ideal time
            is behind the best prediction. Same result; false is the program as published, for search times.
        time_limit_s, memory_limit_bytes: of the search.
    """

    replication: bool = True
    tensor_parallel: bool = True
    linearize: Literal["auto", "never", "always"] = "auto"
    compatible: bool = False
    released: AbstractReleased | None = None
    max_states: Count = MOST_STATES
    prune: bool = True
    time_limit_s: Positive = 600.0
    memory_limit_bytes: Positive = 8e9

    def __post_init__(self) -> None:
        check_released(self.compatible, self.released)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        if self.compatible and self.released is not None:
            return self.released.plan(self, problem, predict)
        budget = Budget("piper", self.time_limit_s, self.memory_limit_bytes)
        best = Best(problem, "piper", predict, self.replication)
        search = PiperSearch(problem, self, budget)
        best.sweep(search.ideal_s(), search.find, prune=self.prune)
        if best.plan is None:
            uncapped = replace(self, prune=False)
            raise explain(problem, lambda other: first_that_fits(other, PiperSearch(other, uncapped, budget).find))
        degrees = sorted({stage.devices_per_replica for stage in best.plan.stages} - {1})
        split = f"tensor parallelism over {', '.join(map(str, degrees))} devices" if degrees else "none split"
        objective = Objective(value_s=best.value_s, scope="a micro-batch for the slowest stage")
        lines = (
            f"own objective: {objective}, over {search.text}",
            f"best prediction of {best.num_tried} chains over the micro-batch sizes; {split}; a tensor is charged once a boundary, "
            "memory is this project's (compatible=true repeats the released tool)",
        )
        return replace(best.plan, objective=objective, explanation=lines)


class _Menu(NamedTuple):
    """How the operators run at one degree and number of samples: arrays of shape [num_ops].

    Args:
        seconds: forward and backward.
        kept, extra: bytes beyond what the operator's own way keeps for each micro-batch in flight, and holds once.
        share: of its parameters' bytes.
    """

    seconds: np.ndarray
    kept: np.ndarray
    extra: np.ndarray
    share: np.ndarray


class PiperSearch(AbstractChainSearch):
    """The search of one problem."""

    def __init__(self, problem: Problem, settings: Piper, budget: Budget) -> None:
        form = {"auto": "auto", "never": "all", "always": "linear"}[settings.linearize]
        super().__init__(
            problem,
            budget,
            form,
            min(settings.max_states, AUTO_STATES) if form == "auto" else settings.max_states,
            called="downsets",
            fix="strategy.planner.linearize=auto, or a higher strategy.planner.max_states",
            replication=settings.replication,
            prune=settings.prune,
        )
        self.degrees = self._degrees(settings.tensor_parallel and problem.shares_operators)
        self._menus: dict[tuple[int, int], _Menu] = {}
        self._known: dict[tuple[int, int, int], np.ndarray] = {}

    def _degrees(self, tensor_parallel: bool) -> dict[int, np.ndarray]:
        """Tensor-parallel degree -> [num_ops] whether an operator declares it."""
        graph = self.problem.graph
        out = {1: np.ones(graph.num_ops, dtype=bool)}
        if tensor_parallel:
            for t in sorted({v.degree for op in graph.ops for v in op.variants} - {1}):
                if t <= self.num_devices:
                    out[t] = np.array([any(v.degree == t and not v.recompute for v in op.variants) for op in graph.ops])
        return out

    def menu(self, t: int, samples: int) -> _Menu:
        """How the operators run; an operator that does not declare `t` is there as it stands, and never used."""
        if (t, samples) not in self._menus:
            graph, (forward, backward) = self.problem.graph, self.seconds.of(samples, t)
            rows = []
            for op, (able, f, b) in enumerate(zip(self.degrees[t], forward.tolist(), backward.tolist(), strict=True)):
                own = running(graph, op, f, b, False, t if able else 1)
                exchange_s = self._sums_s(own.variant, samples, t) if t > 1 else 0.0
                rows.append(
                    (
                        own.forward_s + own.backward_s + exchange_s,
                        own.saved_bytes - graph.ops[op].saved_bytes,
                        own.extra_bytes,
                        own.params,
                    )
                )
            self._menus[t, samples] = _Menu(*np.array(rows).T)
        return self._menus[t, samples]

    def _sums_s(self, variant: Variant | None, samples: int, t: int) -> float:
        """Seconds of the sums inside an operator's passes; a replica's devices are taken to be neighbours."""
        if variant is None:
            return 0.0
        each, team = (variant.forward_sums, variant.backward_sums), tuple(range(t))
        return sum(sums_s(self.problem.cluster, sums, samples, team) for sums in each)

    def work(self, b: int) -> np.ndarray:
        least = np.full(self.problem.graph.num_ops, np.inf)
        for t, able in self.degrees.items():
            for r in self.counts(b):
                menu = self.menu(t, b // r)
                least = np.minimum(least, np.where(able, r * t * menu.seconds, np.inf))
        return self.family.sums(least)

    def ways(self, room: Room, b: int) -> list[Way]:
        family, out = self.family, []
        for t, able in self.degrees.items():
            unable = family.sums((~able).astype(float))
            for r in self.counts(b):
                if r * t > self.num_devices:
                    continue
                menu = self.menu(t, b // r)
                pairs = room.pairs(r * t)
                start, end = family.start[pairs], family.end[pairs]
                sums = family.sums(menu.seconds)
                compute = np.maximum(sums[start] - sums[end], 0.0)
                keep = (compute <= room.cap_s) & (unable[start] - unable[end] < 0.5)
                pairs, start, end, compute = (a[keep] for a in (pairs, start, end, compute))
                amounts, boundary = self.tables.of(pairs)
                amounts = self._sharded(amounts, menu, Stages(family, start, end)) if t > 1 else amounts
                wire = b // r / self.link.bandwidth_bytes_per_s
                moved = boundary + (2 * self._sync(t, Stages(family, start, end)) if t > 1 else 0.0)
                time_s = compute + moved * wire
                finish = FinishLines.of(self.problem, tuple(range(0, r * t, t))).seconds(amounts.trainable)
                time_s = time_s + finish / self.problem.accumulation(b)
                small = np.flatnonzero(time_s <= room.cap_s)
                found = (Stages(family, start[small], end[small]), amounts.take(small), time_s[small])
                rows = self._remembered((b, t, r), pairs[small], menu, *found)
                fits = np.flatnonzero(rows.min(axis=0) <= room.cap_s) if len(small) else np.arange(0)
                out.append(Way((t, r), r * t, 1, pairs[small[fits]], rows[:, fits]))
        return out

    def _remembered(
        self, key: tuple[int, int, int], pairs: np.ndarray, menu: _Menu, stages: Stages, amounts: Amounts, time_s: np.ndarray
    ) -> np.ndarray:
        """Times of some pairs by depth; those that a lower cap let in are known already."""
        b, _, r = key
        count = self.problem.minibatch_size // b
        if self.family.num_pairs > REMEMBERED:
            return self._rows(menu, b // r, count, stages, amounts, time_s)
        if self._known and next(iter(self._known))[0] != b:
            self._known.clear()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = np.full((1, self.family.num_pairs), np.nan)
        new = np.flatnonzero(np.isnan(known[0, pairs]))
        if len(new):
            rows = self._rows(
                menu, b // r, count, Stages(self.family, stages.start[new], stages.end[new]), amounts.take(new), time_s[new]
            )
            if len(rows) > len(known):
                known = self._known[key] = np.tile(known, (len(rows), 1))
            known[:, pairs[new]] = rows
        return known[:, pairs]

    def _sharded(self, amounts: Amounts, menu: _Menu, stages: Stages) -> Amounts:
        """Amounts on one of the devices that share a replica. Parameters read by several operators are left whole, an upper
        bound."""
        graph = self.problem.graph
        own = [Params.of(graph.param_of[name] for name in op.params if graph.readers[name].bit_count() == 1) for op in graph.ops]
        *columns, _ = zip(*own, strict=True)
        sums = (stages.family.sums((1 - menu.share) * np.array(column)) for column in columns)
        less = self.problem.amounts_of(Params(*(each[stages.start] - each[stages.end] for each in sums)), 0.0, 0.0, 0.0)
        return amounts._replace(
            trainable=amounts.trainable - less.trainable,
            version=amounts.version - less.version,
            static=amounts.static - less.static,
            update=amounts.update - less.update,
        )

    def _sync(self, t: int, stages: Stages) -> np.ndarray:
        """[num_stages] bytes per sample that the devices of a replica exchange at the stage's boundary, each way."""
        out = np.zeros(len(stages.start))
        for op, own in enumerate(self.problem.graph.ops):
            variant = next((v for v in own.variants if v.degree == t and not v.recompute), None)
            for peer, size in (*variant.receive, *variant.send) if variant else ():
                out += size * (stages.holds(op) & ~stages.holds(peer))
        return out

    def _rows(self, menu: _Menu, samples: int, count: int, stages: Stages, amounts: Amounts, time_s: np.ndarray) -> np.ndarray:
        """Times by position from the end, infinite where a stage does not fit; one row if all fit everywhere."""
        memory = self._held(amounts, menu, stages, samples)
        held = partial(self.problem.regime.held, most=count)
        every = self.problem.regime.keeps_all
        most = min(self.most, count)
        depths = [1] if every else list(range(1, most + 1))
        if not (memory.peak(held(depths[-1])) > self.limit).any():
            return time_s[None, :]
        by_depth = np.tile(time_s, (len(depths), 1))
        for row, depth in zip(by_depth, depths, strict=True):
            row[memory.peak(held(depth)) > self.limit] = np.inf
        if every:
            return by_depth
        positions = np.clip(np.arange(self.most + 1), 1, most) - 1
        return by_depth[positions]

    def _held(self, amounts: Amounts, menu: _Menu, stages: Stages, samples: int) -> StageBytes:
        """Bytes of the stages."""
        kept, once = amounts.kept + stages_sum(stages, menu.kept), amounts.once + stages_sum(stages, menu.extra)
        return amounts._replace(kept=kept, once=once).held(samples, self.problem.regime.assumed_copies)

    def part(self, mask: int, way: Way) -> Part:
        t, r = way.key  # pyright: ignore[reportGeneralTypeIssues]  # as `ways` made it
        return Part(mask, r, mechanisms=(value_of("tensor_parallel", degree=t),) if t > 1 else ())


def stages_sum(stages: Stages, values: np.ndarray) -> np.ndarray:
    """[num_stages] sums of a value that may be negative."""
    if not values.any():
        return np.zeros(len(stages.start))
    sums = stages.family.sums(values)
    return sums[stages.start] - sums[stages.end]
