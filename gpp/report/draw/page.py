"""Pages: templates filled with plain values. A page is self-contained: it loads no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from gpp.errors import printable
from gpp.report.draw.palette import tokens_css
from gpp.report.draw.stage_graph import hatch_definition
from gpp.report.draw.svg import Drawing

if TYPE_CHECKING:
    from jinja2 import Environment

Kind: TypeAlias = Literal["", "n", "c"]
TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
SCRIPTS = (
    *("text", "theme", "unpack", "tips", "links", "find", "tables"),
    *("viewport", "gestures", "paint", "pointing", "timeline", "start"),
)
"""Scripts of every page, one file a concern, in the order in which they need each other."""


class Column(NamedTuple):
    """A table's column; `kind` is "" for words, "n" for numbers, "c" for code."""

    name: str
    kind: Kind = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell with more than plain words.

    Args:
        look: `status` is the coloured word for how a run ended, `best` marks the best row, `line` never wraps,
            `heading` is a bold line.
        link: a file beside the page.
        small: a second line in small print.
        more: text that unfolds.
    """

    text: str
    look: Literal["", "status", "best", "line", "heading"] = ""
    link: str = ""
    small: str = ""
    more: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table; cells are text, drawings or `Cell`s.

    Args:
        stages: the stage that each row is about, which links it to the drawings; empty where rows are about something else.
        sortable: whether readers may sort it; not where rows stand under headings of their own.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell]]
    stages: Sequence[int] = ()
    sortable: bool = True


def render(template: str, *, scripts: Sequence[str] = (), beside: Path | None = None, **values: Any) -> str:
    """A page from a template of `gpp/report/templates`; whatever is not a `Drawing` is escaped.

    Args:
        scripts: names of scripts of this page alone, without `.js`.
        beside: a folder with more templates and scripts.

    Raises:
        jinja2.UndefinedError: the template names a value that is not given.
    """
    script = page_script(*scripts, beside=beside)
    own = {"tokens": Drawing(tokens_css()), "hatch": hatch_definition(), "script": script}
    return _environment(beside).get_template(template).render(**own, **values)


def page_script(*more: str, beside: Path | None = None) -> Drawing:
    """The scripts of a page as one, in a scope of their own; `more` and `beside` as `render` has them."""
    paths = [(beside or TEMPLATES) / f"{name}.js" for name in more]
    paths = [TEMPLATES / f"{name}.js" for name in SCRIPTS] + [path if path.exists() else TEMPLATES / path.name for path in paths]
    found = [path.read_text(encoding="utf-8") for path in paths]
    return Drawing('(() => {\n"use strict";\n' + "\n".join(found) + "})();")


def embedded(data: Any) -> Drawing:
    """A value as JSON inside a page's `script` element, which no text in it can end."""
    return Drawing(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


@cache
def _environment(beside: Path | None = None) -> Environment:
    # jinja2 is loaded with the first page: most commands that import this module end without one.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([TEMPLATES, *([beside] if beside else ())]),
        autoescape=True,
        # No page may hold control characters.
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
