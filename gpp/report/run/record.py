"""The record of one run: what is known of it, each fact once. result.json, the reports, the terminal and the trackers are views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gpp.analysis.comparison import Attempt, Status, best_of
from gpp.graph.series_parallel import branches
from gpp.report.run.gain_words import gain_dicts
from gpp.report.run.result import finite, plan_dict, prediction_error
from gpp.timeline import Metrics, Outcome, Timeline

if TYPE_CHECKING:
    from gpp.analysis.explain.explanation import Explanation
    from gpp.analysis.gains import Gains
    from gpp.analysis.max_batch import LargestMicrobatch
    from gpp.analysis.one_stage import OneStage
    from gpp.cluster import Cluster
    from gpp.cost.models.base import AbstractCostModel
    from gpp.graph.captured import Checked
    from gpp.graph.op_graph import OpGraph
    from gpp.plan.plan import Plan
    from gpp.planners.bounds.lower_bound import Bound
    from gpp.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request for a run, by name.

    Args:
        schedule, weights, cost: the strategy's schedule and weight policy, and the cost model; empty where they are not known.
        configuration: hash of the settings that decide the result; None where a run has none.
        command: the command line that reproduces the run.
    """

    model: str = ""
    strategy: str = ""
    schedule: str = ""
    weights: str = ""
    cluster: str = ""
    cost: str = ""
    engine: str = ""
    seed: int = 0
    configuration: str | None = None
    command: str = ""

    @classmethod
    def of(cls, strategy: Strategy, cost: AbstractCostModel, **others: Any) -> Asked:
        """The request for a run under a strategy, whose parts have names; `others` are the other fields."""
        parts = {"schedule": strategy.schedule.name, "weights": strategy.weights.name, "cost": cost.name}
        return cls(strategy=strategy.name, **parts, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The results of planning. A run that ended before lacks some.

    Args:
        predicted: the timeline of the plan.
        peak_bytes: memory of this process, at most, until the plan and its prediction were there.
        checked: how the captured model was compared with the user's own module, and the seconds that it took.
    """

    plan: Plan | None = None
    graph: OpGraph | None = None
    cluster: Cluster | None = None
    predicted: Timeline | None = None
    peak_bytes: int | None = None
    checked: Checked | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorth:
    """The judgement of the plan.

    Args:
        bound: a time that no plan for the problem can beat.
        unbounded: what such a time is not known for, as "updates in parts"; empty where it is, or where nobody asks.
        baseline: other strategies' predictions for the same problem, `sequential` first.
        explanation: bottleneck, idle time and alternatives of the plan.
        one_stage: why a plan for several devices is one stage.
        gains: what the plan gains over the best chain and over one device.
    """

    bound: Bound | None = None
    unbounded: str = ""
    baseline: Mapping[str, Metrics] = field(default_factory=dict)
    explanation: Explanation | None = None
    one_stage: OneStage | None = None
    gains: Gains | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """Several strategies on one problem; the run's plan is then the best one's.

    Args:
        attempts: what each strategy found.
        boundaries: the largest micro-batch of each of them; None where it was not looked for.
    """

    attempts: tuple[Attempt, ...] = ()
    boundaries: tuple[LargestMicrobatch, ...] | None = None


class Resumed(NamedTuple):
    """Where a run went on from: the step, and its checkpoint."""

    step: int
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run that is finished, infeasible or failed; in the last two cases it may lack a plan and timelines.

    Args:
        reason: why the run is not ok.
        outcome: what the engine measured; losses are one value a step, from the first step of this run on.
        survey: None for a run of one strategy.
    """

    asked: Asked = field(default_factory=Asked)
    status: Status = "ok"
    reason: str | None = None
    planned: Planned = field(default_factory=Planned)
    outcome: Outcome = field(default_factory=Outcome)
    resumed: Resumed | None = None
    judged: PlanWorth = field(default_factory=PlanWorth)
    survey: Surveyed | None = None
    warnings: tuple[str, ...] = ()

    def knowing(self, **facts: Any) -> RunRecord:
        """The record with these facts, by their names: its own, or those of one of its parts."""
        own = {name: fact for name, fact in facts.items() if name not in _PART_OF}
        for name, fact in facts.items():
            if (part := _PART_OF.get(name)) is not None:
                own[part] = replace(own.get(part) or getattr(self, part) or _PARTS[part](), **{name: fact})
        return replace(self, **own)

    @property
    def plan(self) -> Plan | None:
        return self.planned.plan

    @property
    def graph(self) -> OpGraph | None:
        return self.planned.graph

    @property
    def cluster(self) -> Cluster | None:
        return self.planned.cluster

    @property
    def predicted(self) -> Timeline | None:
        return self.planned.predicted

    @property
    def measured(self) -> Timeline | None:
        return self.outcome.measured

    @property
    def source(self) -> str:
        """What readers are told that the measured timeline is: with emulated devices nothing is measured of the real ones."""
        return "emulated" if self.outcome.emulation is not None else "measured"

    @property
    def first_step(self) -> int:
        """The step of the first loss."""
        return self.resumed.step if self.resumed else 0

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The findings of each of several strategies; empty for a run of one."""
        return self.survey.attempts if self.survey else ()

    @property
    def boundaries(self) -> tuple[LargestMicrobatch, ...]:
        """The largest micro-batch of each strategy; empty where it was not looked for."""
        return (self.survey.boundaries or ()) if self.survey else ()

    @property
    def strategy(self) -> str:
        """The strategy whose plan the run has: of several, the best one."""
        best = best_of(self.attempts).own
        return best.strategy if best else self.asked.strategy

    @cached_property
    def branches(self) -> tuple[int | None, ...]:
        """For each operator its branch, or None for the trunk; empty where there is no graph."""
        return tuple(branches(self.planned.graph)) if self.planned.graph else ()

    @cached_property
    def result(self) -> dict[str, Any]:
        """result.json, the contract of a run: in JSON's own types, string keys, and null where a number is not finite."""
        asked, planned, outcome, judged = self.asked, self.planned, self.outcome, self.judged
        best = best_of(self.attempts).own
        bound = judged.bound if best is None or not best.unbounded else None
        order = judged.explanation.order if judged.explanation else None
        predicted = planned.predicted.metrics if planned.predicted else None
        measured = outcome.measured.metrics if outcome.measured else None
        num_ops = planned.graph.num_ops if planned.graph else None
        final = {name: value for name, value in (outcome.evaluations[-1] if outcome.evaluations else {}).items() if name != "step"}
        return finite(
            {
                "status": self.status,
                "reason": self.reason,
                "model": asked.model,
                "strategy": self.strategy,
                "cluster": asked.cluster,
                "engine": asked.engine,
                "seed": asked.seed,
                "plan": plan_dict(planned.plan, num_ops, predicted, bound, order) if planned.plan else None,
                "predicted": asdict(predicted) if predicted else None,
                "measured": asdict(measured) if measured else None,
                "prediction_error": prediction_error(predicted, measured),
                "loss": outcome.losses,
                "final_metric": {name.removeprefix("metric:"): value for name, value in final.items()},
                **self._more(),
                "planning_peak_bytes": planned.peak_bytes,
            }
        )

    def _more(self) -> dict[str, Any]:
        """Keys of result.json that only some runs have."""
        outcome, judged, survey, out = self.outcome, self.judged, self.survey, dict[str, Any]()
        if survey is not None:
            from gpp.report.run.strategies import best_names, boundary_dicts, compared_dicts

            num_ops = self.planned.graph.num_ops if self.planned.graph else None
            out["compared"] = compared_dicts(survey.attempts, judged.bound, num_ops)
            out["best"] = best_names(survey.attempts)
            if survey.boundaries is not None:
                out["max_batch"] = boundary_dicts(survey.boundaries)
        elif self.asked.schedule:
            out["schedule"] = self.asked.schedule
        if self.asked.configuration is not None:
            out["configuration"] = self.asked.configuration
        if outcome.terms:
            out["loss_terms"] = {name.removeprefix("loss:"): values for name, values in outcome.terms.items()}
        if self.resumed is not None and outcome.losses:
            out["resumed"] = self.resumed._asdict()
        for name, value in (("emulation", outcome.emulation), ("versions", outcome.versions), ("checked", self.planned.checked)):
            if value is not None:
                out[name] = asdict(value)
        if judged.explanation is not None:
            out["idle_s"] = dict(judged.explanation.idle_s)
        if judged.gains and (gains := gain_dicts(judged.gains)):
            out["gains"] = gains
        if outcome.answers:
            out["answers"] = dict(outcome.answers)
        if outcome.replaced:
            out["replaced"] = [asdict(one) for one in outcome.replaced]
        return out


_PARTS: Mapping[str, type[Any]] = {"asked": Asked, "planned": Planned, "outcome": Outcome, "judged": PlanWorth, "survey": Surveyed}
_PART_OF: Mapping[str, str] = {one.name: part for part, kind in _PARTS.items() for one in fields(kind)}
"""Fact -> the part of a record that has it."""
