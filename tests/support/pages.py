"""The pages of docs/ and README.md as data: their blocks of code, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorial.md", DOCS / "tutorial_plan.md")
"""Two pages, which a reader follows one after the other."""


@dataclass(frozen=True)
class Block:
    """A fenced block: `language`, the `file` that its title names (empty for none), and its `text`."""

    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fences = re.finditer(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(fence[1], fence[2] or "", fence[3]) for fence in fences]


def commands(block: Block) -> list[str]:
    """The lines of a block of commands, those that end in a backslash joined with the next."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines outside fenced and indented blocks, with their numbers."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def plain(text: str) -> str:
    """A heading's text as it is read: without the marks of code, emphasis and links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "")


def github_anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: each space is a hyphen."""
    return re.sub(r"[^\w\- ]", "", plain(heading).lower()).strip().replace(" ", "-")


def site_anchor(heading: str) -> str:
    """The anchor that the site gives it: Python-Markdown keeps ASCII, and runs of spaces and hyphens are one."""
    ascii_only = plain(heading).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip())


def headings(page: Path) -> list[str]:
    """The texts of a page's headings."""
    return [match[1] for _, line in prose(page) if (match := re.match(r"#{1,6} (.+)", line))]


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The targets of a page's links and pictures, with their lines; a link may be broken over two lines."""
    text = "\n".join(line for _, line in prose(page))
    text = re.sub(r"`[^`\n]*`", "", text)
    for match in re.finditer(r"\]\(([^()\s]+(?:\([^()]*\))?)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", text):
        yield text.count("\n", 0, match.start()) + 1, match[1] or match[2]


def navigation() -> list[str]:
    """The pages that mkdocs.yml lists, in order."""

    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(each)

    return list(walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
