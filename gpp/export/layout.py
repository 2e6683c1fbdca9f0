"""A layout from the files of another engine: which modules stand in which stage, before any model is known.

"Et*3|(tt|)*29,m|L" of Megatron, `module_fqns_per_model_part` of torchtitan and VLLM_PP_LAYER_PARTITION="24,40" have this form:
stages in order, and in each either names of modules, or how many of the layers follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.export.modules import Modules
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan

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
        microbatch_size: samples on each replica; None: not said.
    """

    source: str
    text: str
    parts: tuple[LayoutPart, ...]
    degree: int | None = None
    microbatch_size: int | None = None

    def plan(self, problem: Problem, modules: Modules) -> Plan:
        """The plan on a graph whose operators are the model's modules (`Modules.graph`).

        Raises:
            InvalidConfig: it is none for this model, or this cluster; says what lacks.
        """
        chosen = [self._chosen(part, modules) for part in self._numbered(modules)]
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
        size = problem.microbatch_size or self.microbatch_size or max(1, problem.minibatch_size // (4 * len(masks)))
        while problem.minibatch_size % size:
            size -= 1
        try:
            return make_plan(
                problem,
                f"layout of {self.source}",
                [(mask, 1) for mask in masks],
                size,
                chain=True,
                ordered=True,
                placement=[(s % ranks,) for s in kept],
            )
        except ValueError as error:
            raise self._wrong(f"is no chain of this model: {error}", "order its stages as the model runs") from None

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

    def _chosen(self, part: LayoutPart, modules: Modules) -> list[str]:
        known = set(modules.names)
        for name in part.names:
            if name not in known:
                rule = f"names {name}, and the model's modules are {', '.join(modules.shown)}"
                raise self._wrong(rule, "correct the name")
        return list(part.names)

    def _wrong(self, rule: str, fix: str) -> InvalidConfig:
        return InvalidConfig("plan", self.text, rule, fix)
