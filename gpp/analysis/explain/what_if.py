"""Times of other plans and other clusters: plans changed and simulated, problems changed and planned."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpp.analysis.explain.changes import (
    replicate_stages,
    split_stages,
    with_links,
    with_memory,
    with_other_microbatches,
    with_twice_the_devices,
)
from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible
from gpp.graph.op_graph import mask_of
from gpp.memory import fits_whole
from gpp.plan.plan import Plan
from gpp.strategy import Strategy

MORE_MEMORY, LESS_MEMORY = MEMORY = "twice the memory", "half the memory"
How = Literal["simulated", "planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """A plan in a few numbers; plans with one digest have the same stages on the same devices."""

    num_stages: int
    depth: int
    num_devices: int
    microbatch_sizes: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, plan: Plan) -> PlanShape:
        """The shape of a plan."""
        content = repr([(s.ops, s.devices, s.microbatch_size) for s in plan.stages] + [plan.edges])
        return cls(
            num_stages=len(plan.stages),
            depth=plan.depth,
            num_devices=plan.num_devices,
            microbatch_sizes=tuple(sorted({stage.microbatch_size for stage in plan.stages})),
            digest=hashlib.sha256(content.encode()).hexdigest()[:16],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and its effect.

    Args:
        change: the change in words.
        how: whether the plan was changed and simulated again, or the changed problem planned again.
        iteration_s: predicted time; None where no plan fits.
        speedup: the explained plan's time over this one's; below 1 where the change makes things slower.
        reason: why there is no plan.
    """

    change: str
    how: How
    iteration_s: float | None = None
    speedup: float | None = None
    shape: PlanShape | None = None
    reason: str = ""

    @classmethod
    def of(cls, change: str, how: How, plan: Plan, iteration_s: float, base_s: float) -> WhatIf:
        """The plan that a change gives, compared with one that takes `base_s` seconds a step."""
        speedup = base_s / iteration_s if iteration_s > 0 else None
        return cls(change=change, how=how, iteration_s=iteration_s, speedup=speedup, shape=PlanShape.of(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The results of planning again within the time given."""

    alternatives: tuple[WhatIf, ...]
    sensitivities: tuple[WhatIf, ...]
    left_out: tuple[str, ...]
    took_s: float


def reliefs(plan: Plan, iteration_s: float, problem: Problem, strategy: Strategy, bottlenecks: Sequence[int]) -> tuple[WhatIf, ...]:
    """The plan with its bottlenecks changed, simulated; best first."""
    strategy, problem = strategy.drafted, strategy.posed(problem)
    count = len(bottlenecks)
    which = f"s{bottlenecks[0]}" if count == 1 else f"the {count} slowest stages"
    more = sum(len(plan.stages[s].devices) for s in bottlenecks)
    devices = f"{more} more device{'s' * (more != 1)}"
    changed: list[tuple[str, tuple[Plan, Problem] | None]] = [
        (f"split {which} in two ({devices})", split_stages(plan, problem, bottlenecks)),
        (f"replicate {which} ({devices})", replicate_stages(plan, problem, bottlenecks)),
        ("the same plan on links twice as fast", (plan, replace(problem, cluster=with_links(problem.cluster, 2.0)))),
    ]
    changed += [(f"the same stages with {words}", (other, problem)) for words, other in with_other_microbatches(plan, problem)]
    out = [_outcome(words, iteration_s, found[1], strategy, found[0]) for words, found in changed if found is not None]
    return tuple(sorted(out, key=lambda w: float("inf") if w.iteration_s is None else w.iteration_s))


def replanned(plan: Plan, iteration_s: float, problem: Problem, strategy: Strategy, *, budget_s: float) -> Replanned:
    """Other problems planned with the same strategy, the most telling first, until the time is spent.

    A search begins only if as much time is left as the first one took; twice the devices count double. Where the whole model fits
    one device, with the memory that there is and with that of the other problem, memory decides nothing: the plan is the same.
    """
    strategy, cluster, posed = strategy.drafted, problem.cluster, strategy.posed(problem)
    free = [stage for stage in plan.stages if not mask_of(stage.ops) & problem.minibatch_ops] or plan.stages
    sizes = sorted({stage.microbatch_size for stage in free})
    tasks: list[tuple[bool, str, Problem, float]] = [
        (True, MORE_MEMORY, replace(problem, cluster=with_memory(cluster, 2.0)), 1.0),
        (True, "links twice as fast", replace(problem, cluster=with_links(cluster, 2.0)), 1.0),
        (True, "twice the devices", replace(problem, cluster=with_twice_the_devices(cluster)), 2.0),
        (True, LESS_MEMORY, replace(problem, cluster=with_memory(cluster, 0.5)), 1.0),
    ]
    if problem.microbatch_size is None:
        near = sorted({b for b in (sizes[-1] * 2, sizes[0] // 2) if b in problem.microbatch_sizes()} - set(sizes))
        tasks += [(False, f"micro-batch {b}", replace(problem, microbatch_size=b), 1.0) for b in near]
    if problem.max_replicas != 1 and any(len(stage.devices) > 1 for stage in plan.stages):
        tasks.append((False, "without replicas", replace(problem, max_replicas=1), 1.0))
    began = time.monotonic()
    found: dict[bool, list[WhatIf]] = {True: [], False: []}
    left_out = []
    for sensitivity, words, other, weight in tasks:
        if words in MEMORY and budget_s > 0 and fits_whole(posed) and fits_whole(strategy.posed(other)):
            found[sensitivity].append(WhatIf.of(words, "planned", plan, iteration_s, iteration_s))
            continue
        if time.monotonic() - began + weight * plan.search_s > budget_s:
            left_out.append(words)
            continue
        found[sensitivity].append(_outcome(words, iteration_s, other, strategy))
    return Replanned(
        alternatives=tuple(found[False]),
        sensitivities=tuple(found[True]),
        left_out=tuple(left_out),
        took_s=time.monotonic() - began,
    )


def _outcome(words: str, iteration_s: float, problem: Problem, strategy: Strategy, plan: Plan | None = None) -> WhatIf:
    """A plan simulated, or, without one, the problem planned."""
    how: How = "planned" if plan is None else "simulated"
    try:
        if plan is None:
            plan = strategy.plan(problem)
        else:
            strategy.check(plan, problem)
        seconds = strategy.predict(plan, problem, record=False).metrics.iteration_s
    except Infeasible as error:
        return WhatIf(change=words, how=how, reason=f"does not fit the memory: {error}")
    except Exception as error:
        # A planner's bug on a changed problem must not lose the run's own plan.
        reason = str(error) if isinstance(error, GppError) else f"{type(error).__name__}: {error}"
        return WhatIf(change=words, how=how, reason=reason)
    return WhatIf.of(words, how, plan, seconds, iteration_s)
