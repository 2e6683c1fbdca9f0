"""Judges plans against what is known of the problems. It needs nothing but Python.

    python benchmarks/pipebench/score.py FOLDER     plans as FOLDER/NAME.json, NAME a problem's; any number of them

Prints each plan's step beside the best known one and the bound, and ends with 1 where a plan is invalid. What beats the best known
value goes into known.json, with the name of who found it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from verify import Invalid, judge

HERE = Path(__file__).resolve().parent


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 1:
        print(__doc__)
        return 2
    known, wrong, ratios = json.loads((HERE / "known.json").read_text()), 0, []
    for path in sorted(Path(words[0]).glob("*.json")):
        problem = json.loads((HERE / "problems" / path.name).read_text())
        told = known[path.stem]
        try:
            step_s = judge(problem, json.loads(path.read_text()))
        except Invalid as error:
            print(f"{path.stem}: invalid: rule {error}")
            wrong += 1
            continue
        ratios.append(step_s / told["best_s"])
        said = "better than the best known" if ratios[-1] < 1 - 1e-9 else f"{ratios[-1] - 1:.2%} over the best known"
        print(f"{path.stem}: {step_s:.6g} s, {said}, at most {step_s / told['bound_s'] - 1:.2%} over any plan")
    if ratios:
        print(f"{len(ratios)} plans, {wrong} invalid, median {sorted(ratios)[len(ratios) // 2]:.4f} of the best known")
    return int(bool(wrong) or not ratios)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
