"""What the files of gpp/ and baselines/ say, each parsed and walked once: a walk through all of them takes seconds."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.pages import ROOT

SOURCES = sorted((ROOT / "gpp").rglob("*.py"))
BASELINES = sorted((ROOT / "baselines").rglob("*.py"))


def name_of(path: Path) -> str:
    """The module that a file is."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in [*SOURCES, *BASELINES]}


@dataclass
class Said:
    """What a file says.

    Args:
        imports: (module, whether it is imported at run time).
        classes: the definitions of its classes.
        lengths: name and lines of each function, without its docstring.
    """

    imports: list[tuple[str, bool]] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)
    lengths: list[tuple[str, int]] = field(default_factory=list)


@cache
def said(path: Path) -> Said:
    """What a file of gpp/ or baselines/ says."""
    found, typing_only = Said(), set[int]()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            typing_only |= set(map(id, ast.walk(node)))
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or 0) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
            found.lengths.append((node.name, length))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module or "" for name in full]
        found.imports += [(name, id(node) not in typing_only) for name in dict.fromkeys(names)]
    return found
