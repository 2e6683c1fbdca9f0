"""Run the long checks one after another, each in full, and say what each took and how it ended.

    python -m tests.checks                  all of them (`make check`), for hours
    python -m tests.checks kills serving    these
    python -m tests.checks --list           what each is, in a line

A check is a module of this folder; those that only measure, and so cannot fail, are run by `make figures` instead. The exit code
is 1 if one of those that ran failed.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.pages import ROOT

FULL = {
    "card_path": "python -m tests.checks.card_path",
    "captured_once": "python -m tests.checks.captured_once --train",
    "cards": "python -m tests.checks.cards --count 2000 --jobs 2",
    "compiled": "python -m tests.checks.compiled",
    "docs": "python -m tests.checks.docs",
    "edgepipe": "python -m tests.checks.edgepipe --count 300",
    "equivalence": """
        for sweep in equivalence equivalence_replicated; do
            python run.py -cd sweeps -cn $sweep hydra.sweep.dir=$DIR/$sweep
            python -m tests.checks.equivalence $DIR/$sweep
        done""",
    "flops": """
        python -m tests.checks.flops
        python -m tests.checks.flops --masks""",
    "fuzz": "python -m tests.checks.fuzz --count 5000",
    "idioms": "python -m tests.checks.idioms",
    "kills": "python -m tests.checks.kills --count 30",
    "largest_batches": """
        python run.py -cd sweeps -cn dawnpiper_max_batch model=gpt,t5_large 'strategies=[pipedream_whole,vpipe_stash]' \
            hydra.sweep.dir=$DIR
        python -m tests.checks.largest_batches $DIR""",
    "long": "python -m tests.checks.long",
    "markings": "python -m tests.checks.markings --count 500",
    "memory": """
        python -m tests.checks.memory --count 300
        python -m tests.checks.memory --strategies 50
        python -m tests.checks.memory --planners dawnpiper --count 300""",
    "memory_bill": """
        python run.py -cd sweeps -cn memory_accuracy hydra.sweep.dir=$DIR
        python -m tests.checks.memory_bill $DIR""",
    "parallelize": """
        python -m tests.checks.parallelize
        python -m tests.checks.parallelize --lengths --launch ranks
        python -m tests.checks.parallelize --tokens --memory""",
    "shares": "python -m tests.checks.shares",
    "pipebench": "python -m tests.checks.pipebench --count 1000",
    "planners": """
        python -m tests.checks.planners --jobs 2 --what validate --count 2000
        python -m tests.checks.planners --jobs 2 --what oracle --count 300
        python -m tests.quality oracle --count 100
        python -m tests.checks.planners --jobs 2 --what dags --count 500
        python -m tests.checks.planners --jobs 2 --what chains --count 60
        python -m tests.checks.planners --jobs 2 --what models --count 105
        python -m tests.checks.planners --jobs 2 --what placements --count 120
        python -m tests.checks.planners --jobs 2 --what unequal --count 400
        python -m tests.checks.planners --jobs 2 --what determinism --count 20""",
    "planning_speed": "python -m tests.checks.planning_speed",
    "replanning": "python -m tests.checks.replanning --equal 200 --real --kills 20",
    "report": "python -m tests.checks.report $DIR",
    "same": """
        python -m tests.checks.same record --out $DIR
        python -m tests.checks.same compare --against $DIR""",
    "serving": "python -m tests.checks.serving --kills 20",
    "split_backward": "python -m tests.checks.split_backward --count 500",
    "split_speed": """
        export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648
        python -m tests.checks.split_speed""",
    "torch_runtime": "python -m tests.checks.torch_runtime",
    "trackers": "python -m tests.checks.trackers $DIR --make",
    "tutorial": "python -m tests.checks.tutorial",
    "zoo": "python -m tests.checks.zoo",
}
"""The full run of each check, in bash; `$DIR` is an empty folder that goes when the check has ended."""


def purpose(name: str) -> str:
    """The first line of a check's docstring."""
    return (ast.get_docstring(ast.parse((Path(__file__).parent / f"{name}.py").read_text())) or "").partition("\n")[0]


def ran(script: str) -> bool:
    """Run one check to its end, on this terminal."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="check_") as folder:
        return not subprocess.call(["bash", "-euc", script], cwd=ROOT, env={**os.environ, "PATH": path, "DIR": folder})


def run(scripts: Mapping[str, str]) -> int:
    """All of them, also after one that failed."""
    rows = []
    for name, script in scripts.items():
        print(f"\n=== {name}: {purpose(name)}", flush=True)
        began, before = time.monotonic(), os.times()
        outcome = "ok" if ran(script) else "failed"
        took, after = time.monotonic() - began, os.times()
        cpu = after.children_user - before.children_user + after.children_system - before.children_system
        rows.append(f"{name:<16} {took:6.0f} s  {cpu:6.0f} s of CPU  {outcome}")
        print(rows[-1], flush=True)
    failed = sum(row.endswith("failed") for row in rows)
    print("", *rows, f"{len(rows)} checks, {failed} failed", sep="\n")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all where none is named")
    parser.add_argument("--list", action="store_true", help="say what each is, and run none")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in FULL]
    if unknown:
        parser.error(f"there is no check {', '.join(unknown)}. There are {', '.join(FULL)}")
    names = given.names or list(FULL)
    if given.list:
        print(*(f"{name:<16} {purpose(name)}" for name in names), sep="\n")
        return 0
    return run({name: FULL[name] for name in names})


if __name__ == "__main__":
    sys.exit(main())
