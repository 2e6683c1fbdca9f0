"""The user's operator behind a line of a stage's generated code, for messages about what went wrong there."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from types import TracebackType

from gpp.graph.captured import Captured, Node

GENERATED = "<eval_with_key>"
"""What the names of files of generated code begin with (`torch.fx`)."""

_PLACE = re.compile(rf"({re.escape(GENERATED)}[^(]*)\((\d+)\)")
_CALL = re.compile(r"= ([\w.]+)\(")


def place_of(frames: Sequence[str]) -> tuple[str, int] | None:
    """File and line of the innermost generated code among the profiler's frames; None where there is none."""
    found = next((match for match in map(_PLACE.match, frames) if match), None)
    return (found[1].strip(), int(found[2])) if found else None


def raised_at(trace: TracebackType | None) -> tuple[str, int] | None:
    """File and line of the innermost generated code that an exception came through; None where there is none."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(GENERATED):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


def operator_at(captured: Captured, nodes: Iterable[str], place: tuple[str, int]) -> Node | None:
    """The node that a line of generated code runs; None where it runs none.

    The code calls the stage's nodes in their order, one a line, with lines of other calls between them. So lines and nodes are
    matched as two sequences of the operators' names.

    Args:
        nodes: the nodes of the stage.
        place: file and line.
    """
    file, number = place
    own = set(nodes)
    made = [node for node in captured.nodes if node.kind == "call" and (node.free or node.name in own)]
    lines = {at: _name(match[1]) for at, line in enumerate(linecache.getlines(file), start=1) if (match := _CALL.search(line))}
    places = list(lines)
    if number not in lines:
        return None
    matcher = SequenceMatcher(None, [lines[at] for at in places], [_name(node.target) for node in made], autojunk=False)
    for begin, first, count in matcher.get_matching_blocks():
        offset = places.index(number) - begin
        if 0 <= offset < count:
            return made[first + offset]
    return None


def _name(path: str) -> str:
    """An operator's name, without its namespace and its overload: `linear` of `torch._C._nn.linear` and `aten.linear.default`."""
    parts = path.removeprefix("torch.ops.").split(".")
    return parts[-1] if parts[0] == "torch" else parts[1] if len(parts) > 1 else parts[0]
