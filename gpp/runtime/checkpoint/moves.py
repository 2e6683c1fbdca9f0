"""Who saves which tensor of a training, and which tensors change devices where another plan takes over.

What a device begins with under the next plan is what it would read from a checkpoint made at that step: a tensor that replicas may
hold differently (a buffer that forwards write) is the first holder's, and so is what a device lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpp.capture.codec import dtype_of
from gpp.capture.stage import leaves_of
from gpp.runtime.job import Job, owners_of


class Move(NamedTuple):
    """A weight, buffer or constant that one device sends to another.

    Args:
        state: whether the optimizer's state goes with it.
    """

    name: str
    source: int
    destination: int
    state: bool


def _leaves(job: Job) -> list[frozenset[str]]:
    """Names of the tensors that each stage holds."""
    return [leaves_of(job.captured, job.graph.nodes_of(stage.ops)) for stage in job.plan.stages]


def _first_holders(job: Job, leaves: Sequence[frozenset[str]]) -> dict[str, int]:
    """Name -> the first device of the first stage that holds the tensor."""
    first = dict[str, int]()
    for stage, names in zip(job.plan.stages, leaves, strict=True):
        for name in names:
            first.setdefault(name, stage.devices[0])
    return first


def owned_names(job: Job, device: int, names: Iterable[str]) -> frozenset[str]:
    """The names among those that a device holds whose tensors it saves: a tensor is saved once, by its owner or its first holder.

    Replicas hold equal parameters, and so do stages that share one; of buffers, which replicas update by the samples
    that they see, the first replica's are kept.
    """
    first = _first_holders(job, _leaves(job)) | owners_of(job)
    # A hand-written block may hold tensors that the captured graph does not name.
    otherwise = next((stage.devices[0] for stage in job.plan.stages if device in stage.devices), device)
    return frozenset(name for name in names if first.get(name, otherwise) == device)


def moves(old: Job, new: Job) -> tuple[Move, ...]:
    """What is sent where `new` takes over from `old`, in one order on all devices; both have the same model and devices."""
    before, after = _leaves(old), _leaves(new)
    owned, owns = owners_of(old), owners_of(new)
    first = _first_holders(old, before) | owned
    trained = {name for names in old.graph.trained_by for name in names}
    written = {name for node in old.captured.nodes for name in node.mutates}
    out = set[Move]()
    for device, stages in new.plan.stages_of_device.items():
        had = {name for s in old.plan.stages_of_device.get(device, ()) for name in before[s]}
        for name in {name for s in stages for name in after[s]}:
            state = name in trained and owns.get(name, device) == device
            has = name in had and name not in written and (not state or owned.get(name, device) == device)
            if (source := first[name]) != device and not has:
                out.add(Move(name, source, device, state))
    return tuple(sorted(out))


def moved_bytes(job: Job, sent: Iterable[Move], state_factor: float) -> dict[tuple[int, int], float]:
    """Bytes from each device to each other one.

    Args:
        state_factor: bytes of an optimizer's state for each byte of a weight.
    """
    out: dict[tuple[int, int], float] = {}
    leaf = {node.target: node for node in job.captured.nodes if node.kind in ("param", "buffer", "constant")}
    for move in sent:
        node, pair = leaf[move.name], (move.source, move.destination)
        size = math.prod(node.shape or ()) * dtype_of(node.dtype or "float32").itemsize
        out[pair] = out.get(pair, 0.0) + size * (1.0 + state_factor * move.state)
    return out
