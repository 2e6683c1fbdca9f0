"""Networks that are no chain, on 2 and 4 workers beside plain PyTorch, and what other engines do with them.

    python -m tests.checks.zoo [NAMES] [--devices 2 4]    losses, weights and bytes of a step; --threads: workers in this process
    python -m tests.checks.zoo [NAMES] --peers            torch's `pipeline()`; with GPP_PEERS_PYTHON, which names a Python with
                                                          deepspeed and torchtitan 0.3.0, those, too

The exit code is 1 if losses or weights differ from those of a plain loop in float64 by more than 1e-12.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.support.conf import model_named
from tests.support.pages import ROOT
from tests.support.threads import workers_in_threads
from tests.zoo.peers import RANKS
from tests.zoo.rows import ROWS, trained


def ours(names: list[str], devices: list[int], threads: bool) -> int:
    """The table of our own runs; how many rows are wrong."""
    print("| network | workers | stages | losses apart | weights apart | bytes a step, to each stage | to each device | measured |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    wrong = 0
    for name in names:
        for count in devices:
            with tempfile.TemporaryDirectory() as folder, workers_in_threads() if threads else nullcontext():
                row = trained(name, count, Path(folder, "run"))
            wrong += not row.equal
            found = f"{row.loss:.0e} | {row.weights:.0e} | {row.apart:,} | {row.predicted:,} | {row.measured:,}"
            print(f"| {name} | {count} | {row.stages} | {found} |", flush=True)
    return wrong


def peers(names: list[str]) -> None:
    """What each engine said of each network, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder, "cases.json")
        cases.write_text(json.dumps({name: described(name) for name in names}))
        store = Path(folder, "store")
        ranks = [said(sys.executable, "torch", cases, str(rank), str(store)) for rank in range(RANKS)]
        answers = [lines(rank) for rank in ranks]
        for ranked in zip(*answers, strict=True):
            show("torch", max(map(judged, ranked), key=lambda found: VERDICTS.index(found["verdict"])))
        if other := os.environ.get("GPP_PEERS_PYTHON"):
            for engine in ("deepspeed", "torchtitan"):
                for found in lines(said(other, engine, cases)):
                    show(engine, found)


VERDICTS = ("accepted", "wrong", "silent", "refused")
"""Of what the ranks found the last one counts: a rank that waits in vain for another is silent, and the other says why."""


def judged(found: dict[str, str]) -> dict[str, str]:
    """What a rank found, where a refusal that is only the other rank's silence is called so."""
    waited = found["verdict"] == "refused" and re.search(
        r"timed out|connection (closed|reset|refused)", found["words"], re.IGNORECASE
    )
    return {**found, "verdict": "silent"} if waited else found


def described(name: str) -> dict[str, object]:
    """A network as its class, its arguments, its loss and the shapes of inputs and target."""
    from inspect import signature

    from gpp.models.dotted import resolve

    model = model_named(name)
    known = signature(resolve(model.network, field="network")).parameters
    specs = {key: (list(spec.shape), spec.dtype, spec.high) for key, spec in model.inputs().items()}
    (target,) = ((list(spec.shape), spec.dtype, spec.high) for spec in model.targets().values())
    given = {key: value for key, value in model.arguments.items() if key in known}
    return {
        "network": model.network,
        "arguments": given,
        "loss": model.loss,
        "inputs": specs,
        "target": target,
        "split": ROWS[name],
    }


def said(python: str, engine: str, cases: Path, *more: str) -> subprocess.Popen[str]:
    """The process that asks an engine."""
    words = [python, "-m", "tests.zoo.peers", engine, str(cases), *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


def lines(process: subprocess.Popen[str]) -> list[dict[str, str]]:
    """What a process found, when it has ended."""
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))}\n{err[-3000:]}")  # pyright: ignore[reportArgumentType]
    return [json.loads(line.removeprefix("FOUND ")) for line in out.splitlines() if line.startswith("FOUND ")]


def show(engine: str, found: dict[str, str]) -> None:
    print(f"{engine:10} {found['model']:24} {found['verdict']:9} {' '.join(found['words'].split())[-400:]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all where none is named")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--threads", action="store_true")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in ROWS]:
        parser.error(f"there is no network {', '.join(unknown)} in the zoo. There are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    names = given.names or list(ROWS)
    if given.peers:
        peers(names)
        return 0
    return int(ours(names, given.devices, given.threads) > 0)


if __name__ == "__main__":
    sys.exit(main())
