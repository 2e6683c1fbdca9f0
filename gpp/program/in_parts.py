"""Passes in whose place others stand (`Kind.instead_of`): those of a stage are all whole, or all in parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpp.errors import MalformedProgram
from gpp.program.action import Action
from gpp.program.kinds import KINDS, TOGETHER


def check_parts(device: int, actions: Sequence[Action]) -> None:
    """Refuse a part without the others of its pass, and a stage that has whole passes beside passes in parts.

    That a part comes in time, the graph of waits says (`gpp.program.waits`).

    Raises:
        MalformedProgram: names the action.
    """
    if TOGETHER.keys().isdisjoint({action.kind for action in actions}):
        return
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for kind, stage, microbatch, *_ in actions:
        found[stage, kind].add(microbatch)
    for stage, kind in [key for key in found if key[1] in TOGETHER]:
        if whole := found[stage, KINDS[kind].instead_of]:
            text = Action(KINDS[kind].instead_of, stage, min(whole)).text(device)
            raise MalformedProgram(f"{text}: stage {stage} has others of these in parts; it must have all of them so, or none")
        for other in TOGETHER[kind]:
            if alone := found[stage, kind] - found[stage, other]:
                text, lacks = (Action(part, stage, min(alone)).text(device) for part in (kind, other))
                raise MalformedProgram(f"{text} is part of a pass, of which {lacks} is missing")
