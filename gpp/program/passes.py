"""The seconds of each kind of pass, from the bill of its stage."""

from __future__ import annotations

from gpp.cost.stage import StageCost
from gpp.program.kinds import BACKWARD, FORWARD, PASS, TIMED


def pass_seconds(bill: StageCost, *, last: bool = False) -> dict[str, float]:
    """Kind -> seconds of a pass of one micro-batch, or of the last one, which may be smaller.

    The kinds of mechanisms take what their rows say, or their bills.
    """
    forward_s, backward_s = bill.pass_s(last=last)
    found = {kind: seconds(bill, last) for kind, seconds in TIMED.items()}
    return {PASS[FORWARD]: forward_s, PASS[BACKWARD]: backward_s, **found, **dict(bill.own_s)}
