"""Kill a training at many instants, damage its checkpoints, go on each time, and end where the undisturbed one ends.

    python -m tests.checks.kills --count 30

What is killed is the controller or a worker: while processes start, between steps, while a checkpoint is written, or
after it is written and before it has its name. After every other kill the latest checkpoint is damaged: a bit flipped,
cut off, zeroed, or deleted. Ten seconds after a kill no process of the run may be left but a
controller that writes its report, and none after its end. Every resume must succeed, from the checkpoint that it is to
find, and every step's loss and the final weights must be those of the undisturbed training, bit for bit. Exit code 1 if
anything differs.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpp.errors import InvalidConfig
from gpp.runtime.checkpoint.final import load_final
from gpp.runtime.checkpoint.resume import find, steps_in
from tests.support.cli import start
from tests.support.options import options

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
MARK = "GPP_CHECK_KILLS"
"""Environment variable by which every process of a run is known, whatever it is."""

LIMIT_S = 10.0
CASES = [(victim, phase) for phase in ("start", "steps", "writing", "renaming") for victim in ("controller", "worker")]


@dataclass
class Attempt:
    """One run of the training, to its end or killed.

    Args:
        killed: what was killed, when and what the run was doing.
        left_s: seconds from the kill until no worker was left.
    """

    run_dir: Path
    code: int
    out: str
    killed: str | None = None
    left_s: float = 0.0

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss, of the steps that all workers finished."""
        path = self.run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return {record["step"]: record["loss"] for record in records if "loss" in record}


def processes_of(run_dir: Path) -> dict[int, dict[str, str]]:
    """Every process that a run has started, with its environment; one that has ended has none."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"{MARK}={run_dir}".encode() in words:
            pairs = (word.decode(errors="replace").partition("=") for word in words)
            found[int(entry.name)] = {name: value for name, _, value in pairs}
    return found


def workers_of(run_dir: Path) -> dict[int, int]:
    """Process of each rank of a run."""
    return {int(env["RANK"]): pid for pid, env in processes_of(run_dir).items() if "RANK" in env}


def attempt(run_dir: Path, *words: str, kill: Kill | None = None) -> Attempt:
    """Run the training, to its end or until one of its processes is killed."""
    process = start(run_dir, *WORDS, *words, **{MARK: str(run_dir)})
    try:
        killed = kill(process, run_dir) if kill is not None else None
        since = time.monotonic()
        while killed and workers_of(run_dir) and time.monotonic() < since + 60:
            time.sleep(0.05)
        left_s = time.monotonic() - since
        out, _ = process.communicate(timeout=300)
        if left := processes_of(run_dir):
            out += f"\nprocesses were left after the end: {left}"
            left_s = 60.0
    finally:
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
    return Attempt(run_dir, process.returncode, out, killed, left_s)


def parts_of(run_dir: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return sorted(path for path in (run_dir / "checkpoints").glob(".step_*") if path.is_dir())


def files_of(folder: Path) -> list[str]:
    """Names of the files in a folder; none if it has got another name meanwhile."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def steps_done(run_dir: Path) -> list[int]:
    """How many steps of the training each rank has done, of those that have done any."""
    logs = [path.read_text().rpartition("\n")[0].splitlines() for path in sorted((run_dir / "ranks").glob("rank_*.jsonl"))]
    records = [[json.loads(line) for line in lines if line.startswith('{"step"')] for lines in logs]
    return [steps[-1]["step"] + 1 for steps in records if steps]


