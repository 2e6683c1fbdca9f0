"""The static proof for cards against the model of cards, on many random programs; a small sample runs in the ordinary tests.

    python -m tests.checks.cards --count 2000

Each program is tried as gloo has it, in the order for cards, and in that order with some messages moved; each of these on the
runtime's path, on variants of it, and on the strictest path (one operation at a time on a card). On the strictest path, proof and
model must say the same of every one, and what is proved must run on the others. Prints how many run and how many do not, and ends
with 1 if they disagree anywhere or if a program in the order for cards hangs.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from gpp.errors import MalformedProgram
from gpp.program.cards import check_cards
from gpp.program.communicators import Communicator, communicators
from gpp.program.program import Program, teams
from tests.oracle.cards import outcome
from tests.support.card_programs import Case, case, perturbed, stretch
from tests.support.cards.machine import Policy
from tests.support.options import options

POLICIES: tuple[Policy, ...] = ("random", "eager", "lazy")

PATHS: dict[str, dict[str, Any]] = {
    "overlapped, one send under way": {"pending": 0},
    "overlapped, three sends under way": {"pending": 2},
    "overlapped": {},
    "overlapped, receives behind passes": {"pending": 1, "receives_wait": True},
    "one communicator": {},
    "a communicator for each pair of devices": {},
    "strictest": {"one_queue": True},
}
"""Name -> rules of the model."""


def communicators_of(path: str, found: Case, program: Program) -> tuple[Communicator, ...]:
    """Those of the runtime, or fewer: on them messages stand in line behind others."""
    made = communicators(found.groups, program, replicas=teams(found.plan))
    pairs = tuple(pair for one in made for pair in one.pairs)
    if path == "one communicator":
        groups = tuple(group for one in made for group in one.groups if one.devices == tuple(sorted(program.actions)))
        one = Communicator("all", tuple(sorted(program.actions)), pairs, groups)
        return (
            one,
            *(other for other in made if other.groups and not set(other.groups) <= set(groups)),
            *(other for other in made if other.replica),
        )
    if path == "a communicator for each pair of devices":
        # torch's lazy mode: both directions share it.
        shared = sorted({(min(pair), max(pair)) for pair in pairs})
        lazy = [Communicator(f"{a} and {b}", (a, b), tuple(p for p in ((a, b), (b, a)) if p in pairs)) for a, b in shared]
        return *lazy, *(other for other in made if other.groups or other.replica)
    return made


def proved(found: Case, program: Program) -> bool:
    """Whether the proof says that a program runs."""
    try:
        check_cards(replace(program, minibatches=1), found.plan, found.groups)
    except MalformedProgram:
        return False
    return True


def check(seed: int) -> tuple[list[str], Counter[str]]:
    """Where proof and model disagree on the programs of a seed, and what they say."""
    rng = random.Random(seed)
    found = case(seed)
    ordered = found.ordered()
    check_cards(ordered, found.plan, found.groups)
    variants = {"gloo's order": found.program, "order for cards": ordered}
    if ordered.minibatches > 1:
        # The proof is about all lengths; the model runs one.
        length = rng.randint(1, 6) if rng.random() < 0.9 else ordered.minibatches + rng.randint(0, 2)
        variants = {name: stretch(program, found.plan, length) for name, program in variants.items()}
    for number in range(2):
        moved = perturbed(found, variants["order for cards"], rng)
        if moved:
            variants[f"moved {number}"] = moved
    wrong: list[str] = []
    counts = Counter({f"program: {word}": 1 for word in found.words})
    for name, program in variants.items():
        static = proved(found, program)
        for path, model in PATHS.items():
            ran = outcome([program], communicators_of(path, found, program), policy=rng.choice(POLICIES), seed=seed, **model)
            kind = name.rstrip("01 ")
            counts[f"{kind}, {path}: {ran}"] += 1
            if (ran == "runs") != static and (static or path == "strictest"):
                wrong.append(f"seed {seed}, {name}, {path}: the proof says {'runs' if static else 'hangs'}, the model {ran}")
            if kind.startswith("order for cards") and ran != "runs":
                wrong.append(f"seed {seed}, {name}, {path}: {ran}")
    return wrong, counts


def check_many(count: int, *, start: int = 0, jobs: int = 1) -> tuple[list[str], Counter[str]]:
    """The same for `count` seeds from `start` on."""
    seeds = range(start, start + count)
    if jobs > 1:
        with multiprocessing.Pool(jobs) as pool:
            outcomes = pool.map(check, seeds, chunksize=4)
    else:
        outcomes = [check(seed) for seed in seeds]
    return [line for wrong, _ in outcomes for line in wrong], sum((counts for _, counts in outcomes), Counter())


def main() -> None:
    args = options(__doc__, count=100, start=0, jobs=1)
    wrong, counts = check_many(args.count, start=args.start, jobs=args.jobs)
    lines = [f"{args.count} programs from {args.start}, {len(wrong)} disagreements"]
    lines += [f"  {name}: {number}" for name, number in sorted(counts.items())]
    print("\n".join([*wrong[:50], *lines]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
