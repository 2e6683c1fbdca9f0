"""What pyproject.toml's package needs with some extras, one a line: `python tests/support/requirements.py test dev`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]


def needed(extras: list[str]) -> list[str]:
    """The package's own requirements, and those of the extras; an extra may be made of others, as in gpp[exact,ui]."""
    words = list(PROJECT["dependencies"])
    for word in (word for extra in extras for word in PROJECT["optional-dependencies"][extra]):
        others = re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", word)
        words += needed(others[1].split(",")) if others else [word]
    return list(dict.fromkeys(words))


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1:])))
