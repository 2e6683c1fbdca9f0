"""What a step takes under torch's pipeline runtime and under ours, the same plans by turns, beside what is predicted of both.

    python -m tests.checks.torch_runtime [--only PATTERN] [--rounds 8] [--least 3]

Each case is planned for two workers of this machine, by times in place, and written by `export=torch`; torch's runtime trains it
with the script that users get. All processes of a case are started, and then stand still (SIGSTOP) but those of one runtime,
each for a slice of time by turns. Printed are medians over the rounds. The command ends with 1 where the losses of both differ.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.app.experiment import Experiment
from gpp.export.base import ToExport
from gpp.export.torch import Torch
from gpp.plan.chain import device_order
from gpp.runtime.engine import Progress
from tests.checks.runtime import ENVIRONMENT, MANY_STEPS, WARM_STEPS, Program, by_turns, end, longest_step_s
from tests.support.conf import CONF
from tests.support.options import options

ROOT = CONF.parent
SLICE_S = 1.0
"""Seconds of a slice, at least."""
COMMON = (
    "name=torch_runtime",
    "cluster=local",
    "cluster.num_devices=2",
    "minibatch_size=64",
    "evaluate_every=0",
    "logger=none",
    "optimizer=sgd",
    "strategies=[]",
)
CHAIN = ("strategy=sequential", "strategy.planner.replication=false")
BRANCHES = ("strategy=graphpipe", "strategy.planner.replication=false", "strategy.planner.per_stage=false")
CASES = {
    "a chain of equal layers": ("model=gpt_small", "strategy=even", "microbatch_size=8"),
    "a chain of blocks of an image": ("model=vit_small", *CHAIN, "microbatch_size=8"),
    "a chain of convolutions": ("model=resnet_small", *CHAIN, "microbatch_size=8"),
    "two towers": ("model=clip_small", *BRANCHES, "microbatch_size=8"),
    "branches that are carried": ("model=bridge_tower_small", *BRANCHES, "microbatch_size=8"),
}
SAME = 1e-4
"""Relative difference of two losses in float32 after the first steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A case that is planned, and written for both runtimes.

    Args:
        last: the rank of the last stage, which makes the loss.
        ours_s, torch_s: predicted seconds of a step; torch's is that of the plan as exported.
        lost: what torch's runtime does otherwise.
    """

    stages: int
    world: int
    last: int
    ours_s: float
    torch_s: float
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of the seconds of a step over the rounds, and how far losses are apart (relative).

    Args:
        ratio: torch's over ours, the median of ratios within a round.
    """

    ours_s: float
    torch_s: float
    ratio: float
    apart: float


def planned(words: Sequence[str], folder: Path) -> Planned:
    """Plan a case by times in place, and write it: `ours/job`, and `torch/` as `export=torch` has it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=[*COMMON, *words])
    one: Experiment = instantiate(composed, _convert_="all")
    one.check()
    captured = one.captured()
    problem = one.problem(captured, one.op_graph(captured))
    problem, plan = one.in_place(captured, problem, one.make_plan(problem), Progress())
    asked = ToExport(model=one.model.name, captured=captured, problem=problem, strategy=one.strategy, plan=plan)
    made = Torch().exported(asked)
    job, weights = one.job(captured, problem, plan), one.weights(captured)
    job = replace(job, settings=replace(job.settings, steps=MANY_STEPS))
    for name in ("ours", "torch"):
        job.save(folder / name, weights)
    for name, text in made.files.items():
        (folder / "torch" / name).write_text(text)
    return Planned(
        stages=len(plan.stages),
        world=len(plan.devices),
        last=device_order(plan).index(plan.stages[-1].devices[0]),
        ours_s=asked.step_s(),
        torch_s=made.ran.step_s(),
        lost=tuple(each.what for each in made.lost),
    )


def programs(folder: Path, world: int, last: int) -> Iterator[tuple[str, Program]]:
    """Both runtimes, each started without a controller when it is asked for."""
    ranks = range(world)
    with (folder / "ours.log").open("w") as out:
        started = launched(["-m", "gpp.runtime.worker", str(folder / "ours")], world, [out] * world)
    yield "ours", Program(started, [folder / "ours" / "ranks" / f"rank_{rank}.jsonl" for rank in ranks])
    logs = [folder / f"torch_{rank}.jsonl" for rank in ranks]
    with ExitStack() as opened:
        outs = [opened.enter_context(log.open("w")) for log in logs]
        started = launched([str(folder / "torch" / "train.py")], world, outs)
    yield "torch", Program(started, [logs[last]])


def launched(words: Sequence[str], world: int, outs: Sequence[IO[str]]) -> list[subprocess.Popen[bytes]]:
    """A process for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environment = ENVIRONMENT | place | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *words], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT, stdout=out
        )
        for rank, out in enumerate(outs)
    ]


