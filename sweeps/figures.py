"""The page of results: each headline is made by its command, kept in docs/figures.json, and shown in docs/figures.md.

    make figures                                          all of them, hours: each command is run, and the page is written
    python -m sweeps.figures --only oracle,order          some of them
    python -m sweeps.figures --only order --printed FILE  from what its command has printed before, with `--seconds` as it took
    python -m sweeps.figures --page                       the page alone, from the data

The list of headlines is sweeps/headlines.py. A number that has not been made by its command is not on the page. Sweeps write to
outputs/figures/NAME, which is emptied before.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sweeps.headlines import HEADLINES, Headline
from sweeps.readings import Number

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs" / "figures.json", ROOT / "docs" / "figures.md"
MEASURED = ("gpp", "conf", "baselines", "sweeps", "run.py", ":!sweeps/figures.py", ":!sweeps/headlines.py", ":!sweeps/readings.py")
"""What decides on the numbers: the commit of a number is the last one that changed any of it."""

HEAD = """# Figures

Each number was written by the command above it; `make figures` runs all of them. The machine is shared and has no card,
so ratios mean more than seconds. Brackets have the least and the largest, the median stands before them. Each section
ends with its date, commit, and seconds. The diary (`docs/log/`) has earlier numbers.
"""
AT = ", load "
"""Parts a machine from how busy it was."""


def commit() -> str:
    """The last commit that changed what decides on the numbers; with a plus where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words, "--", *MEASURED], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=8") + ("+" if git("status", "--porcelain") else "")


def machine() -> str:
    """Where the numbers are of, and how busy it was: programs that wanted a core in the last minute."""
    return f"{os.cpu_count()} cores, torch {version('torch')}{AT}{os.getloadavg()[0]:.1f}"


def folder(headline: Headline) -> Path:
    """Where its sweep writes."""
    return ROOT / "outputs" / "figures" / headline.name


def words(headline: Headline, command: str) -> list[str]:
    """A command as it is run: with this Python, and its sweep in a folder of its own."""
    program, *rest = shlex.split(command)
    named = [str(folder(headline)) if word.startswith("outputs/sweeps/") else word for word in rest]
    into = [f"hydra.sweep.dir={folder(headline)}"] if "-cn" in rest else []
    return [sys.executable if program == "python" else program, *named, *into]


def run(headline: Headline) -> tuple[str, float]:
    """What its commands print, and the seconds that they take.

    Raises:
        CalledProcessError: one of them fails. A check of tests/ that ends with 1 has found a limit broken, and its numbers count.
    """
    shutil.rmtree(folder(headline), ignore_errors=True)
    began, printed = time.monotonic(), []
    for command in headline.commands:
        done = subprocess.run(words(headline, command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode > int(command.startswith("python -m tests.")) or done.returncode < 0:
            done.check_returncode()
        printed.append(done.stdout)
    return "\n".join(printed), time.monotonic() - began


def entry(headline: Headline, numbers: list[Number], seconds: float, where: str) -> dict[str, Any]:
    """What is kept of a headline."""
    return {
        "commands": headline.commands,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": where,
        "seconds": round(seconds),
        "numbers": [asdict(number) for number in numbers],
    }


def kept() -> dict[str, Any]:
    """The data, by headline."""
    return json.loads(DATA.read_text()) if DATA.is_file() else {}


def shown(value: float, unit: str) -> str:
    """A number as a reader sees it."""
    if unit == "%":
        return f"{value:.2%}" if abs(value) < 0.01 else f"{value:.1%}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 10 else f"{value:.3g}"


def line(number: Number) -> str:
    """A number with its range and what it is compared with."""
    text = shown(number.value, number.unit) + ("" if number.unit in ("", "%") else f" {number.unit}")
    if number.high is not None:
        least = "at most" if number.low is None else f"{shown(number.low, number.unit)} to"
        text += f" ({least} {shown(number.high, number.unit)})"
    return f"* {number.what}: **{text}**" + (f"; {number.beside}" if number.beside else "")


def section(headline: Headline, found: dict[str, Any] | None, where: str) -> str:
    """The section of a headline.

    Args:
        where: the machine that the page names for all sections; empty where they have several.
    """
    lines = [f"## {headline.question}", "", *(f"    {command}" for command in headline.commands), ""]
    lines += [*textwrap.wrap(headline.beside, 120), ""]
    if found is None:
        return "\n".join([*lines, "Not yet measured.", ""])
    lines += [line(Number(**number)) for number in found["numbers"]]
    machine = found["machine"].removeprefix(where).removeprefix(", ")
    return "\n".join([*lines, "", f"{found['date']}, {found['commit']}, {found['seconds']:,} s, {machine}.", ""])


def page(data: dict[str, Any]) -> str:
    """The page from its data."""
    machines = {found["machine"].partition(AT)[0] for found in data.values()}
    where = machines.pop() if len(machines) == 1 else ""
    head = [HEAD, *([f"All were measured on {where}.", ""] if where else [])]
    return "\n".join([*head, *(section(headline, data.get(headline.name), where) for headline in HEADLINES)])


def main() -> None:
    """The command line."""
    names = [headline.name for headline in HEADLINES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--printed", type=Path, help="a file with what the commands of the one headline have printed")
    parser.add_argument("--seconds", type=float, default=0.0, help="that they took")
    given = parser.parse_args()
    chosen = [headline for headline in HEADLINES if headline.name in given.only.split(",")]
    if not chosen or (given.printed and len(chosen) != 1):
        parser.error(f"--only={given.only}: must name {'one' if given.printed else 'some'} of {', '.join(names)}")
    for headline in [] if given.page else chosen:
        where = machine()
        printed, seconds = (given.printed.read_text(), given.seconds) if given.printed else run(headline)
        found = entry(headline, headline.read(printed, folder(headline)), seconds, where)
        DATA.write_text(json.dumps(kept() | {headline.name: found}, indent=1) + "\n")
        print(f"{headline.name}: {len(found['numbers'])} numbers in {seconds:.0f} s", flush=True)
    PAGE.write_text(page(kept()))


if __name__ == "__main__":
    main()
