"""The seconds of each kind of pass, from the bill of its stage."""

from __future__ import annotations

from gpp.cost.stage import StageCost
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PARTS, PASS, TOGETHER


def pass_seconds(bill: StageCost, *, last: bool = False) -> dict[str, float]:
    """Kind -> seconds of a pass of one micro-batch, or of the last one, which may be smaller.

    What stands in place of a pass takes what its row says; of passes that several devices make, each has its part. Other kinds of
    mechanisms take what their bills say.
    """
    forward_s, backward_s = bill.pass_s(last=last)
    found = {PASS[FORWARD]: forward_s, PASS[BACKWARD]: backward_s}
    for kind in TOGETHER:
        if (seconds := KINDS[kind].seconds) is not None:
            found[kind] = seconds(bill, last)
    return {**found, **{part: found[whole] for part, whole in PARTS.items()}, **dict(bill.own_s)}
