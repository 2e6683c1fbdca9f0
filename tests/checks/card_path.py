"""The real workers on the stream model, over the whole matrix; the ordinary tests run every case once.

    python -m tests.checks.card_path [--processes 2]

Every case of the equality matrix under every schedule, every weight policy on every shape, and every split stage; each with both
rules of the model and all its policies. Prints how many ran and every one that did not give one device's losses and weights, and
ends with 1 if there is one.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.mechanisms.tensor_parallel import test_worker as tensor_parallel
from tests.mechanisms.weight_versions.test_async_equality import POLICIES
from tests.runtime import test_equality as equality
from tests.runtime.cards import test_path as path
from tests.support.cards.machine import Machine
from tests.support.options import options
from tests.support.staged import SCHEDULES

Case = tuple[str, str, str, str, str]
"""Kind, name, schedule or shape, rule, policy."""


def cases() -> Iterator[Case]:
    for rule, policy in path.WAYS:
        for name in equality.CASES:
            for schedule in SCHEDULES:
                yield "drained", name, schedule, rule, policy
                if equality.CASES[name].network != "Dropping":  # the reference with dropout does not clip
                    yield "clipped", name, schedule, rule, policy
        for name in POLICIES:
            for shape in path.SHAPES:
                yield "continuous", name, shape, rule, policy
        for name in tensor_parallel.CASES:
            yield "split", name, "1F1B", rule, policy


def check(case: Case) -> tuple[Case, str | None]:
    kind, name, other, rule, policy = case
    torch.set_num_threads(1)
    machine = Machine(rule=rule, policy=policy)  # pyright: ignore[reportArgumentType]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if kind == "continuous":
                network, replicas = path.SHAPES[other]
                path.check_continuous(network, POLICIES[name], replicas, machine, Path(folder))
            elif kind == "split":
                path.check_split(name, machine, Path(folder))
            else:
                path.check_drained(name, other, machine, Path(folder), clip=kind == "clipped")
        except Exception as error:
            return case, f"{type(error).__name__}: {error}"
    return case, None


def main() -> int:
    every = list(cases())
    bad: list[tuple[Case, str]] = []
    with multiprocessing.get_context("fork").Pool(options(__doc__, processes=2).processes) as pool:
        for case, error in pool.imap_unordered(check, every, chunksize=4):
            if error:
                bad.append((case, error))
                print(f"{', '.join(case)}: {error}", flush=True)
    kinds = Counter(case[0] for case in every)
    print(f"{len(every)} runs ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}), {len(bad)} wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
