"""DawnPiper's planner: cuts anywhere, each stage's memory made to fit, the slowest stage fastest (arXiv 2505.05856).

Objective (reported in the plan's explanation): seconds of a forward and a backward of a micro-batch in the slowest stage,

    max over stages of (T + R),   T = sum over its operators of forward and backward,   R = the least added seconds to fit

with R from `fit` beside this: what is computed again, and copies that do not hide. Messages overlap. The best chain of every
micro-batch size is predicted, and the best prediction wins; on graphs a hill is then climbed over predictions (`climb`), in which
stages may stand side by side.

Constraints:
1. Stages are intervals of a linear order (`common.linear_orders`), until the hill is climbed; operators are not grouped beyond
   `graph.max_ops`, and a stage may end inside a block.
2. Memory: the stage at position p from the sink holds p micro-batches (what the schedule has there), and the weight policy's
   versions of its weights at p.
3. A stage has one device. On unequal devices stages take them in order.
4. All stages use the same b; b is swept.

Complexity: exact: see `furthest`. Binary: see `halving`.

Departures: the body of the paper is not public to us. That cuts are made at single operators, that the slowest stage of T counts
and messages overlap, that a theorem on two stages bounds the cuts and the stages are halved: this is published. What R is, how
it is found, the bracket that the theorem gives (between the cut of equal times and that of equal *added* seconds) and the exact
search are ours.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import ClassVar, Literal, NamedTuple, final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.mechanisms.marks.fitted import FittedStages, depths, fitted, one_minibatch
from gpp.mechanisms.marks.furthest import FurthestEnds
from gpp.mechanisms.marks.halving import Halving
from gpp.mechanisms.marks.policies import Auto, Offload, Recompute
from gpp.memory import AbstractMemory, Keep
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.candidates import Assessor
from gpp.planners.common.incumbent import MARGIN, Incumbent
from gpp.planners.common.linear_orders import branch_first_order, depth_first_order
from gpp.planners.common.local_search import ENOUGH, EqualMicrobatches, climb
from gpp.planners.common.stage_costs import StageCosts
from gpp.settings import Count, settings
from gpp.timeline import ENDLESS, Timeline

MEMORY: dict[str, AbstractMemory] = {"keep": Keep(), "recompute": Recompute(), "offload": Offload(), "auto": Auto()}
"""What may be done to operators, as memory policies; planners that mark stages themselves ask them."""


@final
@settings("strategy.planner")
class DawnPiper(AbstractPlanner):
    """The chain of fitted stages whose slowest one is fastest.

    Args:
        search: `exact`; `binary`, as published; `first`, the first chain that fits, whatever its time.
        ways: what may be done to operators of a stage that lacks memory: `recompute`, `offload`, either (`auto`), or nothing
            (`keep`).
        patience: predictions without a better plan after which the climb on graphs ends.
        most_climbed: operators of a graph beyond which no hill is climbed.
    """

    marks: ClassVar[bool] = True

    search: Literal["exact", "binary", "first"] = "exact"
    ways: Literal["auto", "recompute", "offload", "keep"] = "auto"
    patience: Count = 6
    most_climbed: Count = 96

    @property
    def fits_by(self) -> AbstractMemory:
        return MEMORY[self.ways]

    @property
    def fitting(self) -> DawnPiper:
        return replace(self, search="first")

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        run, best, best_s = one_minibatch(problem), None, float("inf")
        # Where a search for the best ends without a chain, that for any chain may still find one.
        for searching, b in product((self, self.fitting), run.microbatch_sizes()):
            if searching is not self and (best is not None or searching == self):
                break
            found = searching._chain(run, b, best_s / (problem.minibatch_size // b))
            if found is None:
                continue
            seconds = predict(found.plan).metrics.iteration_s
            if seconds < best_s * MARGIN:
                best, best_s = found, seconds
        if best is None:
            devices = run.cluster.num_devices
            done = "kept" if self.ways == "keep" else "kept, computed again or on the host"
            raise Infeasible(
                f"no chain of up to {devices} stages fits, whatever operators are {done}",
                "devices with more memory or links to their hosts, more devices, or a smaller micro-batch",
            )
        climbed = self._climbed(run, best.plan, best_s, predict)
        plan = climbed or best.plan
        objective = Objective(value_s=best.seconds, scope="a micro-batch for the slowest stage")
        marked = sum(stage.spares for stage in plan.stages)
        how = "proven for this order" if best.proven else SAID[self.search]
        lines = (
            f"own objective: {objective} ({how}); {len(plan.stages)} stages, micro-batch {plan.stages[0].microbatch_size}",
            f"{marked} stages have marks; " + ("stages side by side, found by climbing" if climbed else "a chain"),
        )
        return replace(plan, objective=None if climbed else objective, explanation=lines)

    def _chain(self, run: Problem, microbatch_size: int, below_s: float) -> Chain | None:
        """The best chain at a micro-batch size over the orders, if its slowest stage is below `below_s`."""
        best: Chain | None = None
        for order in dict.fromkeys((depth_first_order(run.graph), branch_first_order(run.graph))):
            found = self.best_chain(run, order, microbatch_size, min(below_s, best.seconds if best else below_s))
            if found is not None and (best is None or found.seconds < best.seconds * MARGIN):
                best = found
        return best

    def best_chain(
        self, problem: Problem, order: tuple[int, ...], microbatch_size: int, below_s: float = float("inf")
    ) -> Chain | None:
        """The best chain of an order over all numbers of stages; None if nothing fits with a slowest stage below `below_s`.

        Args:
            problem: of one mini-batch (`gpp.mechanisms.marks.fitted.one_minibatch`).
        """
        best, first = None, self.search == "first"
        for depth in depths(problem):
            stages = FittedStages(problem, order, microbatch_size, self.fits_by, depth, first=first)
            search = Halving(stages) if self.search == "binary" else FurthestEnds(stages, first=first)
            found = search.solve(min(below_s, best.seconds if best else below_s))
            plan = None if found is None else stages.plan("dawnpiper", found[1], stages.within if first else 0.0)
            if found is not None and plan is not None and (best is None or found[0] < best.seconds * MARGIN):
                best = Chain(found[0], plan, search.proven)
                if first:
                    break
        return best

    def _climbed(self, run: Problem, start: Plan, seconds: float, predict: Predict) -> Plan | None:
        """A better plan than the chain, its stages of any shape; None if none is found, or the graph is a chain or too large."""
        graph = run.graph
        if (
            self.search == "first"
            or graph.num_ops > self.most_climbed
            or all(t.consumers in ((t.producer + 1,), ()) for t in graph.tensors)
        ):
            return None
        plans: dict[Plan, Plan] = {}

        def judged(candidate: Plan) -> Timeline:
            marked = fitted(candidate, run, self.fits_by, CLOSE)
            if marked is None:
                return Timeline(source="predicted", metrics=ENDLESS)
            plans[candidate] = marked
            return predict(marked)

        endless = Assessor(StageCosts(run.with_endless_memory, replication=False))
        incumbent = Incumbent(endless, "dawnpiper", judged)
        incumbent.best_s = seconds
        hill = EqualMicrobatches(incumbent=incumbent)
        climb(hill, [(hill.start(start), seconds)], patience=self.patience, least_gain=ENOUGH)
        if incumbent.best is None:
            return None
        exact = fitted(incumbent.best, run, self.fits_by)
        return plans[incumbent.best] if exact is None else exact


SAID = {"exact": "furthest ends first, not proven", "binary": "halving", "first": "the first that fits"}
"""What is said of a chain that is not proven to be fastest, by the search."""

CLOSE = 0.02
"""Share by which added seconds may be above a bound while a hill is climbed."""


class Chain(NamedTuple):
    """A chain: seconds of its slowest stage, its plan, and whether nothing is faster in its order."""

    seconds: float
    plan: Plan
    proven: bool
