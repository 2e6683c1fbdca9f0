"""A function of a test in a fork of the warm process: the workers that it starts are forks, too, and import nothing."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from tests.support.cli import environment
from tests.support.warm import warm


def call(module: str, function: str, *words: str) -> str:
    """Call a function of a module with some words; what it asserts must hold there. Returns what is printed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        code = warm().run([module, function, *words], environment(), out, script=__file__)
        assert code == 0, out.read_text()
        return out.read_text()


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])
