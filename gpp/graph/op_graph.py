"""The operator graph: a model's compute, messages and memory, per sample.

Operators are numbered 0..n-1 in a topological order; sets of operators are Python-int bit masks (bit i = operator i).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from gpp.errors import InvalidGraph
from gpp.serialization import to_json
from gpp.settings import Count, Natural, NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A trainable or frozen parameter under its full name.

    `aliases` are the other names of the same storage (tied weights); `bytes` is counted once.
    `gathered` says that a forward pass reads only the rows that its samples name (an embedding table).
    `copy_of` names the parameter of which this is a copy in the type of the passes; empty for all others.
    """

    name: str
    num_bytes: Natural
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    gathered: bool = False
    copy_of: Annotated[str, Field(exclude_if=lambda name: not name)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A user input or a target.

    A device fetches rows of whole mini-batches: operators that keep a part of them keep no memory of their own."""

    name: str
    bytes_per_sample: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSums:
    """All-reduces over the devices that share one replica.

    Args:
        count: for each micro-batch.
        num_bytes: per sample, of all of them together.
    """

    count: Natural = 0
    num_bytes: NotNegative = 0.0

    def plus(self, num_bytes: float, count: int = 1) -> ReplicaSums:
        """These sums and further ones."""
        return ReplicaSums(count=self.count + count, num_bytes=self.num_bytes + num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another way to run an operator; amounts per sample, on one device.

    A profile declares times as measured, and captures declare shares.

    Args:
        degree: devices that share one replica; 1 for a way to recompute.
        recompute: whether the activations are computed again in the backward pass.
        forward, backward: times, as multiples of the forward plus backward time of the operator as it stands.
        share: of the operator's arithmetic and traffic, from which the cost model makes both times instead.
        params: share of the operator's parameter bytes.
        saved_bytes: activations kept from forward to backward.
        extra_bytes: bytes held once, for the current micro-batch, beyond weights and gradients.
        receive, send: (other operator, bytes) that the devices exchange, each way, if that edge crosses the stage's
            boundary.
        forward_sums, backward_sums: sums over the devices that a pass waits for, wherever the stage is cut.
    """

    degree: Count = 1
    recompute: bool = False
    forward: NotNegative = 0.0
    backward: NotNegative = 0.0
    share: NotNegative | None = None
    params: NotNegative = 1.0
    saved_bytes: NotNegative = 0.0
    extra_bytes: float = 0.0
    receive: tuple[tuple[Natural, NotNegative], ...] = ()
    send: tuple[tuple[Natural, NotNegative], ...] = ()
    forward_sums: ReplicaSums = ReplicaSums()
    backward_sums: ReplicaSums = ReplicaSums()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator, or a convex group of them after coarsening. Amounts are per sample.

    Args:
        name: the module path that the user wrote.
        forward_flops, backward_flops: floating-point operations.
        weight_flops: those of the backward that can be left for later, the gradients of the weights; 0 for an
            operator that reads no trained weights, or whose kernel makes both gradients at once.
        traffic_bytes: bytes that the forward pass reads and writes, weights excluded.
        num_kernels: kernels that one forward pass launches (not per sample).
        saved_bytes: activations kept from forward to backward, own output included if any operator saves it.
        late_bytes: held until these are made, where they are left for later: what they are made of. A storage that several
            operators need is counted with the first.
        transient_bytes: beyond what is saved, at the fullest moment of its forward or its backward (`gpp.graph.transients`).
        again_bytes: beside those, what its set has once while it runs: activations that are made again, of all operators together.
        answer_bytes: of the model's answers that it makes; 0 where the model is trained.
        fixed_bytes: transients at any number of samples, as of a weight's gradient on its way into the sum; not per sample.
        params: names of the parameters read.
        inputs: names of the user inputs and targets read.
        nodes: names of the captured nodes (or hand-written blocks) that make it up.
        variants: other ways to run it; without any, it is never split over devices, and recomputed by the general rule.
    """

    name: str
    kind: str = "op"
    forward_flops: NotNegative = 0.0
    backward_flops: NotNegative = 0.0
    traffic_bytes: NotNegative = 0.0
    num_kernels: Natural = 1
    saved_bytes: NotNegative = 0.0
    weight_flops: NotNegative = 0.0
    late_bytes: NotNegative = 0.0
    transient_bytes: NotNegative = 0.0
    again_bytes: NotNegative = 0.0
    # Left out of files where it says nothing, as of every model that is trained.
    answer_bytes: Annotated[NotNegative, Field(exclude_if=lambda found: not found)] = 0.0
    fixed_bytes: NotNegative = 0.0
    params: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value that one operator hands to others.

    Args:
        name: name of the captured node that makes it.
        producer, consumers: operator ids; consumers ascend.
        bytes_per_sample: its size.
        saved: whether an operator keeps it for backward, so that the producer's `saved_bytes` counts it.
        differentiable: whether a gradient of the same size flows back.
        values: `real` numbers of the graph's dtype, those that a `gelu` makes, or `other` ones (integers, another type).
    """

    name: str
    producer: Natural
    consumers: tuple[Natural, ...]
    bytes_per_sample: NotNegative
    saved: bool = True
    differentiable: bool = True
    # Left out of files where it says nothing: graphs without integers read as they always did.
    values: Annotated[Literal["real", "gelu", "other"], Field(exclude_if=lambda values: values == "real")] = "real"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpAmounts:
    """The amounts of all operators as arrays of shape [num_ops], for cost models.

    Args:
        param_bytes: bytes of all parameters that an operator reads, copies of others left out.
        gathered_bytes: bytes of the gathered parameters among them.
        trains: whether the operator reads a trainable parameter.
        differentiated: whether a backward pass runs through the operator.
    """

    forward_flops: np.ndarray
    backward_flops: np.ndarray
    traffic_bytes: np.ndarray
    num_kernels: np.ndarray
    saved_bytes: np.ndarray
    weight_flops: np.ndarray
    late_bytes: np.ndarray
    param_bytes: np.ndarray
    gathered_bytes: np.ndarray
    trains: np.ndarray
    differentiated: np.ndarray


_OWN = ("forward_flops", "backward_flops", "traffic_bytes", "num_kernels", "saved_bytes", "weight_flops", "late_bytes")
"""Fields of `OpAmounts` that an operator has, too."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of a number of a type, by torch's name of it, as `bfloat16`."""
    found = re.search(r"\d+", dtype)
    return int(found.group()) // 8 if found else 1


def bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, ascending.

    >>> list(bits(0b1101)), mask_of([0, 2, 3])
    ([0, 2, 3], 13)
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(ops: Iterable[int]) -> int:
    """The mask with the given bits set."""
    mask = 0
    for op in ops:
        mask |= 1 << op
    return mask


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """Operators in a topological order and the tensors between them.

    Raises:
        InvalidGraph: an edge does not go forward, an operator is unknown, two operators have one name, or one reads a
            parameter or an input that is not listed.

    >>> graph.num_ops, graph.ops[1].name, [t.consumers for t in graph.tensors], list(bits(graph.successors[0]))
    (2, 'op1', [(1,)], [1])
    """

    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    params: tuple[Param, ...] = ()
    inputs: tuple[Input, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        names = [op.name for op in self.ops]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidGraph(f"operator names must be unique; repeated: {', '.join(twice[:5])}")
        for tensor in self.tensors:
            if not 0 <= tensor.producer < len(self.ops) or any(c >= len(self.ops) for c in tensor.consumers):
                raise InvalidGraph(f"tensor {tensor.name} names an operator that does not exist")
            if any(consumer <= tensor.producer for consumer in tensor.consumers):
                raise InvalidGraph(
                    f"tensor {tensor.name} goes from {names[tensor.producer]} to an earlier operator; "
                    "operators must be given in a topological order without cycles"
                )
        known = {param.name for param in self.params}
        for op in self.ops:
            if missing := [name for name in op.params if name not in known]:
                raise InvalidGraph(f"operator {op.name} reads unknown parameters: {', '.join(missing[:5])}")
            if missing := sorted({*op.inputs} - {given.name for given in self.inputs}):
                raise InvalidGraph(f"operator {op.name} reads unknown inputs: {', '.join(missing[:5])}")

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    @cached_property
    def all_mask(self) -> int:
        return (1 << len(self.ops)) - 1

    @cached_property
    def successors(self) -> tuple[int, ...]:
        """Mask of direct successors of each operator."""
        out = [0] * len(self.ops)
        for tensor in self.tensors:
            out[tensor.producer] |= mask_of(tensor.consumers)
        return tuple(out)

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """Mask of direct predecessors of each operator."""
        out = [0] * len(self.ops)
        for tensor in self.tensors:
            for consumer in tensor.consumers:
                out[consumer] |= 1 << tensor.producer
        return tuple(out)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Mask of every operator reachable from each one, itself excluded."""
        out = [0] * len(self.ops)
        for op in reversed(range(len(self.ops))):
            for nxt in bits(self.successors[op]):
                out[op] |= out[nxt] | 1 << nxt
        return tuple(out)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Mask of every operator from which each one is reachable, itself excluded."""
        out = [0] * len(self.ops)
        for op in range(len(self.ops)):
            for prev in bits(self.predecessors[op]):
                out[op] |= out[prev] | 1 << prev
        return tuple(out)

    @cached_property
    def consumer_masks(self) -> tuple[int, ...]:
        """Mask of the consumers of each tensor."""
        return tuple(mask_of(tensor.consumers) for tensor in self.tensors)

    @cached_property
    def tensors_of(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tensors that each operator makes or reads, ascending."""
        out: list[list[int]] = [[] for _ in self.ops]
        for i, tensor in enumerate(self.tensors):
            for op in (tensor.producer, *tensor.consumers):
                out[op].append(i)
        return tuple(tuple(indices) for indices in out)

    def touching(self, mask: int) -> list[int]:
        """Indices of the tensors that operators of a set make or read, ascending."""
        return sorted({i for op in bits(mask) for i in self.tensors_of[op]})

    def nodes_of(self, ops: Iterable[int]) -> list[str]:
        """Names of the captured nodes of operators, in their order."""
        return [node for op in ops for node in self.ops[op].nodes]

    @cached_property
    def _made(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tensors that each operator makes."""
        return tuple(tuple(i for i in own if self.tensors[i].producer == op) for op, own in enumerate(self.tensors_of))

    def made_by(self, mask: int) -> list[int]:
        """Indices of the tensors that operators of a set make, ascending."""
        return sorted(i for op in bits(mask) for i in self._made[op])

    @cached_property
    def trained_by(self) -> tuple[tuple[str, ...], ...]:
        """Trainable parameters that each operator reads."""
        return tuple(tuple(name for name in op.params if self.param_of[name].trainable) for op in self.ops)

    @cached_property
    def shared_by(self) -> tuple[tuple[str, ...], ...]:
        """Trainable parameters of each operator that another operator reads too."""
        return tuple(tuple(name for name in names if self.readers[name].bit_count() > 1) for names in self.trained_by)

    @cached_property
    def differentiated(self) -> int:
        """Mask of the operators that backward passes run through.

        The other operators train nothing, hand on no gradients and compute nothing backwards: a frozen tower up to the
        first trainable operator. (They save only their output, if a trained operator reads it.)
        """
        out = mask_of(i for i, op in enumerate(self.ops) if self.trained_by[i] or op.backward_flops > 0)
        for tensor in self.tensors:
            if tensor.differentiable:
                out |= mask_of((tensor.producer, *tensor.consumers))
        return out

    @cached_property
    def readers(self) -> dict[str, int]:
        """Mask of the operators that read each parameter."""
        out = {param.name: 0 for param in self.params}
        for i, op in enumerate(self.ops):
            for name in op.params:
                out[name] |= 1 << i
        return out

    @cached_property
    def rows(self) -> tuple[tuple[float, int], ...]:
        """Bytes per sample of each input that somebody reads, and the mask of its readers."""
        read = [(own.bytes_per_sample, mask_of(i for i, op in enumerate(self.ops) if own.name in op.inputs)) for own in self.inputs]
        return tuple((size, readers) for size, readers in read if readers)

    def is_convex(self, mask: int) -> bool:
        """Whether every path between two operators of the set stays inside it."""
        below = above = 0
        for op in bits(mask):
            below |= self.descendants[op]
            above |= self.ancestors[op]
        return not below & above & ~mask

    @cached_property
    def param_of(self) -> dict[str, Param]:
        return {param.name: param for param in self.params}

    @cached_property
    def amounts(self) -> OpAmounts:
        params = [[p for name in op.params if not (p := self.param_of[name]).copy_of] for op in self.ops]
        return OpAmounts(
            **{name: np.array([getattr(op, name) for op in self.ops], dtype=float) for name in _OWN},
            param_bytes=np.array([sum(param.num_bytes for param in read) for read in params], dtype=float),
            gathered_bytes=np.array([sum(param.num_bytes for param in read if param.gathered) for read in params], dtype=float),
            trains=np.array([any(param.trainable for param in read) for read in params], dtype=bool),
            differentiated=np.array([self.differentiated >> i & 1 for i in range(self.num_ops)], dtype=bool),
        )

    @cached_property
    def _shares(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def weight_share(self) -> np.ndarray:
        """[num_ops] share of the backward's FLOPs that the gradients of the weights take, where they can be left for later."""
        whole = self.amounts.backward_flops
        return np.divide(self.amounts.weight_flops, whole, out=np.zeros_like(whole), where=whole > 0)

    def shares(self, degree: int) -> np.ndarray:
        """[num_ops] the share of each operator's work that one of `degree` devices does; 1 where no variant says so."""
        if degree not in self._shares:
            ways = [next((v for v in op.variants if v.degree == degree and not v.recompute), None) for op in self.ops]
            self._shares[degree] = np.array([1.0 if v is None or v.share is None else v.share for v in ways])
        return self._shares[degree]

    @cached_property
    def fingerprint(self) -> str:
        """Content hash: two graphs with the same hash give the same plans."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]
