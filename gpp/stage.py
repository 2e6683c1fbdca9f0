"""One stage of a plan, and what mechanisms say of it."""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator

from gpp.errors import InvalidFile
from gpp.graph.op_graph import Tensor
from gpp.mechanism import found
from gpp.routing import Piece, pieces
from gpp.serialization import from_json, to_json
from gpp.settings import Count, Natural

Edges = Sequence[tuple[int, int]]
"""Source and destination of every edge between stages, which are in a topological order."""

EdgeTensors = Mapping[tuple[int, int], Sequence[Tensor]]
"""The same edges, in the same order, with the tensors that go over each; none over one that is an order only."""


def neighbours(edges: Iterable[tuple[int, int]], count: int) -> tuple[tuple[int, ...], ...]:
    """For each of `count` stages the other ends of the edges that begin there, in the edges' order.

    >>> neighbours([(0, 1), (0, 2), (1, 2)], 3)
    ((1, 2), (2,), ())
    """
    out: list[list[int]] = [[] for _ in range(count)]
    for s, t in edges:
        out[s].append(t)
    return tuple(map(tuple, out))


class AbstractStageValue(ABC):
    """What one mechanism says of a stage: a frozen dataclass, which plan.json has under the name of the mechanism's package."""

    name: ClassVar[str]
    """The last part of the package's name."""
    spares: ClassVar[bool] = False
    """Whether the stage holds less than plain passes do, and takes time for it."""
    periodic: ClassVar[bool] = False
    """Whether the devices of the whole plan run side by side, each doing in a period what others have prepared in periods before: a
    stage is as late as the samples in flight say, and has updates of its own."""
    dealt: ClassVar[str] = ""
    """How replicas have micro-batches, in words, of a mechanism by which not all of them split each (`stride`)."""
    codes: ClassVar[bool] = False
    """Whether the stage's messages forwards are other than its tensors are; the mechanism's bill then says what they take."""
    backward: ClassVar[tuple[str, ...]] = ()
    """Kinds of which the stage's backward consists, whatever the schedule; none: the schedule says."""
    earlier: ClassVar[Mapping[str, str]] = {}
    """Fields that earlier plan.json files have in the stage itself, with their names in the value, where each has a default."""
    without: ClassVar[str] = ""
    """The setting under which no stage has the value, for messages."""

    @property
    def devices_per_replica(self) -> int:
        """Devices that share one replica of the stage."""
        return 1

    def stride(self, replicas: int) -> int:
        """Micro-batches in a row of which each of so many replicas has a part in one, which divides them."""
        return 1

    @property
    def acts(self) -> bool:
        """Whether the stage's program has actions of the mechanism's own, so that a step is what a simulation says, no formula."""
        return False

    @property
    def lacking(self) -> tuple[str, str] | None:
        """What an engine that runs plain passes alone does not do for the stage, and how to go without, in words; None: nothing."""
        return None

    @property
    def beside(self) -> tuple[int, ...]:
        """Devices that have a part in the stage's passes, beside its own."""
        return ()

    @property
    def adding(self) -> tuple[int, ...]:
        """Those of them that make gradients of the stage's weights, which are summed with what its own device makes."""
        return ()

    @property
    def predicted_only(self) -> bool:
        """Whether no job is made of the stage where nothing runs, because only an engine can say whether it could."""
        return False

    @classmethod
    def upgraded(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The content of a plan.json, its stages a list, with the value where it stands now: some have been fields of the plan."""
        return content

    @classmethod
    def check_plan(cls, stages: tuple[Stage, ...], edges: EdgeTensors, num_devices: int, *, trains: bool) -> None:
        """Prove that the values of all stages fit together, once for a plan that has one.

        Args:
            trains: whether any stage has backward passes.

        Raises:
            InvalidPlan: names stage, field, value, rule and fix.
        """
        return None

    def check_pipeline(self, s: int, *, trains: bool) -> None:
        """Refuse the value, of stage number s, in a pipeline that drains before every update, or that trains nothing.

        Raises:
            InvalidPlan: names stage, field, value, rule and fix.
        """
        return None

    def within(self, ops: tuple[int, ...]) -> AbstractStageValue | None:
        """The value of the stage once it has these of its operators alone; None: it then has no value."""
        return self

    def check(self, s: int, stage: Stage, stages: tuple[Stage, ...], *, backward: bool) -> None:
        """Prove that the value fits its stage, which is number s of `stages`.

        Args:
            backward: whether the stage has backward passes.

        Raises:
            InvalidPlan: names stage, field, value, rule and fix.
        """
        return None

    def words(self) -> str:
        """What the report says beside the stage; empty for nothing."""
        return ""


V = TypeVar("V", bound=AbstractStageValue)


def value_of(name: str, **values: Any) -> AbstractStageValue:
    """The value of the mechanism of that name with these fields, for planners that know the name alone."""
    known: dict[str, type[AbstractStageValue]] = found("stage", "Value", type)
    return known[name](**values)


def _by_name(given: Any) -> tuple[AbstractStageValue, ...]:
    """The values of a stage, from a file (name -> fields) or as they are."""
    if isinstance(given, tuple):
        return given
    if not isinstance(given, dict):
        raise ValueError("be an object with the fields of each mechanism under its name")
    known: dict[str, type[AbstractStageValue]] = found("stage", "Value", type)
    out = []
    for name, fields in sorted(given.items()):
        if name not in known:
            raise ValueError(f"name mechanisms, which are {', '.join(known) or 'none'}, and not {name!r}")
        try:
            out.append(from_json(known[name], json.dumps(fields)))
        except InvalidFile as error:
            raise ValueError(f"fit {name!r}, of which {error.place} {error.rule}") from None
    return tuple(out)


def with_earlier(content: Any) -> Any:
    """The content of a plan.json in which every field stands where it does now: some were fields of a stage or of the plan once.

    What is no plan comes back as it is, to be refused as such.
    """
    stages = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(stages, list):
        return content
    known: dict[str, type[AbstractStageValue]] = found("stage", "Value", type)
    moving = {field: (name, kind) for name, kind in known.items() for field in kind.earlier}
    content = {**content, "stages": [_nested(stage, moving) for stage in stages]}
    for kind in known.values():
        content = kind.upgraded(content)
    return content


def _nested(stage: Any, moving: Mapping[str, tuple[str, type[AbstractStageValue]]]) -> Any:
    values = stage.get("mechanisms", {}) if isinstance(stage, dict) else None
    if not isinstance(values, dict) or moving.keys().isdisjoint(stage):
        return stage
    for field, (name, kind) in moving.items():
        own = kind.earlier[field]
        if stage.get(field) not in (None, [], getattr(kind(), own)):
            inner = values.get(name, {})
            if not isinstance(inner, dict):
                return stage
            values = {**values, name: {**inner, own: stage[field]}}
    return {**{field: value for field, value in stage.items() if field not in moving}, "mechanisms": values}


def _named(values: tuple[AbstractStageValue, ...]) -> dict[str, Any]:
    return {value.name: json.loads(to_json(value)) for value in values}


Values = Annotated[
    tuple[AbstractStageValue, ...],
    PlainValidator(_by_name),
    PlainSerializer(_named),
    # Left out of files where there are none: plans of plain stages read as they always did.
    Field(exclude_if=lambda values: not values),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A convex set of operators on its own devices (GraphPipe, section 3: S = <G, b, D, order>).

    Args:
        ops: operator ids, ascending.
        devices: device ids, ascending; more than one means data parallelism inside the stage.
        microbatch_size: samples over all replicas (b); where it does not divide the mini-batch, the last one is smaller.
        k: the k of kFkB.
        in_flight: samples whose activations the stage may hold at a time (i), over all replicas: a multiple of
            `unit`, so that all may hold equally many micro-batches, whole or in part (`ahead`).
        mechanisms: what mechanisms say of the stage, in the order of their names.
    """

    ops: tuple[Natural, ...]
    devices: tuple[Natural, ...]
    microbatch_size: Count
    in_flight: Count
    k: Count = 1
    mechanisms: Values = ()

    def __getitem__(self, kind: type[V]) -> V | None:
        """What a mechanism says of the stage; None where it says nothing."""
        return next((value for value in self.mechanisms if type(value) is kind), None)

    def having(self, value: AbstractStageValue) -> Stage:
        """The stage with a mechanism's value, in place of the one that it has of that mechanism."""
        others = (other for other in self.mechanisms if other.name != value.name)
        return replace(self, mechanisms=tuple(sorted((*others, value), key=lambda one: one.name)))

    def without(self, kind: type[AbstractStageValue]) -> Stage:
        """The stage of which a mechanism says nothing."""
        left = tuple(value for value in self.mechanisms if type(value) is not kind)
        return self if len(left) == len(self.mechanisms) else replace(self, mechanisms=left)

    @property
    def beside(self) -> tuple[int, ...]:
        """Devices that have a part in the stage's passes, beside its own, ascending."""
        return tuple(sorted({device for value in self.mechanisms for device in value.beside}))

    @property
    def adding(self) -> tuple[int, ...]:
        """Those of them whose gradients of the stage's weights are summed with its own device's, ascending."""
        return tuple(sorted({device for value in self.mechanisms for device in value.adding}))

    def within(self, ops: tuple[int, ...]) -> Stage:
        """The stage with other operators, of which those that it has already run as they did."""
        values = (value.within(ops) for value in self.mechanisms)
        return replace(self, ops=ops, mechanisms=tuple(value for value in values if value is not None))

    @property
    def spares(self) -> bool:
        """Whether the stage holds less than plain passes do."""
        return any(value.spares for value in self.mechanisms)

    @property
    def keeping(self) -> Stage:
        """The stage that holds what plain passes do."""
        if not self.spares:
            return self
        return replace(self, mechanisms=tuple(value for value in self.mechanisms if not value.spares))

    @property
    def devices_per_replica(self) -> int:
        """Devices that share one replica (t), 1 without a mechanism that says so; replica r is devices r t .. r t + t - 1."""
        return math.prod(value.devices_per_replica for value in self.mechanisms) if self.mechanisms else 1

    @property
    def unshared(self) -> str:
        """The setting under which each replica has one device, for messages; empty where it has."""
        return next((value.without for value in self.mechanisms if value.devices_per_replica > 1), "")

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica."""
        t = self.devices_per_replica
        return tuple(self.devices[i : i + t] for i in range(0, len(self.devices), t))

    def replica_of(self, device: int) -> tuple[int, ...]:
        """The devices of the replica that one of them belongs to; the first one leads it."""
        t = self.devices_per_replica
        at = self.devices.index(device) // t * t
        return self.devices[at : at + t]

    @property
    def sharing(self) -> AbstractStageValue | None:
        """By what replicas share out micro-batches; None: all split each of them."""
        return next((value for value in self.mechanisms if value.dealt), None)

    @property
    def stride(self) -> int:
        """Micro-batches in a row of which a replica has a part in one: replica r in each m that leaves the rest r mod stride."""
        sharing = self.sharing if self.mechanisms else None
        return sharing.stride(len(self.devices) // self.devices_per_replica) if sharing else 1

    @property
    def unit(self) -> int:
        """Samples that pass a stage while each of its replicas has a part in one micro-batch."""
        return self.microbatch_size * self.stride

    @property
    def dealt(self) -> str:
        """How replicas have micro-batches, in words; empty where each has a part in all of them."""
        return self.sharing.dealt if self.sharing and self.stride > 1 else ""

    def first(self, device: int) -> int:
        """The first micro-batch that a device has a part in; the next ones follow by strides."""
        return self.devices.index(device) // self.devices_per_replica % self.stride

    def takers(self, microbatch: int) -> tuple[int, ...]:
        """The devices that pass through a micro-batch, even one with too few samples for some of them."""
        stride = self.stride
        return self.devices if stride == 1 else tuple(d for team in self.replicas[microbatch % stride :: stride] for d in team)

    @property
    def samples(self) -> int:
        """Samples of a micro-batch on each device that has a part in it, at most."""
        return self.share(self.microbatch_size)

    def share(self, num_samples: int) -> int:
        """Samples on each device of a micro-batch of so many, at most."""
        return -(-num_samples * self.devices_per_replica * self.stride // len(self.devices))

    @property
    def ahead(self) -> int:
        """Micro-batches, whole or in part, that a replica may hold at a time."""
        return self.in_flight // self.unit

    def pieces(self, num_samples: int) -> list[Piece]:
        """The samples that each replica has in a pass over `num_samples`: pieces on its first device.

        >>> [tuple(piece) for piece in plan.stages[1].pieces(2)]
        [(1, 0, 0, 1), (1, 1, 1, 2)]
        """
        leaders = self.devices[:: self.devices_per_replica]
        return pieces(leaders, self.microbatch_size, num_samples, self.stride)
