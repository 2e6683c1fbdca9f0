"""The table of idioms in docs/idioms.md, made of the cases whose outcomes tests and `python -m tests.checks.idioms` prove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module

from tests.idioms.case import IDIOMS, Idiom
from tests.support.pages import DOCS

PAGE = DOCS / "idioms.md"
BEGIN, END = "<!-- idioms: written by python -m tests.checks.idioms -->", "<!-- idioms: end -->"
FILES = ("parameters", "state", "hooks", "layers", "losses", "optimizers")


def idioms() -> list[Idiom]:
    """All cases, in the order of the table."""
    places = {import_module(f"tests.idioms.{name}").__name__: place for place, name in enumerate(FILES)}
    return sorted(IDIOMS, key=lambda case: places[case.make.__module__])


def counted(cases: Sequence[Idiom]) -> str:
    """How many there are of each kind, in words."""
    kinds = Counter(case.kind for case in cases)
    return f"{len(cases)} idioms: {kinds['equal']} equal, {kinds['refused']} refused, {kinds['warned']} warned of, 0 silent."


def block(cases: Sequence[Idiom]) -> str:
    """The part of the page between the marks, with them: what is refused or warned of; all else is equal."""
    lines = [BEGIN, "", counted(cases)]
    for theme in dict.fromkeys(case.theme for case in cases):
        lines += ["", f"**{theme}**", "", "| what you write | what happens | write instead |", "|---|---|---|"]
        for case in cases:
            if case.theme == theme and case.kind != "equal":
                lines.append(f"| {_cell(case.name)} | {case.kind} | {_cell(case.fix)} |")
    return "\n".join([*lines, "", END])


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def written(page: str, cases: Sequence[Idiom]) -> str:
    """The page with the block as it is to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + block(cases) + after
