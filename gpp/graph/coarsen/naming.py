"""Names of operator groups: the user's module paths, as short as they can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from gpp.graph.order import fresh_name

# A group is named after the heaviest members that make up this share of it, and their equals.
_MAJOR = 0.8


def group_names(names: Sequence[str], weight: Sequence[int], parts: Sequence[tuple[int, ...]]) -> list[str]:
    """A unique name for each group.

    The name is the common module path if the group holds the whole module; else it is the path and the parts of the
    module: `branches.0.layers.3`, `layers.3.attention+mlp`, `layers.0-3`. A group of one operator keeps its name.

    Args:
        names: dotted module paths of all operators.
        weight: weights of all operators; light ones do not show in a name.
        parts: operator ids of every group, in topological order.
    """
    paths = [tuple(name.split(".")) for name in names]
    main = [_main(part, weight) for part in parts]
    inside: Counter[tuple[str, ...]] = Counter(
        path[:depth] for ops in main for path in (paths[op] for op in ops) for depth in range(len(path) + 1)
    )
    out: list[str] = []
    taken = {names[part[0]] for part in parts if len(part) == 1}
    for part, ops in zip(parts, main, strict=True):
        if len(part) == 1:
            out.append(names[part[0]])
            continue
        out.append(fresh_name(_group_name([paths[op] for op in ops], inside), taken, "#"))
    return out


def common(paths: Sequence[tuple[str, ...]]) -> int:
    """The number of leading components that the paths share."""
    return next((d for d, level in enumerate(zip(*paths, strict=False)) if len(set(level)) > 1), min(map(len, paths)))


def _main(part: tuple[int, ...], weight: Sequence[int]) -> list[int]:
    left = _MAJOR * sum(weight[op] for op in part)
    least = 0
    for least in sorted((weight[op] for op in part), reverse=True):
        left -= least
        if left <= 0:
            break
    return [op for op in part if weight[op] >= least]


def _group_name(paths: list[tuple[str, ...]], inside: Counter[tuple[str, ...]]) -> str:
    if len(paths) == 1:
        return ".".join(paths[0])
    depth = common(paths)
    prefix = paths[0][:depth]
    if inside[prefix] == len(paths):
        return ".".join(prefix) or "model"
    parts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in paths:
        if len(path) > depth:
            parts[path[depth]].append(path)
    whole = all(inside[(*prefix, part)] == len(members) for part, members in parts.items())
    if whole or len(parts) > 3:
        own = _short(list(parts))
    else:
        own = "+".join(_group_name(members, inside).removeprefix(".".join((*prefix, ""))) for members in parts.values())
    return ".".join((*prefix, own))


def _short(own: list[str]) -> str:
    """`0-3` for a range of numbers, `a+b+c` for up to three, else `first..last`."""
    if len(own) > 1 and all(part.isdecimal() for part in own):
        numbers = sorted(int(part) for part in own)
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]}-{numbers[-1]}"
    return "+".join(own) if len(own) <= 3 else f"{own[0]}..{own[-1]}"
