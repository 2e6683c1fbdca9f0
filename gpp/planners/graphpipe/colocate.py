"""Walks over the plans of a problem, whose devices may hold several stages, or keep to one each.

A stage starts when all that it receives is there, and sends when all of it is done. A device with one stage therefore waits in
three ways that a device with several does not:

* a branch and the join behind it: the branch needs nothing from the others, but in one stage with the join it waits for them;
* several branches: each goes on when its own inputs are there, and hands on its own results;
* chunks of a chain (virtual stages, as in Megatron's interleaved schedule, or there and back, as in zero bubble's V): while one
  chunk waits for the pipeline to fill or to drain, the other has work.

Objective: the predicted iteration time under the strategy's own schedule, which merges the orders of a device's stages
(`gpp.schedules.merge`).

Constraints: the stages of a device fit into its memory together, each with its own samples in flight (`Assessor.assess`); one
micro-batch size for all stages; weights that drain, since programs that go on over mini-batches have one stage a device.

Search: rounds of a walk (`gpp.planners.search.climb`), which times a plan in some microseconds as the simulator would. The first
round of each promising micro-batch size begins at its best plan so far, or at the first layout from which a walk comes to a plan
that fits; where nobody has found one, longer rounds from all layouts go on. Then come those of the best sizes: by turns from the
best plan of all rounds, and from layouts made for sharing (`layouts`) and from data parallelism. The last ones are long, from the
best plans. Models of few operators get further ones, also from devices divided among branches, where half of the moves deal
devices anew, or with `never` from the best plans of other sizes.
What the rounds find is judged like any candidate. Nothing is searched where the best plan leaves no device idle. With `never`,
where every device keeps to one stage as in the paper, the walks begin at the best plans and at data parallelism, and a stage that
gets a device takes it from the stage that had it.

Source: none for the search; the GraphPipe paper gives every stage devices of its own. Layouts: Narayanan et al., SC '21
(interleaved); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR '24 (V).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

import numpy as np

from gpp.compiled import KNOWN
from gpp.graph.op_graph import bits, mask_of
from gpp.graph.series_parallel import Order
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.layouts import State, divided, layouts, state_of
from gpp.planners.search.climb import Climber
from gpp.planners.search.numbers import KEPT, MANY, MOST_DEVICES
from gpp.planners.search.timers import Timers

Colocate = Literal["auto", "never", "always"]
"""Whether devices may hold several stages: as far as a budget reaches, not at all, or ten times as far."""

WORTH = 1e-3
"""Relative gain below which devices keep one stage each: another stage is another action to dispatch."""

ROUNDS: Final = {"never": 24, "auto": 35, "always": 120}
"""Rounds of a search, short ones and long ones; `always` has ten times the passes of `auto`."""

SHORT = 32
"""Rounds that are short. They find where a long one is worth its time: three long ones behind them took steps of 20 to 28
operators on eight devices down by 3.8 %, those of 7 to 14 operators on four by 0.7 %, in 1.25 times the CPU seconds; long ones
alone did as well on the first, and no better than short ones on the second. (32 random graphs that are not in the ledger, each
with two seeds.)"""

PASSES = 4_000, 20_000
"""Passes of all stages that a short round times, and a long one, for each operator of a model of `SMALL` operators or fewer."""

FEW, MORE = 12, 8
"""Models of fewer operators get so many more rounds from each start, with passes as for `FEW`, in which half of the moves give two
stages any devices at once. Of 385 models of 3 to 6 operators on up to 4 devices (those from 300 on) 22 were worse than the best of
all plans, by up to 30 %, with three long rounds for each size and fewer such moves; with half of these it is 3, by up to 0.9 %
(`python -m tests.quality oracle --ops 6 --devices 4 --first 300 --count 400`). The other half is for 3 of the first 300, which
were 2.3 to 2.5 % off, and takes a fifth of the time of planning such a model."""

SMALL = 16
"""Operators beyond which a round times as many passes as their square asks for: each has more places where it could go."""

THRESHOLDS = 0.03, 0.1, 0.05
"""Share of a step by which a walk lets it become longer at first: the first round of a size, other short ones, long ones."""

PLANS = 200
"""Plans that a round times at least, where these have many passes."""

SIZES = 2
"""Micro-batch sizes that are searched after a first round of all promising ones."""

STAGES = 4
"""Stages for each device of the cluster."""


def colocate(
    incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]], how: Colocate, rounds: int | None
) -> str:
    """Find plans that are faster than the incumbent's best.

    Args:
        orders, lines: series-parallel structures of the graph and linear orders of its operators, for `layouts`.
        rounds: in place of those that go with `how`, unless None.

    Returns:
        What is known of plans that share devices now, in words.
    """
    assessor, regime = incumbent.assessor, incumbent.assessor.problem.regime
    if rounds == 0 or not (regime.trains and regime.weights.flushes):
        return "plans with several stages on a device were not tried"
    if assessor.cluster.num_devices > MOST_DEVICES:
        return f"plans with several stages on a device were not tried, as there are more than {MOST_DEVICES} devices"
    if not _leaves_idle(incumbent):
        return "plans with several stages on a device were not tried, as they could gain next to nothing"
    best, best_s = incumbent.best, incumbent.best_s
    _Walks(incumbent, orders, lines, apart=how == "never").run(ROUNDS[how] if rounds is None else rounds)
    if how == "never":
        return "plans with several stages on a device were not tried"
    if best is not None and incumbent.best_s >= best_s * (1 - WORTH):
        incumbent.best, incumbent.best_s = best, best_s
    slow = "" if KNOWN else " in plain Python, fifty times slower: gpp was installed without a C compiler, or has changed since"
    return f"plans with several stages on a device were searched in part, by local search{slow}"


@final
@dataclass(slots=True)
class _Walks:
    """Rounds of walks over the plans of a problem."""

    incumbent: Incumbent
    orders: Sequence[Order]
    lines: Sequence[tuple[int, ...]]
    apart: bool
    timers: Timers = field(init=False)
    walkers: dict[int, Climber] = field(default_factory=dict)
    found: dict[int, list[tuple[float, State]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timers = self.incumbent.timers(STAGES * self.incumbent.assessor.cluster.num_devices)

    def run(self, rounds: int) -> None:
        """All rounds: first one for each promising size, then those of the best sizes by turns, short ones and long ones.

        More rounds begin with the same ones, so that they are never worse.
        """
        costs = self.incumbent.assessor.costs
        bound = self.incumbent.best_s * (1 - WORTH)
        sizes = [b for b in _promising(costs) if _always_busy_s(costs, b) < bound][:rounds]
        starts = {b: self._starts(b) for b in sizes}
        for number, b in enumerate(sizes):
            for start in starts[b]:
                self._round(b, number, start, THRESHOLDS[0] if len(start[1]) <= MANY else 0.0, PASSES[0])
                if b in self.found:
                    break  # else the walk came to no plan that fits
        best, short, tried = self._best_sizes(), min(rounds, SHORT) - len(sizes), 0
        while sizes and not best and self.incumbent.best is None and tried < short:  # nobody has found a plan that fits
            b = sizes[-1 - tried % len(sizes)]
            start = starts[b][tried // len(sizes) % len(starts[b])]
            self._round(b, len(sizes) + tried, start, THRESHOLDS[1], PASSES[1])
            best, tried = self._best_sizes(), tried + 1
        for number in range(tried, short if best else 0):
            b = best[number % len(best)]
            turn = number // len(best)
            # Every other round goes on from the best of all rounds.
            start = starts[b][1 + (turn // 2) % (len(starts[b]) - 1)] if turn % 2 and len(starts[b]) > 1 else self.found[b][0][1]
            self._round(b, len(sizes) + number, start, THRESHOLDS[1], PASSES[0])
        best = self._best_sizes()
        for number in range(max(SHORT, len(sizes)), rounds if best else 0):
            b = best[(number - SHORT) % len(best)]
            self._round(b, number, self.found[b][0][1], THRESHOLDS[2], PASSES[1])
        self._more(rounds, starts)
        for seconds, b, state in sorted((seconds, b, state) for b, found in self.found.items() for seconds, state in found):
            if self.timers.exact and not self.incumbent.worth(seconds):
                break
            candidate = self._candidate(b, state)
            if candidate is not None:
                self.incumbent.simulate(candidate)

    def _more(self, rounds: int, starts: Mapping[int, Sequence[State]]) -> None:
        """The rounds that only models of few operators get, behind all others."""
        costs = self.incumbent.assessor.costs
        if costs.graph.num_ops >= FEW or rounds < (ROUNDS["never"] if self.apart else SHORT + 1):
            return
        passes = PASSES[0] * FEW // costs.graph.num_ops
        for b, before in starts.items():
            own = list(dict.fromkeys([*before, *self._others(b)]))
            for number in range(MORE * (len(own) + 1)):
                best_s = min((found[0][0] for found in self.found.values()), default=float("inf"))
                if _always_busy_s(costs, b) < best_s:
                    places = list(dict.fromkeys([self.found[b][0][1], *own] if b in self.found else own))
                    start = places[number % len(places)]
                    self._round(b, rounds + number, start, THRESHOLDS[1], passes, deals=not self.apart)

    def _others(self, b: int) -> list[State]:
        """Where further rounds begin: at devices divided among branches; with one stage a device at other sizes' best plans."""
        costs = self.incumbent.assessor.costs
        if not self.apart:
            return [divided(costs, order, b) for order in self.orders]
        best = [self.found[size][0][1] for size in self._best_sizes() if size != b]
        return [state for state in best if all(own.bit_count() in costs.replicas[b] for own in state[1])]

    def _best_sizes(self) -> list[int]:
        """The micro-batch sizes of the shortest steps so far."""
        return sorted(self.found, key=lambda b: (self.found[b][0][0], b))[:SIZES]

    def _round(self, b: int, seed: int, start: State, threshold: float, passes: int, deals: bool = False) -> None:
        """One walk; the best plans that are known of the size are kept.

        Args:
            passes: for each operator, as `PASSES` has them.
            deals: whether two stages may get any devices at once (`Climber.walk`).
        """
        if b not in self.walkers:
            self.walkers[b] = Climber(*self.timers.of(b))
        stages = self.incumbent.assessor.problem.minibatch_size // b * 2 * sum(own.bit_count() for own in start[1])
        num_ops = len(start[0])
        most = max(passes * num_ops * max(num_ops, SMALL) // SMALL, PLANS * stages)
        walked = self.walkers[b].walk(start, seed + 1, threshold, most, self.apart, deals)
        every = {state: seconds for seconds, state in self.found.get(b, [])} | {(of, own): s for s, of, own in walked}
        kept = sorted((seconds, state) for state, seconds in every.items())[:KEPT]
        if kept:
            self.found[b] = kept

    def _starts(self, b: int) -> list[State]:
        """Where the rounds of a size begin: its best plan so far, layouts, and all operators on as many devices as may be."""
        incumbent, costs = self.incumbent, self.incumbent.assessor.costs
        graph = costs.graph
        most = max(costs.replicas[b])
        plans = [plan for plan, _ in incumbent.best_by_size() if plan.stages[0].microbatch_size == b]
        found = [state_of([(mask_of(stage.ops), stage.devices) for stage in plan.stages], graph.num_ops) for plan in plans]
        everywhere = state_of([(graph.all_mask, tuple(range(most)))], graph.num_ops)
        if self.apart:
            return list(dict.fromkeys([*found, everywhere]))
        return list(dict.fromkeys([*found, *layouts(costs, self.orders, self.lines, b), everywhere]))

    def _candidate(self, b: int, state: State) -> Candidate | None:
        """The candidate of a state; None if it does not fit after all."""
        stage_of, devices = state
        masks = [0] * len(devices)
        for op, s in enumerate(stage_of):
            masks[s] |= 1 << op
        placement = [tuple(bits(own)) for own in devices]
        parts = [(mask, len(own)) for mask, own in zip(masks, placement, strict=True)]
        found = self.incumbent.assessor.assess(parts, b, placement=placement)
        return found if isinstance(found, Candidate) else None


def _leaves_idle(incumbent: Incumbent) -> bool:
    """Whether always busy devices would beat the best plan by more than `WORTH`; else no plan can."""
    costs = incumbent.assessor.costs
    return _always_busy_s(costs, _promising(costs)[0]) < incumbent.best_s * (1 - WORTH)


def _promising(costs: StageCosts) -> list[int]:
    """Micro-batch sizes, those first whose passes take least."""
    return sorted(costs.microbatch_sizes, key=lambda b: (_always_busy_s(costs, b), b))


def _always_busy_s(costs: StageCosts, b: int) -> float:
    """No iteration is shorter: no device ever waits, and each operator takes as long as on the device that is best for it."""
    problem, work_s = costs.problem, costs.least_work_s(costs.graph.all_mask, b)
    if not costs.cluster.homogeneous:
        kinds = sorted(set(problem.type_of_device))
        times = [(r, problem.op_times(b // r, kind)) for r in costs.replicas[b] for kind in kinds]
        work_s = float(np.min([r * (t.forward_s + t.backward_s) for r, t in times], axis=0).sum())
    return problem.minibatch_size // b * work_s / costs.cluster.num_devices
