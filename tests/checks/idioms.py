"""What users do to modules, losses and optimizers, each through `gpp.parallelize` against a plain loop, and the table of them.

    python -m tests.checks.idioms                        all cases, with real workers; writes the table of docs/idioms.md
    python -m tests.checks.idioms --threads [WORD ...]   workers as threads, and cases whose names have such a word alone

A line for each case; the exit code is 1 if one is silently different, broken, or otherwise than the table says.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.idioms.case import Idiom, Outcome, agrees, tried
from tests.idioms.table import PAGE, counted, idioms, written
from tests.support.threads import workers_in_threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases")
    parser.add_argument("--threads", action="store_true", help="workers in this process")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every = idioms()
    chosen = [case for case in every if not given.words or any(word in case.name for word in given.words)]
    kinds: Counter[str] = Counter()
    wrong = [case for case in chosen if not _shown(case, given.threads, kinds)]
    print(", ".join(f"{kinds[kind]} {kind}" for kind in ("equal", "refused", "warned", "silent", "failed")))
    if wrong:
        raise SystemExit(f"{len(wrong)} are otherwise than expected: {', '.join(case.name for case in wrong)}")
    if len(chosen) == len(every):
        PAGE.write_text(written(PAGE.read_text(), every))
        print(f"docs/{PAGE.name}: {counted(every)}")


def _shown(case: Idiom, threads: bool, kinds: Counter[str]) -> bool:
    """Try a case and print its line; whether it is as expected."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = tried(case, Path(folder, "run"), workers_in_threads if threads else nullcontext)
        except Exception as error:
            found = Outcome("failed", (f"{type(error).__name__}: {error}",))
    kinds[found.kind] += 1
    right = agrees(case, found)
    said = "" if right and found.kind == "equal" else " | ".join(found.said)[:300].replace("\n", " ")
    mark = "" if right else f" (expected: {case.kind})"
    print(f"{found.kind:8}{mark} {found.difference:.0e} {time.perf_counter() - began:5.1f} s  {case.name}  {said}", flush=True)
    return right


if __name__ == "__main__":
    main()
