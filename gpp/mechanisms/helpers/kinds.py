"""Actions of helpers, and of the devices that they help.

s2.SW0>s2.d4[0:4]@d1     send a helper what the gradients of the weights are made of
s2.RW0<s2.d1[0:4]@d4     receive it
s2.HW0@d4                a helper's W: of a stage that its device does not have
s2.SI0>s2.d4[0:4]@d1     send a helper the gradients of the outputs, and its columns of the weights
s2.RI0<s2.d1[0:4]@d4     receive them
s2.HI0@d4                a helper's part of I
s2.SP0>s1.d3[0:4]@d4     send its part of the gradients of the inputs
"""

from __future__ import annotations

from typing import Final

from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, input_s, weight_s
from gpp.program.kind import Kind, Need, Role
from gpp.routing import BACKWARD, Direction

HELPING: Final[Direction] = "W"
HELPING_INPUTS: Final[Direction] = "I"
"""Directions of helpers' passes, and of the messages that these need, which are made on the stage's own device."""

HELPED_WEIGHTS: Final = "HW"
HELPED_INPUTS: Final = "HI"
"""Second halves that a helper makes, and parts of first halves."""
SEND_PART: Final = "SP"
"""What a helper sends in place of the stage's own device."""

KINDS: Final = (
    Kind(
        text=HELPED_WEIGHTS,
        meaning="weight gradients for another device",
        role=Role.COMPUTE,
        direction=HELPING,
        finishes=True,
        seconds=weight_s,
    ),
    Kind(
        text=HELPED_INPUTS,
        meaning="input gradients for another device",
        role=Role.COMPUTE,
        direction=HELPING_INPUTS,
        returns=True,
        seconds=input_s,
    ),
    Kind(text="SW", meaning="send to a helper", role=Role.SEND, needs=(Need(INPUT_GRADIENTS),), direction=HELPING),
    Kind(
        text="SI",
        meaning="send to a helper for input gradients",
        role=Role.SEND,
        needs=(Need(INPUT_GRADIENTS),),
        direction=HELPING_INPUTS,
    ),
    Kind(
        text=SEND_PART,
        meaning="send a part of gradients",
        role=Role.SEND,
        needs=(Need(HELPED_INPUTS),),
        direction=BACKWARD,
    ),
    Kind(text="RW", meaning="receive as a helper", role=Role.RECEIVE, direction=HELPING),
    Kind(text="RI", meaning="receive as a helper for input gradients", role=Role.RECEIVE, direction=HELPING_INPUTS),
)
