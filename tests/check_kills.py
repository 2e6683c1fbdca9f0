"""Kill a worker of a training at a random instant, go on from its checkpoints, and do that many times.

    python -m tests.check_kills --count 30

Every other kill waits for a checkpoint to be under way. Every resume must succeed, and every step's loss and the final
weights must be those of the undisturbed training, bit for bit. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpp.errors import InvalidConfig
from gpp.runtime.checkpoint.resume import find
from gpp.runtime.checkpoint.state import load_final
from tests.support.cli import start

WORKERS = 4
WORDS = [
    "model=digits",
    "logger=none",
    "cost=analytical",
    "dtype=float64",
    "minibatch_size=48",
    "microbatch_size=8",
    "evaluate_every=0",
    "graph.max_ops=24",
    f"cluster.num_devices={WORKERS}",
]


@dataclass
class Attempt:
    """One run of the training, to its end or killed."""

    run_dir: Path
    code: int
    out: str
    killed: str | None = None

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss, of the steps that all workers finished."""
        path = self.run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return {record["step"]: record["loss"] for record in records if "loss" in record}


def workers_of(run_dir: Path) -> list[int]:
    """Process ids of a run's workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"gpp.runtime.worker" in words and str(run_dir).encode() in words:
            found.append(int(entry.name))
    return sorted(found)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def attempt(run_dir: Path, *words: str, kill: Kill | None = None) -> Attempt:
    """Run the training, to its end or until one of its workers is killed."""
    process = start(run_dir, *WORDS, *words)
    try:
        while process.poll() is None and len(workers_of(run_dir)) < WORKERS:
            time.sleep(0.01)
        killed = kill(process, run_dir) if kill is not None else None
        out, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
    pids = workers_of(run_dir)
    while not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return Attempt(run_dir, process.returncode, out, killed)


def steps_done(run_dir: Path) -> list[int]:
    """How many steps of the training each rank has done, of those that have done any."""
    logs = [path.read_text().rpartition("\n")[0].splitlines() for path in sorted((run_dir / "ranks").glob("rank_*.jsonl"))]
    records = [[json.loads(line) for line in lines if line.startswith('{"step"')] for lines in logs]
    return [steps[-1]["step"] + 1 for steps in records if steps]


@dataclass
class Kill:
    """Kills a random worker.

    Args:
        after: steps that some rank has done before; None for an instant while the workers start.
        writing: then wait on until a checkpoint is being written.
    """

    rng: random.Random
    after: int | None
    writing: bool

    def __call__(self, process: subprocess.Popen[str], run_dir: Path) -> str | None:
        """Wait for the instant, then kill; returns what the run was doing, or None if it had ended before."""
        parts = run_dir / "checkpoints"
        if self.after is None:
            time.sleep(self.rng.uniform(0.0, 3.0))
        else:
            while process.poll() is None and max(steps_done(run_dir), default=0) <= self.after:
                time.sleep(0.002)
            while self.writing and process.poll() is None and not list(parts.glob(".step_*")):
                time.sleep(0.0005)
            time.sleep(self.rng.uniform(0.0, 0.1))
        pids = workers_of(run_dir)
        if process.poll() is not None or not pids:
            return None
        steps, part = steps_done(run_dir), sorted(path.name for path in parts.glob(".step_*"))
        try:
            os.kill(self.rng.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return None
        return f"steps done {steps}" + (f", writing {', '.join(part)}" if part else "")


@dataclass
class Tally:
    """What the check has seen."""

    kills: int = 0
    resumes: int = 0
    finished: int = 0
    anew: int = 0
    while_writing: int = 0
    bad: list[str] = field(default_factory=list)


def check(tally: Tally, done: Attempt, expected: Attempt, first: int) -> None:
    """Compare an attempt, which begins at step `first`, with the undisturbed run, bit for bit."""
    name, losses = done.run_dir.name, done.losses
    differing = [step for step, loss in losses.items() if loss != expected.losses[step]]
    if differing:
        tally.bad.append(f"{name}: the losses of steps {differing[:5]} differ")
    if losses and min(losses) != first:
        tally.bad.append(f"{name}: went on from step {min(losses)}, not {first}")
    if done.code == 0:
        mine, theirs = load_final(done.run_dir), load_final(expected.run_dir)
        if mine.keys() != theirs.keys() or any(not torch.equal(mine[key], theirs[key]) for key in theirs):
            tally.bad.append(f"{name}: the final weights differ")
        if max(losses, default=-1) != max(expected.losses):
            tally.bad.append(f"{name}: ended at step {max(losses, default=-1)}")
    elif "killed by SIGKILL" not in done.out:
        tally.bad.append(f"{name}: failed without having been killed:\n{done.out[-2000:]}")


def run(count: int, steps: int, every: int, folder: Path, seed: int, expected: Attempt | None = None) -> Tally:
    """Kill `count` workers, one after the other, going on each time; the last training is brought to its end.

    Args:
        expected: the undisturbed run, if there is one already.
    """
    rng, tally = random.Random(seed), Tally()
    words = [f"steps={steps}", f"checkpoint.every={every}"]
    expected = expected or attempt(folder / "undisturbed", *words)
    if expected.code != 0 or len(expected.losses) != steps:
        tally.bad.append(f"the undisturbed run failed:\n{expected.out[-2000:]}")
        return tally
    before: Path | None = None
    number = 0
    while tally.kills < count or before is not None:
        number += 1
        resume = [f"resume={before}"] if before is not None else []
        first = find(before, steps).manifest.step if before is not None else 0
        after = None if rng.random() < 0.15 else rng.randrange(first, steps)
        # A training near its end may come to it, so that others begin.
        spared = tally.kills >= count or (first >= steps - every and rng.random() < 0.5)
        kill = None if spared else Kill(rng, after, writing=number % 2 == 1)
        done = attempt(folder / f"run_{number}", *words, *resume, kill=kill)
        check(tally, done, expected, first)
        tally.resumes += bool(resume)
        tally.kills += done.killed is not None and done.code != 0
        tally.while_writing += done.killed is not None and "writing" in done.killed
        tally.finished += done.code == 0
        print(
            f"{done.run_dir.name}: {f'resumed at step {first}' if resume else 'from the start'}; "
            + (f"killed, {done.killed}" if done.code else "ended"),
            flush=True,
        )
        if tally.bad:
            return tally
        before = done.run_dir if done.code else None
        if before is not None:
            try:
                find(before, steps)
            except InvalidConfig:
                tally.anew, before = tally.anew + 1, None
        source = find(before, steps).folder.parent.parent if before is not None else None
        for path in folder.iterdir():
            if path not in (folder / "undisturbed", before, source):
                shutil.rmtree(path)
    return tally


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="kills")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = run(args.count, args.steps, args.every, Path(folder).resolve(), args.seed)
    for line in tally.bad:
        print(f"BAD {line}")
    print(
        f"{tally.kills} kills ({tally.while_writing} while a checkpoint was being written), {tally.resumes} resumes, "
        f"{tally.anew} starts anew (killed before any checkpoint), {tally.finished} trainings ended; {len(tally.bad)} bad"
    )
    return int(bool(tally.bad) or tally.kills < args.count)


if __name__ == "__main__":
    sys.exit(main())
