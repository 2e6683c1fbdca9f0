"""A stage's backwards are all whole, or all in two halves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpp.errors import MalformedProgram
from gpp.mechanisms.split_backward.kinds import HALVES, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.program.action import Action
from gpp.program.kinds import BACKWARD, PASS
from gpp.program.rule import AbstractRule


class WholeOrSplit(AbstractRule):
    """No half of a backward is alone, and no stage has whole ones beside split ones.

    That a half comes in time, the graph of waits says (`gpp.program.waits`).
    """

    def check(self, device: int, actions: Sequence[Action]) -> None:
        found: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for kind, stage, microbatch, *_ in actions:
            if kind in HALVES or kind == PASS[BACKWARD]:
                found[stage][kind].add(microbatch)
        for stage, kinds in found.items():
            first, second, whole = kinds[INPUT_GRADIENTS], kinds[WEIGHT_GRADIENTS], kinds[PASS[BACKWARD]]
            if whole and (first or second):
                text = Action(PASS[BACKWARD], stage, min(whole)).text(device)
                raise MalformedProgram(f"{text}: stage {stage} splits other backwards; it must split all of them or none")
            for alone, half, other in (
                (first - second, INPUT_GRADIENTS, WEIGHT_GRADIENTS),
                (second - first, WEIGHT_GRADIENTS, INPUT_GRADIENTS),
            ):
                if alone:
                    text, lacks = (Action(kind, stage, min(alone)).text(device) for kind in (half, other))
                    raise MalformedProgram(f"{text} is half a backward: {lacks} is missing")


RULE = WholeOrSplit()
