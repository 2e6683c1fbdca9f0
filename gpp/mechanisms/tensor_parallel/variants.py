"""The variants that a captured model declares by itself: its operators at the tensor-parallel degrees that it can run at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from gpp.capture.added import AbstractVariants
from gpp.graph.captured import Captured, evaluate
from gpp.graph.op_graph import Op, ReplicaSums, Variant, dtype_bytes
from gpp.mechanisms.tensor_parallel.regions import Sharding, shard

DEGREES = (2, 4)
"""Degrees that are tried: devices of one machine, joined by its fastest links."""


@final
@dataclass(frozen=True, kw_only=True)
class TensorParallelVariants(AbstractVariants):
    """A variant of each operator for every degree at which some of the model runs on shards.

    An operator on shards takes its share of the arithmetic, of the parameters and of what is kept for the backward, and the sums
    over the members that begin and end its region; any other operator runs whole on every member.
    """

    degrees: tuple[int, ...] = DEGREES

    def declared(self, captured: Captured) -> Captured:
        found = [sharding for sharding in (shard(captured, degree) for degree in self.degrees) if sharding.applied]
        if not found:
            return captured
        tables = [_Variants(captured, sharding).table() for sharding in found]
        every = zip(captured.graph.ops, zip(*tables, strict=True), strict=True)
        ops = tuple(replace(op, variants=(*op.variants, *own)) for op, own in every)
        return replace(captured, graph=replace(captured.graph, ops=ops))


VARIANTS = TensorParallelVariants()


class _Variants:
    """The variants of all operators at one degree."""

    def __init__(self, captured: Captured, sharding: Sharding) -> None:
        self.captured, self.sharding = captured, sharding
        graph = captured.graph
        self.owner = {name: i for i, op in enumerate(graph.ops) for name in op.nodes}

    def table(self) -> list[Variant]:
        graph = self.captured.graph
        forward, backward = self._sums()
        receive: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        send: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for tensor in graph.tensors:
            if tensor.name in self.sharding.layouts:
                # A split tensor leaves a stage whole.
                for consumer in tensor.consumers:
                    send[tensor.producer][consumer] += tensor.bytes_per_sample
                    receive[consumer][tensor.producer] += tensor.bytes_per_sample
        return [self._variant(op, forward[i], backward[i], receive[i], send[i]) for i, op in enumerate(graph.ops)]

    def _variant(
        self, op: Op, forward: ReplicaSums, backward: ReplicaSums, receive: Mapping[int, float], send: Mapping[int, float]
    ) -> Variant:
        own = [self.captured.node_of[name] for name in op.nodes]
        calls = [node for node in own if node.kind == "call" and not node.free]
        split = [node for node in calls if node.name in self.sharding.applied]
        share = 1 - len(split) / max(len(calls), 1) * (1 - 1 / self.sharding.degree)
        # A sum is whole on every member, and so is what its readers keep of it.
        keeps = any(self.sharding.applied[node.name].summed for node in split)
        return Variant(
            degree=self.sharding.degree,
            share=share,
            params=self._params(op),
            saved_bytes=op.saved_bytes * (1.0 if keeps else share),
            receive=tuple(receive.items()),
            send=tuple(send.items()),
            forward_sums=forward,
            backward_sums=backward,
        )

    def _params(self, op: Op) -> float:
        """Share of an operator's parameter bytes that a member holds."""
        split = {self.captured.node_of[name].target for name in self.sharding.layouts}
        sizes = {name: self.captured.graph.param_of[name].num_bytes for name in op.params}
        whole = sum(sizes.values())
        held = sum(size / (self.sharding.degree if name in split else 1) for name, size in sizes.items())
        return held / whole if whole else 1.0

    def _sums(self) -> tuple[dict[int, ReplicaSums], dict[int, ReplicaSums]]:
        """Operator -> sums over the members that it waits for in a forward, and in a backward."""
        forward: dict[int, ReplicaSums] = defaultdict(ReplicaSums)
        backward: dict[int, ReplicaSums] = defaultdict(ReplicaSums)
        entered: set[str] = set()
        for node in self.captured.nodes:
            applied, number = self.sharding.applied.get(node.name), self.owner.get(node.name)
            if applied is None or number is None:
                continue
            if applied.summed:
                forward[number] = forward[number].plus(self._bytes(node.name))
            for name in self.sharding.entered(node):
                if self.captured.node_of[name].requires_grad and name not in entered:
                    entered.add(name)
                    backward[number] = backward[number].plus(self._bytes(name))
        return forward, backward

    def _bytes(self, name: str) -> float:
        """Bytes per sample of a whole tensor; 0 of a parameter, which is summed once a micro-batch and small."""
        node = self.captured.node_of[name]
        if node.kind == "param":
            return 0.0
        batch = self.captured.batch or 1
        return math.prod(int(evaluate(extent, batch)) for extent in node.shape or ()) * dtype_bytes(node.dtype or "float32") / batch
