"""What the runtime costs beside a plain PyTorch loop (`tests/plain_loop.py`), both in turn second by second.

    python -m tests.checks.runtime [--widths 352,1024] [--microbatches 4,8,32] [--rounds 6] [--tree CHECKOUT] [--before CHECKOUT]

A machine's speed changes from minute to minute, and one core's beside the other's. So all programs of a case are started,
and then stand still (SIGSTOP) but one, each for a slice of time by turns:

    plain     the plain loop, alone on the machine: M micro-batches of the whole model
    beside    the plain loop beside another one: what two busy cores make of the same operators
    single    engine=single, which is to be the plain loop in time
    ours      engine=distributed, the model in two equal stages on two workers (once for each checkout)

The ideal of two stages is plain / 2 x (M + 1) / M. Printed are medians over the rounds of ratios within a round, by
`plain` and by the slower loop of `beside`, and microseconds that a step takes above the ideal for each forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from gpp.runtime.worker.parent import KEEP_MEMORY

BLOCKS, ROWS, MANY_STEPS = 4, 64, 10**6
WARM_STEPS = 3
"""Steps of every program before the first slice, and a share of each slice that is left out: caches fill."""
WARM_SHARE = 0.15
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **KEEP_MEMORY}


@dataclass(slots=True)
class Program:
    """Processes that run and stand still together.

    Args:
        logs: each process's log of steps.
        joint: a step of one log is a part of one step of all; otherwise each is a program of its own.
    """

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    joint: bool = True

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def settle(self) -> None:
        """Wait for the first steps, then stand still.

        Raises:
            RuntimeError: a process has ended.
        """
        while min(map(len, self.ends())) < WARM_STEPS:
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError("a program has ended before its first steps; its own words are above")
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)

    def ends(self) -> list[list[float]]:
        """By log, when its steps ended."""
        return [[float(end) for end in _ends(log)] for log in self.logs]

    def look(self, start: float, end: float) -> list[float]:
        """Seconds of the steps inside a slice: of all logs together, or the slowest log's median."""
        found = self.ends()
        if self.joint:
            found = [[max(together) for together in zip(*found, strict=False)]]
        start += (end - start) * WARM_SHARE
        steps = [[b - a for a, b in pairwise(log) if a > start and b < end] for log in found]
        return [median(each) for each in steps if each]


def _ends(log: Path) -> Iterator[str]:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    for line in lines:
        if line.startswith("{"):
            record = json.loads(line)
            if "step" in record:
                yield record["end"]
        else:
            yield line.split()[1]


def plain(width: int, microbatches: int, folder: Path, name: str) -> Program:
    """The plain loop, started."""
    log = folder / f"{name}.log"
    words = [sys.executable, "-m", "tests.plain_loop", f"--width={width}", f"--blocks={BLOCKS}", f"--rows={ROWS}"]
    words += [f"--microbatches={microbatches}", f"--out={log}"]
    return Program([subprocess.Popen(words, env=ENVIRONMENT)], [log])


def engine(name: str, width: int, microbatches: int, folder: Path, tree: Path) -> Program:
    """An engine's workers, started without a controller."""
    strategy = {"distributed": "strategy=sequential engine=distributed", "single": "strategy=single engine=single"}[name]
    words = (
        f"model=mlp model.num_blocks={BLOCKS} model.width={width} cluster=local cluster.num_devices=2 cluster.memory_bytes=4e9 "
        f"{strategy} cost=analytical logger=none optimizer=sgd optimizer.momentum=0.0 data.num_samples=2048 "
        f"data.num_test_samples=64 microbatch_size={ROWS} minibatch_size={ROWS * microbatches} evaluate_every=0 "
        f"final_weights=false steps=1 hydra.run.dir={folder}"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "run.py", *words.split()], cwd=tree, env=environment, check=True, capture_output=True)
    settings = folder / "job" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"steps": MANY_STEPS}))
    for old in (folder / "ranks").iterdir():
        if old.is_file():
            old.unlink()
    world = 2 if name == "distributed" else 1
    module = [] if name == "distributed" else ["baselines.whole_model_worker"]
    command = [sys.executable, "-m", "gpp.runtime.worker", str(folder), *module]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    processes = [subprocess.Popen(command, cwd=tree, env=environment | place) for place in places]
    return Program(processes, [folder / "ranks" / f"rank_{rank}.jsonl" for rank in range(world)])


