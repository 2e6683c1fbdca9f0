"""Whether a change of the code keeps the results: the same command lines in two checkouts, side by side.

    python -m tests.checks.same record --out DIR [--tree CHECKOUT]         plan, program, prediction of each case; losses of runs
    python -m tests.checks.same compare --against DIR [--tree CHECKOUT]    run the cases of a record again, and say what differs
    python -m tests.checks.same times --before CHECKOUT [--tree CHECKOUT]  seconds of search, the checkouts in turn
    python -m tests.checks.same overhead --before CHECKOUT                 seconds of a step of the runtime, the checkouts in turn

A checkout is a folder with a `run.py`, and CHECKOUT is this one by default. The tool rests on the words of the command line
and on the files of a run directory alone. `--only PATTERN` takes the cases in which the regular expression is found. `compare`
ends with 1 if anything differs that `MEANT` in `tests/same/cases.py` does not name; what has another name now stands in
`RENAMED` there.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.same import cases, times
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


def timed(given: argparse.Namespace) -> None:
    """Runs cases in two checkouts in turn and prints how long each took, then how the checkouts compare."""
    trees = (given.before, given.tree)
    if given.out is not None:
        given.out.unlink(missing_ok=True)
    if given.command == "times":
        found = times.in_turn(trees, chosen(times.searches(), "all", given.only), given.rounds, given.out)
    else:
        found = times.in_turn(trees, chosen(times.steps(), "all", given.only), given.rounds, given.out, timing=False)
        found |= times.in_turn(trees, chosen([times.CHAIN], "all", given.only), given.rounds, given.out)
    print("\n".join(times.summary(found, least_s=given.least)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare", "times", "overhead"):
        command = commands.add_parser(name)
        command.add_argument("--tree", type=Path, default=Path(), help="the checkout to run")
        command.add_argument("--only", metavar="PATTERN", help="of the cases, those in which this is found")
        if name in ("times", "overhead"):
            command.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
            command.add_argument("--rounds", type=int, default=3, help="times that each case runs in each checkout")
            command.add_argument("--least", type=float, default=0.02, help="seconds before, below which a ratio is noise")
            command.add_argument("--out", type=Path, help="file for what was measured, one line of JSON a case")
            continue
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
    if given.command == "record":
        record(
            chosen([*cases.matrix(), *cases.runs()], given.what, given.only),
            given.tree,
            given.out,
            jobs=given.jobs,
            resume=given.resume,
        )
    else:
        timed(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
