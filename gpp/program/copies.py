"""Which actions of a device stand before which, where its stages copy to the host: the needs of `gpp.program.kinds`.

A stage that has a copy on a device copies every micro-batch there and back. At most `RESIDENT_COPIES` micro-batches' copies are
then in the memory of the device. A forward needs the copy out of the micro-batch before, so one goes at most. Beside it one comes
or is in use; a second may come only while none goes: its fetch waits for the last copy out, and no forward follows before a
backward has made room.

The first of three stages under 1F1B, where a copy takes as long as a backward; `here` has the micro-batches whose copies are in
the device's memory:

    pass    F0 .  .  F1 .  .  F2 B0 -- F3 .  B1 -- F4 .  B2 -- .  .  B3 -- B4 --
    out     .  O0 -- .  O1 -- .  O2 -- .  O3 -- .  .  O4 --
    in      .  .  .  .  P0 -- .  .  .  P1 -- .  .  P2 -- .  .  P3 -- P4 --
    here    0  0  0  1  1  1  2  2  2  3  3  3  1  4  4  4  2  3  3  3  3  4  4
                        0  0  0  0  0  1  1  1     2  2  2           4  4

F1 waits for O0, so that micro-batches 0 and 1 never go at once. P4 comes beside micro-batch 3, because nothing
goes any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from typing import final

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.errors import MalformedProgram
from gpp.program.kinds import COPIES, KINDS, TOGETHER, Action, Kind, Resource

_FOLLOWED = frozenset(row.text for row in KINDS.values() if row.needs and not row.transfers)
"""Kinds of which a stage that copies has one for each micro-batch: of a pass that may be in parts the whole, or all parts."""


@final
class Copies:
    """The copies of a device, with the actions that they need and those that need them.

    Args:
        device: whose actions they are.
        stages: the stages that copy.
    """

    def __init__(self, device: int, stages: AbstractSet[int]) -> None:
        self.device, self.stages = device, stages
        self.steps: dict[tuple[str, int, int], int] = {}
        """(kind, stage, micro-batch) of a copy -> its place in the order of all actions."""
        self._nodes: dict[tuple[str, int, int], int] = {}
        self._latest: dict[tuple[str, int], int] = {}
        self._here: dict[int, int] = dict.fromkeys(stages, 0)
        """Stage -> micro-batches that were fetched and are not used up."""

    def take(self, kind: str, stage: int, microbatch: int, node: int) -> tuple[int, ...] | None:
        """The copies that the device's next action waits for; None if it has run, or if what it needs has not come before it."""
        if (kind, stage, microbatch) in self._nodes:
            return None
        out: list[int] = []
        row, here = KINDS[kind], self._here[stage]
        if self._is_third(row, stage):
            return None
        for need in row.needs:
            of = self._latest.get((kind, stage)) if need.previous else microbatch
            if of is not None:
                found = self._nodes.get((need.kind, stage, of))
                if found is None:
                    return None
                if need.kind in COPIES:
                    out.append(found)
        if row.occupies is Resource.COPY_IN and here:
            (went,) = row.needs
            out.append(self._nodes[went.kind, stage, self._latest[went.kind, stage]])
        self._here[stage] = here + (row.occupies is Resource.COPY_IN) - row.returns
        self._nodes[kind, stage, microbatch] = node
        self._latest[kind, stage] = microbatch
        return tuple(out)

    def _is_third(self, row: Kind, stage: int) -> bool:
        """Whether an action would bring a third micro-batch's copies into the device's memory."""
        return self._here[stage] >= RESIDENT_COPIES and (row.holds or row.occupies is Resource.COPY_IN)

    def why(self, action: Action) -> str | None:
        """Words for what an action lacks; None if copies have nothing to do with it."""
        kind, stage, microbatch = action[:3]
        if stage not in self.stages or kind not in _FOLLOWED:
            return None
        if self._is_third(KINDS[kind], stage):
            return f"{action.text(self.device)} comes before a backward of stage {stage} has made room for its copies"
        for need in KINDS[kind].needs:
            of = self._latest.get((kind, stage)) if need.previous else microbatch
            if of is not None and (need.kind, stage, of) not in self._nodes:
                wanted = Action(need.kind, stage, of).text(self.device)
                return f"{action.text(self.device)} needs {wanted} ({KINDS[need.kind].meaning}) before it on its device"
        return None

    def check(self) -> None:
        """Refuse a copy that nothing uses, and a pass without its copies.

        Raises:
            MalformedProgram: a micro-batch lacks an action of some kind; names it.
        """
        found: dict[int, dict[str, set[int]]] = {stage: defaultdict(set) for stage in self.stages}
        for kind, stage, microbatch in self._nodes:
            found[stage][kind].add(microbatch)
        for stage, kinds in found.items():
            everything = set().union(*kinds.values())
            parts = {part for kind in kinds.keys() & TOGETHER.keys() for part in TOGETHER[kind]}
            for kind in sorted(_FOLLOWED - {KINDS[part].instead_of for part in parts} - (TOGETHER.keys() - parts)):
                if missing := everything - kinds[kind]:
                    what = Action(kind, stage, min(missing)).text(self.device)
                    raise MalformedProgram(
                        f"{what} ({KINDS[kind].meaning}) is missing: a stage that copies to the host copies every micro-batch "
                        "there and back, between its forward and its backward"
                    )
