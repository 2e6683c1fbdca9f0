"""Whether a change of the code keeps the results: the same command lines in two checkouts, side by side.

    python -m tests.checks.same record --out DIR [--tree CHECKOUT]         plan, program, prediction of each case; losses of runs
    python -m tests.checks.same compare --against DIR [--tree CHECKOUT]    run the cases of a record again, and say what differs

A checkout is a folder with a `run.py`, and CHECKOUT is this one by default. The tool rests on the words of the command line
and on the files of a run directory alone. `--only PATTERN` takes the cases in which the regular expression is found. `compare`
ends with 1 if anything differs that `MEANT` in `tests/same/cases.py` does not name. What two checkouts take is compared by
`tests.quality compare` (planning) and `tests.checks.runtime --before` (a step).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.same import cases
from tests.same.compare import report
from tests.same.record import load, record


def chosen(every: Iterable[str], what: str, only: str | None) -> list[str]:
    """Those of the cases that are `simulated`, `runs` or either (`all`), and in which the pattern is found."""
    kinds = {"all": (True, False), "simulated": (True,), "runs": (False,)}[what]
    return [case for case in every if ("engine=simulate" in case.split()) in kinds and (only is None or re.search(only, case))]


def compare(given: argparse.Namespace) -> int:
    """Runs the cases of a record again, prints what differs; 1 if that was not meant."""
    before = load(given.against)
    before = {case: before[case] for case in chosen(before, given.what, given.only)}
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        out = given.recorded or given.out or Path(folder)
        after = load(out) if given.recorded else record(before, given.tree, out, jobs=given.jobs, resume=given.resume)
        lines, unmeant = report(before, after, (given.against, out))
    print("\n".join(lines))
    return int(unmeant > 0 or not before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--tree", type=Path, default=Path(), help="the checkout to run")
        command.add_argument("--only", metavar="PATTERN", help="of the cases, those in which this is found")
        command.add_argument("--out", type=Path, required=name == "record", help="folder for the record")
        command.add_argument("--what", choices=("all", "simulated", "runs"), default="all")
        command.add_argument("--jobs", type=int, default=2, help="cases that run at a time")
        command.add_argument("--resume", action="store_true", help="go on with the record in --out")
        if name == "compare":
            command.add_argument("--against", type=Path, required=True, help="folder of the record to compare with")
            command.add_argument("--recorded", type=Path, help="folder of a record to compare, in place of running the cases")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given)
    every = chosen([*cases.matrix(), *cases.runs()], given.what, given.only)
    record(every, given.tree, given.out, jobs=given.jobs, resume=given.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
