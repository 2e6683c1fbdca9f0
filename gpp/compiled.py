"""Files that an install compiles: those with a .pxd file beside them, which says which of their numbers are a processor's own.

Such a file is plain Python and is imported as any other. Where there was no compiler, or one of a folder's files has changed since,
the folder's files run as they are: they do the same, some ten to a hundred times slower. So they keep to arrays and numbers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def parts(folder: Path) -> list[str]:
    """The names of a folder's files that are compiled."""
    return sorted(path.stem for path in folder.glob("*.pxd"))


def digests(folder: Path) -> dict[str, str]:
    """What a folder's files say, by their names; setup.py writes it beside what it has compiled of them."""
    return {
        name: hashlib.sha256(b"".join((folder / f"{name}.{kind}").read_bytes() for kind in ("pxd", "py"))).hexdigest()
        for name in parts(folder)
    }


def up_to_date(folder: Path) -> bool:
    """Whether what was compiled is what the files say now."""
    try:
        return json.loads((folder / "compiled.json").read_bytes()) == digests(folder)
    except (OSError, ValueError):
        return False


def from_source(folder: Path, package: str) -> None:
    """Load a folder's files as plain Python, as modules of a package of that name."""
    for name in parts(folder):
        spec = spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)


def chosen(folder: Path, package: str) -> bool:
    """Whether a package's files run compiled; else they are loaded as plain Python."""
    compiled = up_to_date(folder)
    if not compiled:
        from_source(folder, package)
    return compiled


def integers(count: int) -> array[int]:
    """So many whole numbers."""
    return array("q", bytes(8 * count))


def reals(count: int) -> array[float]:
    """So many floating-point numbers."""
    return array("d", bytes(8 * count))
