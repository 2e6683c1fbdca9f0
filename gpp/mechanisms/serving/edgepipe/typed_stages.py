"""The stages of a graph with the least bottleneck, on types of devices: exact, for graphs with few downsets.

Every partition into stages whose graph has no cycle is a chain of downsets, each stage the difference of two of them. A search puts
one stage after the other. What decides how it can go on is

    (operators done, devices used of each type, for every tensor that is still to be read its stage, and that stage's type)

so of two ways to one such state the second is left out. A stage is put onto a type if it takes at most tau and fits, and if so does
each message that it gets: all tensors from one stage to another are one message. tau is bisected, as in
`typed_chain`.

On a chain the tensors to be read are those of the stage before, which makes it the same problem as there, more slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpp.graph.op_graph import bits
from gpp.mechanisms.serving.edgepipe.forward import Assigned, ForwardProblem, Kinds
from gpp.mechanisms.serving.edgepipe.typed_chain import Used, least, using
from gpp.planners.chains.downsets import Budget, all_states

ROUNDING = 1 + 1e-12
"""By which sums of the same seconds may differ."""


class TooManyStates(Exception):
    """The search would take more states than it may."""


class _Waiting(NamedTuple):
    """Tensors that one stage has made and others have still to read: the stage's type, and a mask of tensors."""

    kind: int
    tensors: int


class _State(NamedTuple):
    done: int
    used: Used
    waiting: tuple[_Waiting, ...]


Way = dict[_State, tuple[_State, int, int] | None]
"""State -> the state before it, and the mask and type of the stage between them."""


class TypedStages:
    """The search for one problem.

    Args:
        most_downsets, most_states: limits of the graph, and of the searches for all bottlenecks together.

    Raises:
        TooMany: the graph has more downsets.
    """

    def __init__(self, forward: ForwardProblem, kinds: Kinds, *, most_downsets: int, most_states: int) -> None:
        graph = forward.problem.graph
        found = all_states(graph, most_downsets, Budget("edgepipe", math.inf, math.inf))
        if found is None:
            raise TooManyStates
        self._forward, self._kinds, self._graph, self._left = forward, kinds, graph, most_states
        self._downsets = np.array(sorted((graph.all_mask & ~state for state in found), key=int.bit_count), dtype=object)
        first = [group[0] for group in kinds.groups]
        # [types, downsets]: equal devices of one type take the same, and differ in no link.
        members = np.array([[mask >> op & 1 for op in range(graph.num_ops)] for mask in self._downsets], dtype=float)
        self._seconds = forward.seconds[first] @ members.T
        self._at = {int(mask): i for i, mask in enumerate(self._downsets)}
        self._first = first
        self._read_by = graph.consumer_masks
        self._fitting: dict[tuple[int, int], bool] = {}
        self._moves: dict[tuple[int, int, float], float] = {}

    def fastest(self, known: Assigned | None, least_s: float) -> Assigned | None:
        """Stages and devices with the least bottleneck; None where nothing fits.

        Args:
            known: some that fit; None where none are known.
            least_s: none are faster.

        Raises:
            TooMany: the searches have more states than they may.
        """
        # The bound is a sum in another order.
        return least(self._within, self._forward.bottleneck_s, known or self._within(math.inf), least_s, rounding=ROUNDING)

    def _within(self, tau: float) -> Assigned | None:
        """Stages whose bottleneck is at most tau, by ascending number of them."""
        start = _State(0, (0,) * len(self._kinds.groups), ())
        ways: Way = {start: None}
        layer = [start]
        while layer:
            nexts = list[_State]()
            for state in layer:
                for then, mask, kind in self._after(state, tau):
                    if then in ways:
                        continue
                    ways[then] = state, mask, kind
                    if then.done == self._graph.all_mask:
                        return self._trace(ways, then)
                    nexts.append(then)
                    self._left -= 1
                    if self._left < 0:
                        raise TooManyStates
            layer = nexts
        return None

    def _after(self, state: _State, tau: float) -> Iterator[tuple[_State, int, int]]:
        """The states that one more stage leads to, and that stage."""
        here = self._at[state.done]
        for kind, count in enumerate(self._kinds.counts):
            if state.used[kind] == count:
                continue
            used = using(state.used, kind)
            took = self._seconds[kind] - self._seconds[kind, here] + self._forward.pass_s
            for at in np.flatnonzero(took <= tau * ROUNDING):
                done = int(self._downsets[at])
                mask = done & ~state.done
                if not mask or state.done & ~done or self._forward.stage_s(mask, self._first[kind]) > tau:
                    continue
                if self._fits(mask, kind) and all(self._arrives_s(other, mask, kind) <= tau for other in state.waiting):
                    yield _State(done, used, self._waiting(state, done, mask, kind)), mask, kind

    def _fits(self, mask: int, kind: int) -> bool:
        key = mask, kind
        if key not in self._fitting:
            self._fitting[key] = self._forward.fits(mask, self._first[kind])
        return self._fitting[key]

    def _arrives_s(self, waiting: _Waiting, mask: int, kind: int) -> float:
        """Seconds of the message from one stage to the next, which reads some of what waits."""
        size = sum(self._graph.tensors[t].bytes_per_sample for t in bits(waiting.tensors) if self._read_by[t] & mask)
        if not size:
            return 0.0
        key = waiting.kind, kind, size
        if key not in self._moves:
            self._moves[key] = self._kinds.move_s(waiting.kind, kind, size * self._forward.microbatch_size)
        return self._moves[key]

    def _waiting(self, state: _State, done: int, mask: int, kind: int) -> tuple[_Waiting, ...]:
        """The tensors that are still to be read behind a new stage."""
        own = sum(1 << t for t in self._graph.made_by(mask))
        out = []
        for one, tensors in [*state.waiting, (kind, own)]:
            left = sum(1 << t for t in bits(tensors) if self._read_by[t] & ~done)
            if left:
                out.append(_Waiting(one, left))
        return tuple(sorted(out))

    def _trace(self, ways: Way, state: _State) -> Assigned:
        stages = list[tuple[int, int]]()
        while (before := ways[state]) is not None:
            state, mask, kind = before
            stages.append((mask, kind))
        return self._kinds.placed(reversed(stages))
