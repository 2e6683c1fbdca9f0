"""The command line of a check, said by its defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def options(doc: str | None, words: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """What was asked for: `--name` for each default, of its type; a flag for False, several words for a list.

    Args:
        doc: of the check, which says what its options are.
        words: those of the command line if None.
        defaults: `names` are words without an option before them.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            plain = {"type": type(default[0]) if default else str, "nargs": "*", "default": default}
            parser.add_argument("names" if name == "names" else f"--{name}", **plain)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(words)
