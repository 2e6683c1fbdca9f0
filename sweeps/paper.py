"""Make GraphPipe's figures again, and print their tables.

    python -m sweeps.paper                     all of them, about ten minutes of one core
    python -m sweeps.paper figure6             one of them

The sweeps' folders are outputs/paper/HASH/NAME, by a hash of the source and the settings: what is done is skipped, and nothing of
another state of the source is taken for this one's.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gpp.models.dotted import source_hash
from sweeps.fit_v100 import CHAIN, CLUSTERS, FITTED, OURS, published, table

ROOT = Path(__file__).resolve().parent.parent
DEVICES = {cluster: n for n, cluster in CLUSTERS.items()}


def folder(name: str) -> Path:
    """Where a sweep's results are."""
    sources = [path for top in ("gpp", "conf", "sweeps") for kind in ("*.py", "*.yaml") for path in (ROOT / top).rglob(kind)]
    return ROOT / "outputs" / "paper" / source_hash(sources)[7:19] / name


def run(name: str) -> Path:
    """Run a sweep, or what is left of it."""
    into = folder(name)
    words = ["-cd", "sweeps", "-cn", name, f"hydra.sweep.dir={into}"]
    into.mkdir(parents=True, exist_ok=True)
    with (into.parent / f"{name}.log").open("w") as log:
        subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    return into


def results(into: Path) -> list[dict[str, str]]:
    """A sweep's jobs."""
    with (into / "results.csv").open() as file:
        return list(csv.DictReader(file))


def number(row: dict[str, str] | None, field: str) -> float | None:
    """A field of a job; None where it has none."""
    return float(row[field]) if row and row.get(field) else None


def figure6(into: Path) -> list[str]:
    """Throughput, beside what is published, with the devices that the plans use."""
    jobs = {(row["model"], row["strategy"].removesuffix("_apart"), DEVICES[row["cluster"]]): row for row in results(into)}
    rows, gains, gaps = [], [], []
    for model, columns in published().items():
        for n in CLUSTERS:
            found = {name: jobs.get((model, name, n)) for name in (OURS, FITTED, "piper", CHAIN)}
            rates = {name: number(row, "predicted.throughput_samples_per_s") for name, row in found.items()}
            cells = []
            for name in found:
                said = columns.get(name, {}).get(n)
                cells.append("–" if rates[name] is None else f"{rates[name]:,.0f}" + (f" ({said:,.0f})" if said else ""))
            used = [number(found[name], "plan.num_devices") for name in (OURS, FITTED, CHAIN)]
            ours, rivals = rates[OURS] or 0.0, [rates[name] or 0.0 for name in (FITTED, "piper")]
            others = [values[n] for name, values in columns.items() if name != OURS and n in values]
            gap = number(found[OURS], "plan.optimality_gap") or 0.0
            gains.append(ours / max(rivals))
            gaps.append(gap)
            over = f"{gains[-1]:.2f} ({columns[OURS][n] / max(others):.2f})"
            chain = f"{ours / (rates[CHAIN] or 1.0):.2f}"
            devices = ", ".join(f"{count:.0f}" for count in used if count)
            rows.append([model, n, *cells, over, chain, devices, f"{gap:.0%}"])
    head = ["model", "devices", "graphpipe", "pipedream", "piper", "sequential", "over the better of pipedream, piper"]
    lines = list(table([*head, "over sequential", "devices used: graphpipe, pipedream, sequential", "gap to the bound"], rows))
    return [*lines, f"gain: {min(gains):.2f} to {max(gains):.2f}; median gap {median(gaps):.0%}"]


def points(into: Path) -> list[str]:
    """What a sweep's figures show, point by point."""
    summary: dict[str, Any] = json.loads((into / "summary.json").read_text())
    rows = []
    for figure in summary["figures"]:
        for point in figure["points"]:
            ours, said = point["ours"], point["published"]
            rows.append([point["panel"] or "", point["series"], point["x"], "–" if ours is None else f"{ours:.4g}", said or ""])
    return list(table(["panel", "series", "x", "ours", "published"], rows))


MADE: dict[str, Callable[[Path], list[str]]] = {
    "figure6": figure6,
    "figure7_branches": points,
    "figure7_microbatch": points,
    "figure9_ablation": points,
    "figure10_case_study": points,
    "table_a3_sequential": points,
}


def main(names: list[str]) -> None:
    """Make the named sweeps, or all."""
    if unknown := sorted(set(names) - set(MADE)):
        raise SystemExit(f"no such figure: {', '.join(unknown)}; there are {', '.join(MADE)}")
    for name in names or MADE:
        print(f"\n{name}\n", *MADE[name](run(name)), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
