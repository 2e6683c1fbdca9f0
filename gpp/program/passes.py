"""The seconds of each kind of pass, from the bill of its stage."""

from __future__ import annotations

from gpp.cost.stage import StageCost
from gpp.program.kinds import BACKWARD, FORWARD, INPUT_GRADIENTS, PARTS, PASS, WEIGHT_GRADIENTS


def pass_seconds(bill: StageCost, *, last: bool = False) -> dict[str, float]:
    """Kind -> seconds of a pass of one micro-batch, or of the last one, which may be smaller.

    The halves of a backward take together what it takes whole; of halves that several devices make, each has its part. The kinds of
    mechanisms take what their bills say.
    """
    forward_s, backward_s = bill.pass_s(last=last)
    weight_s = bill.last_weight_s if last else bill.weight_s
    found = {
        PASS[FORWARD]: forward_s,
        PASS[BACKWARD]: backward_s,
        INPUT_GRADIENTS: backward_s - weight_s,
        WEIGHT_GRADIENTS: weight_s,
    }
    return {**found, **{part: found[whole] for part, whole in PARTS.items()}, **dict(bill.own_s)}
