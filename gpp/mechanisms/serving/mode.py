"""mode=inference: what it refuses before anything is captured, and what it makes of the settings of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.data.base import AbstractData
from gpp.errors import InvalidConfig, InvalidPlan
from gpp.graph.captured import Captured
from gpp.graph.forward_only import forward_only
from gpp.mechanisms.serving.course import Arrivals, Requests, requests_of
from gpp.mechanisms.serving.model import served
from gpp.mechanisms.serving.stream import check_served
from gpp.memory import Keep
from gpp.models.base import AbstractModel
from gpp.plan.plan import Plan
from gpp.runtime.engine import AbstractServer
from gpp.runtime.job import Job
from gpp.runtime.mode import AbstractMode, RunSettings
from gpp.schedules.forward_only import ForwardOnly
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy


def _refuses(engine: Callable[[Any], str | None]) -> Callable[[Plan], str | None]:
    def why_not(plan: Plan) -> str | None:
        try:
            check_served(plan)
        except InvalidPlan as error:
            return str(error)
        return engine(plan)

    return why_not


class Inference(AbstractMode):
    """mode=inference."""

    name: ClassVar[str] = "inference"

    def check(self, e: RunSettings) -> None:
        if e.mode == self.name:
            self._check(e)
        else:
            self._check_elsewhere(e)

    def _check(self, e: RunSettings) -> None:
        if not isinstance(e.engine, AbstractServer):
            rule = f"engine={e.engine.name} trains only"
            raise InvalidConfig("mode", self.name, rule, "use engine=distributed, emulate, simulate or reference")
        if e.engine.arrivals != "deterministic" and e.engine.arrival_rate is None:
            rule = "says how far apart requests are, and without engine.arrival_rate another one always waits"
            raise InvalidConfig("engine.arrivals", e.engine.arrivals, rule, "set engine.arrival_rate=20, or leave it out")
        if e.checkpoint.every:
            rule = "mode=inference changes no weights, so there is nothing to save"
            raise InvalidConfig("checkpoint.every", e.checkpoint.every, rule, "leave checkpoint.every out")
        if e.resume is not None:
            rule = "goes on with a training, and mode=inference only reads weights"
            raise InvalidConfig("resume", e.resume, rule, f"set load_weights={e.resume}")
        if e.loss_scope == "minibatch":
            raise InvalidConfig("loss.scope", "minibatch", "mode=inference computes no loss", "leave loss.scope out")
        for name, off in (("autocast", None), ("compile", None), ("launch", "local"), ("enforce_memory", False)):
            value = getattr(e.engine, name, off)
            if value != off:
                rule = "is for training; mode=inference runs what was captured, on workers that this process starts"
                alone = ", and start python run.py without a launcher" if name == "launch" else ""
                raise InvalidConfig(f"engine.{name}", value, rule, f"leave engine.{name} out{alone}")

    def _check_elsewhere(self, e: RunSettings) -> None:
        rate = e.engine.arrival_rate if isinstance(e.engine, AbstractServer) else None
        if rate is not None:
            rule = f"is the rate of requests, and mode={e.mode} answers none"
            raise InvalidConfig("engine.arrival_rate", rate, rule, "set mode=inference, or leave it out")
        for strategy in (e.strategy, *e.strategies):
            for each in strategy.choices:
                each.check(trains=True)
            if strategy.objective != "throughput":
                rule = f"is what plans for requests minimise, and mode={e.mode} answers none"
                fix = "set mode=inference (engine=simulate only predicts), or leave it out"
                raise InvalidConfig("strategy.objective", strategy.objective, rule, fix)

    def adapted(self, strategy: Strategy) -> Strategy:
        """The strategy with forwards only: the schedule that it has by default is that of a training."""
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

    def model(self, captured: Captured) -> Captured:
        """The model without its loss, metrics and targets."""
        # A profile has no nodes, and says what a forward takes.
        return served(captured) if captured.nodes else replace(captured, graph=forward_only(captured.graph))

    def posed(self, e: RunSettings, sizes: Mapping[str, int], problem: Problem) -> Problem:
        """The problem of serving: its regime, and what no stream can run through, refused beside what the engine refuses."""
        engine, split = e.engine, "test" if sizes["test"] else "train"
        assert isinstance(engine, AbstractServer), "any other is refused"
        course = Requests(
            buffers=engine.buffers,
            arrivals=Arrivals(requests=e.num_steps, rate=engine.arrival_rate, spacing=engine.arrivals, seed=e.seed),
            split=split,
            samples=sizes[split],
            answers=engine.answers,
        )
        regime, refuses = Regime(course=course), _refuses(problem.refuses)
        return replace(problem, regime=regime, refuses=refuses, optimizer_state_factor=0.0, global_norm=False)

    def judged(
        self, e: RunSettings, whole: Captured, data: AbstractData, model: AbstractModel, job: Job, run_dir: Path
    ) -> dict[str, float]:
        if not (e.engine.runs and e.engine.needs_weights and requests_of(job.settings.course).answers):
            return {}
        from gpp.mechanisms.serving.results import judged

        return judged(whole, job, run_dir, data, model)


MODE = Inference()
