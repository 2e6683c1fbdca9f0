"""A layout from the files of another engine: which modules stand in which stage, before any model is known.

"Et*3|(tt|)*29,m|L" of Megatron, `module_fqns_per_model_part` of torchtitan and VLLM_PP_LAYER_PARTITION="24,40" have this form:
stages in order, and in each either names of modules, or how many of the layers follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.export.actions import listed, passes, word
from gpp.export.modules import Modules
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.plan.build import make_plan
from gpp.plan.chain import PlanChain
from gpp.plan.plan import Plan
from gpp.program.program import Program

OPENING, LAYER, CLOSING = "opening", "layer", "closing"
"""What stands before the layers, one of them, and what follows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPart:
    """What a stage of a layout holds.

    Args:
        kinds: `opening`, `layer` and `closing`, in order.
        names: modules by name, in place of kinds.
    """

    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayout:
    """Stages in order.

    Args:
        source: the exporter whose form it has.
        text: as the user wrote it.
        degree: ranks, around which stages go; None: one for each stage, or all devices where there are fewer of them.
        fold: how stages go around ranks: `loop`, round and round; `v`, there and back.
        replicas: of each stage; None: as many as the devices allow where `degree` is said, else one.
        microbatch_size: samples on each replica; None: not said.
        called: the engine's own names of a model's modules, by ours; None: the names are the model's.
        order: the engine's own name of its order of passes, and the `strategy/schedule` that is the same; empty: there is none.
        csv: the file with the order of passes, which counts more than a name; empty: there is none.
    """

    source: str
    text: str
    parts: tuple[LayoutPart, ...]
    degree: int | None = None
    fold: Literal["loop", "v"] = "loop"
    replicas: int | None = None
    microbatch_size: int | None = None
    called: Callable[[Modules], Mapping[str, str]] | None = None
    order: tuple[str, str] = ("", "")
    csv: str = ""

    def warnings(self, schedule: str) -> tuple[str, ...]:
        """What a user is to know who runs it under a schedule."""
        theirs, ours = self.order
        if not theirs or schedule == ours or self.csv:
            return ()
        fix = f"set strategy/schedule={ours} for the file's" if ours else "no strategy/schedule is the file's"
        return (f"plan={self.text} has the order of {theirs}, and the run that of strategy/schedule={schedule}: {fix}",)

    def check_order(self, plan: Plan, graph: OpGraph, program: Program, schedule: str) -> None:
        """Refuse to run in another order of passes than that of the file.

        Args:
            plan: of this layout.
            schedule: the name of the order of the program.

        Raises:
            InvalidConfig: the file cannot be read, or has another order; names the first pass that differs.
        """
        if not self.csv:
            return
        leave = "take the file's name out of the layout to run in the order of strategy/schedule"
        try:
            theirs = listed(Path(self.csv).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise self._wrong(
                f"has its order of passes in {self.csv}, which cannot be read: {error}", f"put it there, or {leave}"
            ) from None
        ours = [[word(task) for task in row] for row in passes(program, PlanChain.of(plan, graph))]
        for rank, (own, other) in enumerate(zip_longest(ours, theirs, fillvalue=())):
            for here, there in zip_longest(own, other, fillvalue="nothing more"):
                if here != there:
                    rule = f"has the order of {self.csv}: rank {rank} does {there} where strategy/schedule={schedule} does {here}"
                    fix = "set the strategy/schedule, minibatch_size and microbatch_size that it was written for"
                    raise self._wrong(rule, f"{fix}, or {leave}")

    def plan(self, problem: Problem, modules: Modules) -> Plan:
        """The plan on a graph whose operators are the model's modules (`Modules.graph`).

        Raises:
            InvalidConfig: it is none for this model, or this cluster; says what lacks.
        """
        ours = {name: own for own, name in self.called(modules).items()} if self.called else {}
        chosen = [self._chosen(part, modules, ours) for part in self._numbered(modules)]
        flat = [name for names in chosen for name in names]
        if lacking := [name for name in modules.names if name not in flat]:
            raise self._wrong(f"leaves out {', '.join(lacking[:4])} of the model's {len(modules.names)} modules", "add them")
        if twice := next((name for name in flat if flat.count(name) > 1), None):
            raise self._wrong(f"has {twice} twice", "name each module once")
        graph = problem.graph
        number = {op.name: i for i, op in enumerate(graph.ops)}
        # An empty stage has a place among the ranks, and no work.
        kept = [s for s, names in enumerate(chosen) if names]
        masks = [mask_of(number[name] for name in chosen[s]) for s in kept]
        # An operator of no module, as the loss, stands where what it reads is made.
        owner = {op: s for s, mask in enumerate(masks) for op in range(graph.num_ops) if mask >> op & 1}
        for op in range(graph.num_ops):
            if op not in owner:
                before = [owner[p] for p in range(op) if graph.predecessors[op] >> p & 1]
                owner[op] = max(before, default=0)
                masks[owner[op]] |= 1 << op
        count, devices = len(self.parts), problem.cluster.num_devices
        ranks = self.degree or (count if count <= devices or count % devices else devices)
        if ranks > devices:
            rule = f"needs {ranks} devices, or a divisor of its {count} stages, and cluster={problem.cluster.name} has {devices}"
            raise self._wrong(rule, f"set cluster.num_devices={ranks}")
        replicas = self.replicas or (devices // ranks if self.degree else 1)
        if ranks * replicas > devices:
            rule = (
                f"needs {ranks * replicas} devices for {ranks} ranks of {replicas} replicas, and cluster={problem.cluster.name} has"
            )
            raise self._wrong(f"{rule} {devices}", f"set cluster.num_devices={ranks * replicas}")
        said = self.microbatch_size and self.microbatch_size * replicas
        size = problem.microbatch_size or said or max(replicas, problem.minibatch_size // (4 * len(masks)))
        while problem.minibatch_size % size:
            size -= 1
        try:
            return make_plan(
                problem,
                f"layout of {self.source}",
                [(mask, replicas) for mask in masks],
                size,
                chain=True,
                ordered=True,
                placement=[tuple(range(r * replicas, (r + 1) * replicas)) for r in (self._rank(s, ranks) for s in kept)],
            )
        except ValueError as error:
            raise self._wrong(f"is no chain of this model: {error}", "order its stages as the model runs") from None

    def _rank(self, stage: int, ranks: int) -> int:
        return min(stage, 2 * ranks - 1 - stage) if self.fold == "v" else stage % ranks

    def _numbered(self, modules: Modules) -> tuple[LayoutPart, ...]:
        """The parts, of which kinds have become names."""
        if any(part.names for part in self.parts):
            return self.parts
        count = sum(part.kinds.count(LAYER) for part in self.parts)
        if count != len(modules.layers):
            rule = f"has {count} layers, and the model has {len(modules.layers)} ({modules.prefix}.*)"
            raise self._wrong(rule, "correct one of them")
        out, layers = [], iter(modules.layers)
        for part in self.parts:
            names: list[str] = []
            for kind in part.kinds:
                names += {OPENING: modules.opening, CLOSING: modules.closing}.get(kind) or [next(layers)] * (kind == LAYER)
            out.append(LayoutPart(names=tuple(names)))
        return tuple(out)

    def _chosen(self, part: LayoutPart, modules: Modules, ours: Mapping[str, str]) -> list[str]:
        known, chosen = set(modules.names), [ours.get(name, name) for name in part.names]
        for name in chosen:
            if name not in known:
                rule = f"names {name}, and the model's modules are {', '.join(modules.shown)}"
                raise self._wrong(rule, "correct the name")
        return chosen

    def _wrong(self, rule: str, fix: str) -> InvalidConfig:
        return InvalidConfig("plan", self.text, rule, fix)
