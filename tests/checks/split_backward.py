"""Train with backwards in two halves, and compare with the same training with whole ones.

    python -m tests.checks.split_backward --count 500

Every small model in turn, in float32 and float64, cut at random: replicas, tied and frozen weights, dropout, sizes of
micro-batches. The gradients of the weights are late by 0 to 7 micro-batches; operators are discarded and moved to the host
at random in every third training. Losses, all gradients and final weights and buffers must be equal bit for bit. Exit
code 1 if anything differs.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, final

from gpp import Flush, Plan
from gpp.cost.holding import Holding
from gpp.mechanisms.split_backward.kinds import HALVES, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.program.kinds import PASS
from gpp.schedules.base import Pass, StageSchedule
from gpp.settings import Natural, settings
from tests.support.markings import keep, random_case, random_trainings, random_ways, train
from tests.support.options import options

LATEST = 7


@final
@settings("schedule")
class Delayed(StageSchedule):
    """Another schedule with split backwards, whose second half comes so many micro-batches after the first."""

    schedule: StageSchedule
    late: Natural = 0
    holds: ClassVar[Holding] = Holding(ahead=None, parts=HALVES)

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        out: list[Pass] = []
        for kind, m in self.schedule.order(plan, stage, num_microbatches):
            if kind != PASS["B"]:
                out.append((kind, m))
                continue
            out.append((INPUT_GRADIENTS, m))
            if m >= self.late:
                out.append((WEIGHT_GRADIENTS, m - self.late))
        done = max(num_microbatches - self.late, 0)
        return [*out, *((WEIGHT_GRADIENTS, m) for m in range(done, num_microbatches))]


def differences(name: str, rng: random.Random, *, late: int, dtype: str, marked: bool, minibatch: int = 16) -> list[str]:
    """What is not equal bit for bit, of a random training of a model with whole and with split backwards."""
    case = random_case(name, Flush(), rng, minibatch=minibatch, dtype=dtype)
    ways = random_ways(rng) if marked else keep
    state = rng.getstate()
    whole = case.job(ways, dtype=dtype)
    rng.setstate(state)
    order = case.strategy.schedule
    assert isinstance(order, StageSchedule)  # random cases have 1F1B or GPipe
    split = replace(case, strategy=replace(case.strategy, schedule=Delayed(schedule=order, late=late)))
    halves = split.job(ways, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        return train(whole, case.weights, Path(folder, "a")).differences(train(halves, case.weights, Path(folder, "b")))


def compared(seed: int, name: str, rng: random.Random, done: Counter[str]) -> tuple[list[str], str]:
    """The same of any lateness and type; and which training it is."""
    late, dtype, marked = rng.randint(0, LATEST), rng.choice(["float32", "float64"]), seed % 3 == 2
    done.update((dtype, f"{late} late"))
    wrong = differences(name, rng, late=late, dtype=dtype, marked=marked)
    return wrong, f"{dtype}, {late} late, {'marked' if marked else 'kept'}"


if __name__ == "__main__":
    sys.exit(random_trainings(options(__doc__, count=500, first=0, models=[]), compared))
