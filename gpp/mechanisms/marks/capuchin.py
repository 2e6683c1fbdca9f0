"""Capuchin's greedy choice (Peng et al., ASPLOS 2020), on operators in place of tensors.

* Free time first: of the operators whose copies to the host and back hide behind the passes of others, the largest go to the host.
* When no further copy hides, the operator with the most memory saved per second is next: computed again, or copied at the price of
  what does not hide, whichever takes less time for it. Every choice changes what the others cost, so all are asked anew.

What a choice saves is what the bill says: of the final peak, with all choices made so far.
"""

from __future__ import annotations

import numpy as np

from gpp.mechanisms.marks.choices import HAIR, Choices, Judged, Marking


def capuchin(choices: Choices, limit: float) -> Judged | None:
    """The greedy choice; None if it ends without a fit."""
    now = choices.judge(Marking())
    sizes = dict(zip(choices.stage.ops, choices.problem.graph.amounts.saved_bytes[list(choices.stage.ops)].tolist(), strict=True))
    if choices.offloads:
        for op in sorted(sizes, key=lambda op: (-sizes[op], op)):
            if now.peak <= limit * (1 + HAIR):
                return now
            tried = choices.judge(_with(now.marking, op, host=True))
            if tried.added_s <= now.added_s and tried.peak < now.peak:
                now = tried
    while now.peak > limit * (1 + HAIR):
        taken = {*now.marking.recompute, *now.marking.offload}
        steps = []
        for op in choices.stage.ops:
            if op in taken:
                continue
            tried = [choices.judge(_with(now.marking, op, host=host)) for host in _ways(choices, op)]
            # A byte less is what counts; where the largest run hides it, the bytes that are held.
            steps += [(_per_second(now, one, sizes[op]), -op, one) for one in tried if np.isfinite(one.peak)]
        if not steps:
            return None
        best = max(steps, key=lambda step: (step[0], step[1], -step[2].peak))
        if best[0] <= 0:
            return None
        now = best[2]
    return now


def _ways(choices: Choices, op: int) -> list[bool]:
    again = choices.recomputes and bool(choices.able[choices.at[op]])
    return [host for host, able in ((False, again), (True, choices.offloads)) if able]


def _with(marking: Marking, op: int, *, host: bool) -> Marking:
    recompute, offload, _ = marking
    return Marking(recompute, tuple(sorted((*offload, op)))) if host else Marking(tuple(sorted((*recompute, op))), offload)


def _per_second(now: Judged, then: Judged, size: float) -> float:
    """Bytes per second of added time."""
    less = now.peak - then.peak if now.peak > then.peak else HAIR * size
    return less / max(then.added_s - now.added_s, 1e-15)
