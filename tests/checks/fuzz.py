"""Damage every file that the platform reads, in thousands of ways, and see what it says.

    python -m tests.checks.fuzz --count 5000
    python -m tests.checks.fuzz --count 500 --seed 7 --format plan
    python -m tests.checks.fuzz --case plan:0:123 --keep /tmp/case          writes the files of one case and says what happens

A damaged file is either used, to the end, or refused with one of the project's errors that names the file. Anything else (another
exception, a use that fails afterwards, a case that takes more than `LIMIT_S` seconds) is listed, and makes the exit code 1.
`tests/fuzz/` says what the files are, and how they are damaged; a small sample of each format runs in the ordinary tests.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from gpp.errors import GppError
from tests.fuzz.formats import FORMATS, AbstractFormat
from tests.fuzz.mutations import mutated

LIMIT_S = 5.0
"""Seconds of processor time that a case may take."""

MOST_BYTES = 6 * 2**30
"""Memory that the command may use: a number in a file that makes it allocate more is found."""


class Hang(BaseException):
    """A case took too long; no `except Exception` stops it."""


@dataclass(slots=True)
class Outcome:
    """What became of the cases of a format."""

    accepted: int = 0
    refused: int = 0
    violations: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@cache
def known(name: str) -> tuple[AbstractFormat, dict[str, bytes], list[str]]:
    """A format, its files as they should be, and those to damage."""
    kind = FORMATS[name]()
    return kind, dict(kind.files()), kind.victims()


def check(name: str, seed: int, number: int, folder: Path, out: Outcome) -> None:
    """One case: one damaged file in an empty folder."""
    (kind, whole, victims), rng = known(name), random.Random(f"{name}:{seed}:{number}")
    files = dict(whole)
    victim = rng.choice(victims)
    files[victim] = mutated(files[victim], rng)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    start, case = time.process_time(), f"{name}:{seed}:{number} ({victim})"
    try:
        with _limited():
            used = kind.use(folder)
        out.accepted, out.refused = out.accepted + used, out.refused + (not used)
    except GppError as error:
        out.refused += 1
        out.kinds[type(error).__name__] += 1
        if kind.named and Path(victim).name not in str(error):
            out.violations.append(f"{case}: does not name the file: {type(error).__name__}: {str(error)[:300]}")
        elif len(str(error)) > 4000:
            out.violations.append(f"{case}: says {len(str(error))} characters")
    except Hang:
        out.violations.append(f"{case}: takes more than {LIMIT_S} s")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = next((f for f in reversed(frames) if "/gpp/" in f.filename), frames[-1])
        where = f"{Path(own.filename).name}:{own.lineno}"
        out.violations.append(f"{case}: {type(error).__name__} at {where}: {str(error)[:200]}")
    out.slowest_s = max(out.slowest_s, time.process_time() - start)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check_many(name: str, seed: int, numbers: Sequence[int]) -> Outcome:
    """Many cases of a format."""
    out = Outcome()
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            check(name, seed, number, Path(folder), out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="cases in all, dealt out over the formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=sorted(FORMATS), action="append", help="only these")
    parser.add_argument("--case", help="FORMAT:SEED:NUMBER of one case")
    parser.add_argument("--keep", type=Path, help="folder for the files of --case")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    # Whole runs are forks of a process that stands beside the cache, as in the tests.
    with tempfile.TemporaryDirectory(prefix="fuzz_", ignore_cleanup_errors=True) as beside:
        os.environ["GPP_CACHE"] = f"{beside}/cache"
        sys.exit(one(given) if given.case else every(given))


def one(given: argparse.Namespace) -> int:
    """The case of `--case`, whose files are kept; 1 where it goes wrong."""
    name, seed, number = given.case.split(":")
    out = Outcome()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="fuzz_"))
    folder.mkdir(parents=True, exist_ok=True)
    check(name, int(seed), int(number), folder, out)
    print(f"{folder}: {out}")
    return int(bool(out.violations))


def every(given: argparse.Namespace) -> int:
    """So many cases of each format; 1 where one goes wrong."""
    names = given.format or list(FORMATS)
    total = Outcome()
    for name in names:
        start, count = time.process_time(), -(-given.count // len(names))
        out = check_many(name, given.seed, range(count))
        took = time.process_time() - start
        kinds = ", ".join(f"{kind} {n}" for kind, n in out.kinds.most_common())
        print(
            f"{name:<14} {count:>5} cases: {out.accepted:>5} used, {out.refused:>5} refused ({kinds or 'in silence'}), "
            f"{len(out.violations)} wrong; {took:.0f} s, the slowest {out.slowest_s:.2f} s",
            flush=True,
        )
        for line in out.violations[:20]:
            print(f"    {line}", flush=True)
        total.violations += out.violations
    print(f"{len(total.violations)} wrong")
    return int(bool(total.violations))


if __name__ == "__main__":
    main()
