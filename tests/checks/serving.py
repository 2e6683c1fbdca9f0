"""Kill workers of a model that serves at many instants: every answer comes once, in order, equal to those of one device.

    python -m tests.checks.serving --kills 20

Each stream begins on four workers and loses one to three of them: while processes start, between requests, and while the workers of
a new plan start. A stream must end well, with all requests answered in order and none twice (metrics.jsonl), its answers equal, bit
for bit, to those that one device gives to requests cut alike; what it says of each loss must be true; and no process may be left.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.checks.kills import MARK, processes_of, steps_done, workers_of
from tests.support.cli import start
from tests.support.options import options

WORKERS = 4
REQUESTS = 400
ANSWERS = "answers.safetensors"


def words(strategy: str, devices: int, requests: int = REQUESTS) -> list[str]:
    """The command line of a stream."""
    return [
        "mode=inference",
        "model=digits",
        "logger=none",
        "cost=analytical",
        f"strategy={strategy}",
        f"cluster.num_devices={devices}",
        f"steps={requests}",
        "minibatch_size=8",
        "microbatch_size=4",
        "strategy.replan.every=32",
        "strategy.replan.slower=1e9",  # only losses count here
    ]


def alone(folder: Path, requests: int = REQUESTS) -> bytes:
    """The answers of one device."""
    run_dir = folder / "alone"
    process = start(run_dir, *words("even", 1, requests))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return (run_dir / ANSWERS).read_bytes()


def kill_one(process: subprocess.Popen[str], run_dir: Path, rng: random.Random, seen: set[int], after: int) -> int | None:
    """Kill a random worker of the present plan, at a random instant; its process, or None if the stream has ended before.

    Args:
        seen: processes of earlier plans.
        after: requests that must be done; 0: while processes start.
    """
    while process.poll() is None and not set(workers_of(run_dir).values()) - seen:
        time.sleep(0.01)
    if after:
        while process.poll() is None and max(steps_done(run_dir), default=0) < after:
            time.sleep(0.005)
    else:
        time.sleep(rng.uniform(0.0, 3.0))
    fresh = sorted(set(workers_of(run_dir).values()) - seen)
    if process.poll() is not None or not fresh:
        return None
    seen.update(fresh)
    victim = rng.choice(fresh)
    os.kill(victim, signal.SIGKILL)
    return victim


def stream(run_dir: Path, rng: random.Random, wanted: bytes, kills: int, devices: int = WORKERS) -> tuple[int, list[str]]:
    """One stream that loses devices; how many were killed, and what was wrong."""
    strategy = rng.choice(["even", "sequential", "graphpipe"]) if devices > 2 else "even"
    process = start(run_dir, *words(strategy, devices), **{MARK: str(run_dir)})
    seen, killed, done = set[int](), 0, 0
    try:
        for _ in range(kills):
            done = rng.choice([0, rng.randint(done + 1, min(done + 150, REQUESTS - 20))])
            killed += kill_one(process, run_dir, rng, seen, done) is not None
        out, _ = process.communicate(timeout=300)
        wrong = [] if not processes_of(run_dir) else [f"processes are left: {processes_of(run_dir)}"]
    finally:
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
    if process.returncode:
        return killed, [*wrong, f"code {process.returncode}: {out}"]
    answered = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    replaced = json.loads((run_dir / "result.json").read_text()).get("replaced", [])
    if answered != list(range(REQUESTS)):
        wrong.append(f"answers came as {answered}")
    if (run_dir / ANSWERS).read_bytes() != wanted:
        wrong.append("answers differ from those of one device")
    if len(replaced) != killed or any(len(one["lost"]) != 1 for one in replaced):
        wrong.append(f"{killed} workers were killed, and the result says {replaced}")
    if replaced and len(set(replaced[-1]["devices"])) != devices - killed:
        wrong.append(f"{replaced[-1]['devices']} are not what is left of {devices} devices")
    return killed, wrong


def main() -> int:
    given = options(__doc__, kills=20, seed=0)
    rng, killed, failed = random.Random(given.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        wanted = alone(Path(folder))
        number = 0
        while killed < given.kills:
            run_dir = Path(folder) / f"stream_{number}"
            found, wrong = stream(run_dir, rng, wanted, min(rng.randint(1, 3), given.kills - killed))
            killed, number, failed = killed + found, number + 1, failed + bool(wrong)
            print(f"stream {number}: {found} killed; {'; '.join(wrong) or 'every answer once, in order, equal'}", flush=True)
    print(f"{killed} workers killed in {number} streams of {REQUESTS} requests, {failed} streams wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
