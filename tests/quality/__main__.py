"""How good the plans are, and what they cost: the ledger of all planners, and two yardsticks of `graphpipe`.

    python -m tests.quality record --out FILE [--tree CHECKOUT] [--planner graphpipe,sequential] [--only PATTERN] [--jobs N]
    python -m tests.quality compare BEFORE [AFTER] [--planner ...] [--only PATTERN]
    python -m tests.quality yardstick [--seconds 30] [--only PATTERN] [--out FILE]
    python -m tests.quality oracle [--count 300] [--ops 5] [--devices 3]

`record` writes a JSON line for each problem and planner, goes on with a file that it finds, and prints a table. `compare` takes
two commits or checkouts (AFTER is this checkout, unless given) and plans every problem in both by turns, or two records; it
ends with 1 if a predicted step is longer by more than 0.5 %, or a plan is missing. `yardstick` searches plans at random for
as long as it may and compares the planner with the best that is known; `--out` keeps what is known. `oracle` tries every plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.quality import ledger, oracle, yardstick
from tests.quality.problems import ON_DEMAND, PLANNERS, questions
from tests.quality.summary import compared, paired, summed


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record, compare, search, oracles = (commands.add_parser(name) for name in ("record", "compare", "yardstick", "oracle"))
    record.add_argument("--tree", type=Path, default=Path.cwd(), help="the checkout whose planners plan; else this one")
    record.add_argument("--jobs", type=int, default=1, help="problems that are planned at a time")
    record.add_argument("--out", type=Path, required=True)
    compare.add_argument("before", help="a commit, a checkout, or a record")
    compare.add_argument("after", nargs="?", default=str(Path.cwd()))
    for each in (record, compare):
        each.add_argument("--planner", default=",".join(PLANNERS), help=f"also {', '.join(ON_DEMAND)}")
    for each in (record, compare, search):
        each.add_argument("--only", metavar="PATTERN", default="", help="of the problems, those in whose name this is found")
    search.add_argument("--seconds", type=float, default=30.0, help="CPU seconds of search for a problem; 0: what is known")
    search.add_argument("--out", type=Path, help="a file of the best plans known, which gets those that are better")
    oracles.add_argument("--count", type=int, default=300, help="problems")
    oracles.add_argument("--first", type=int, default=0, help="number of the first one")
    oracles.add_argument("--ops", type=int, default=5, help="most operators")
    oracles.add_argument("--devices", type=int, default=3, help="most devices")
    given = parser.parse_args()
    if given.command == "yardstick":
        return yardstick.main(given.seconds, given.only, given.out)
    if given.command == "oracle":
        return oracle.main(given.first, given.count, given.ops, given.devices)
    planners = given.planner.split(",")
    if given.command == "record":
        say(summed(ledger.record(given.tree, given.out, questions(given.only), planners, jobs=given.jobs, say=say)))
        return 0
    if Path(given.before).is_file():
        pairs = paired(ledger.load(Path(given.before)), ledger.load(Path(given.after)))
    else:
        with ledger.checkout(given.before) as before, ledger.checkout(given.after) as after:
            pairs = list(ledger.by_turns(before, after, questions(given.only), planners, say=say))
    verdict = compared(pairs)
    say(verdict.text)
    say(f"{len(pairs)} answers, {len(verdict.worse)} worse by more than 0.5 %")
    return int(bool(verdict.worse) or not pairs)


if __name__ == "__main__":
    sys.exit(main())
