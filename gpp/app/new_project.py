"""`mode=new path=FOLDER`: a repository of the user's own, with a model, a data set, settings and a test that pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gpp.errors import InvalidConfig

TEMPLATE = Path(__file__).with_name("template")
ENDING = ".txt"
"""Of the template's files, so that no tool takes them for modules of ours."""


def write_project(words: Sequence[str]) -> str:
    """Write the template, and say what to type next.

    Args:
        words: of the command line; `path=FOLDER` names the new folder.

    Raises:
        InvalidConfig: there is no path, it has files already, or its name is none for a package.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if others := [word for word in words if word.split("=")[0] not in ("mode", "path")]:
        raise InvalidConfig(others[0].split("=")[0], others[0], "means nothing to mode=new", "leave it out")
    path = Path(given.get("path") or "")
    if not given.get("path"):
        raise InvalidConfig("path", None, "mode=new writes a folder", "add path=FOLDER, as in path=../mine")
    package = re.sub(r"[^a-z0-9]+", "_", path.resolve().name.lower()).strip("_")
    if not package.isidentifier() or package in ("gpp", "conf", "tests", "baselines", "run"):
        raise InvalidConfig(
            "path", str(path), "its last part becomes the name of a package", "name it otherwise, as in path=../mine"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidConfig("path", str(path), "is there already", "name a folder that is empty, or not there yet")
    for source in sorted(TEMPLATE.rglob(f"*{ENDING}")):
        relative = str(source.relative_to(TEMPLATE)).removesuffix(ENDING).replace("PACKAGE", package)
        target = path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text("utf-8").replace("PACKAGE", package), "utf-8")
    return f"{path} is written. Next:\n  cd {path}\n  python -m pytest\n  python run.py\nREADME.md there says what to change."
