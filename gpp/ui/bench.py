"""Planning again: the problem of a run, posed once, and what a page asks of it.

Nothing is captured or measured but where a run has left no job: then the model comes from the cache, or is captured once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required, final

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from gpp import mechanism
from gpp.analysis.comparison import Attempt, attempt, chain_beside
from gpp.analysis.explain.changes import with_memory
from gpp.app.experiment import Experiment
from gpp.app.exporting import export_plan, to_plan_for
from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible, InvalidConfig, UnsupportedPlan
from gpp.export.base import AbstractExporter, ToExport, ToPlanFor
from gpp.export.deepspeed import DeepSpeed
from gpp.export.megatron import Megatron
from gpp.export.modules import Modules
from gpp.export.nearest import by_modules, nearest
from gpp.export.torch import Torch
from gpp.export.torchtitan import TorchTitan
from gpp.files import write_text
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import branches
from gpp.plan.plan import Plan
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.report.draw import text
from gpp.report.sweep.jobs import RESULT, ResultFile
from gpp.runtime.job import overheads_of
from gpp.runtime.mode import mode_named
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.serialization import from_json, read_json, to_json
from gpp.strategy import Strategy
from gpp.ui.moved import BorderShift, OperatorMove, moved, moves, shifted
from gpp.ui.settings import settings_of
from gpp.ui.views import Control, figures, meaning, plan_view

AUTO = "auto"
"""The micro-batch that the planner chooses."""

EXPORTERS: Mapping[str, AbstractExporter] = {
    each.name: each for each in (Torch(weights=False), TorchTitan(), Megatron(), DeepSpeed())
}
"""The engines that a plan is written for; initial weights, which may be large, are left to `mode=export`."""


@with_config(ConfigDict(extra="forbid", strict=True))
class PlanQuestion(TypedDict, total=False):
    """What a page asks: a plan by settings, or with `plan`, the text of a plan.json, that plan, changed by hand or exported.

    Args:
        state: the position of each control's value.
        near: a micro-batch size to which a quick search may keep.
        whole: whether to search to the end, where there is a quick form of the search (`quick`).
        move: operator and stage to which it goes.
        shift: two stages, and how many operators go from the first to the second.
        export: a name of `EXPORTERS`; `nearest` as `AbstractExporter` has it.
    """

    state: Required[list[int]]
    near: int | None
    whole: bool
    plan: str | None
    move: list[int] | None
    shift: list[int] | None
    export: str | None
    nearest: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run's problem, and how it may be changed."""

    run_dir: Path
    experiment: Experiment
    captured: Captured
    problem: Problem
    branches: tuple[int | None, ...]
    strategies: Mapping[str, Strategy]
    schedules: Mapping[str, AbstractSchedule]
    controls: tuple[Control, ...]
    start: tuple[int, ...]
    own: Plan | None
    rules: AbstractExporter | None
    exporters: Mapping[str, AbstractExporter]

    @classmethod
    def of(cls, run_dir: Path, trusted: Collection[str] = ()) -> Bench:
        """The bench of a run directory.

        Raises:
            InvalidConfig: the run's files describe no planning problem.
        """
        (experiment, exporter, ruled), job = settings_of(run_dir, trusted), run_dir / "job"
        kept = (job / "graph.json").exists()
        captured = read_json(Captured, job / "model.json") if kept else experiment.captured()
        graph = read_json(OpGraph, job / "graph.json") if kept else experiment.op_graph(captured)
        rules = exporter if ruled else None
        if rules is not None and rules.whole and graph.fingerprint != Modules.of(captured).graph.fingerprint:
            rules = None  # the engine could run what was planned without them
        problem = _problem(experiment, captured, graph, rules)
        problem = replace(problem, overheads=overheads_of(run_dir))
        plan = read_json(Plan, job / "plan.json") if kept else None
        strategies = _strategies([experiment.strategy, *experiment.strategies])
        trains = mode_named(experiment.mode) is None
        schedules = schedules_offered([experiment.strategy.schedule, *(exporter.schedules if exporter else ())], trains=trains)
        found = read_json(ResultFile, run_dir / RESULT) if (run_dir / RESULT).exists() else None
        made = tuple(_controls(problem, list(strategies), list(schedules)))
        starts = (
            str(problem.cluster.num_devices),
            str(problem.microbatch_size or AUTO),
            "1",
            experiment.strategy.name,
            (found and found.get("schedule")) or experiment.strategy.schedule.name,
        )
        return cls(
            run_dir=run_dir,
            experiment=experiment,
            captured=captured,
            problem=problem,
            branches=tuple(branches(graph)),
            strategies=strategies,
            schedules=schedules,
            controls=made,
            own=plan,
            rules=rules,
            exporters=_exporters(exporter),
            start=tuple(list(control.values).index(word) for control, word in zip(made, starts, strict=True)),
        )

    @property
    def near(self) -> int | None:
        """The micro-batch size of the run's own plan."""
        return max(stage.microbatch_size for stage in self.own.stages) if self.own else None

    def warm(self) -> None:
        """Search once: what is computed once for a graph is known then."""
        self._planned(*self._posed(self.start), PlanQuestion(state=list(self.start), near=self.near))

    def page(self) -> dict[str, Any]:
        """What the page of the run reads, but for its entries, which are planned when they are asked for."""
        own = mode_named(self.experiment.mode)
        meanings = {name: meaning(each.planner) for name, each in self.strategies.items()}
        meanings |= {name: meaning(each) for name, each in self.schedules.items()}
        return {
            "meanings": meanings,
            "controls": [each._asdict() for each in self.controls],
            "start": self.start,
            "near": self.near,
            "rules": self.rules and self.rules.engine,
            "exporters": [name for name, each in self.exporters.items() if each.mode == (own.name if own else "train")],
        }

    def answer(self, asked: PlanQuestion) -> dict[str, Any]:
        """The entry of settings.js for a question, with the plan's text and the moves that it allows; or the words on an export.

        Raises:
            GppError: the question is none that the page can ask, or the engine cannot run the plan.
        """
        strategy, problem = self._posed(asked["state"])
        given = asked.get("plan")
        if given is None:
            if self.own is not None and tuple(asked["state"]) == self.start:
                return self._entry(_checked(self.own, problem, strategy), problem) | {"more": False}
            return self._planned(strategy, problem, asked)
        plan = from_json(Plan, given, "the page's plan")
        if (name := asked.get("export")) is not None:
            return self._exported(plan, problem, strategy, name, nearest=asked.get("nearest", False))
        if (shift := asked.get("shift")) is not None:
            change = shifted(plan, problem, strategy, BorderShift(*_numbers("shift", shift, 3)))
        else:
            change = moved(plan, problem, strategy, OperatorMove(*_numbers("move", asked.get("move") or [], 2)))
        return {"change": change.change} | self._entry(_checked(change.plan, problem, strategy), problem)

    def _planned(self, strategy: Strategy, problem: Problem, asked: PlanQuestion) -> dict[str, Any]:
        """The entry of a plan that is searched for; `more` says that a whole search may find a better one, or more words."""
        if asked.get("whole"):
            return self._entry(self._attempt(strategy, problem), problem) | {"more": False}
        less = quick(strategy, problem, asked.get("near"))
        found = self._attempt(*less)
        if isinstance(found.error, Infeasible) and less[1] is not problem:
            found = self._attempt(less[0], problem)
        if isinstance(found.error, Infeasible):  # what is missing takes many searches
            return {"status": found.status, "reason": f"{found.error.short}.", "more": True}
        return self._entry(found, problem) | {"more": less != (strategy, problem)}

    def _posed(self, state: Sequence[int]) -> tuple[Strategy, Problem]:
        """The strategy and the problem of a state of the controls.

        Raises:
            InvalidConfig: there is no such state, or the strategy's weights do not go with the schedule.
        """
        if len(state) != len(self.controls) or any(not 0 <= i < len(c.values) for i, c in zip(state, self.controls, strict=True)):
            raise InvalidConfig("state", list(state), "must be a position for each control", "load the page again")
        words = [control.values[i] for i, control in zip(state, self.controls, strict=True)]
        cluster, size = self.problem.cluster, words[1]
        if (count := int(words[0])) < cluster.num_devices:
            cluster = cluster.only(range(count))
        if (factor := float(words[2])) != 1:
            cluster = with_memory(cluster, factor)
        problem = replace(self.problem, cluster=cluster, microbatch_size=None if size == AUTO else int(size))
        strategy = replace(self.strategies[words[3]], schedule=self.schedules[words[4]])
        if (rules := self.rules) is not None:
            ruled = self._to_plan(strategy, problem)
            problem = replace(problem, refuses=lambda plan: rules.why_not(ruled.having(plan)))
        return strategy, problem

    def _to_plan(self, strategy: Strategy, problem: Problem) -> ToPlanFor:
        return to_plan_for(self.experiment, self.captured, problem, strategy)

    def _attempt(self, strategy: Strategy, problem: Problem) -> Attempt:
        """A strategy's plan, or the best one that was found under the rules of the run's engine of others."""
        if self.rules is None:
            return attempt(strategy, problem)
        found = nearest(self._to_plan(strategy, problem), self.rules, others=False)
        if found is None:
            why = Infeasible(f"no plan was found that {self.rules.engine} can run", "another setting of this page")
            return Attempt(strategy=strategy.name, status="infeasible", error=why)
        return _checked(found.plan, problem, strategy)

    def _entry(self, found: Attempt, problem: Problem) -> dict[str, Any]:
        """What the page shows of an attempt."""
        out, plan = figures(found), found.plan
        if plan is None or found.predicted is None:
            return out
        graph = problem.graph
        return out | {
            **plan_view(plan, found.predicted, graph, self.branches),
            "size": max(stage.microbatch_size for stage in plan.stages),
            "json": to_json(plan),
            "operators": [len(stage.ops) for stage in plan.stages],
            "moves": [(op, s, t, graph.ops[op].name) for s, own in enumerate(moves(plan, graph)) for op, t in own],
        }

    def _exported(self, plan: Plan, problem: Problem, strategy: Strategy, name: str, *, nearest: bool) -> dict[str, Any]:
        """Write a plan for an engine below the run's directory; where, and what is to be known of it.

        Raises:
            GppError: there is no such engine, or it cannot run any such plan.
        """
        if name not in self.exporters:
            raise InvalidConfig("export", name, f"must be one of {', '.join(self.exporters)}", "load the page again")
        run, own = self.experiment, mode_named(self.experiment.mode)
        exporter: Any = self.exporters[name]
        exporter = replace(exporter, nearest=nearest)
        strategy.check(plan, problem)
        asked = self._to_plan(strategy, problem).having(plan)
        if (own.name if own else "train") != exporter.mode:
            raise InvalidConfig("export", name, f"is for mode={exporter.mode}", "use an engine of that mode")

        def save(e: ToExport, folder: Path) -> None:
            replace(run, mode="export", export=exporter, cluster=problem.cluster).job(e.captured, e.problem, e.plan).save(folder)

        folder = self.run_dir / "export" / name
        _, made = export_plan(asked, exporter, folder, save)
        write_text(folder / "plan.json", to_json(plan), exact=True)
        return {"folder": str(folder), "command": made.command, "page": (folder / "PLAN.md").read_text(encoding="utf-8")}


