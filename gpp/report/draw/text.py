"""Amounts and module names as short text for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from gpp.quantities import num_bytes as num_bytes
from gpp.quantities import seconds as seconds
from gpp.quantities import significant as significant

_NUMBERED = re.compile(r"(.*?)(\d+)")
_Part = tuple[str, int, int]  # text, first and last number; -1, -1 without a number


def percent(value: float | None) -> str:
    """A share as per cent: `12.3 %`."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def ratio(value: float | None) -> str:
    """A factor: `1.07×`."""
    return "–" if value is None or not math.isfinite(value) else f"{significant(value)}×"


def quotient(a: float | None, b: float | None) -> float | None:
    """The quotient a / b where both are known and b is not zero."""
    return None if a is None or b is None or b == 0 else a / b


def ranges(numbers: Iterable[int], prefix: str = "") -> str:
    """Ascending integers as ranges: `d0-3, d6`."""
    return ", ".join(f"{prefix}{a}" if a == b else f"{prefix}{a}-{b}" for a, b in _runs((n, n) for n in numbers))


def _runs(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Spans of integers, those that touch as one, ascending."""
    out: list[list[int]] = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1] + 1:
            out[-1][1] = max(out[-1][1], last)
        else:
            out.append([first, last])
    return out


def sentence(words: str) -> str:
    """The words with a capital at their start."""
    return words[:1].upper() + words[1:]


def shorten(value: str, length: int) -> str:
    """At most `length` characters; the middle gives way to `…`, since module paths differ at both ends."""
    if len(value) <= length:
        return value
    head = max(0, (length - 1) // 2)
    tail = max(0, length - 1 - head)
    return f"{value[:head]}…{value[len(value) - tail :]}"


def shorten_end(value: str, length: int) -> str:
    """At most `length` characters of a sentence; its end gives way to `…`."""
    return value if len(value) <= length else f"{value[: max(1, length - 1)]}…"


def shorten_path(path: str, length: int) -> str:
    """A module path in at most `length` characters: words give way from the left, numbers and the end stay (`b.0.layers.0-3`)."""
    pieces = path.split(".")
    for keep in (4, 2, 1):
        for i, piece in enumerate(pieces[:-1]):
            if len(".".join(pieces)) <= length:
                break
            if not any(c.isdigit() for c in piece):
                pieces[i] = piece[:keep]
    short = ".".join(pieces)
    return short if len(short) <= length else f"…{short[len(short) - max(1, length - 1) :]}"


def path_end(path: str, length: int) -> str:
    """The end of a module path in at most `length` characters, from a whole piece on where one fits: `…0.layers.0-3`.

    For drawings, where the whole path is a pointer away; `shorten_path` keeps more of it, for terminals.
    """
    if len(path) <= length:
        return path
    pieces = path.split(".")
    ends = (f"…{'.'.join(pieces[start:])}" for start in range(1, len(pieces)))
    return next((end for end in ends if len(end) <= length), f"…{path[len(path) - max(1, length - 1) :]}")


def compress_names(names: Sequence[str], universe: Sequence[str] = ()) -> tuple[str, ...]:
    """Module paths in a short form of the same meaning.

    A module stands for its operators if `names` holds all of them (`universe` lists all operators of the model); then
    paths that differ in one number only are joined.

    Example:
        >>> compress_names([f"branches.0.layers.{i}" for i in range(4)] + ["head"])
        ('branches.0.layers.0-3', 'head')
    """
    split = [[(piece, _NUMBERED.fullmatch(piece)) for piece in name.split(".")] for name in _whole_modules(names, universe)]
    parts: list[tuple[_Part, ...]] = [
        tuple((match[1], int(match[2]), int(match[2])) if match else (piece, -1, -1) for piece, match in path) for path in split
    ]
    before = -1
    while before != len(parts):
        before = len(parts)
        for position in reversed(range(max(map(len, parts), default=0))):
            parts = _join(parts, position)
    return tuple(".".join(_show(part) for part in path) for path in parts)


def _whole_modules(names: Sequence[str], universe: Sequence[str]) -> list[str]:
    """Replace operators by the outermost module that lies wholly inside `names`, in order of first appearance."""
    held = set(names)
    outside = {name for name in universe if name not in held}
    mixed = {prefix for name in outside for prefix in _prefixes(name)}
    out: dict[str, None] = {}
    for name in names:
        whole = next((p for p in _prefixes(name) if p not in mixed), name) if universe else name
        out[whole] = None
    return list(out)


def _prefixes(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[:i]) for i in range(1, len(pieces) + 1)]


def _show(part: _Part) -> str:
    text, first, last = part
    return text if first < 0 else f"{text}{first}" if first == last else f"{text}{first}-{last}"


def _join(paths: list[tuple[_Part, ...]], position: int) -> list[tuple[_Part, ...]]:
    """Join paths that agree everywhere but in the number at `position`, where their ranges touch."""
    groups: dict[tuple[object, ...], list[tuple[_Part, ...]]] = {}
    for path in paths:
        numbered = position < len(path) and path[position][1] >= 0
        key = (path[:position], path[position][0], path[position + 1 :]) if numbered else (path, None)
        groups.setdefault(key, []).append(path)
    out = []
    for members in groups.values():
        if len(members) == 1:
            out += members
            continue
        runs, path = _runs(path[position][1:] for path in members), members[0]
        out += [(*path[:position], (path[position][0], a, b), *path[position + 1 :]) for a, b in runs]
    return out
