"""One run as a value: its fields are the root keys of the configuration, its methods the steps of the story.

    capture → coarsen → problem → plan → job → execute

`run.py` (through `gpp.app.cli`) tells the story with a recorder around it; `gpp.train` tells it from Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from gpp.app.capturing import captured_model, compared_model, makes_whole, must_compare, uneven_targets, weights_or_origin
from gpp.app.given import check_engine, check_given, check_only_size
from gpp.app.made import MadeOnce
from gpp.app.moving import check_movable, check_replan
from gpp.app.sections import GraphSettings, LossSettings
from gpp.app.several import check_survey
from gpp.app.uneven import with_varying
from gpp.cluster import Cluster
from gpp.cost.counted import check_counted, masked_warnings
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem, check_batch
from gpp.cost.uneven import UnevenSamples
from gpp.data.base import AbstractData, Samples
from gpp.errors import InvalidConfig
from gpp.export.base import AbstractExporter, check_export
from gpp.export.imports import layout_of
from gpp.export.layout import GivenLayout
from gpp.export.modules import Modules
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.loggers.base import AbstractLogger
from gpp.models.base import AbstractModel
from gpp.models.profile import AbstractProfile
from gpp.models.random_graph import RandomGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.loss_stage import LossScope, coarsen_for, loss_mask
from gpp.plan.plan import Plan
from gpp.planners.chains.data_parallel import DataParallel
from gpp.runtime.checkpoint.resume import AUTO, Checkpoints, FoundCheckpoint, continues, find, training_of, uncaptured
from gpp.runtime.cut_batches import ANOTHER_ENGINE, ON_COMMAND_LINE, check_whole_loss, cut_warnings
from gpp.runtime.devices import check_devices, check_measurable
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.job import Job, WritesItself, assemble
from gpp.runtime.job_asked import asked_by, asked_model, with_asked
from gpp.runtime.mode import AbstractMode, check_modes, mode_named
from gpp.runtime.task import EngineTask
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.serialization import read_json
from gpp.settings import Count, Natural, NotNegative, Seed, settings
from gpp.strategy import Strategy


@settings("", slots=False)
class Experiment:
    """The settings of one run.

    Args:
        mode: `train`; `inference`: answer requests; `plan`: only predict and explain; `compare`: plan with several strategies;
            `max_batch`: the largest micro-batch of several strategies; `profile`: show measurements; `export`: files for another
            engine.
        strategies: strategies that `compare` and `max_batch` plan with.
        optimized_metric: what a search over settings asks of the run: the dotted name of a number of result.json.
        export: the engine that `export` writes the plan for, and `plan` makes it for.
        confirm: whether `max_batch` runs what it has found, on workers whose memory is bounded.
        explain_s: seconds that the explanation may spend on planning again; 0 leaves this out.
        baselines_s: seconds that the steps of the best chain and of one device may take, which are measured after a training to
            tell what was gained; 0: they are predicted.
        steps: optimizer steps.
        minibatch_size: samples between two optimizer steps.
        microbatch_size: samples of a micro-batch; None leaves it to the planner.
        evaluate_every: steps between evaluations on held-out data; 0 evaluates at the end only.
        on_nonfinite: `stop` fails the run at the first loss that is not finite; `warn` says so and goes on;
            `trace` fails at the first gradient that is NaN, too, and names the function that made it.
        graph: `max_ops`, the number of operators to coarsen to; None for those that were captured.
        loss: `scope`, the samples that the loss is computed on at once: each `microbatch`, or the whole `minibatch`.
        uneven: the input that says how much work a sample makes, and what follows.
        plan: path of a plan.json to run instead of planning, or a layout in the form of another engine (`gpp.export.imports`).
        checkpoint: when to save checkpoints, and how many to keep.
        resume: a run directory, or one of its checkpoints, to go on from; `steps` still counts from the very first
            step. `auto`: the run's own directory, if it has a checkpoint (`going_on`).
        load_weights: a run directory, or safetensors: a file or a folder of them; None for those that the model is built with.
        initial_weights: made `whole` by this process, or `stages` by each worker; `auto`: `stages` above `capturing.SHARE`.
        cache_dir: folder of captured graphs and profiles.
    """

    name: str
    model: AbstractModel
    data: AbstractData
    cluster: Cluster
    cost: AbstractCostModel
    strategy: Strategy
    engine: AbstractEngine
    optimizer: AbstractOptimizer
    steps: Count
    minibatch_size: Count
    cache_dir: str
    mode: Literal["train", "inference", "plan", "compare", "max_batch", "profile", "export"] = "train"
    microbatch_size: Count | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: Seed = 0
    evaluate_every: Natural = 0
    on_nonfinite: Literal["stop", "warn", "trace"] = "stop"
    graph: GraphSettings | None = None
    loss: LossSettings | None = None
    uneven: UnevenSamples = field(default_factory=UnevenSamples)
    plan: str | None = None
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    resume: str | None = None
    load_weights: str | None = None
    initial_weights: Literal["auto", "whole", "stages"] = "auto"
    final_weights: bool = True
    strategies: Sequence[Strategy] = ()
    explain_s: NotNegative = 5.0
    baselines_s: NotNegative = 15.0
    confirm: bool = False
    optimized_metric: str | None = None
    export: AbstractExporter | None = None
    logger: Mapping[str, AbstractLogger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_batch(self.minibatch_size, self.microbatch_size)
        check_export(self.mode, self.export)
        check_survey(self.mode, self.engine, self.plan, self.strategies, self.confirm)
        if isinstance(self.engine.planner, DataParallel) and self.loss_scope == "minibatch":
            rule = f"engine={self.engine.name} has the loss on each device's share of the mini-batch only"
            raise InvalidConfig("loss.scope", "minibatch", rule, "use engine=distributed")
        self.engine.refuse_settings(self.strategy.weights, self.optimizer, self.strategy.schedule)
        for part in () if self.engine.own_runtime else asked_by(self.optimizer, self.engine.worker_settings):
            part.refuse_engine(self.engine.name)
        check_modes(self)
        check_replan(self)
        if self.own_mode is not None:
            object.__setattr__(self, "strategy", self.own_mode.adapted(self.strategy))
        elif self.engine.planner is not None:
            # The prediction is that of the engine's own plan, which runs one micro-batch after the other.
            object.__setattr__(self, "strategy", replace(self.strategy, planner=self.engine.planner, schedule=OneFOneB()))

    @cached_property
    def made(self) -> MadeOnce:
        """What it has made so far."""
        return MadeOnce()

    @property
    def max_ops(self) -> int | None:
        return (self.graph or {}).get("max_ops", 64)

    @property
    def loss_scope(self) -> LossScope:
        return (self.loss or {}).get("scope", "microbatch")

    @property
    def times(self) -> AbstractCostModel:
        """The cost model: a profile brings its own."""
        return self.model.times if isinstance(self.model, AbstractProfile) else self.cost

    @property
    def runs(self) -> bool:
        """Whether an engine is to run the plan."""
        return (self.mode == "train" or self.own_mode is not None) and self.engine.runs and self.mode != "export"

    @property
    def own_mode(self) -> AbstractMode | None:
        """The mode where it is a mechanism's, in which nothing is trained; else None."""
        return mode_named(self.export.mode if self.mode == "export" and self.export else self.mode)

    @property
    def computes(self) -> bool:
        """Whether workers compute, with weights and data."""
        return self.trains or (self.own_mode is not None and self.engine.runs and self.engine.needs_weights)

    @property
    def trains(self) -> bool:
        """Whether workers train, with weights and data: in a run, or in a rehearsal of one."""
        return self.mode in ("train", "profile") and self.engine.runs and self.engine.needs_weights

    @property
    def num_steps(self) -> int:
        """Steps that the engine runs."""
        most = None if self.own_mode is not None else self.engine.max_steps
        return self.steps if most is None else max(2, min(self.steps, most))

    def check(self) -> None:
        """Refuse bad settings before anything is captured or measured.

        Raises:
            InvalidConfig: the plan's file cannot be read, or holds no plan; there is no checkpoint to go on from, or it is
                that of another training; the data cannot feed the model, or holds less than a mini-batch.
        """
        if self.resume is not None and not (self.trains and self.runs):
            raise InvalidConfig("resume", self.resume, "needs mode=train and an engine that trains", "leave resume out")
        if self.runs or self.trains:
            check_engine(self.engine, self.strategy, self.given_plan)
        if isinstance(self.model, AbstractProfile):
            if self.trains or self.engine.planner is not None:
                raise self.model.untrained()
            return
        if isinstance(self.model, RandomGraph):
            self.model.refuse(computes=self.computes, measures=isinstance(self.cost, Profiled))
        if isinstance(self.cost, Analytical) and any(max(d.peak_flop_per_s.values()) <= 1.0 for d in self.cluster.devices):
            rule = "has devices without a speed, for profiles, which bring their times"
            raise InvalidConfig("cluster", self.cluster.name, rule, "use cluster=summit_1x4, or model=profile")
        if self.runs:
            check_devices(self.cluster, self.engine.devices_here(self.cluster), self.engine.name)
        if isinstance(self.cost, Profiled):
            check_measurable(self.cluster)
        self.data.check(self.model)
        if self.computes:
            from gpp.app.in_place import early

            self.made.rehearsals = early(self.cost, self.cluster, self.engine)
        if self.trains:
            num_train = self._num_samples["train"]
            if self.minibatch_size > num_train:
                rule = f"must be at most the number of training samples, {num_train}"
                fix = f"set minibatch_size={num_train} or less, or use more data"
                raise InvalidConfig("minibatch_size", self.minibatch_size, rule, fix)
            if self.resumed is not None:
                sizes = {"minibatch_size": self.minibatch_size, "train_samples": num_train}
                self.resumed.refuse_another(uncaptured(self.model, self.optimizer, dtype=self.dtype, seed=self.seed, **sizes))

    def going_on(self, run_dir: Path, *, again: bool) -> Experiment:
        """This training with its own run directory in place of `resume=auto`, or with no `resume` where that has no checkpoint.

        Args:
            again: whether a launcher has started it before in this directory: whatever `resume` says, it goes on there.
        """
        if not (self.trains and self.runs) or not (again or self.resume == AUTO):
            return self
        otherwise = None if self.resume == AUTO else self.resume
        return replace(self, resume=str(run_dir) if continues(run_dir) else otherwise)

    @cached_property
    def resumed(self) -> FoundCheckpoint | None:
        """The checkpoint that this run goes on from."""
        return None if self.resume is None else find(self.resume, self.steps)

    @cached_property
    def _num_samples(self) -> dict[str, int]:
        """Samples of each split; none where nothing is computed."""
        if not self.computes and not (self.export and self.export.weights):
            return {"train": 0, "test": 0}
        return {split: len(self.samples(split)) for split in ("train", "test")}

    def samples(self, split: str) -> Samples:
        return self.data.load(split, self.model, seed=self.seed, dtype=self.dtype)

    def captured(self) -> Captured:
        """The captured model that runs: with its loss, if it is trained."""
        found = self.with_loss() if self.own_mode is None else self.own_mode.model(self.with_loss())
        return asked_model(found, self.optimizer, self.engine.worker_settings)

    def with_loss(self) -> Captured:
        """The captured model with its loss; from the cache, without torch, if it was captured before."""
        captured = captured_model(self.model, self.dtype, self.cache_dir, self.microbatch_size, self.minibatch_size)
        if not (self.trains and must_compare(captured)) or not self._whole(captured):
            return captured
        given = {"seed": self.seed, "dtype": self.dtype}
        found, self.made.network = compared_model(self.model, captured, self.samples("train"), self.cache_dir, **given)
        return found

    def op_graph(self, captured: Captured) -> OpGraph:
        """The operators that planners see: convex groups, at most `graph.max_ops` of them, or the captured ones."""
        if isinstance(self.model, AbstractProfile) and not self.model.coarsen:
            return captured.graph
        if self.loss_scope == "minibatch":
            check_whole_loss(captured, self.minibatch_size)
        if self.layout is not None:  # engines that have layouts cut between modules
            self.made.modules = Modules.of(captured)
        modules, whole = self.made.modules, self.model.whole
        return modules.graph if modules else coarsen_for(captured, self.max_ops, self.loss_scope, whole)

    def problem(self, captured: Captured, graph: OpGraph) -> Problem:
        """The planning problem; measures the operators first if the cost model is a profile.

        Raises:
            InvalidConfig: as `check_only_size`; no FLOPs are known of an operator.
        """
        cost = self.times
        if isinstance(cost, Profiled):
            from gpp.app.in_place import profiled

            cost = profiled(cost, captured, graph, self.cluster, self.optimizer, self.microbatch_size or self.minibatch_size)
        check_counted(captured, graph, self.cluster, cost)
        fixed = captured.batch is not None and self.engine.planner is None
        if fixed and captured.batch:
            check_only_size(captured.batch, self.minibatch_size, self.model.name)
        whole_loss = self.loss_scope == "minibatch"
        imposed = None if self.engine.planner is not None and whole_loss else self.microbatch_size
        posed = Problem(
            graph=graph,
            cluster=self.cluster,
            cost=cost,
            minibatch_size=self.minibatch_size,
            microbatch_size=captured.batch if fixed else imposed,
            max_replicas=1 if fixed else None,
            copies=fixed and self.own_mode is None,
            optimizer_state_factor=self.optimizer.state_factor,
            optimizer=self.optimizer,
            minibatch_ops=loss_mask(captured, graph) if whole_loss and self.engine.planner is None else 0,
        )
        clips = self.optimizer.clip_norm is not None
        posed = replace(posed, refuses=self.engine.limits(EngineTask.of_problem(captured, posed, clips=clips)))
        posed = with_asked(posed, self.optimizer, self.engine.worker_settings)
        train = partial(self.samples, "train") if self.own_mode is None else None
        posed = with_varying(posed, captured, self.uneven, train, steps=self.num_steps, seed=self.seed)
        posed = self.own_mode.posed(self, self._num_samples, posed) if self.own_mode else posed
        if not self.engine.runs:
            return posed
        from gpp.app.in_place import here

        return here(posed, self.engine)

    def make_plan(self, problem: Problem) -> Plan:
        """The plan to run: the user's own file, the one made for an engine of others, or the strategy's.

        Raises:
            Infeasible, InvalidPlan: no plan fits; the user's file is none for this model.
        """
        given = (self.layout and self.made.modules and self.layout.plan(problem, self.made.modules)) or self.given_plan
        if given is None:
            return self.made.plan or self.strategy.plan(problem)
        check_given(self.strategy, self.plan, given, problem, self.layout)
        return given

    def in_place(self, captured: Captured, problem: Problem, plan: Plan, progress: Progress) -> tuple[Problem, Plan]:
        """The problem and the plan by times that were measured in place, where workers compute (`gpp.app.in_place.settle`)."""
        if not self.computes:
            return problem, plan
        from gpp.app.in_place import renewed, settle

        given, started = self.plan is not None, self.made.rehearsals
        if (fresh := renewed(problem, captured, self.engine, self.optimizer, progress.warn)) is not problem:
            problem, plan = fresh, plan if given else self.strategy.plan(fresh)
        job_of, weights = partial(self.job, captured), partial(self.weights, captured)
        made = {"given": given, "started": started, "job_of": job_of, "weights": weights}
        found = settle(problem, plan, self.strategy, self.engine, **made, progress=progress)
        if started is not None and not self.baselines_s:
            started.close()  # else what was gained is measured by the same process
        return found

    @cached_property
    def layout(self) -> GivenLayout | None:
        """The layout that `plan` has in place of a plan.json."""
        return layout_of(self.plan, self.export) if self.plan else None

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan in the user's own file; None where the strategy is to plan, or a layout becomes one once there is a graph."""
        given = None if self.layout else self.plan
        return read_json(Plan, given, setting="plan", fix="correct the file, or leave plan out") if given else None

    def warnings(self, captured: Captured, plan: Plan) -> tuple[str, ...]:
        out = list(self.engine.check(plan)) if self.runs else []
        out += self.layout.warnings(self.strategy.schedule.name) if self.layout else ()
        whole_loss, whole = self.loss_scope == "minibatch", self.engine.planner is not None
        out += self.data.warnings() if self.computes else ()
        uneven = self.trains and uneven_targets(captured, self.samples("train"), self.minibatch_size, self.seed, weighs=not whole)
        words = ANOTHER_ENGINE if whole else ON_COMMAND_LINE
        out += cut_warnings(captured, plan, whole_loss=whole_loss, words=words, uneven=uneven)
        out += masked_warnings(captured, self.cluster, self.times)
        out += self.made.notes if not self._whole(captured) and self.weights(captured) else ()
        out += self.resumed.warnings(self.steps, self.optimizer.learning_rate) if self.resumed else ()
        return tuple(out)

    def job(self, captured: Captured, problem: Problem, plan: Plan) -> Job:
        """Everything the workers need.

        Raises:
            InvalidConfig, UnsupportedPlan: the engine cannot run it; `resume` is another training.
        """
        sizes, every = self._num_samples, self.strategy.replan.every if self.mode == "train" and self.runs else 0
        if every:
            check_movable(plan, captured, every)
        unit = max(stage.microbatch_size for stage in plan.stages) if captured.batch else 1
        job = assemble(
            captured,
            problem,
            plan,
            self.strategy,
            optimizer=self.optimizer,
            data=self.data,
            model=self.model,
            steps=self.num_steps,
            dtype=self.dtype,
            seed=self.seed,
            train_samples=sizes["train"],
            evaluation_samples=0 if self.own_mode is not None else sizes["test"] // unit * unit,
            overwrites=self.engine.overwrites,
            evaluate_every=self.evaluate_every,
            on_nonfinite=self.on_nonfinite,
            final_weights=self.final_weights,
            replan_every=every,
            uneven=self.uneven if self.uneven.amount else None,
            **self.checkpoint.settings(self.resumed),
            **self.engine.worker_settings,
        )
        if self.resumed:
            self.resumed.refuse_another(training_of(job.settings, captured))
        if self.runs:
            self.engine.refuse(job)
        return job

    def judged(self, job: Job, run_dir: Path) -> dict[str, float]:
        """What a run that trains nothing has made is worth this by the data's targets; empty where there is nothing to judge."""
        return self.own_mode.judged(self, self.with_loss(), self.data, self.model, job, run_dir) if self.own_mode else {}

    def _whole(self, captured: Captured) -> bool:
        return not (self.computes and self.engine.own_weights) or makes_whole(self.initial_weights, captured)

    def weights(self, captured: Captured) -> Mapping[str, Any] | WritesItself:
        """Initial weights by full name, or how workers make them: those of `load_weights`, or a function of model, dtype, seed."""
        given = {"seed": self.seed, "dtype": self.dtype, "whole": self._whole(captured)}
        return weights_or_origin(self.made, self.model, captured, self.load_weights, **given)