def _problem(run: Experiment, captured: Captured, graph: OpGraph, rules: AbstractExporter | None) -> Problem:
    """The run's problem; under the rules of an engine that cuts between modules, with the times that it had for them."""
    if rules is None or not rules.whole:
        return run.problem(captured, graph)
    return by_modules(to_plan_for(run, captured, run.problem(captured, run.op_graph(captured)))).problem


def _exporters(own: AbstractExporter | None) -> dict[str, AbstractExporter]:
    """The engines that a plan is written for, the run's own with its settings."""
    if own is None:
        return dict(EXPORTERS)
    plain: Any = own
    return {**EXPORTERS, own.name: replace(plain, weights=False) if own.weights else own}


def _numbers(field: str, given: Sequence[int], count: int) -> Sequence[int]:
    if len(given) != count:
        raise InvalidConfig(field, list(given), f"must be {count} numbers", "load the page again")
    return given


def quick(strategy: Strategy, problem: Problem, near: int | None) -> tuple[Strategy, Problem]:
    """The part of a search that answers while a reader waits: with one micro-batch size, and without walks.

    For mmt on 32 devices that is a tenth of the search. Of ten changes its plans were 0.6 to 7.9 % slower than those of the
    whole search, 2.4 % in the median.
    """
    planner = strategy.planner
    if isinstance(planner, GraphPipe):
        strategy = replace(strategy, planner=replace(planner, rounds=0))
    if problem.microbatch_size is None and near in problem.microbatch_sizes():
        problem = replace(problem, microbatch_size=near)
    return strategy, problem


