"""Layouts in the forms of other engines, as the setting `plan` names them: a text, or a file."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gpp import export, mechanism
from gpp.errors import InvalidConfig
from gpp.export.base import AbstractExporter
from gpp.export.layout import GivenLayout

MOST_BYTES = 1 << 20
"""Of a file with a layout; a list of names of a thousand layers is a fiftieth of it."""


def shipped() -> Iterator[AbstractExporter]:
    """One of each exporter that ships, with the settings that it has by default, by the names of their files."""
    for file in pkgutil.iter_modules(export.__path__):
        if file.name == "base":
            continue
        module: Any = import_module(f"{export.__name__}.{file.name}")
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, AbstractExporter) and found.__module__ == module.__name__:
                yield found()
    yield from mechanism.found("exporter", "EXPORTER", AbstractExporter).values()


def layout_of(text: str, also: AbstractExporter | None = None) -> GivenLayout | None:
    """The layout that a setting names; None where it names a plan.json, or a file that is not there.

    Args:
        also: an exporter with settings of the user's own, which reads before those that ship.

    Raises:
        InvalidConfig: the text, or the file, has the form of one and means nothing.
    """
    if text.endswith(".json") and Path(text).name != "parts.json":
        return None
    if text.endswith(".py"):
        rule = "is a program, and a plan is data: nothing of it is run"
        raise InvalidConfig("plan", text, rule, "name the torchtitan.toml beside it, whose [parallelism] has the stages")
    content, folder = text, Path()
    if Path(text).suffix in (".toml", ".json", ".txt"):
        try:
            path = Path(text)
            if path.stat().st_size > MOST_BYTES:
                raise InvalidConfig("plan", text, f"is larger than {MOST_BYTES} bytes, which no layout is", "name another file")
            content, folder = path.read_text("utf-8").strip(), path.parent
        except (OSError, UnicodeDecodeError):
            return None
    for exporter in (*([also] if also else []), *shipped()):
        if (found := exporter.layout(content)) is not None:
            # What a file names lies beside it.
            return replace(found, csv=str(folder / found.csv)) if found.csv else found
    return None
