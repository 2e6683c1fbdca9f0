"""Where the values of a training stopped being finite, told from what its stages still hold.

The loss of every micro-batch is looked at, a number that is there in any case. Nothing else is looked at while all is
well. When a loss is not finite, no stage has made the backward of its micro-batch: each still holds what it received
and made in the forward. A `Finding` says which of that is not finite, and the first one in the order of the stages is
the origin. So *first* is: of the first micro-batch that came to a loss with such a value, the first forward that made
one of finite tensors and finite weights.

Weights that are not finite have become so in an earlier update. For this case a stage keeps one number of each of its
last backwards, the sum over one small gradient, and looks at them only now: the origin is then the first backward that
left such a gradient. A backward whose other gradients alone are not finite is not seen by it; the message then names
the stage and the update, and says that the micro-batch is not known.

Steps, stages and micro-batches count from 0, as in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from gpp.graph.captured import LOSS

if TYPE_CHECKING:
    import torch

PROBE_ELEMENTS = 4096
"""Most elements of the gradient that is summed after each backward: a sum that takes no time."""


def shown(names: Iterable[str]) -> str:
    """The first of some names, and how many follow."""
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def nonfinite(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of the tensors with a value that is not finite."""
    # A sum is one pass without memory of its own; it overflows without such a value too, so a second look decides.
    suspects = [(name, t) for name, t in tensors.items() if t.is_floating_point() and not math.isfinite(t.detach().sum().item())]
    return tuple(name for name, t in suspects if not t.isfinite().all())


class PassPlace(NamedTuple):
    """A forward or a backward: the step, the samples [sample, end) of its mini-batch, and the micro-batch's number."""

    step: int
    sample: int
    end: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Values of a stage that are not finite, by name.

    Args:
        received, rows, made: of the forward of a micro-batch: tensors from other stages, rows of the data set, and
            tensors for other stages or the loss.
        gone: tensors for other stages that the stage has let go of, so that only who received them can tell.
        weights: trained parameters.
        backward: the first backward, of those remembered, whose gradient is not finite.
    """

    stage: int
    microbatch: int = -1
    received: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    backward: PassPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A loss that is not finite: its result's name, its value, and where it was made."""

    name: str
    value: float
    stage: int
    place: PassPlace

    def __str__(self) -> str:
        return self._text(f"step {self.place.step}")

    def held_out(self) -> str:
        """One sentence, where the samples are those of an evaluation after `place.step` steps."""
        return f"{self._text(f'the evaluation after {self.place.step} steps')}; where it began is not known"

    def _text(self, of: str) -> str:
        name = "the loss" if self.name == LOSS else f"the loss term {self.name.removeprefix(f'{LOSS}:')}"
        return f"{name} of micro-batch {self.place.microbatch} of {of}, on stage {self.stage}, is not finite ({self.value})"


class Probes:
    """One number of each of a stage's last backwards, from which it can be told later which gradient was not finite.

    Args:
        masters: the trained parameters in the order of the forward. The first small one is summed: gradients run
            backwards, so what is not finite anywhere in the stage or behind it comes to it.
    """

    def __init__(self, masters: Sequence[torch.Tensor], *, last: int) -> None:
        small = (i for i, p in enumerate(masters) if p.numel() <= PROBE_ELEMENTS)
        smallest = min(range(len(masters)), key=lambda i: (masters[i].numel(), i), default=None)
        self.index: int | None = next(small, smallest)
        self._sums: deque[tuple[PassPlace, torch.Tensor]] = deque(maxlen=last)

    def note(self, place: PassPlace, gradient: torch.Tensor | None) -> None:
        """After a backward: keep the sum over the gradient of the parameter number `index`."""
        if gradient is not None:
            self._sums.append((place, gradient.sum()))

    def forget(self) -> None:
        """What the gradients were is of no interest: their update was left out."""
        self._sums.clear()

    def first(self) -> PassPlace | None:
        """The first backward after which the gradient was not finite."""
        return min((place for place, total in list(self._sums) if not math.isfinite(total.item())), default=None)


def told(seen: Seen, findings: Sequence[Finding], *, silent: Sequence[int] = (), first_step: int = 0) -> str:
    """One sentence on a loss that is not finite, with its origin.

    Args:
        findings: of all stages, as far as they are known.
        silent: ranks that have said nothing.
        first_step: of this run.
    """
    unknown = f"; ranks {', '.join(map(str, silent))} have not said what they hold" if silent else ""
    return f"{seen}: {_origin(seen, findings, first_step)}{unknown}"


def told_of_weights(findings: Sequence[Finding], *, step: int) -> str:
    """One sentence on weights that are not finite after the last step, number `step`."""
    worst = _last_with_weights(findings)
    names = f"the weights of stage {worst.stage} ({shown(worst.weights)}) are not finite after the last step, number {step}"
    return f"{names}: {_by_backward(findings, None) or 'its gradient or its update was not; the micro-batch is not known'}"


def _last_with_weights(findings: Sequence[Finding]) -> Finding:
    """Gradients run backwards: the last stage had it first."""
    return max((f for f in findings if f.weights), key=lambda f: f.stage)


def _by_backward(findings: Sequence[Finding], before: PassPlace | None) -> str | None:
    """The first gradient; None if there is none, or it has come of the forward `before`."""
    found = [(f.backward, f.stage) for f in findings if f.backward]
    found = [
        (p, s) for p, s in found if before is None or p.step < before.step or (p.step == before.step and p.end <= before.sample)
    ]
    if not found:
        return None
    first = min(place for place, _ in found)
    # Gradients run backwards: of the same samples, the last stage had it first.
    same = [(s, p) for p, s in found if p.step == first.step and p.sample < first.end]
    stage, place = max(same)
    return f"it began with a gradient, in the backward of micro-batch {place.microbatch} of step {place.step} on stage {stage}"


def _with_gone(findings: Sequence[Finding]) -> list[Finding]:
    """The same, with what others have received of a micro-batch in place of what its stage has let go of."""
    received = {name for f in findings for name in f.received}
    # Of a stage that has several of those samples' micro-batches in flight, nobody knows which one it was.
    once = {name for name, count in Counter(name for f in findings for name in f.gone).items() if count == 1}
    return [replace(f, made=(*f.made, *(name for name in f.gone if name in received & once))) for f in findings]


def _origin(seen: Seen, findings: Sequence[Finding], first_step: int) -> str:
    if gradient := _by_backward(findings, seen.place):
        return gradient
    if any(f.weights for f in findings):
        worst = _last_with_weights(findings)
        whose = f"the weights of stage {worst.stage} ({shown(worst.weights)})"
        if seen.place.step == first_step:
            return f"{whose} were not finite when the run began"
        when = f"its gradient or update before step {seen.place.step} was not"
        return f"{whose} were not finite any more: {when}; the micro-batch is not known"
    findings = _with_gone(findings)
    made = sorted((f for f in findings if f.made), key=lambda f: (f.stage, f.microbatch))
    first = next((f for f in made if not f.received), None)
    if first is not None:
        where = f"in the forward of micro-batch {first.microbatch} on stage {first.stage}"
        if first.rows:
            return f"it began {where}, with rows of the data set ({shown(first.rows)})"
        return f"it began {where} ({shown(first.made)})"
    received = min((f for f in findings if f.received), key=lambda f: (f.stage, f.microbatch), default=None)
    if received is not None:
        return f"it came to stage {received.stage} with {shown(received.received)}, from a stage that keeps nothing or is not known"
    return "where it began is not known"