def _checked(plan: Plan, problem: Problem, strategy: Strategy) -> Attempt:
    """A plan that was changed by hand, predicted; or why it cannot run."""
    try:
        strategy.check(plan, problem)
        if (why := problem.refuses(plan)) is not None:
            raise UnsupportedPlan(why)
        return Attempt(strategy=strategy.name, status="ok", plan=plan, predicted=strategy.predict(plan, problem))
    except GppError as error:
        return Attempt(strategy=strategy.name, status="infeasible", error=error.with_traceback(None))


def _strategies(own: Sequence[Strategy]) -> dict[str, Strategy]:
    """The run's strategies, and beside them the best chain and the graph of stages, by name."""
    beside = [chain_beside(own[0]), Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())]
    return {each.name: each for each in [*(one for one in reversed(beside) if one), *reversed(own)]}


def schedules_offered(own: Sequence[AbstractSchedule], *, trains: bool) -> dict[str, AbstractSchedule]:
    """The run's schedules, the strategy's first, and the synchronous ones that any strategy may have that trains, by name."""
    offered = dict[str, AbstractSchedule]()
    if trains:
        offered = {"1f1b": OneFOneB(), "gpipe": GPipe()}
        for added in mechanism.found("schedules", "OFFERED", dict).values():
            offered |= added
    return {**{each.name: each for each in reversed(own) if each not in offered.values()}, **offered}


