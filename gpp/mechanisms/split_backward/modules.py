"""Stages whose code leaves the gradients of the weights for later."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from gpp.capture.codec import operator_of
from gpp.capture.cut import Cut
from gpp.capture.stage import StageModule
from gpp.mechanisms.split_backward.late import Late
from gpp.mechanisms.split_backward.operators import Halves, halves

_LATE: Final = WeakKeyDictionary[StageModule, Late]()


def halves_of(cut: Cut, *, whole: frozenset[str] = frozenset(), formulas: bool = False, elsewhere: bool = False) -> Halves:
    """The split of a stage's backward; arguments as `halves` has them."""
    return halves(cut.node_of, cut.calls, cut.outputs, whole=whole, formulas=formulas, elsewhere=elsewhere)


def split(module: StageModule, *, whole: frozenset[str] = frozenset(), formulas: bool = False, elsewhere: bool = False) -> Halves:
    """Let the backward of training passes leave the gradients of the weights in `late_of`; arguments as `halves` has them."""
    cut = module.cut
    found, late = halves_of(cut, whole=whole, formulas=formulas, elsewhere=elsewhere), Late(cut.device)
    targets = {name: cut.node_of[name].target for name in found.split}
    module.call_through({name: late.of(name, targets[name], own, operator_of(targets[name])) for name, own in found.split.items()})
    _LATE[module] = late
    return found


def late_of(module: StageModule) -> Late:
    """What the last backward of a module that is split has left."""
    return _LATE[module]
