"""Strategies and sizes of micro-batches beside each other, by the planner alone: which is best for a model, and by how much.

    python examples/sweep.py

`python run.py -m strategy=graphpipe,sequential microbatch_size=4,8` does the same with real workers, and writes a report.
"""

import csv
import sys
from pathlib import Path

import torch
from plan_only import Towers, cards
from torch.nn.functional import mse_loss

import gpp

STRATEGIES = ("graphpipe", "graphpipe schedule=gpipe", "sequential", "even")


def main(folder: str = "outputs/sweep") -> list[dict[str, object]]:
    """Plan with every strategy and size; the rows of the table, the shortest step first."""
    with torch.device("meta"):
        inputs = {name: torch.empty(2, 64, 512) for name in ("video", "sound", "text")}
        captured = gpp.capture_model(Towers(width=512, layers=2), inputs, torch.empty(2, 512), mse_loss)
    rows: list[dict[str, object]] = []
    for words in STRATEGIES:
        strategy = gpp.Planning(strategy=words).made
        for size in (4, 16):
            problem = gpp.problem(captured, cards(4), minibatch_size=64, microbatch_size=size, max_ops=16)
            plan = strategy.plan(problem)
            found = strategy.predict(plan, problem).metrics
            most = max(found.peak_memory_bytes.values())
            rows.append(
                {
                    "strategy": words,
                    "micro-batch": size,
                    "stages": len(plan.stages),
                    "depth": plan.depth,
                    "ms": round(found.iteration_s * 1e3, 2),
                    "idle": f"{found.bubble_fraction:.0%}",
                    "MB": round(most / 1e6),
                }
            )
    rows.sort(key=lambda row: row["ms"])  # type: ignore[arg-type, return-value]
    print("".join(f"{name:>14}" if name != "strategy" else f"{name:26}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value!s:>14}" if name != "strategy" else f"{value:26}" for name, value in row.items()))
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, "sweep.csv"), "w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:2])
