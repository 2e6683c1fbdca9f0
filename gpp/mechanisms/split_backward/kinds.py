"""The halves of a backward.

s2.I0@d1                 the half that makes the gradients of the stage's inputs
s2.W0@d1                 the other half, which makes the gradients of its weights
"""

from __future__ import annotations

from typing import Final

from gpp.cost.stage import StageCost
from gpp.program.kind import Kind, Need, Role
from gpp.routing import BACKWARD

INPUT_GRADIENTS: Final = "I"
WEIGHT_GRADIENTS: Final = "W"
HALVES: Final = (INPUT_GRADIENTS, WEIGHT_GRADIENTS)


def weight_s(bill: StageCost, last: bool) -> float:
    """Seconds of a second half; of the last micro-batch, or of another."""
    return bill.last_weight_s if last else bill.weight_s


def input_s(bill: StageCost, last: bool) -> float:
    """Seconds of a first half: the halves take together what a whole backward takes."""
    return bill.pass_s(last=last)[1] - weight_s(bill, last)


KINDS: Final = (
    Kind(
        text=INPUT_GRADIENTS,
        meaning="input gradients",
        role=Role.COMPUTE,
        needs=(Need("F"),),
        direction=BACKWARD,
        returns=True,
        instead_of="B",
        seconds=input_s,
    ),
    Kind(
        text=WEIGHT_GRADIENTS,
        meaning="weight gradients",
        role=Role.COMPUTE,
        needs=(Need(INPUT_GRADIENTS),),
        frees=True,
        finishes=True,
        instead_of="B",
        seconds=weight_s,
    ),
)
