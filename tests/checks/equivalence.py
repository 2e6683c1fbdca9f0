"""Compare every run of a sweep with a single-device run of the same model: losses and final weights.

    python -m tests.checks.equivalence outputs/sweeps/equivalence

The single-device runs are made here, under SWEEP_DIR/single_MODEL. Exit code 1 if anything differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from gpp.runtime.checkpoint.final import load_final

LOSS, WEIGHT = 1e-9, 1e-8


def reference(sweep: Path, overrides: dict[str, str], config: dict) -> Path:
    run_dir = sweep / f"single_{overrides['model']}"
    if not (run_dir / "result.json").exists():
        keep = {key: config[key] for key in ("dtype", "steps", "evaluate_every", "minibatch_size", "seed")}
        words = [f"{key}={value}" for key, value in keep.items()]
        subprocess.run(
            [
                sys.executable,
                "run.py",
                f"model={overrides['model']}",
                "engine=single",
                "cost=analytical",
                "logger=none",
                f"hydra.run.dir={run_dir}",
                *words,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return run_dir


def main(sweep: Path) -> int:
    bad, checked, replicated, worst_loss, worst_weight = 0, 0, 0, 0.0, 0.0
    for job in json.loads((sweep / "jobs.json").read_text()):
        path, overrides = sweep / job["folder"], dict(word.split("=", 1) for word in job["overrides"])
        result = json.loads((path / "result.json").read_text())
        if result["status"] != "ok":
            print(f"{path.name} {overrides}: {result['status']}: {result['reason']}")
            bad += result["status"] == "failed"
            continue
        single = reference(sweep, overrides, yaml.safe_load((path / "config.yaml").read_text()))
        expected = json.loads((single / "result.json").read_text())["loss"]
        loss = max(abs(a - b) for a, b in zip(result["loss"], expected, strict=True))
        mine, theirs = load_final(path), load_final(single)
        names = [name for name in theirs if name in mine]
        weight = max((mine[name] - theirs[name]).abs().max().item() for name in names)
        ok = loss <= LOSS and weight <= WEIGHT and len(names) == len(theirs)
        plan = result["plan"]
        copied = any(len(stage["devices"]) > stage["k"] for stage in json.loads((path / "job" / "plan.json").read_text())["stages"])
        print(
            f"{'ok ' if ok else 'BAD'} loss {loss:.1e} weight {weight:.1e}  {plan['num_stages']} stages on "
            f"{plan['num_devices']} devices{' replicated' if copied else ''}  {overrides}"
        )
        bad, checked, replicated = bad + (not ok), checked + 1, replicated + copied
        worst_loss, worst_weight = max(worst_loss, loss), max(worst_weight, weight)
    worst = f"loss {worst_loss:.1e}, weight {worst_weight:.1e}"
    print(f"{checked} runs checked, {replicated} with replicated stages, {bad} bad; largest difference: {worst}")
    return int(bad > 0 or checked == 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
