"""What an exporter promises: it refuses what its engine cannot run, and writes the rest in the engine's own words.

An exporter is one file of this folder, or of a user's own, and one YAML of `conf/export/`. What mechanisms say of stages reaches an
engine through the file `export.py` of their package, `EXPORT` in it (`AbstractExportPart`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gpp.cluster import Cluster
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export.layout import GivenLayout
from gpp.export.ways import EngineWay, of_replicas
from gpp.graph.captured import Captured
from gpp.mechanism import found
from gpp.plan.chain import refuse_early_loss, refuse_unequal_microbatches
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.runtime.task import EngineTask
from gpp.schedules.base import AbstractSchedule
from gpp.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPlanFor:
    """What a plan for an engine follows from.

    Args:
        model: its name.
        clips: whether gradients are clipped by a norm.
        bound: a time that no plan can beat; None where it is not known.
    """

    model: str
    captured: Captured
    problem: Problem
    strategy: Strategy
    clips: bool = False
    bound: Bound | None = None

    @property
    def task(self) -> EngineTask:
        """What engines ask beside the plan."""
        return EngineTask.of_problem(self.captured, self.problem, clips=self.clips)

    def having(self, plan: Plan, problem: Problem | None = None, strategy: Strategy | None = None) -> ToExport:
        """The same with a plan, or with another one."""
        own = {each.name: getattr(self, each.name) for each in fields(ToPlanFor)}
        return ToExport(**own | {"problem": problem or self.problem, "strategy": strategy or self.strategy, "plan": plan})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToExport(ToPlanFor):
    """A plan, and all that follows from it or that it follows from."""

    plan: Plan

    def step_s(self) -> float:
        """The predicted seconds of a step."""
        return self.strategy.predict(self.plan, self.problem, record=False).metrics.iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Something of a plan that an engine does otherwise.

    Args:
        what: in words.
        seconds: by which a step is predicted to be longer for it; None where no prediction has it.
    """

    what: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an engine is given.

    Args:
        files: path in the folder -> text.
        command: what starts the engine there.
        ran: the plan as the engine runs it, which its prediction is of.
        lost: what the engine does otherwise than the plan.
        notes: what the user has to know, in sentences.
        job: whether the folder has a job, with its model and weights, beside these files.
    """

    files: Mapping[str, str]
    command: str
    ran: ToExport
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()
    job: bool = False


class AbstractExporter(ABC):
    """Writes plans for one engine. Its settings are its fields."""

    name: ClassVar[str]
    """The word that chooses it, `export=NAME`."""
    engine: ClassVar[str]
    """The engine's own name."""
    mode: ClassVar[str] = "train"
    """The mode whose plans it takes: that of a mechanism for an engine that trains nothing."""
    whole: ClassVar[bool] = False
    """Whether the engine cuts a model between its modules alone (`gpp.export.modules`)."""
    replicas: ClassVar[bool] = False
    """Whether stages may have replicas, equally many."""
    schedules: ClassVar[tuple[AbstractSchedule, ...]] = ()
    """Orders of passes that it has, beside the strategy's own where it runs any."""
    weights: bool = False
    """Whether the folder holds the initial weights, for an engine that reads them."""
    nearest: bool = False
    """Whether to write the nearest plan that the engine can run where it cannot run the plan itself."""

    @abstractmethod
    def exported(self, e: ToExport) -> Exported:
        """The files.

        Raises:
            UnsupportedPlan: the engine cannot run the plan; names the edge or the stage.
        """

    def layout(self, text: str) -> GivenLayout | None:
        """The layout that a text in the engine's own form means; None where it has another form, or the engine none.

        Raises:
            InvalidConfig: it has the form, and means nothing.
        """
        return None

    def why_not(self, e: ToExport) -> str | None:
        """Why the engine cannot run a plan; None if it can."""
        try:
            self.exported(e)
        except UnsupportedPlan as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an engine is told for a mechanism.

    Args:
        settings: by the engine's own names.
        lost: what it does otherwise.
        plan: the plan as the engine runs it; None: as it is.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    plan: Plan | None = None


class AbstractExportPart(ABC):
    """What a mechanism says of a plan's stages, for the engines of others."""

    @abstractmethod
    def told(self, engine: str, plan: Plan) -> Told | None:
        """What the engine of an exporter of that name is told of a plan in which a stage has the mechanism.

        Returns:
            None where the engine has no such thing.

        Raises:
            UnsupportedPlan: it has, but not in this plan; names the stage.
        """

    def ways(self, engine: str, problem: Problem, strategy: Strategy) -> Iterator[EngineWay]:
        """Ways to plan with the mechanism for that engine; none where it has no such thing."""
        yield from ()


def ways(exporter: AbstractExporter, problem: Problem, strategy: Strategy) -> Iterator[EngineWay]:
    """All ways to use the devices that an engine has: what mechanisms offer, and replicas, each with each."""
    chosen = [EngineWay(problem=problem, strategy=strategy, expand=lambda plan: plan)]
    for part in found_parts().values():
        chosen += [own.then(other) for own in chosen for other in part.ways(exporter.name, own.problem, own.strategy)]
    for own in chosen:
        yield own
        if exporter.replicas:
            yield from (own.then(other) for other in of_replicas(own.problem, own.strategy))


