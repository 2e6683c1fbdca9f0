"""How far predictions are from measured steps, and whether the plan that is predicted faster is faster.

    python run.py -cd sweeps -cn prediction_error half=local hydra.sweep.dir=DIR
    python -m tests.checks.predictions DIR

Repeats (seeds) of a case are one case, with the median of their measured steps: a machine's speed changes by the minute.
Cases of a model whose predictions differ by less than 2 % are one plan, since steps are not measured better. Kendall's tau is
scipy's.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy.stats import kendalltau

SAME = 0.02
"""Relative difference below which two predictions are of one plan."""


def cases(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str, float, float]]:
    """Model, the other words, predicted and measured seconds of each case."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    # The overrides that have no column of their own come after all figures.
    first = list(rows[0]).index("planning_peak_bytes") + 1 if rows else 0
    for row in rows:
        if row["status"] != "ok" or not row.get("measured.iteration_s"):
            continue
        words = " ".join([row["strategy"], *(f"{key}={row[key]}" for key in list(row)[first:] if key not in ("half", "seed"))])
        found[row["model"], words].append((float(row["predicted.iteration_s"]), float(row["measured.iteration_s"])))
    for (model, words), pairs in found.items():
        # Each repeat is compared with the prediction that it had; plans may become better from one to the next.
        yield model, words, statistics.median(p for p, _ in pairs), statistics.median(m for _, m in pairs)


def tau(pairs: list[tuple[float, float]]) -> float | None:
    """Kendall's tau of predictions and measurements, over plans that are predicted to differ; None for fewer than two."""
    plans: list[list[tuple[float, float]]] = []
    for pair in sorted(pairs):
        if plans and pair[0] <= plans[-1][0][0] * (1 + SAME):
            plans[-1].append(pair)
        else:
            plans.append([pair])
    if len(plans) < 2:
        return None
    means = [(plan[0][0], statistics.fmean(m for _, m in plan)) for plan in plans]
    return float(kendalltau([p for p, _ in means], [m for _, m in means])[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the sweep")
    with open(parser.parse_args().folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    of_model: dict[str, list[tuple[float, float]]] = defaultdict(list)
    errors = []
    for model, words, predicted, measured in cases(rows):
        error = measured / predicted - 1
        errors.append(abs(error))
        of_model[model].append((predicted, measured))
        print(f"{model:20} {words:50} {1e3 * predicted:8.2f} ms predicted {1e3 * measured:8.2f} ms measured {error:+7.1%}")
    if not errors:
        raise SystemExit("error: no case of the sweep was measured. Fix: run half=local to its end")
    within = sum(error <= 0.15 for error in errors) / len(errors)
    print(
        f"{len(errors)} cases: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, within 15 %: {within:.0%}"
    )
    for model, pairs in of_model.items():
        found = tau(pairs)
        print(f"{model}: Kendall's tau {'-' if found is None else f'{found:.2f}'} over {len(pairs)} cases")


if __name__ == "__main__":
    main()
