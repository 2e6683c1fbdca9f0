"""One action of a program."""

from __future__ import annotations

from typing import NamedTuple

from gpp.program.kinds import written


class Action(NamedTuple):
    """One thing that a device does, and its kind (`gpp.program.kinds.KINDS`).

    `microbatch` is the stage's own; of a reduction, the gradient group; of an update, the mini-batch.

    >>> Action("SF", stage=0, microbatch=2, peer_stage=1, peer_device=3, lo=8, hi=12).text(device=1)
    's0.SF2>s1.d3[8:12]@d1'
    """

    kind: str
    stage: int
    microbatch: int
    peer_stage: int = -1
    peer_device: int = -1
    lo: int = 0
    hi: int = 0

    def text(self, device: int) -> str:
        return written(*self, device=device)
