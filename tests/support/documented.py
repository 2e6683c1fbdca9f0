"""The commands and the Python blocks of README.md and docs/, and a folder with the files that they say are yours."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.support.pages import DOCS, ROOT, blocks

PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
PROGRAMS = ("python run.py", "gpp", "torchrun", "srun", "python -m", "make")
EXAMPLES = Path("tests/extending/conf")
"""The options of the examples, as the commands name their folder."""
LEFT_OUT = re.compile(r"\.\.\.|\b(RUN_DIR|THE SAME|FOLDER|ENTITY|GROUP=|SETTING=|PATH\b)")
"""What stands for words that the reader fills in; a row of a table with them is no command."""


@dataclass(frozen=True)
class Command:
    """A command as the pages show it, `where` it stands, and its words behind `run.py` or `gpp`."""

    where: str
    text: str

    @cached_property
    def program(self) -> str:
        return next(name for name in PROGRAMS if re.match(rf"{name}(\s|$)", self.text))

    @cached_property
    def words(self) -> list[str]:
        words = shlex.split(self.text)
        start = next(i for i, word in enumerate(words) if word in ("run.py", "gpp", "-m", "make"))
        return [word for word in words[start + 1 :] if word != "..."]


@cache
def known_settings(folder: Path) -> frozenset[str]:
    """Dotted paths of all settings that some option has, whatever is chosen beside it."""
    out: set[str] = set()
    for root in _roots(folder):
        for file in root.rglob("*.yaml"):
            parts = file.relative_to(root).parts[:-1]
            found = yaml.load(file.read_text(), yaml.CSafeLoader)
            if isinstance(found, dict):
                out |= {".".join([*(() if parts[:1] == ("experiment",) else parts), path]) for path in _paths(found)}
    return frozenset(out)


def _roots(folder: Path) -> tuple[Path, ...]:
    """Folders of options: ours, and those of the reader's folder."""
    return ROOT / "conf", ROOT / "sweeps", ROOT / EXAMPLES, folder / "conf"


def _paths(node: dict[Any, Any]) -> Iterator[str]:
    for key, value in node.items():
        yield str(key)
        if isinstance(value, dict):
            yield from (f"{key}.{path}" for path in _paths(value))


def unknown_words(command: Command, folder: Path) -> list[str]:
    """Words of a command that name an option or a setting which nothing here has.

    Args:
        folder: the reader's, whose conf/ has options of their own.
    """
    roots, out = _roots(folder), []
    for word in command.words:
        key, _, value = word.lstrip("+").partition("=")
        if word.startswith("-") or not value or key.startswith(("hydra.", "hydra/")):
            continue
        group = key.partition("@")[0].replace(".", "/")
        if any((root / group).is_dir() for root in roots):
            names = value.strip("[]").split(",")
            out += [f"{key}={name}" for name in names if not any((root / group / f"{name}.yaml").is_file() for root in roots)]
        elif key not in known_settings(folder) | {"path"}:
            out.append(word)
    return out


def documented() -> list[Command]:
    """Every command of the pages, each once: those of blocks, fenced or indented, and those that stand in a line by themselves."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for number, text in _lines(page):
            found.setdefault(text, Command(f"{page.name}:{number}", text))
    return list(found.values())


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    starts = re.compile(rf"(?:[A-Z_]+=\S+ )*((?:{'|'.join(PROGRAMS)})(?:\s.*)?)$")
    fenced, held, began = "", "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = "" if fenced else line[3:].split()[0] if line[3:].strip() else "text"
            continue
        block = line.startswith("    ") if not fenced else fenced in ("sh", "console")
        if held or (block and starts.match(line.strip())):
            began = began if held else number
            held += line.strip()
            if held.endswith("\\"):
                held = held[:-1].rstrip() + " "
                continue
            match = starts.match(held)
            assert match
            # Behind the words stands what they do.
            yield began, re.split(r"\s+#\s|\s{2,}|\s+&&\s", match[1])[0].strip()
            held = ""
        elif not fenced:
            for text in re.findall(r"`(python run\.py(?: [^`]+)?)`", line):
                if not LEFT_OUT.search(text):
                    yield number, text


@dataclass(frozen=True)
class PythonBlock:
    """A fenced block of Python, and where it stands."""

    where: str
    text: str


def python_blocks() -> list[PythonBlock]:
    """The Python blocks of the pages that name no file: those of the tutorial are files, which its own test writes."""
    out = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and not block.file:
                line = page.read_text()[: page.read_text().index(block.text)].count("\n")
                out.append(PythonBlock(f"{page.name}:{line}", block.text))
    return out


def yaml_files() -> dict[str, str]:
    """YAML files that these pages show, by the path in their first line, a comment."""
    out = {}
    for name in ("models.md", "extending.md", "tracking.md"):
        for match in re.finditer(r"^( *)# (conf/\S+\.yaml)\b.*\n((?:\1(?!```).+\n)+)", (DOCS / name).read_text(), re.M):
            out[match[2]] = textwrap.dedent(match[3])
    return out


NETS = """
import torch
from torch import nn


class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture, self.embed, self.head = nn.Linear(3 * 32 * 32, 16), nn.Embedding(49408, 16), nn.Linear(32, 10)

    def forward(self, x, tokens):
        return self.head(torch.cat([self.picture(x.flatten(1)), self.embed(tokens).mean(1)], -1))


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(49408, width)

    def forward(self, ids):
        return self.embed(ids).mean(1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.pixels = nn.Linear(64, 10), nn.Linear(3 * 32 * 32, 10)

    def forward(self, text, pixels):
        return self.text(text) + self.pixels(pixels.flatten(1))
"""
DATA = """
import torch


class MyDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        pixels, ids = torch.randn(3, 32, 32, generator=draw), torch.randint(49408, (77,), generator=draw)
        return {"x": pixels, "pixels": pixels, "tokens": ids, "ids": ids}, torch.randint(10, (), generator=draw)
"""
PLANNER = """
from typing import Annotated, Literal, final

from pydantic import Field

from gpp.cost.problem import Problem
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.settings import Count, settings
"""
"""Imports of the block that shows a planner's settings; the tutorial has them in its own file."""


def prepare(folder: Path) -> None:
    """Write the files that the pages' commands name, apart from those of an earlier run."""
    profiles = ROOT / "tests" / "support" / "profiles"
    shutil.copy(profiles / "b4x8.graph.txt", folder / "graph.txt")
    shutil.copy(profiles / "piper_bert32a100.json", folder / "bert.json")
    for name in ("models.yml", "device_types.yml"):
        shutil.copy(ROOT / "sweeps" / "pipeedge" / name, folder / name)
    shutil.copy(ROOT / "sweeps" / "pipeedge" / "devices_4_4.yml", folder / "devices.yml")
    (folder / "sweeps").symlink_to(ROOT / "sweeps")
    (folder / "tests").mkdir()
    (folder / EXAMPLES).parent.symlink_to(ROOT / EXAMPLES.parent)
    (folder / "seconds.json").write_text('{"right.3.0": {"forward_s": 1e-3, "backward_s": 2e-3}}')
    for name, text in yaml_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    package = folder / "mypackage"
    package.mkdir()
    net = next(block.text for block in python_blocks() if '@arguments("model")' in block.text)
    (package / "nets.py").write_text(NETS + "\n\n" + net)
    (package / "data.py").write_text(DATA)