def measured(folder: Path, case: Planned, rounds: int, least: int) -> Measured:
    """Run both by turns.

    Args:
        least: steps that a slice has at least.
    """
    running: dict[str, Program] = {}
    try:
        for name, program in programs(folder, case.world, case.last):
            running[name] = program
            program.settle()
        slice_s = max(SLICE_S, (least + 1) * longest_step_s(running))
        seen = [{name: median(steps) for name, steps in found.items()} for found in by_turns(running, slice_s, rounds)]
        losses = [losses_of(program) for program in running.values()]
    finally:
        end(running)
    return Measured(
        ours_s=median(one["ours"] for one in seen),
        torch_s=median(one["torch"] for one in seen),
        ratio=median(one["torch"] / one["ours"] for one in seen),
        apart=max(abs(a / b - 1) for a, b in zip(*losses, strict=True)),
    )


def losses_of(program: Program) -> list[float]:
    """The losses of the first steps: those of our ranks are parts, which add up to the mini-batch's."""
    whole = [log.read_text().splitlines(keepends=True)[: WARM_STEPS + 1] for log in program.logs]
    rows = [[json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")] for lines in whole]
    return [sum(record.get("loss") or 0.0 for record in step) for step in zip(*rows, strict=False)][:WARM_STEPS]


def told(name: str, case: Planned, found: Measured) -> str:
    """A line on a case, and one on what torch's runtime does otherwise."""
    ours, torch = found.ours_s / case.ours_s - 1, found.torch_s / case.torch_s - 1
    lines = [
        f"{name}: {case.stages} stages; ours predicted {1e3 * case.ours_s:.2f} ms, measured {1e3 * found.ours_s:.2f} "
        f"({ours:+.1%}); torch predicted {1e3 * case.torch_s:.2f} ms, measured {1e3 * found.torch_s:.2f} ({torch:+.1%}), "
        f"{found.ratio:.3f} of ours; losses of {WARM_STEPS} steps within {found.apart:.0e}"
    ]
    return "\n    ".join([*lines, *case.lost])


def main() -> int:
    given = options(__doc__, only="", rounds=8, least=4)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what it has started stands still, and would stay
    apart, errors = 0.0, list[tuple[float, float]]()
    for name, words in CASES.items():
        if re.search(given.only, name):
            with tempfile.TemporaryDirectory(prefix="torch_runtime_") as folder:
                case = planned(words, Path(folder))
                found = measured(Path(folder), case, given.rounds, given.least)
            print(told(name, case, found), flush=True)
            apart = max(apart, found.apart)
            errors.append((abs(found.ours_s / case.ours_s - 1), abs(found.torch_s / case.torch_s - 1)))
    if not errors:
        raise SystemExit(f"error: --only {given.only} names none of {', '.join(CASES)}. Fix: leave it out")
    ours, torch = (median(column) for column in zip(*errors, strict=True))
    print(f"{len(errors)} cases: median error {ours:.1%} under our runtime, {torch:.1%} under torch's")
    return int(not apart <= SAME)


if __name__ == "__main__":
    sys.exit(main())
