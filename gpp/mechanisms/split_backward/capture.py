"""The halves of a captured model's backward: what the second one holds until it runs, and how the two are timed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from gpp.capture.added import AbstractCapturePart, MeasuredModel
from gpp.mechanisms.split_backward.late import FORMULAS
from gpp.mechanisms.split_backward.operators import halves, late_of, split

if TYPE_CHECKING:
    from gpp.capture.stage import StageModule


class SplitCapturePart(AbstractCapturePart):
    """Gradients of weights in the second half.

    Between the halves an operator with a formula needs what autograd keeps for it; one with a graph of its own also its data. All
    need the gradients of their outputs. The first who needs a storage answers for it, and nobody for a user's input or for what
    follows from weights alone, which does not grow with the samples.
    """

    def left(self, model: MeasuredModel) -> tuple[Collection[str], Mapping[int, int]]:
        nodes, facts, calls, losses, closures = model
        found = halves(nodes, calls, losses)
        others = {*found.alone, *(name for name, node in nodes.items() if node.kind == "input")}
        seen = {storage for name in others for storage in facts[name].storages}
        held: dict[int, int] = defaultdict(int)
        for number, closure in enumerate(closures):
            for name in closure:
                if name not in found.split:
                    continue
                own = facts[name]
                needs = [(storage, size) for storage, _, size in own.saved]
                needs += own.gradients + (own.data if nodes[name].target not in FORMULAS else [])
                for storage, size in needs:
                    if storage not in seen:
                        seen.add(storage)
                        held[number] += size
        return found.split, held

    def parted(self, module: StageModule) -> Callable[[], Callable[[], None]] | None:
        if not split(module).split:
            return None
        late = late_of(module)
        return lambda: late.take().deliver


CAPTURE = SplitCapturePart()
