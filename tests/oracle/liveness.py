"""What a stage takes when some of its operators are discarded, by walking one micro-batch through forward and backward.

Every tensor is an object of its own here: it is made, read, kept by some operators for their backward, dropped. No sum and no
run of the bill is asked for: what has to be computed again is found from what a backward misses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gpp.graph.op_graph import OpGraph


@dataclass(slots=True)
class Walk:
    """One micro-batch of one sample in a stage, nothing but activations and gradients counted.

    Args:
        ops: of the stage, in the order in which it runs them.
        ends: those of `gone` whose outputs stay.
        keepers: for each tensor that somebody saves, who of its maker and its readers inside does.
        hidden: operator -> bytes that it keeps besides its tensors.
    """

    graph: OpGraph
    ops: tuple[int, ...]
    gone: frozenset[int]
    ends: frozenset[int]
    host: frozenset[int]
    keepers: dict[int, tuple[int, ...]]
    hidden: dict[int, float]
    kept: float = 0.0
    moved: float = 0.0
    peak: float = 0.0
    again: set[int] = field(default_factory=set)

    def made_by(self, op: int) -> list[int]:
        return [i for i, t in enumerate(self.graph.tensors) if t.producer == op]

    def group(self, op: int) -> set[int]:
        """Discarded operators that are joined to one by tensors between discarded operators, if they do not stay."""
        found, todo = {op}, [op]
        while todo:
            at = todo.pop()
            for tensor in self.graph.tensors:
                ends = {tensor.producer, *tensor.consumers} & self.gone
                if at in ends and tensor.producer in self.gone - self.ends:
                    todo += sorted(ends - found)
                    found |= ends
        return found

    def wanted(self, op: int) -> bool:
        """Whether a backward keeps something of what a discarded operator makes, or of what is made from it without leaving
        the discarded ones."""
        if self.hidden[op] > 0:
            return True
        if op in self.ends:
            return False
        if any(i in self.keepers for i in self.made_by(op)):
            return True
        reading = {c for i in self.made_by(op) for c in self.graph.tensors[i].consumers if c in self.gone}
        return any(self.wanted(c) for c in reading)

    def run(self) -> Walk:
        tensors, inside = self.graph.tensors, set(self.ops)
        self.again = {op for op in self.gone if self.wanted(op)}
        # After the forward: what is kept for each operator's backward, and what computing again will read.
        held: dict[tuple[str, int], float] = {}
        for op in self.ops:
            if op in self.gone - self.ends:
                continue
            if self.hidden[op] and op not in self.ends:
                held["hidden", op] = self.hidden[op]
            for i in self.made_by(op):
                if i in self.keepers or any(c in self.again for c in tensors[i].consumers):
                    held["tensor", i] = tensors[i].bytes_per_sample
        for i, tensor in enumerate(tensors):
            if tensor.producer not in inside and inside & set(tensor.consumers):
                held["received", i] = tensor.bytes_per_sample
        on_host = {key: size for key, size in held.items() if key[0] != "received" and self._maker(key) in self.host}
        self.moved = sum(on_host.values())
        self.kept = sum(held.values()) - self.moved
        self._backward(held)
        return self

    def _maker(self, key: tuple[str, int]) -> int:
        return key[1] if key[0] == "hidden" else self.graph.tensors[key[1]].producer

    def _backward(self, held: dict[tuple[str, int], float]) -> None:
        """Follow all that is there from the last operator to the first, and note the most at a time."""
        tensors, inside = self.graph.tensors, set(self.ops)
        out = [t for t in tensors if t.producer in inside and set(t.consumers) - inside and t.differentiable]
        leaving = sum(t.bytes_per_sample for t in out)
        gradients: dict[int, float] = {}
        here, computed = dict(held), set[int]()
        done: set[int] = set()
        for op in reversed(self.ops):
            own = self.graph.ops[op]
            needs = {self._maker(("tensor", i)) for i, who in self.keepers.items() if op in who} - self.ends
            needs |= {op} if self.hidden[op] else set()
            waiting = sum(size for i, size in gradients.items() if tensors[i].producer != op)
            for maker in sorted(needs & self.gone - computed, reverse=True):
                if maker in computed:
                    continue
                group = sorted(self.group(maker) & self.again)
                computed |= set(group)
                between: dict[int, float] = {}
                for again in group:
                    # It reads what is between, and takes its own beside it.
                    size = self.graph.ops[again].transient_bytes + self._made(again)
                    self._note(sum(here.values()) + sum(between.values()) + size + sum(gradients.values()) + leaving)
                    if self.hidden[again]:
                        here["hidden", again] = self.hidden[again]
                    for i in self.made_by(again) if again not in self.ends else ():
                        if i in self.keepers:
                            here["tensor", i] = tensors[i].bytes_per_sample
                        elif any(c in group for c in tensors[i].consumers):
                            between[i] = tensors[i].bytes_per_sample
                    between = {
                        i: size for i, size in between.items() if any(c in group and c > again for c in tensors[i].consumers)
                    }
            beyond = own.transient_bytes
            # Gradients that come from outside are in `leaving` all the time.
            beyond -= sum(t.bytes_per_sample for t in out if t.producer == op and not t.saved)
            self._note(sum(here.values()) + beyond + waiting + leaving)
            done.add(op)
            here.pop(("hidden", op), None)
            for i, who in self.keepers.items():
                if set(who) <= done:
                    here.pop(("tensor", i), None)
            for i, tensor in enumerate(tensors):
                if ("tensor", i) in here and i not in self.keepers and tensor.producer in done:
                    del here["tensor", i]
                if op in tensor.consumers and tensor.differentiable:
                    gradients[i] = tensor.bytes_per_sample
            gradients = {i: size for i, size in gradients.items() if tensors[i].producer not in done}

    def _made(self, op: int) -> float:
        """What an operator makes and somebody keeps."""
        return self.hidden[op] + sum(self.graph.tensors[i].bytes_per_sample for i in self.made_by(op) if i in self.keepers)

    def _note(self, there: float) -> None:
        self.peak = max(self.peak, there)


def keepers_of(graph: OpGraph, ops: tuple[int, ...], rng: random.Random | None) -> dict[int, tuple[int, ...]]:
    """Who keeps each saved tensor that the stage makes: some of maker and readers inside at random, or all of them."""
    out = {}
    for i, tensor in enumerate(graph.tensors):
        if tensor.saved and tensor.producer in ops:
            able = [tensor.producer, *(c for c in tensor.consumers if c in ops)]
            out[i] = tuple(able) if rng is None else tuple(sorted(rng.sample(able, rng.randint(1, len(able)))))
    return out
