"""mode=inference: what it refuses before anything is captured, and what it makes of the settings of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from gpp.cost.arrivals import Arrivals
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.data.base import AbstractData
from gpp.errors import InvalidConfig, InvalidPlan
from gpp.graph.captured import Captured
from gpp.graph.inference import forward_only, served
from gpp.memory import Keep
from gpp.models.base import AbstractModel
from gpp.plan.plan import Plan
from gpp.program.stream import check_served
from gpp.runtime.checkpoint.resume import Checkpoints
from gpp.runtime.engine import AbstractEngine, AbstractServer
from gpp.runtime.job import Job, ServeSettings, job_parts
from gpp.schedules.forward_only import ForwardOnly
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy

INFERENCE: Final = "inference"
"""The mode."""


class ServingSettings(Protocol):
    """What of a run's settings decides how it serves; `gpp.app.experiment.Experiment` has them all."""

    @property
    def mode(self) -> str: ...
    @property
    def engine(self) -> AbstractEngine: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def strategies(self) -> Sequence[Strategy]: ...
    @property
    def checkpoint(self) -> Checkpoints: ...
    @property
    def resume(self) -> str | None: ...
    @property
    def load_weights(self) -> str | None: ...
    @property
    def loss_scope(self) -> str: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...


def serving_strategy(strategy: Strategy) -> Strategy:
    """The strategy with forwards only: the schedule that a strategy has by default is that of a training.

    Raises:
        InvalidConfig: a weight policy, a memory policy or a schedule was asked for that says what backwards do.
    """
    if not strategy.weights.flushes:
        rule = "mode=inference has no updates, so one version of the weights is all there is"
        fix = "set strategy/weights=flush strategy/schedule=1f1b, or strategy=sequential or graphpipe"
        raise InvalidConfig("strategy.weights", strategy.weights.name, rule, fix)
    if strategy.memory.ways:
        rule = "mode=inference keeps nothing for a backward, so there is nothing to recompute or to move"
        raise InvalidConfig("strategy.memory", strategy.memory.name, rule, "set strategy/memory=keep")
    if not isinstance(strategy.schedule, OneFOneB | ForwardOnly):
        rule = "orders backwards, and mode=inference has forwards only: it runs every micro-batch once, in order"
        raise InvalidConfig("strategy.schedule", strategy.schedule.name, rule, "leave strategy/schedule out")
    return replace(strategy, schedule=ForwardOnly(), memory=Keep())


def check_inference(e: ServingSettings) -> None:
    """Refuse settings of a training that mode=inference cannot follow.

    Raises:
        InvalidConfig: names the setting.
    """
    if e.mode != INFERENCE:
        if e.load_weights is not None:
            raise InvalidConfig(
                "load_weights", e.load_weights, "is what mode=inference answers with", "set resume=PATH to go on training"
            )
        rate = e.engine.arrival_rate if isinstance(e.engine, AbstractServer) else None
        if rate is not None:
            rule = f"is the rate of requests, and mode={e.mode} answers none"
            raise InvalidConfig("engine.arrival_rate", rate, rule, "set mode=inference, or leave it out")
        for strategy in (e.strategy, *e.strategies):
            for each in strategy.choices:
                each.check(serves=False)
            if strategy.objective != "throughput":
                rule = f"is what plans for requests minimise, and mode={e.mode} answers none"
                fix = "set mode=inference (engine=simulate only predicts), or leave it out"
                raise InvalidConfig("strategy.objective", strategy.objective, rule, fix)
        return
    if not isinstance(e.engine, AbstractServer):
        rule = f"engine={e.engine.name} trains only"
        raise InvalidConfig("mode", INFERENCE, rule, "use engine=distributed, emulate, simulate or reference")
    if e.checkpoint.every:
        rule = "mode=inference changes no weights, so there is nothing to save"
        raise InvalidConfig("checkpoint.every", e.checkpoint.every, rule, "leave checkpoint.every out")
    if e.resume is not None:
        rule = "goes on with a training, and mode=inference only reads weights"
        raise InvalidConfig("resume", e.resume, rule, f"set load_weights={e.resume}")
    if e.loss_scope == "minibatch":
        raise InvalidConfig("loss.scope", "minibatch", "mode=inference computes no loss", "leave loss.scope out")
    for name, fix in (("autocast", None), ("compile", None), ("launch", "local"), ("enforce_memory", False)):
        value = getattr(e.engine, name, fix)
        if value != fix:
            rule = "is for training; mode=inference runs what was captured, on workers that this process starts"
            raise InvalidConfig(f"engine.{name}", value, rule, f"leave engine.{name} out")


def arrivals_of(e: ServingSettings, engine: AbstractServer) -> Arrivals:
    """The stream of requests: `steps` of them."""
    return Arrivals(requests=e.num_steps, rate=engine.arrival_rate, spacing=engine.arrivals, seed=e.seed)


def posed(e: ServingSettings, problem: Problem) -> Problem:
    """The problem of serving: its regime, and what no stream can run through, refused beside what the engine refuses."""
    engine = e.engine
    if e.mode != INFERENCE or not isinstance(engine, AbstractServer):
        return problem
    regime = Regime(buffers=engine.buffers, arrivals=arrivals_of(e, engine), writes=engine.answers)
    return replace(problem, regime=regime, refuses=_refuses(problem.refuses), optimizer_state_factor=0.0, global_norm=False)


def _refuses(engine: Callable[[Any], str | None]) -> Callable[[Plan], str | None]:
    def why_not(plan: Plan) -> str | None:
        try:
            check_served(plan)
        except InvalidPlan as error:
            return str(error)
        return engine(plan)

    return why_not


def model_of(e: ServingSettings, captured: Captured) -> Captured:
    """The model that runs: in mode=inference without its loss, metrics and targets."""
    if e.mode != INFERENCE:
        return captured
    # A profile has no nodes, and says what a forward takes.
    return served(captured) if captured.nodes else replace(captured, graph=forward_only(captured.graph))


def serve_settings(
    e: ServingSettings, engine: AbstractEngine, sizes: dict[str, int], plan: Plan, problem: Problem
) -> ServeSettings | None:
    """The settings that serving adds to a job; None where it trains."""
    if e.mode != INFERENCE or not isinstance(engine, AbstractServer):
        return None
    split = "test" if sizes["test"] else "train"
    return ServeSettings(
        buffers=engine.buffers,
        arrivals=arrivals_of(e, engine),
        split=split,
        samples=sizes[split],
        answers=engine.answers,
        kept={name: number for part in job_parts(plan.mechanisms) for name, number in part.kept(plan, problem).items()},
    )


def judge(
    e: ServingSettings, whole: Captured, data: AbstractData, model: AbstractModel, job: Job, run_dir: Path
) -> dict[str, float]:
    """The quality of the answers by the data's targets; empty where nothing was answered.

    Args:
        whole: the model with its loss.
    """
    if not (e.engine.runs and e.engine.needs_weights and job.settings.serving and job.settings.serving.answers):
        return {}
    from gpp.runtime.controller.stream import judged

    return judged(whole, job, run_dir, data, model)