def _controls(problem: Problem, strategies: Sequence[str], schedules: Sequence[str]) -> list[Control]:
    """The settings of the page, in the order in which `Bench._posed` reads them."""
    counts = [str(n) for n in range(1, problem.cluster.num_devices + 1)]
    devices = [f"{n} device{'s' * (n != '1')}" for n in counts]
    sizes = [str(b) for b in problem.microbatch_sizes()]
    of_sizes = [f"micro-batches of {b}" for b in sizes]
    said = [f"{b} samples: {problem.minibatch_size // int(b)} in a mini-batch of {problem.minibatch_size}" for b in sizes]
    if problem.microbatch_size is None:
        sizes, of_sizes = [AUTO, *sizes], ["micro-batches of the planner's choice", *of_sizes]
        said = ["the planner's choice", *said]
    factors = [f"{2 ** (eighth / 2):.3g}" for eighth in range(-12, 5)]
    least = min(device.memory_bytes for device in problem.cluster.devices)
    memory = [text.num_bytes(least * float(factor)) for factor in factors]
    owned = [f"{words} a device" for words in memory]
    described = [words if factor != "1" else f"{words}, as described" for words, factor in zip(memory, factors, strict=True)]
    ways = [f"schedule {name}" for name in schedules]
    return [
        Control("devices", "Devices", counts, devices, devices, counts, True),
        Control("microbatch", "Micro-batch", sizes, said, of_sizes, of_sizes, True),
        Control("memory", "Memory of a device", factors, described, owned, memory, True),
        Control("strategy", "Strategy", strategies, strategies, strategies, strategies, False),
        Control("schedule", "Schedule", schedules, schedules, ways, schedules, False),
    ]


def question(content: bytes) -> PlanQuestion:
    """The question of a request's body.

    Raises:
        InvalidFile: it is none.
    """
    return from_json(PlanQuestion, content, "the request", "load the page again")


def written(answer: Mapping[str, Any]) -> bytes:
    """An answer as the page reads it."""
    return json.dumps(answer, separators=(",", ":")).encode()
