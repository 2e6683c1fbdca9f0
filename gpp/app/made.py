"""What a run makes once on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpp.cost.problem import Problem
    from gpp.export.modules import Modules
    from gpp.plan.plan import Plan
    from gpp.planners.bounds.lower_bound import Bound
    from gpp.runtime.checkpoint.origin import ToMake
    from gpp.runtime.rehearsal.rehearse import Rehearsals


@dataclass(slots=True)
class MadeOnce:
    """What takes long and is needed more than once on the way of a run; an experiment itself never changes.

    Args:
        rehearsals: those whose process has started early.
        network: the model with its first weights, from the comparison with its capture until the weights are asked for.
        weights: the initial weights, or how workers make them.
        notes: what the user is told of them.
        modules: those of the model, where its plan is a layout of them.
        plan: the one that was made under the rules of an engine of others.
        bound: the problem that was asked about last, and the time that no plan for it can beat.
    """

    rehearsals: Rehearsals | None = None
    network: torch.nn.Module | None = None
    weights: dict[str, torch.Tensor] | ToMake | None = None
    notes: tuple[str, ...] = ()
    modules: Modules | None = None
    plan: Plan | None = None
    bound: tuple[Problem, Bound | None] | None = None
