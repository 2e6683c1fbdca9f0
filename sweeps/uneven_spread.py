"""The spread of steps on texts with 0 to 8 pictures, on 2 real workers: predicted beside measured, where the machine is not quiet.

python -m sweeps.uneven_spread [REPEATS]        5 minutes with 5

A run draws the same samples whenever it is repeated, so a step takes the same but for what other programs take from it. Runs with
micro-batches of even work and in the order given alternate; of each step the least seconds over the repeats count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpp.timeline import StepSpread

STEPS, UNTIMED = 60, 2
ROOT = Path(__file__).parents[1]


def run(folder: Path, *, evened: bool) -> tuple[StepSpread, dict[int, float]]:
    """One run: the predicted spread, and the seconds of each step that counts."""
    words = "model=pictured_small data=pictured uneven.amount=there minibatch_size=64 microbatch_size=8 cluster.num_devices=2"
    words += f" strategy=even steps={STEPS} evaluate_every=0 baselines_s=0 explain_s=0 logger=none final_weights=false"
    command = [sys.executable, ROOT / "run.py", *words.split(), f"uneven.evened={evened}", f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ends: dict[int, float] = {}
    for path in folder.glob("ranks/rank_*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "end" in record and "step" in record:
                ends[record["step"]] = max(record["end"], ends.get(record["step"], 0.0))
    predicted = json.loads((folder / "result.json").read_text())["predicted"]["spread"]
    return StepSpread(**predicted), {step: ends[step] - ends[step - 1] for step in sorted(ends) if step >= UNTIMED}


def main() -> None:
    """Print a row for each order of the samples."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    predicted: dict[bool, list[StepSpread]] = {True: [], False: []}
    least: dict[bool, dict[int, float]] = {True: {}, False: {}}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for evened in (True, False):
                spread, took = run(Path(folder, f"{repeat}-{evened}"), evened=evened)
                predicted[evened].append(spread)
                least[evened] = {step: min(seconds, least[evened].get(step, seconds)) for step, seconds in took.items()}
                print(f"  evened={evened}: {StepSpread.of(list(took.values()), 0.9)}", flush=True)
    print("| micro-batches | median predicted | measured | ratio | 90 % within predicted | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for evened, spreads in predicted.items():
        own = spreads[-1]
        seen = StepSpread.of(list(least[evened].values()), 0.9)
        cells = [("even" if evened else "in order")]
        for a, b in ((own.median_s, seen.median_s), (own.tail_s, seen.tail_s)):
            cells += [f"{a * 1e3:.1f} ms", f"{b * 1e3:.1f} ms", f"{b / a:.3f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