@dataclass
class Kill:
    """Kills a controller or a random worker.

    Args:
        after: steps that some rank has done before, in every phase but `start`.
    """

    rng: random.Random
    victim: str
    phase: str
    after: int

    def __call__(self, process: subprocess.Popen[str], run_dir: Path) -> str | None:
        """Wait for the instant, then kill; returns what the run was doing, or None if it had ended before."""
        if self.phase == "start":
            self._wait_for_a_start(process, run_dir)
        else:
            while process.poll() is None and max(steps_done(run_dir), default=0) <= self.after:
                time.sleep(0.002)
            if self.phase == "writing":
                while process.poll() is None and not parts_of(run_dir):
                    time.sleep(0.0005)
            if self.phase == "renaming":
                self._stop_before_the_name(process, run_dir)
            else:
                time.sleep(self.rng.uniform(0.0, 0.1))
        workers = workers_of(run_dir)
        if process.poll() is not None or (self.victim == "worker" and not workers):
            return None
        steps, parts = steps_done(run_dir), [path.name for path in parts_of(run_dir)]
        # Between writing and renaming it is the first rank whose death counts.
        rank = 0 if self.phase == "renaming" else self.rng.choice(sorted(workers)) if workers else 0
        try:
            os.kill(process.pid if self.victim == "controller" else workers[rank], signal.SIGKILL)
        except (ProcessLookupError, KeyError):
            return None
        doing = f"{len(workers)} workers, steps done {steps}" + (f", writing {', '.join(parts)}" if parts else "")
        return f"{self.victim} in {self.phase} ({doing})"

    def _wait_for_a_start(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        """Some time before all workers are at work: often while they import, rarely before there is one."""
        if self.victim == "controller" and self.rng.random() < 0.25:
            time.sleep(self.rng.uniform(0.0, 3.0))
            return
        while process.poll() is None and not workers_of(run_dir):
            time.sleep(0.002)
        time.sleep(self.rng.uniform(0.0, 4.0) if self.rng.random() < 0.7 else 0.0)

    @staticmethod
    def _stop_before_the_name(process: subprocess.Popen[str], run_dir: Path) -> None:
        """Stop the first rank between checkpoint.json and the new name, by as many looks as it takes."""
        first = workers_of(run_dir).get(0)
        while first is not None and process.poll() is None:
            written = {name for part in parts_of(run_dir) for name in files_of(part)}
            if sum(name.endswith(".json") for name in written) < WORKERS - 1:
                time.sleep(0.0002)
                continue
            try:
                os.kill(first, signal.SIGSTOP)
                if any("checkpoint.json" in files_of(part) for part in parts_of(run_dir)):
                    return
                os.kill(first, signal.SIGCONT)
            except ProcessLookupError:
                return


def damage(run_dir: Path, rng: random.Random) -> tuple[Path, str] | None:
    """Damage a file of the latest checkpoint of a run; returns the checkpoint and what was done, None if there is none."""
    folders = sorted(steps_in(run_dir))
    if not folders:
        return None
    folder = folders[-1][1]
    path = rng.choice([folder / "checkpoint.json", *sorted(folder.glob("*.safetensors")) * 2])
    data, what = bytearray(path.read_bytes()), rng.choice(["flipped", "cut off", "zeroed", "deleted"])
    if what == "deleted":
        path.unlink()
        return folder, f"{path.name} deleted"
    if what == "flipped":
        # Of a manifest, in what it says and not in its spaces.
        bit = rng.choice([i for i, byte in enumerate(data) if byte not in b" \n"]) * 8 + rng.randrange(8)
        data[bit // 8] ^= 1 << bit % 8
    elif what == "cut off":
        del data[rng.randrange(len(data)) :]
    else:
        at = rng.randrange(len(data))
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        data[-1] ^= 1  # where there were zeros before
    path.write_bytes(data)
    return folder, f"{path.name} {what}"


@dataclass
class Tally:
    """What the check has seen."""

    kills: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    finished: int = 0
    anew: int = 0
    damages: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    bad: list[str] = field(default_factory=list)


@dataclass
class History:
    """Runs that go on from each other, and which checkpoint the next one is to find.

    Args:
        runs: the latest first.
        damaged: checkpoints from which nobody may go on.
    """

    steps: int
    runs: list[Path] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)

    def source(self) -> tuple[Path, Path] | None:
        """The run to go on from, and its checkpoint: the latest undamaged one of the latest run that has one."""
        for run_dir in self.runs:
            whole = [folder for step, folder in sorted(steps_in(run_dir)) if step < self.steps and folder not in self.damaged]
            if whole:
                return run_dir, whole[-1]
        return None


def check(tally: Tally, done: Attempt, expected: Attempt, first: int) -> None:
    """Compare an attempt, which begins at step `first`, with the undisturbed run, bit for bit."""
    name, losses = done.run_dir.name, done.losses
    differing = [step for step, loss in losses.items() if loss != expected.losses[step]]
    if differing:
        tally.bad.append(f"{name}: the losses of steps {differing[:5]} differ")
    if losses and min(losses) != first:
        tally.bad.append(f"{name}: went on from step {min(losses)}, not {first}")
    if done.killed is not None and done.left_s > LIMIT_S:
        tally.bad.append(f"{name}: processes were left {done.left_s:.1f} s after the kill:\n{done.out[-2000:]}")
    if done.code == 0:
        mine, theirs = load_final(done.run_dir), load_final(expected.run_dir)
        if mine.keys() != theirs.keys() or any(not torch.equal(mine[key], theirs[key]) for key in theirs):
            tally.bad.append(f"{name}: the final weights differ")
        if max(losses, default=-1) != max(expected.losses):
            tally.bad.append(f"{name}: ended at step {max(losses, default=-1)}")
    elif done.code != -signal.SIGKILL and "killed by SIGKILL" not in done.out:
        tally.bad.append(f"{name}: failed without having been killed:\n{done.out[-2000:]}")


def prepare(tally: Tally, history: History, rng: random.Random, hurt: bool) -> list[str]:
    """Damage the latest checkpoint if `hurt`; returns the words to go on with, and notes what must not be."""
    if history.runs and hurt and (done := damage(history.runs[0], rng)):
        folder, what = done
        history.damaged.add(folder)
        tally.damages[what.partition(" ")[2]] += 1
        print(f"  damaged {folder.parent.parent.name}/{folder.name}: {what}", flush=True)
    source = history.source()
    if source is None:
        tally.anew += bool(history.runs)
        history.runs.clear()
        return []
    run_dir, folder = source
    # A run that was killed before it knew what it goes on from hands nothing on.
    for named in (history.runs[0], run_dir):
        try:
            found = find(named, history.steps)
        except InvalidConfig:
            continue
        if found.folder != folder:
            tally.bad.append(f"resume={named.name} finds {found.folder}, not {folder}")
        return [f"resume={named}"]
    tally.bad.append(f"{run_dir.name} has {folder.name}, and resume finds none")
    return []


def run(
    count: int,
    steps: int,
    every: int,
    folder: Path,
    seed: int,
    *,
    cases: list[tuple[str, str]],
) -> Tally:
    """Kill `count` times, going on each time; the last training is brought to its end.

    Args:
        cases: victims and phases, which are taken in turn.
    """
    rng, tally, history = random.Random(seed), Tally(), History(steps)
    words = [f"steps={steps}", f"checkpoint.every={every}"]
    expected = attempt(folder / "undisturbed", *words)
    if expected.code != 0 or len(expected.losses) != steps:
        tally.bad.append(f"the undisturbed run failed:\n{expected.out[-2000:]}")
        return tally
    number = 0
    while tally.kills.total() < count or history.runs:
        resume = prepare(tally, history, rng, hurt=tally.kills.total() % 2 == 1)
        source = history.source()
        first = int(source[1].name.removeprefix("step_")) if source else 0
        number += 1
        # A training near its end may come to it, so that others begin.
        spared = tally.kills.total() >= count or (first >= steps - every and rng.random() < 0.5)
        victim, phase = cases[tally.kills.total() % len(cases)]
        kill = None if spared else Kill(rng, victim, phase, rng.randrange(first, steps - 1))
        done = attempt(folder / f"run_{number}", *words, *resume, kill=kill)
        check(tally, done, expected, first)
        tally.resumes += bool(resume)
        tally.finished += done.code == 0
        if done.killed is not None and done.code != 0:
            tally.kills[f"{victim} in {phase}"] += 1
            tally.longest_s = max(tally.longest_s, done.left_s)
        print(
            f"{done.run_dir.name}: {f'resumed at step {first}' if resume else 'from the start'}; "
            + (f"killed, {done.killed}, all gone after {done.left_s:.1f} s" if done.code else "ended"),
            flush=True,
        )
        if tally.bad:
            return tally
        history.runs = [done.run_dir, *history.runs] if done.code else []
    return tally


def main() -> int:
    """The command line."""
    args = options(__doc__, count=30, steps=60, every=5, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        tally = run(args.count, args.steps, args.every, Path(folder).resolve(), args.seed, cases=CASES)
    for line in tally.bad:
        print(f"BAD {line}")
    print(
        f"{tally.kills.total()} kills ({', '.join(f'{n} of a {what}' for what, n in sorted(tally.kills.items()))}), "
        f"{tally.damages.total()} damages ({', '.join(f'{n} {what}' for what, n in sorted(tally.damages.items()))}), "
        f"{tally.resumes} resumes, {tally.anew} starts anew (nothing whole to go on from), {tally.finished} trainings ended; "
        f"no worker left after {tally.longest_s:.1f} s at most; {len(tally.bad)} bad"
    )
    return int(bool(tally.bad) or tally.kills.total() < args.count)


if __name__ == "__main__":
    sys.exit(main())
