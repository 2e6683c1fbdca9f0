"""The plan that a training goes on with: vPipe's moves from the present one, and whether the switch pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from gpp.cluster import Cluster
from gpp.cost.problem import Problem
from gpp.errors import GppError, InvalidConfig, written
from gpp.graph.captured import Captured
from gpp.plan.loss_stage import with_loss_apart
from gpp.plan.plan import Plan
from gpp.planners.common.borders import Borders, same_stages
from gpp.replan import Moved
from gpp.runtime.mode import RunSettings, mode_named
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from gpp.runtime.engines.distributed import Distributed


FIELD = "strategy.replan.every"


class Better(NamedTuple):
    """A plan, and the predicted seconds of a step under the present one and under it."""

    plan: Plan
    before_s: float
    after_s: float


def better(strategy: Strategy, plan: Plan, problem: Problem) -> Better | None:
    """The fastest plan, by prediction, that moves over the present one's borders reach and that can run; None: there is none."""
    posed = strategy.posed(problem)
    memory = strategy.sparing

    def step_s(one: Plan, problem: Problem = posed) -> float:
        return strategy.predict(one, problem, record=False).metrics.iteration_s

    before_s, found = step_s(plan), list[tuple[float, int, Plan]]()
    for number, other in enumerate(Borders(plan, posed).on_the_way()):
        with suppress(GppError):  # one that the schedule or a loss on whole mini-batches has no place for
            fitting = memory.fastest(with_loss_apart(other, posed), posed, step_s)
            if fitting is not None and not same_stages(fitting, plan) and (took := step_s(fitting)) < before_s:
                found.append((took, number, fitting))
    for after_s, _, other in sorted(found, key=lambda one: one[:2]):
        with suppress(GppError):
            if problem.refuses(other) is None:
                strategy.check(other, problem)
                return Better(other, before_s, after_s)
    return None


def changes(old: Plan, new: Plan) -> tuple[Moved, ...]:
    """The operators that change their stages, by old and new stage."""
    stage_of = old.stage_of_op
    counts = Counter((stage_of[op], t) for t, stage in enumerate(new.stages) for op in stage.ops if stage_of[op] != t)
    return tuple(Moved(operators=count, source=s, destination=t) for (s, t), count in sorted(counts.items()))


def transfer_s(cluster: Cluster, sent: dict[tuple[int, int], float]) -> float:
    """Seconds until all has been sent; a device sends or takes one message at a time.

    Args:
        sent: bytes from each device to each other one.
    """
    busy: dict[int, float] = {}
    for (source, destination), size in sent.items():
        link = cluster.link(source, destination)
        took = link.latency_s + size / link.bandwidth_bytes_per_s
        for device in (source, destination):
            busy[device] = busy.get(device, 0.0) + took
    return max(busy.values(), default=0.0)


def check_replan(e: RunSettings) -> None:
    """Refuse what no plan can be replaced under, before anything is captured.

    Raises:
        InvalidConfig: names the setting.
    """
    strategy, engine, every = e.strategy, e.engine, e.strategy.replan.every
    if not every or (e.mode != "train" and mode_named(e.mode) is None):
        return

    def refuse(rule: str, fix: str) -> None:
        raise InvalidConfig(FIELD, every, rule, f"set {FIELD}=0, or {fix}")

    for name, given in (("plan", e.plan), ("strategy.planner.path", getattr(strategy.planner, "path", None))):
        if given:
            refuse(f"replaces plans that the strategy makes, and {name}={given} names one made by hand", f"leave {name} out")
    from gpp.runtime.engines.distributed import Distributed

    if not isinstance(engine, Distributed):
        refuse(f"needs workers that can be given another plan, which engine={engine.name} has not", "use engine=distributed")
    elif engine.launch != "local":
        rule = (
            f"needs workers that share the run directory with this process, and with engine.launch={engine.launch} it may be copied"
        )
        refuse(rule, "leave engine.launch out, and start python run.py without a launcher")
    elif e.mode == "train":
        _check_training(strategy, engine, e.cluster, refuse)


def _check_training(strategy: Strategy, engine: Distributed, cluster: Cluster, refuse: Callable[[str, str], None]) -> None:
    if strategy.planner.mechanisms:
        rule = f"moves operators between whole stages, and those of strategy.planner={strategy.planner.name} are not"
        refuse(rule, "use another strategy, as pipedream")
    if cluster.devices[0].kind != "cpu":
        refuse("moves layers between workers on processors: of communicators that change nothing is proved", "use cluster=local")
    for name, usual in (("compile", None), ("enforce_memory", False)):
        if (value := getattr(engine, name)) != usual:
            rule = (
                f"makes stages anew in workers that run, and engine.{name}={written(value)} is bound to those that they began with"
            )
            refuse(rule, f"leave engine.{name} out")


def check_unreplanned(strategy: Strategy) -> None:
    """Refuse new plans where the caller holds the plan.

    Raises:
        InvalidConfig: the strategy asks for them.
    """
    if every := strategy.replan.every:
        rule = "is for run.py, which plans while workers run; here the plan is the caller's"
        raise InvalidConfig(FIELD, every, rule, "leave replan out of the strategy")


def check_movable(plan: Plan, captured: Captured, every: int) -> None:
    """Refuse a plan, or a model, that no move can begin from.

    Raises:
        InvalidConfig: a stage splits its operators; the model has hand-written blocks.
    """
    for s, stage in enumerate(plan.stages):
        if (t := stage.devices_per_replica) > 1:
            rule = f"moves whole operators, and stage {s} splits its own over {t} devices"
            raise InvalidConfig(FIELD, every, rule, f"set {FIELD}=0, or {stage.unshared}")
    if block := next((node for node in captured.nodes if node.kind == "block"), None):
        rule = f"moves tensors that the captured model names, and block {block.target} may hold others"
        raise InvalidConfig(FIELD, every, rule, f"set {FIELD}=0")