@contextmanager
def started(width: int, microbatches: int, trees: dict[str, Path]) -> Iterator[dict[str, Program]]:
    """All programs of a case, standing still after their first steps."""
    made: dict[str, Program] = {}
    with tempfile.TemporaryDirectory(prefix="runtime_") as name:
        folder = Path(name)
        try:
            for label, tree in trees.items():
                made[label] = engine("distributed", width, microbatches, folder / label, tree)
                made[label].settle()
            made["single"] = engine("single", width, microbatches, folder / "single", list(trees.values())[-1])
            made["single"].settle()
            first = made["plain"] = plain(width, microbatches, folder, "plain")
            first.settle()
            other = plain(width, microbatches, folder, "other")
            made["beside"] = Program(first.processes + other.processes, first.logs + other.logs, joint=False)
            other.settle()
            yield made
        finally:
            end(made)


def end(programs: Mapping[str, Program]) -> None:
    """Kill all programs and wait for their ends."""
    for program in programs.values():
        program.signal(signal.SIGKILL)
        for process in program.processes:
            process.wait()


def longest_step_s(programs: Mapping[str, Program]) -> float:
    """Seconds of the longest step so far."""
    return max(b - a for program in programs.values() for ends in program.ends() for a, b in pairwise(ends))


def by_turns(programs: Mapping[str, Program], slice_s: float, rounds: int) -> Iterator[dict[str, list[float]]]:
    """Let programs run for a slice of time each, forwards and backwards in turn; what `look` finds in the slices of each round."""
    for number in range(rounds):
        slices = {}
        for name in list(programs)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            programs[name].signal(signal.SIGCONT)
            time.sleep(slice_s)
            programs[name].signal(signal.SIGSTOP)
            slices[name] = start, time.perf_counter()
        yield {name: programs[name].look(*own) for name, own in slices.items()}


def measure(width: int, microbatches: int, trees: dict[str, Path], rounds: int) -> list[dict[str, float]]:
    """Seconds of a step by program, round by round."""
    with started(width, microbatches, trees) as programs:
        longest_s = longest_step_s(programs)
        # Short slices are near each other in time; but one that begins and ends within steps must hold whole ones.
        slice_s = max(0.6, min(8 * longest_s, 2.0), 3.5 * longest_s)
        rows = [seen for seen in by_turns(programs, slice_s, rounds) if all(seen.values())]
    return [{name: max(values) for name, values in seen.items()} for seen in rows]


def told(width: int, microbatches: int, trees: dict[str, Path], found: list[dict[str, float]]) -> list[str]:
    """Lines on a case."""
    filling = (microbatches + 1) / microbatches / 2

    def ratio(over: str, under: str, factor: float = 1.0) -> float:
        return median(one[over] / (one[under] * factor) for one in found)

    at = {name: median(one[name] for one in found) * 1e3 for name in found[0]}
    lines = [
        f"width {width}, {microbatches} micro-batches, {ROWS * width * 4 / 1e3:.0f} KB a message: plain {at['plain']:.2f} ms "
        f"({at['plain'] / 2 / microbatches:.2f} a stage and micro-batch), beside {ratio('beside', 'plain'):.3f} of that, "
        f"single {ratio('single', 'plain'):.3f}"
    ]
    for label in trees:
        above = {
            name: median((one[label] - one[name] * filling) / (2 * microbatches) for one in found) * 1e6
            for name in ("plain", "beside")
        }
        lines.append(
            f"    {label:<8} {at[label]:.2f} ms: {ratio(label, 'plain', filling):.3f} of the ideal by plain, "
            f"{ratio(label, 'beside', filling):.3f} by beside; above it {above['plain']:.0f} and {above['beside']:.0f} us an action"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="224,352,1024")
    parser.add_argument("--microbatches", default="4,8,32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tree", type=Path, default=Path(), help="the checkout to measure")
    parser.add_argument("--before", type=Path, help="a second checkout, measured in the same rounds")
    given = parser.parse_args()
    trees = {"before": given.before.resolve()} if given.before else {}
    trees["ours"] = given.tree.resolve()
    for width in map(int, given.widths.split(",")):
        for microbatches in map(int, given.microbatches.split(",")):
            print("\n".join(told(width, microbatches, trees, measure(width, microbatches, trees, given.rounds))), flush=True)


if __name__ == "__main__":
    main()
