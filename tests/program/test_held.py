"""The bytes of a device with several stages, beside a walk over its passes that keeps everything by name."""

import random

import pytest

from gpp.cost.amounts import StageBytes
from gpp.cost.together import together
from gpp.program.held import order_peak
from gpp.program.program import Task


def _walked(order: list[Task], memories: dict[int, StageBytes]) -> float:
    """The most bytes over an order: what stays, a micro-batch from its forward to the end of its backward, what the stage that
    computes takes, and the messages that may wait for the others."""
    stays = sum(memory.static + memory.versions for memory in memories.values())
    held: set[tuple[int, int]] = set()
    most = 0.0
    for stage, kind, microbatch in order:
        if kind == "F":
            held.add((stage, microbatch))
        others = sum(memory.waiting for s, memory in memories.items() if s != stage)
        most = max(most, stays + sum(memories[s].microbatch for s, _ in held) + memories[stage].transient + others)
        if kind == "B":
            held.remove((stage, microbatch))
    return most


@pytest.mark.parametrize("seed", range(20))
def test_one_stage_computes_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    memories = {}
    for s in range(rng.randint(1, 4)):
        waiting = rng.randint(0, 9)
        sizes = {"static": rng.randint(0, 50), "versions": rng.randint(0, 9), "microbatch": rng.randint(0, 20)}
        memories[s] = StageBytes(**sizes, transient=waiting + rng.randint(0, 80), waiting=waiting)
    todo = {s: ["F", "F", "B", "F", "B", "B"] for s in memories}
    order, done = list[Task](), {(s, kind): 0 for s in memories for kind in "FB"}
    while todo:
        s = rng.choice(sorted(todo))
        kind = todo[s].pop(0)
        order.append(Task(s, kind, done[s, kind]))
        done[s, kind] += 1
        if not todo[s]:
            del todo[s]
    assert order_peak(order, memories) == _walked(order, memories)
    needs = [(memory.peak(2), memory.passing) for memory in memories.values()]
    assert order_peak(order, memories) <= together(needs) <= sum(need for need, _ in needs)
