"""The search over plans whose devices may hold several stages, as one walk in compiled code.

`shape`, `step` and `climb` are plain Python; the .pxd file beside each says which of its numbers are a processor's own, and an
install compiles them. Where there was no compiler, or a file has changed since, the plain Python runs: it finds the same plans and
is about fifty times slower.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
PARTS: Final = ("shape", "step", "climb")
"""The compiled files, each after those that it imports."""


def up_to_date() -> bool:
    """Whether what was compiled is what the files say now."""
    try:
        known = json.loads((FOLDER / "compiled.json").read_bytes())
    except (OSError, ValueError):
        return False
    return all(known.get(name) == hashlib.sha256((FOLDER / f"{name}.py").read_bytes()).hexdigest() for name in PARTS)


def from_source(package: str) -> None:
    """Load the files as plain Python, as modules of a package of that name."""
    for name in PARTS:
        spec = spec_from_file_location(f"{package}.{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)


COMPILED: Final = up_to_date()
if not COMPILED:
    from_source(__name__)
