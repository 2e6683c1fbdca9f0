"""Modules whose operators are one, before anything else is grouped.

blocks.0.attend.norm ─ query/key/value ─ attention ─ blocks.0.project.linear ─ +
                                                                                    `blocks.*.*`
blocks.0.attend ─ blocks.0.project
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from gpp.errors import InvalidConfig
from gpp.graph.coarsen.groups import in_groups, summed
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.order import kahn


def whole_modules(graph: OpGraph, patterns: Sequence[str]) -> OpGraph:
    """The graph with one operator for each module that a pattern names.

    Args:
        patterns: paths of modules, as in `blocks.*.attend`; `*` stands for one component. An operator belongs to the first one that
            its path begins with.

    Raises:
        InvalidConfig: no module has such a path, or one's operators surround another operator, so that they cannot be one.
    """
    if not patterns:
        return graph
    module_of = [_module(op.name, patterns) for op in graph.ops]
    found = {module for module in module_of if module is not None}
    for pattern in patterns:
        if not any(_matches(module, pattern) for module in found):
            rule = f"no module of {graph.name} that computes anything is called that"
            raise InvalidConfig("model.whole", pattern, rule, "name modules by their paths, as blocks.*.attend")
    members: dict[str | int, list[int]] = {}
    for op, module in enumerate(module_of):
        members.setdefault(op if module is None else module, []).append(op)
    return as_modules(graph, members)


def as_modules(graph: OpGraph, members: Mapping[str | int, list[int]]) -> OpGraph:
    """The graph with one operator for each module.

    Args:
        members: module -> its operators; those of none stand under their own numbers.

    Raises:
        InvalidConfig: a module's operators surround another operator, or modules wait for each other.
    """
    for module, ops in members.items():
        if not graph.is_convex(mask_of(ops)):
            rule = "has operators before and behind one of another module, so it cannot be one operator"
            raise InvalidConfig("model.whole", module, rule, "name smaller modules")
    parts = _ordered(graph, list(members.items()))
    group = {op: number for number, (_, ops) in enumerate(parts) for op in ops}
    ops = [graph.ops[own[0]] if isinstance(name, int) else summed(name, "module", graph, own) for name, own in parts]
    ops = [replace(op, variants=()) for op in ops]
    return in_groups(graph, group, ops)


def _module(path: str, patterns: Sequence[str]) -> str | None:
    """The module of an operator that a pattern names; None if none does."""
    words = path.split(".")
    for pattern in patterns:
        module = ".".join(words[: pattern.count(".") + 1])
        if _matches(module, pattern):
            return module
    return None


def _matches(module: str, pattern: str) -> bool:
    words, wanted = module.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(fnmatchcase(word, want) for word, want in zip(words, wanted, strict=True))


def _ordered(graph: OpGraph, parts: list[tuple[str | int, list[int]]]) -> list[tuple[str | int, list[int]]]:
    """Parts in a topological order; ties: smallest operator first."""
    part_of = {op: number for number, (_, ops) in enumerate(parts) for op in ops}
    first = [ops[0] for _, ops in parts]
    follow = [{part_of[behind] for op in ops for behind in bits(graph.successors[op])} - {n} for n, (_, ops) in enumerate(parts)]
    order = kahn(follow, first)
    if left := sorted(set(range(len(parts))) - set(order), key=first.__getitem__):
        names = ", ".join(str(parts[number][0]) for number in left[:3])
        raise InvalidConfig("model.whole", names, "would wait for each other as single operators", "name smaller modules")
    return [parts[number] for number in order]
