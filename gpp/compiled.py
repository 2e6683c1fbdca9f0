"""Files that an install compiles: those with a .pxd file beside them, which says which of their numbers are a processor's own.

Such a file is plain Python. An install compiles all of them into one library, from which they are imported. Where there was no
compiler, or where one of them has changed since, all of them run as they are: they do the same, some ten to a hundred times
slower. So they keep to arrays and numbers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Final

GPP: Final = Path(__file__).parent
LIBRARY: Final = f"library{EXTENSION_SUFFIXES[0]}"
VIEWS: Final = "gpp.memoryviews"
"""Cython's views of arrays, which the library holds beside the modules."""


def names() -> list[str]:
    """The modules that an install compiles."""
    return sorted(".".join(path.relative_to(GPP.parent).with_suffix("").parts) for path in GPP.rglob("*.pxd"))


def digest(name: str) -> str:
    """What the two files of a module say: setup.py writes it down for each that it has compiled."""
    path = GPP.parent.joinpath(*name.split("."))
    return hashlib.sha256(path.with_suffix(".pxd").read_bytes() + path.with_suffix(".py").read_bytes()).hexdigest()


def known() -> dict[str, str]:
    """The modules that were compiled, and what their files said; none if one of them says something else now.

    Nor are there any without a library for this Python: another one may have compiled them in the same folder.
    """
    try:
        found = json.loads((GPP / "compiled.json").read_bytes())
        return found if (GPP / LIBRARY).exists() and all(digest(name) == said for name, said in found.items()) else {}
    except (OSError, ValueError, AttributeError):
        return {}


KNOWN: Final = known()
"""All of them, or none: then they run as they are."""


class CompiledFiles(MetaPathFinder):
    """Finds such modules in the library if it is what their files say, else in these files."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """As importlib asks."""
        if KNOWN and (fullname in KNOWN or fullname == VIEWS):
            library = str(GPP / LIBRARY)
            return spec_from_file_location(fullname, library, loader=ExtensionFileLoader(fullname, library))
        if KNOWN or not fullname.startswith("gpp."):
            return None
        file = GPP.parent.joinpath(*fullname.split(".")).with_suffix(".py")
        return spec_from_file_location(fullname, file) if file.with_suffix(".pxd").exists() else None


sys.meta_path.insert(0, CompiledFiles())


def integers(count: int) -> array[int]:
    """So many whole numbers."""
    return array("q", bytes(8 * count))


def reals(count: int) -> array[float]:
    """So many floating-point numbers."""
    return array("d", bytes(8 * count))
