"""The modules of a model between which engines of chains cut it: what stands before a list of layers, the layers, and what follows.

embed │ layers.0 │ layers.1 │ layers.2 │ norm │ head
opening        layers                    closing
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from gpp.errors import UnsupportedPlan
from gpp.graph.captured import Captured
from gpp.graph.coarsen.whole import as_modules
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan

NOWHERE = ""
"""The module of an operator that stands in the code of the model itself, or is the loss."""


@dataclass(frozen=True)
class Modules:
    """The modules of a captured model, in the order in which they run.

    Args:
        captured: with its nodes; a profile has none.
        prefix: path of the list of layers, as `model.layers`; empty where the model has none.
        of_op: the module of each operator of the captured graph; empty for one of none.
    """

    captured: Captured
    prefix: str
    of_op: tuple[str, ...]

    @classmethod
    def of(cls, captured: Captured) -> Modules:
        """The modules of a model.

        Raises:
            UnsupportedPlan: it is a profile, which has none.
        """
        if not captured.nodes:
            raise UnsupportedPlan(
                f"model={captured.name} is a profile, without modules to name. Fix: a model that is captured, as model=gpt"
            )
        losses, first = set(captured.loss_ops), [_module(captured, op.nodes) for op in captured.graph.ops]
        paths = [NOWHERE if op.name in losses else path for op, path in zip(captured.graph.ops, first, strict=True)]
        lists = Counter(found for path in paths if (found := _list_of(path)))
        # The list with the most operators; lists within its layers are no lists of layers.
        prefix = max(lists, key=lambda name: (lists[name], -name.count(".")), default="")
        return cls(captured, prefix, _of_callers([_unit(path, prefix) for path in paths], prefix))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All modules that compute something."""
        return tuple(dict.fromkeys(name for name in self.of_op if name))

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Those of the list."""
        return tuple(name for name in self.names if self.prefix and name.startswith(f"{self.prefix}."))

    @cached_property
    def opening(self) -> tuple[str, ...]:
        """Those before the list."""
        first = self.names.index(self.layers[0]) if self.layers else len(self.names)
        return self.names[:first]

    @cached_property
    def closing(self) -> tuple[str, ...]:
        """Those behind it, and none of it."""
        return tuple(name for name in self.names[len(self.opening) :] if name not in self.layers)

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """Their names, of which a long list is cut."""
        inner = (self.layers[0], "...", self.layers[-1]) if len(self.layers) > 3 else self.layers
        return (*self.opening, *inner, *self.closing)

    @cached_property
    def graph(self) -> OpGraph:
        """The graph with an operator for each module, by its name; those of none stay as they are."""
        members: dict[str | int, list[int]] = {}
        for op, module in enumerate(self.of_op):
            members.setdefault(module or op, []).append(op)
        return as_modules(self.captured.graph, members)

    def of_stages(self, plan: Plan, graph: OpGraph, engine: str) -> list[tuple[str, ...]]:
        """The modules of each stage, whole ones.

        Args:
            graph: whose operators, coarse or not, the plan cuts.

        Raises:
            UnsupportedPlan: a module is in two stages; names both.
        """
        node_module = {node: module for op, module in zip(self.captured.graph.ops, self.of_op, strict=True) for node in op.nodes}
        stages: dict[str, set[int]] = defaultdict(set)
        for s, stage in enumerate(plan.stages):
            for node in graph.nodes_of(stage.ops):
                if module := node_module.get(node):
                    stages[module].add(s)
        for module, held in stages.items():
            if len(held) > 1:
                s, t = sorted(held)[:2]
                raise UnsupportedPlan(
                    f"edge {s}->{t} lies within {module}, which has operators in both stages: export={engine} cuts between "
                    "modules. Fix: export=torch"
                )
        return [tuple(name for name in self.names if stages[name] == {s}) for s in range(len(plan.stages))]


def _of_callers(units: list[str], prefix: str) -> tuple[str, ...]:
    """The units of all operators, in order, where those of a module that several layers call, as one for rotary positions, are the
    callers'."""
    layers = [unit if prefix and unit.startswith(f"{prefix}.") else NOWHERE for unit in units]
    caller = NOWHERE  # the layer that goes on behind an operator
    out, behind = list(units), dict[str, set[str]]()
    for i in reversed(range(len(units))):
        caller = layers[i] or caller
        if units[i] and not layers[i]:
            behind.setdefault(units[i], set()).add(caller)
            out[i] = caller
    shared = {unit for unit, callers in behind.items() if len(callers) > 1 and NOWHERE not in callers}
    return tuple(new if old in shared else old for old, new in zip(units, out, strict=True))


def _module(captured: Captured, nodes: tuple[str, ...]) -> str:
    """The module in which most nodes of an operator stand."""
    count = Counter(captured.node_of[node].module for node in nodes)
    return max(count, key=lambda path: count[path], default=NOWHERE)


def _list_of(path: str) -> str:
    """The path of the outermost list that a module stands in: what is before the first number."""
    words = path.split(".")
    at = next((i for i, word in enumerate(words) if word.isdigit()), 0)
    return ".".join(words[:at])


def _unit(path: str, prefix: str) -> str:
    """The module to which an operator counts: a layer; a module beside the list; else one of the model's own."""
    if not path:
        return NOWHERE
    if prefix and path.startswith(f"{prefix}."):
        return ".".join(path.split(".")[: prefix.count(".") + 2])
    parent = prefix.rpartition(".")[0]
    depth = parent.count(".") + 2 if parent and path.startswith(f"{parent}.") else 1
    return ".".join(path.split(".")[:depth])
