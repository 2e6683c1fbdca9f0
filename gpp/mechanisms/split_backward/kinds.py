"""The halves of a backward.

s2.I0@d1                 the half that makes the gradients of the stage's inputs
s2.W0@d1                 the other half, which makes the gradients of its weights
"""

from __future__ import annotations

from typing import Final

from gpp.program.kind import BACKWARD, Kind, Need, Resource, Role

INPUT_GRADIENTS: Final = "I"
WEIGHT_GRADIENTS: Final = "W"
HALVES: Final = (INPUT_GRADIENTS, WEIGHT_GRADIENTS)

KINDS: Final = (
    Kind(
        text=INPUT_GRADIENTS,
        meaning="input gradients",
        role=Role.COMPUTE,
        occupies=Resource.DEVICE,
        needs=(Need("F"),),
        direction=BACKWARD,
        returns=True,
        instead_of="B",
        seconds=lambda bill, last: bill.pass_s(last=last)[1] - bill.weights_s(last=last),
    ),
    Kind(
        text=WEIGHT_GRADIENTS,
        meaning="weight gradients",
        role=Role.COMPUTE,
        occupies=Resource.DEVICE,
        needs=(Need(INPUT_GRADIENTS),),
        frees=True,
        finishes=True,
        instead_of="B",
        seconds=lambda bill, last: bill.weights_s(last=last),
    ),
)
