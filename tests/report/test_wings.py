import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[2] / "gpp" / "report"
WINGS = ("draw", "run", "compare", "sweep")
"""A wing imports from itself and from those before it."""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name.name}" for name in node.names]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_sees_the_wings_before_it(wing: str) -> None:
    unseen = tuple(f"gpp.report.{other}." for other in WINGS[WINGS.index(wing) + 1 :])
    for path in sorted((ROOM / wing).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not any(module.startswith(unseen) for module in imported(node)), f"{path.name} imports {imported(node)}"


def test_every_file_lies_in_a_wing() -> None:
    assert {path.parent.name for path in ROOM.rglob("*.py") if path.name != "__init__.py"} == set(WINGS)
