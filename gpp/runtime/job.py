"""The job of the workers, as files that a person can read; no Hydra, no pickles.

RUN_DIR/job/settings.json   batch, steps, dtype, seed, optimizer, data, model, backend
            model.json      the captured model      graph.json   its (coarsened) operator graph
            cluster.json    plan.json               program.txt  evaluation.txt
            costs.json              times and bytes of each stage by the cost model
            overheads.json          fixed costs of the runtime's actions, where they were measured
            weights.safetensors     initial weights, by full parameter name; where workers make their own, `origin.json` says how
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from gpp import mechanism
from gpp.cluster import Cluster
from gpp.cost.overheads import NOTHING, Overheads
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.cost.uneven import UnevenSamples
from gpp.data.base import AbstractData
from gpp.errors import InvalidConfig, InvalidFile, InvalidPlan, MalformedProgram
from gpp.files import write_tensors, write_text
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.mechanism import parts
from gpp.models.base import AbstractModel, describe
from gpp.models.dotted import resolve
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.private import keep, shown
from gpp.program.cards import check_cards
from gpp.program.program import Program, ReduceGroup, check_program, reduce_groups
from gpp.runtime.job_asked import Course, asked, asked_model, with_asked, with_earlier
from gpp.runtime.job_fit import AGAIN, check_clipping, check_nodes, check_ops, check_work
from gpp.runtime.task import EngineTask
from gpp.serialization import from_json, read_json, read_text, write_value
from gpp.settings import Count, Natural, Seconds, Seed
from gpp.strategy import Strategy


def restore(description: Mapping[str, Any]) -> Any:
    """The settings object that `gpp.models.base.describe` described; its class must be an importable dataclass.

    A field that holds another description, with a class of its own, is restored likewise.

    Raises:
        InvalidConfig: there is no such class, or it does not take these values.
    """
    target = str(description.get("_target_"))
    cls = resolve(target, field="job/settings.json: _target_")
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise InvalidConfig("job/settings.json: _target_", target, "must name a dataclass", AGAIN)
    values = {name: value for name, value in description.items() if name not in ("_target_", "source")}
    within = {name: restore(value) for name, value in values.items() if isinstance(value, dict) and "_target_" in value}
    plain = {name: value for name, value in values.items() if name not in within}
    made = from_json(cls, json.dumps(plain), f"job/settings.json: {target}", AGAIN)
    return dataclasses.replace(made, **within) if within else made


def _described(policy: Any) -> dict[str, Any]:
    """A weight policy with the parts that it has, whose classes its fields do not tell."""
    own = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
    return describe(policy) | {name: describe(part) for name, part in own.items() if dataclasses.is_dataclass(part)}


FloatType = Annotated[str, Field(pattern="^(float16|bfloat16|float32|float64)$")]
"""torch's name of a type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run, apart from model and plan.

    Args:
        model: empty for a model that the caller holds in memory.
        steps: optimizer steps.
        evaluate_every: steps between evaluations on held-out data; 0 evaluates at the end only.
        train_samples, evaluation_samples: sizes of the training set and of the held-out one; 0 of these for no evaluation.
        threads: CPU threads of a worker.
        launch: who starts the workers: `local` for the controller; all others may be on several machines.
        interface, timeout_s, startup_timeout_s, autocast, compile, shared_memory, workers_per_card, paced, enforce_memory: as
            `gpp.runtime.engines.distributed.Distributed` has them.
        whole_ops: operators whose gradients of weights are never left for later: both passes take too long, as measured.
        engine: settings that an engine with workers of its own gives them.
        weights: the weight policy; empty for flushing.
        on_nonfinite: `stop` fails the run at the first loss that is not finite; `warn` says so and goes on;
            `trace` fails at the first gradient that is NaN, too, and names the function that made it.
        checkpoint_every, checkpoint_keep, checkpoint_drain: see `gpp.runtime.checkpoint.resume.Checkpoints`.
        replan_every: steps after whose multiples workers may take another plan (`gpp.replan`); 0: never.
        resume, first_step: folder of the checkpoint to go on from, absolute, None to start anew; the first step to do.
        course: what the workers do in place of training steps; None for a job that trains.
        kept: numbers by name that mechanisms keep to (`AbstractJobPart.kept`).
        uneven: where the work differs from sample to sample.
        mechanisms: packages of the user's own mechanisms, which workers import.
    """

    steps: Count
    minibatch_size: Count
    dtype: FloatType
    seed: Seed
    optimizer: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    evaluate_every: Natural = 0
    train_samples: Natural = 0
    evaluation_samples: Natural = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    device_kind: Literal["cpu", "cuda"] = "cpu"
    threads: Count = 1
    launch: str = "local"
    interface: str = "lo"
    timeout_s: Seconds = 600.0
    startup_timeout_s: Seconds = 900.0
    final_weights: bool = True
    autocast: FloatType | None = None
    compile: str | None = None
    whole_ops: tuple[Natural, ...] = ()
    shared_memory: bool = True
    workers_per_card: Count = 1
    paced: bool = False
    enforce_memory: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    on_nonfinite: Literal["stop", "warn", "trace"] = "stop"
    checkpoint_every: Natural = 0
    checkpoint_keep: Count = 2
    checkpoint_drain: bool = False
    replan_every: Natural = 0
    uneven: Annotated[UnevenSamples | None, Field(exclude_if=lambda found: found is None)] = None
    resume: str | None = None
    first_step: Natural = 0
    course: Course = None
    kept: Annotated[dict[str, int | float], Field(exclude_if=lambda found: not found)] = field(default_factory=dict)
    mechanisms: Annotated[tuple[str, ...], Field(exclude_if=lambda found: not found)] = ()

    upgraded = staticmethod(with_earlier)


class WritesItself(Protocol):
    """Initial weights that are not tensors yet (`gpp.runtime.checkpoint.origin.ToMake`)."""

    def save(self, folder: Path) -> None:
        """Write what workers make them of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All values of a run; `save` and `load` are inverse to each other.

    Args:
        costs: times and bytes of each stage, by the cost model that planned.
        overheads: fixed costs of the runtime's actions that the plan was predicted with. No worker reads them; a page that plans
            the run again does.
    """

    settings: Settings
    captured: Captured
    graph: OpGraph
    cluster: Cluster
    plan: Plan
    program: Program
    costs: tuple[StageCost, ...] = ()
    evaluation: Program | None = None
    overheads: Overheads = NOTHING

    @property
    def streams(self) -> bool:
        """Whether the pipeline does not drain between two updates."""
        return self.program.minibatches > 1

    @property
    def mechanisms(self) -> frozenset[str]:
        """The names of the mechanisms of stages, of kinds of actions, of the weight policy, and of settings."""
        settings = {each.name: getattr(self.settings, each.name) for each in dataclasses.fields(self.settings)}
        policy = {restore(self.settings.weights).mechanism} if self.settings.weights else set[str]()
        return self.plan.mechanisms | self.program.mechanisms | policy | asked(self.settings.optimizer, settings).keys()

    def save(self, run_dir: Path, weights: Mapping[str, Any] | WritesItself | None = None) -> None:
        """Write the job below `run_dir`; `weights` are torch tensors by full name, or how workers come by them."""
        folder = run_dir / "job"
        keep(dataclasses.asdict(self.settings))
        for name in FILES:
            write_value(folder / FILES[name], getattr(self, name), _TYPES[name])
        write_text(folder / "program.txt", self.program.to_text(), exact=True)
        if self.cluster.hosts:
            from gpp.formats.pipeedge.written import schedule_of

            if (schedule := schedule_of(self.plan, self.graph, self.cluster)) is not None:
                write_text(folder / "schedule.yml", schedule, exact=True)
        for absent in ("evaluation.txt", OVERHEADS, "origin.json"):  # which an earlier run here may have had
            (folder / absent).unlink(missing_ok=True)
        if self.evaluation:
            write_text(folder / "evaluation.txt", self.evaluation.to_text(), exact=True)
        if self.overheads != NOTHING:
            write_value(folder / OVERHEADS, self.overheads, Overheads)
        if weights is not None and not isinstance(weights, Mapping):
            weights.save(folder)
        elif weights is not None:
            write_tensors(folder / "weights.safetensors", {name: tensor.contiguous() for name, tensor in weights.items()})

    @classmethod
    def load(cls, run_dir: Path) -> Job:
        """The job that `save` wrote below `run_dir`, proved to fit together.

        Raises:
            InvalidFile: a file cannot be read, or does not fit the others; names it, and the place.
            MalformedProgram: a program cannot run to its end under the plan; names the file.
            CaptureError: a module that registers an operator of the model cannot be imported.
        """
        folder = run_dir / "job"
        texts, values = {name: shown(read_text(folder / file)) for name, file in FILES.items()}, dict[str, Any]()
        for name, kind in _TYPES.items():
            values[name] = from_json(kind, texts[name], folder / FILES[name], AGAIN)
            if name == "settings":  # before the plan, which has the values of mechanisms
                mechanism.use(values[name].mechanisms, field="job/settings.json: mechanisms")
        plan, graph = values["plan"], values["graph"]
        try:
            plan.check_stages(graph, values["cluster"].num_devices)
        except InvalidPlan as error:
            raise InvalidFile(folder / FILES["plan"], "", str(error).removesuffix("."), AGAIN) from None
        groups, evaluation = reduce_groups(plan, graph), folder / "evaluation.txt"
        cards = plan if values["settings"].backend == "nccl" else None
        job = cls(
            **values,
            program=_checked(folder / "program.txt", groups, cards),
            overheads=overheads_of(run_dir),
            evaluation=_checked(evaluation, groups, cards) if evaluation.exists() else None,
        )
        _check_fit(job, folder)
        if any(node.home for node in job.captured.nodes):
            from gpp.capture.homes import import_homes

            import_homes(job.captured)
        return job


def overheads_of(run_dir: Path) -> Overheads:
    """The overheads that the plan of a run directory was predicted with."""
    path = run_dir / "job" / OVERHEADS
    return read_json(Overheads, path, fix=AGAIN) if path.exists() else NOTHING


class AbstractJobPart:
    """What a mechanism refuses before a worker starts, and who updates what: nothing, unless its own class says otherwise."""

    def check_engine(self, name: str) -> None:
        """Refuse an engine that does not run the mechanism.

        Raises:
            InvalidConfig: names the engine.
        """
        return None

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        """Refuse a plan that workers do not run, before there is a job: planners are asked with it.

        Raises:
            UnsupportedPlan: names stage, field, value, rule and fix.
        """
        return None

    def kept(self, plan: Plan, problem: Problem) -> Mapping[str, int | float]:
        """Numbers by name that workers keep to where they train nothing, of the problem that the plan was made for."""
        return {}

    def check(self, job: Job, *, overwrites: bool) -> None:
        """Refuse a job whose model, plan or settings are none for the mechanism, whatever runs it.

        Args:
            overwrites: as in `gpp.runtime.engine.AbstractEngine`.

        Raises:
            UnsupportedPlan, InvalidConfig: names stage or setting, field, value, rule and fix.
        """
        return None

    def owners(self, job: Job) -> Mapping[str, int]:
        """The one device that updates a parameter, keeps its state and saves both, by name, where not all that hold it do."""
        return {}

    def refuse(self, job: Job) -> None:
        """Refuse what workers cannot combine with the mechanism.

        Raises:
            InvalidConfig: names the setting.
        """
        return None


def job_parts(names: Collection[str]) -> list[AbstractJobPart]:
    """Those of the mechanisms of these names."""
    return parts(names, "job", "JOB", AbstractJobPart)


def owners_of(job: Job) -> dict[str, int]:
    """The owners of the parameters that have one by a mechanism of the job (`AbstractJobPart.owners`)."""
    return {name: device for part in job_parts(job.mechanisms) for name, device in part.owners(job).items()}


def _check_fit(job: Job, folder: Path) -> None:
    """Refuse files that do not fit each other."""
    settings, plan = job.settings, job.plan
    evaluates = "above 0, because there is an evaluation.txt" if job.evaluation else "0, because there is no evaluation.txt"
    policy = "a policy, because program.txt does not drain" if job.streams else "empty, because program.txt drains"
    rules = (
        ("minibatch_size", settings.minibatch_size == plan.minibatch_size, f"{plan.minibatch_size}, as in plan.json"),
        ("first_step", settings.first_step <= settings.steps, f"at most steps={settings.steps}"),
        ("evaluation_samples", bool(settings.evaluation_samples) == bool(job.evaluation), evaluates),
        ("weights", bool(settings.weights) == job.streams, policy),
    )
    for name, holds, rule in rules:
        if not holds:
            raise InvalidFile(folder / "settings.json", name, f"must be {rule}", AGAIN, [getattr(settings, name)])
    if len(job.costs) != len(plan.stages):
        raise InvalidFile(folder / "costs.json", "", f"must have {len(plan.stages)} bills, one for each stage", AGAIN)
    check_nodes(job.captured, folder / "model.json")
    check_ops(job.graph, job.captured, folder / "graph.json")
    check_work(job.program, plan, job.graph, plan.minibatch_size * job.program.minibatches, folder / "program.txt")
    if job.evaluation:
        check_work(job.evaluation, plan, job.graph, settings.evaluation_samples, folder / "evaluation.txt")


def _checked(path: Path, groups: Sequence[ReduceGroup], cards: Plan | None = None) -> Program:
    """The program in a file, proved to run to its end.

    Args:
        cards: the plan of a job that runs on cards, where more can go wrong.
    """
    text = read_text(path)
    try:
        program = Program.from_text(text)
        check_program(program, groups)
        if cards:
            check_cards(program, cards, groups)
    except MalformedProgram as error:
        raise MalformedProgram(f"{path}: {error}") from None
    return program


def assemble(
    captured: Captured,
    problem: Problem,
    plan: Plan,
    strategy: Strategy,
    *,
    optimizer: AbstractOptimizer,
    data: AbstractData,
    model: AbstractModel | None = None,
    overwrites: bool = True,
    **settings: Any,
) -> Job:
    """The job of a plan: its programs lowered and proved free of deadlock, its settings as plain data.

    Args:
        model: None for a model that the caller holds in memory.
        overwrites: see `gpp.runtime.engine.AbstractEngine`.
        settings: the other fields of `Settings`.
    """
    kind, held_out = settings.pop("device_kind", problem.cluster.devices[0].kind), settings.get("evaluation_samples", 0)
    # NCCL refuses two ranks on one card; gloo's rules are a processor's.
    cards = kind == "cuda" and settings.get("workers_per_card", 1) == 1
    check_clipping(optimizer, plan, problem.graph)
    posed = strategy.posed(problem)
    course: Any = posed.regime.course
    job = Job(
        settings=Settings(
            minibatch_size=plan.minibatch_size,
            optimizer=describe(optimizer),
            data=describe(data),
            model=describe(model) if model else {},
            backend="nccl" if cards else "gloo",
            device_kind=kind,
            whole_ops=problem.cost.whole_ops(problem.graph, problem.cluster.devices[0]),
            weights={} if strategy.weights.flushes else _described(strategy.weights),
            course=course,
            kept={name: number for part in job_parts(plan.mechanisms) for name, number in part.kept(plan, posed).items()},
            mechanisms=mechanism.own(),
            **settings,
        ),
        captured=asked_model(captured, optimizer, settings),
        graph=problem.graph,
        cluster=problem.cluster,
        overheads=problem.overheads,
        plan=plan,
        program=strategy.lower(plan, with_asked(problem, optimizer, settings), cards=cards),
        costs=plan.bills(posed),
        evaluation=strategy.lower_evaluation(plan, problem, held_out, cards=cards) if held_out else None,
    )
    for part in job_parts(job.mechanisms):
        part.check(job, overwrites=overwrites)
    return job


_TYPES: dict[str, Any] = {
    "settings": Settings,
    "captured": Captured,
    "graph": OpGraph,
    "cluster": Cluster,
    "plan": Plan,
    "costs": tuple[StageCost, ...],
}
"""The types of the values that have files, the settings first: they name the mechanisms whose values the plan has."""

FILES = {name: "model.json" if name == "captured" else f"{name}.json" for name in _TYPES}
OVERHEADS = "overheads.json"
