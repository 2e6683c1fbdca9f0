"""Runs PipeBench: every planner on every problem, bounds, and the table.

    python -m benchmarks.pipebench                          all of it; writes known.json, and the table of README.md
    python -m benchmarks.pipebench --only 'random_0' --out FOLDER
    python -m benchmarks.pipebench --table                  the table again, from known.json alone
    python -m benchmarks.pipebench --planner mypackage.Mine --plans FOLDER      the plans of a planner of yours, for score.py

Ends with 1 where a planner beats a bound, which one of both would have to answer for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pipebench.verify import Invalid, judge
from gpp.errors import GppError

HERE = Path(__file__).resolve().parent
LIMIT_S = 10.0
"""Seconds of a mixed-integer program, of which a problem has one to three."""
SAME = 1e-9
EARLIER = ", earlier"
"""Who found a plan that nobody finds any more."""
TABLE = "## The table\n"
"""Where it begins in README.md."""


def problems(only: str = "") -> list[dict[str, Any]]:
    """The problems in whose name the pattern is found, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((HERE / "problems").glob("*.json")) if re.search(only, path.stem)]


def solved(problem: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What is known of a problem after every planner and the bound: steps, CPU seconds, the best plan, and the proofs."""
    from benchmarks.pipebench.bounds import bound_of
    from benchmarks.pipebench.planners import planners

    steps: dict[str, float | str | None] = {}
    took: dict[str, float] = {}
    best: tuple[float, str, Any] = (math.inf, "", None)
    for name, planner in planners().items():
        start = time.process_time()
        plan = planner(problem)
        took[name] = round(time.process_time() - start, 3)
        try:
            steps[name] = None if plan is None else judge(problem, plan)
        except Invalid as error:
            steps[name] = f"rule {error}"
        if isinstance(step_s := steps[name], float) and step_s < best[0]:
            best = (step_s, name, plan)
    start = time.process_time()
    proofs = bound_of(problem, limit_s)
    bound_s = min(proof.bound_s for proof in proofs)
    return {
        "best_s": best[0] if best[2] else None,
        "found_by": best[1],
        "bound_s": bound_s if math.isfinite(bound_s) else None,
        "steps_s": steps,
        "planning_s": took,
        "bounding_s": round(time.process_time() - start, 3),
        "plan": best[2],
        "proofs": [{**p._asdict(), "bound_s": p.bound_s if math.isfinite(p.bound_s) else None} for p in proofs],
    }


def kept(found: dict[str, Any], earlier: dict[str, Any] | None, problem: dict[str, Any]) -> dict[str, Any]:
    """What is known of a problem, with the plan that was known before where none of now is as fast: planners change, and what was
    found stays found. The plan is judged again."""
    if not earlier or not earlier["plan"]:
        return found
    try:
        step_s = judge(problem, earlier["plan"])
    except Invalid:  # the problem is another one by now
        return found
    if found["best_s"] is not None and found["best_s"] <= step_s * (1 + SAME):
        return found
    by = earlier["found_by"].removesuffix(EARLIER) + EARLIER
    return {**found, "best_s": step_s, "found_by": by, "plan": earlier["plan"]}


def written(word: str, only: str, folder: Path) -> int:
    """Write a planner's plans as FOLDER/NAME.json, and print CPU seconds or why there is none; 1 where none was found at all.

    Args:
        word: dotted path of a class of planners, or of a function that makes one.
        only: as `problems` has it.
    """
    from benchmarks.pipebench.planners import planned

    sys.path.insert(0, str(Path.cwd()))
    module, _, name = word.rpartition(".")
    planner, found = getattr(importlib.import_module(module), name)(), 0
    folder.mkdir(parents=True, exist_ok=True)
    for problem in problems(only):
        start = time.process_time()
        try:
            plan = planned(planner, problem)
        except GppError as error:
            print(f"{problem['name']}: {error}", flush=True)
            continue
        found += 1
        (folder / f"{problem['name']}.json").write_text(json.dumps(plan) + "\n")
        print(f"{problem['name']}: {time.process_time() - start:.2f} CPU s", flush=True)
    return int(not found)


def table(known: dict[str, Any]) -> str:
    """Two tables: planners over all problems, and problems."""
    names = list(next(iter(known.values()))["steps_s"])
    asked = {name: one for name, one in known.items() if one["best_s"] is not None}
    gaps = [one["best_s"] / one["bound_s"] - 1 for one in asked.values()]
    proven = sum(gap <= 1e-4 for gap in gaps)
    lines = [
        f"{len(known)} problems, {len(asked)} with a plan; the best known step is over the bound by {median(gaps):.1%} in the "
        f"median, {max(gaps):.1%} at most, and proven to be the best for {proven}.",
        "",
        "| planner | plans | invalid | nothing found | best known | median over it | worst | CPU s, median | most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        found = [one["steps_s"][name] / one["best_s"] for one in asked.values() if isinstance(one["steps_s"][name], float)]
        wrong = sum(isinstance(one["steps_s"][name], str) for one in known.values())
        took = [one["planning_s"][name] for one in known.values()]
        first = sum(ratio <= 1 + SAME for ratio in found)
        shares = f"{median(found) - 1:.1%} | {max(found) - 1:.1%}" if found else "– | –"
        lines.append(
            f"| {name} | {len(found)} | {wrong} | {len(known) - len(found) - wrong} | {first} | {shares} | "
            f"{median(took):.2f} | {max(took):.1f} |"
        )
    lines += ["", "| problem | best known, s | found by | bound, s | gap |", "|---|---|---|---|---|"]
    for name, one in known.items():
        best, bound = one["best_s"], one["bound_s"]
        row = f"{best:.5g} | {one['found_by']} | {bound:.5g} | {best / bound - 1:.1%}" if best else "– | – | – | –"
        lines.append(f"| {name} | {row} |")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of known.json and README.md")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="of a mixed-integer program")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--planner", metavar="PATH", help="a planner of yours, by its dotted path")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="folder of its plans")
    given = parser.parse_args(words)
    if bool(given.planner) != bool(given.plans) or (given.planner and "." not in given.planner):
        parser.error("--planner MODULE.NAME and --plans FOLDER belong together")
    if given.planner:
        return written(given.planner, given.only, given.plans)
    if given.table:
        print(table(json.loads((given.out / "known.json").read_text())))
        return 0
    known, wrong, start = dict[str, Any](), 0, time.monotonic()
    file = given.out / "known.json"
    before_now = json.loads(file.read_text()) if file.exists() else {}
    for problem in problems(given.only):
        name = problem["name"]
        found = known[name] = kept(solved(problem, given.seconds), before_now.get(name), problem)
        beaten = found["best_s"] is not None and (found["bound_s"] is None or found["best_s"] < found["bound_s"] * (1 - SAME))
        wrong += beaten
        said = "a plan beats the bound" if beaten else f"bound {found['bound_s']}"
        print(f"{name}: {found['best_s']} s by {found['found_by']}, {said}", flush=True)
        given.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
    page = given.out / "README.md"
    before = page.read_text().partition(TABLE)[0] if page.exists() else ""
    page.write_text(f"{before}{TABLE}\n{table(known)}")
    print(table(known))
    print(f"{len(known)} problems in {time.monotonic() - start:.0f} s")
    return int(bool(wrong) or not known)


if __name__ == "__main__":
    sys.exit(main())