def found_parts() -> Mapping[str, AbstractExportPart]:
    """What mechanisms say for the engines of others, by their names."""
    return found("export", "EXPORT", AbstractExportPart)


def told(engine: str, plan: Plan) -> Told:
    """What an engine is told for all mechanisms of a plan.

    Raises:
        UnsupportedPlan: it has nothing for one of them; names the stage.
    """
    ran = plan
    parts = found_parts()
    settings: dict[str, Any] = {}
    lost: list[str] = []
    for name in sorted(plan.mechanisms):
        said = parts[name].told(engine, ran) if name in parts else None
        if said is None:
            s, value = next((s, v) for s, stage in enumerate(plan.stages) for v in stage.mechanisms if v.name == name)
            fix = f"plan with {value.without}" if value.without else "plan without it"
            words = value.words() or name
            raise UnsupportedPlan(f"stage {s} has {name} ({words}), for which export={engine} has no setting. Fix: {fix}")
        settings |= said.settings
        lost += said.lost
        ran = said.plan or ran
    return Told(settings=settings, lost=tuple(lost), plan=ran)


def torchrun(cluster: Cluster, plan: Plan) -> str:
    """The launcher of a plan's ranks, one for each device: on every node of it, where it has several.

    `$FIRST_NODE` stands for the host of the first node, and `$RANKS_HERE` for a node's number of ranks where nodes differ in it.

    >>> torchrun(problem.cluster, plan)
    'torchrun --nproc-per-node 2'
    """
    on_node = Counter(cluster.nodes[device] for device in plan.stages_of_device)
    counts = sorted(set(on_node.values()))
    each = f"--nproc-per-node {counts[0] if len(counts) == 1 else '$RANKS_HERE'}"
    if len(on_node) == 1:
        return f"torchrun {each}"
    return f"torchrun --nnodes {len(on_node)} {each} --rdzv-backend c10d --rdzv-endpoint $FIRST_NODE:29500"


def refuse_order(e: ToExport, engine: str) -> None:
    """Refuse a loss before the last stage, and updates that the pipeline does not wait for: engines of trainings have neither.

    Raises:
        UnsupportedPlan: names the stage, or the setting.
    """
    refuse_early_loss(e.plan, e.task.losses, f"export={engine}")
    if not e.strategy.schedule.drains:
        raise UnsupportedPlan(
            f"the pipeline does not drain between updates, and export={engine}'s does. Fix: strategy/weights=flush"
        )


def refuse_unequal(plan: Plan, engine: str) -> None:
    """Refuse micro-batches or replicas of several sizes, which no engine of chains runs.

    Raises:
        UnsupportedPlan: names the stage.
    """
    refuse_unequal_microbatches(plan, f"export={engine}")
    first = plan.stages[0]
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) != len(first.devices):
            raise UnsupportedPlan(
                f"stage {s} has {len(stage.devices)} devices and stage 0 has {len(first.devices)}: export={engine} has as many for "
                "every stage. Fix: strategy.planner.replication=false"
            )


def refuse_skips(plan: Plan, task: EngineTask, engine: str) -> None:
    """Refuse edges that join other stages than neighbours, and boundaries that several tensors cross.

    Raises:
        UnsupportedPlan: names the edge and its tensors.
    """
    tensors = plan.edge_tensors(task.graph)
    for (s, t), crossing in sorted(tensors.items()):
        names = ", ".join(tensor.name for tensor in crossing[:3])
        if t > s + 1 and crossing:
            raise UnsupportedPlan(
                f"edge {s}->{t} ({names}) passes stage {s + 1}: export={engine} hands the output of a stage to the next one alone. "
                "Fix: export=torch, which carries tensors along"
            )
        if len(crossing) > 1:
            raise UnsupportedPlan(
                f"edge {s}->{t} has {len(crossing)} tensors ({names}): export={engine} hands one tensor from stage to stage. "
                "Fix: export=torch"
            )
    for s in range(len(plan.stages) - 1):
        if not tensors.get((s, s + 1)):
            raise UnsupportedPlan(
                f"stage {s} hands nothing to stage {s + 1}: they are branches, and export={engine} runs chains. Fix: export=torch"
            )


def check_export(mode: str, exporter: AbstractExporter | None) -> None:
    """Refuse mode=export without an engine to write for, and an engine in a mode that neither writes for it nor plans.

    Raises:
        InvalidConfig: names the setting.
    """
    if mode == "export" and exporter is None:
        raise InvalidConfig("export", None, "mode=export writes for one engine", "set export=torch, or another of --help")
    if exporter is not None and mode not in ("export", "plan"):
        rule = f"mode={mode} neither writes files for it nor plans for it alone"
        raise InvalidConfig("export", exporter.name, rule, "set mode=export or mode=plan, or leave export out")
    if exporter is not None and mode == "plan" and exporter.mode != "train":
        rule = "takes plans of mode=" + exporter.mode + ", and mode=plan makes those of trainings"
        raise InvalidConfig("export", exporter.name, rule, f"set mode=export export.nearest=true, or mode={exporter.mode}")
