"""What this machine and this runtime take beside operators, measured once: small chains are rehearsed on two workers.

The chains have almost nothing to compute, messages of three lengths, and one or several micro-batches, so that each
constant shows by itself:

* a send, for its length: the events of sends;
* a pass, beside the call of its stage, and a step: what workers compute outside of events, for the number of passes;
* the way of a message until its reader goes on: with one micro-batch both workers wait for each other, so a
  period is what both compute, and twice this;
* a sum of gradients: two replicas without messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from gpp.cluster import Cluster, Link
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.profiled import Setting
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.data.synthetic import Synthetic
from gpp.graph.op_graph import mask_of
from gpp.models.dotted import source_hash
from gpp.models.network import flat
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.planners.chains.single import Single
from gpp.runtime.job import Job, assemble
from gpp.runtime.rehearsal.rehearse import DeviceTimes, Rehearsals
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.serialization import to_json, unseal
from gpp.settings import NotNegative, Positive
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from gpp.graph.captured import Captured

STEPS = 24
"""Steps of each chain; the first two do not count."""

WIRE = 1e12
"""Bytes a second of a message between its two copies, both of which a processor makes: there is no wire."""

CHAINS = ((16, 8, 1), (16, 8, 16), (256, 64, 1), (256, 64, 8), (512, 256, 1))
"""(width, micro-batch size, micro-batches) of chains of two stages: messages of 512 bytes, 64 KB and 512 KB."""

REPLICAS = (32, 512)
"""Widths of models on two replicas, whose gradients are summed: 17 KB and 4.2 MB."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """The constants of a machine.

    Args:
        setting: of the measurement.
        pass_s: seconds of a pass outside of its stage.
        message_s, send_s_per_byte, receive_s_per_byte, step_s: as `Overheads` has them.
        latency_s: seconds from the end of a send until its reader, which slept, goes on.
        sum_s, sum_s_per_byte: seconds of an all-reduce between two workers.
    """

    setting: Setting
    pass_s: NotNegative
    message_s: NotNegative
    send_s_per_byte: NotNegative
    receive_s_per_byte: NotNegative
    step_s: NotNegative
    latency_s: NotNegative
    sum_s: NotNegative
    sum_s_per_byte: Positive

    def overheads(self, pass_s: tuple[float, float]) -> Overheads:
        """Fixed costs for the simulator.

        Args:
            pass_s: seconds of a forward and of a backward of a stage that computes nothing.
        """
        return Overheads(
            forward_s=pass_s[0] + self.pass_s,
            backward_s=pass_s[1] + self.pass_s,
            message_s=self.message_s,
            send_s_per_byte=self.send_s_per_byte,
            receive_s_per_byte=self.receive_s_per_byte,
            step_s=self.step_s,
        )

    def cluster(self, cluster: Cluster) -> Cluster:
        """A cluster of this machine's processors with links as measured."""
        link = Link(latency_s=self.latency_s, bandwidth_bytes_per_s=WIRE)
        return replace(
            cluster,
            intra_node=link,
            inter_node=link,
            # Between two devices a ring has two steps of half the bytes each.
            collective_latency_s=self.sum_s / 2,
            collective_efficiency=1.0 / self.sum_s_per_byte / WIRE,
        )


def machine_path(cache_dir: str, setting: Setting, shared_memory: bool) -> Path:
    """Where the constants are kept: named by the machine and by the runtime's own code."""
    words = f"{to_json(setting)} {shared_memory} {_runtime_hash()}"
    return Path(cache_dir).expanduser() / "machines" / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def known(path: Path) -> MachineCosts | None:
    """The constants on disk; None if there are none, or they cannot be read."""
    return unseal(MachineCosts, path, path.stem)


def measure(rehearsals: Rehearsals, setting: Setting, *, shared_memory: bool) -> MachineCosts:
    """Rehearse the small chains, and fit the constants.

    Raises:
        WorkerFailed: a worker failed.
    """
    found: dict[tuple[int, int, int], tuple[DeviceTimes, ...]] = {}
    for width, size, count in CHAINS:
        job, weights = _job(width, size, count, replicas=1, shared_memory=shared_memory)
        found[width, size, count] = rehearsals.run(job, weights, predicted_s=0.05)
    sums: list[tuple[float, float]] = []
    for width in REPLICAS:
        job, weights = _job(width, 8, 1, replicas=2, shared_memory=shared_memory)
        devices = rehearsals.run(job, weights, predicted_s=0.05)
        num_bytes = sum(param.num_bytes for param in job.graph.params)
        sums.append((num_bytes, min(times.waited_s for times in devices)))
    return fit(found, sums, setting)


def fit(
    chains: Mapping[tuple[int, int, int], Sequence[DeviceTimes]], sums: Sequence[tuple[float, float]], setting: Setting
) -> MachineCosts:
    """The constants that explain rehearsals of chains of two stages, and of two replicas.

    Args:
        chains: (width, micro-batch size, micro-batches) -> both devices.
        sums: (bytes, seconds) of sums over two devices.
    """
    message_s, send = _line([pair for devices in chains.values() for times in devices for pair in times.sends])
    step_s, pass_s = _line([(times.passes, times.rest_s) for devices in chains.values() for times in devices])
    ways = []
    for (width, size, count), (first, second) in chains.items():
        if count == 1:
            # The first worker's own seconds, and all that it waits for: the second's passes and send, and two messages' ways.
            theirs = second.forward_s[1] + second.backward_s[1] + sum(s for _, s in second.sends) + 2 * pass_s
            ways.append((4.0 * width * size, max(first.waited_s - theirs, 0.0) / 2))
    latency_s, receive = _line(ways)
    sum_s, per_byte = _line(sums)
    return MachineCosts(
        setting=setting,
        pass_s=pass_s,
        message_s=message_s,
        send_s_per_byte=send,
        receive_s_per_byte=receive,
        step_s=step_s,
        latency_s=latency_s,
        sum_s=sum_s,
        sum_s_per_byte=max(per_byte, 1.0 / WIRE),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope, neither negative, of the line through (x, y) with the least sum of squared relative errors."""
    x, y = np.array(points, dtype=float).T
    scale = 1.0 / np.maximum(y, 1e-9)
    table = np.stack([np.ones_like(x), x], axis=1) * scale[:, None]
    offset, slope = np.linalg.lstsq(table, y * scale, rcond=None)[0]
    if slope < 0:
        return float(np.median(y)), 0.0
    if offset < 0:
        return 0.0, float(np.median(y[x > 0] / x[x > 0]))
    return float(offset), float(slope)


@cache
def _runtime_hash() -> str:
    """A word that changes when the runtime's code changes."""
    root = Path(__file__).parents[1]
    return source_hash(path for folder in ("worker", "transport", "rehearsal") for path in (root / folder).rglob("*.py"))


def _job(width: int, size: int, count: int, *, replicas: int, shared_memory: bool) -> tuple[Job, Mapping[str, object]]:
    """A chain of two layers on two workers, as two stages or as one with two replicas; and its weights."""
    from gpp.capture.examples import capture_model, initial_weights
    from gpp.cluster import core, local

    model = flat(
        name="machine",
        network="gpp.models.networks.mlp.MLP",
        loss="mse",
        input_specs={"x": {"shape": [width]}},
        target_specs={"y": {"shape": [width]}},
        num_blocks=2,
        width=width,
    )
    captured: Captured = capture_model(model, dtype="float32")
    graph, minibatch = captured.graph, size * count
    first = mask_of(range(next(i for i, op in enumerate(graph.ops) if "blocks.1" in op.name)))  # the first of two blocks
    parts = [(first, 1), (graph.all_mask & ~first, 1)] if replicas == 1 else [(graph.all_mask, replicas)]
    cluster = local(num_devices=2, device=core())
    problem = Problem(graph=graph, cluster=cluster, cost=Analytical(), minibatch_size=minibatch)
    plan = make_plan(problem, "machine", parts, size)
    strategy = Strategy(name="machine", planner=Single(), schedule=OneFOneB())
    data = Synthetic(num_samples=minibatch, num_test_samples=1, noise=0.5)
    job = assemble(
        captured,
        problem,
        plan,
        strategy,
        optimizer=SGD(lr=1e-3, momentum=0.0),
        data=data,
        model=model,
        steps=STEPS,
        dtype="float32",
        seed=0,
        train_samples=minibatch,
        shared_memory=shared_memory,
        final_weights=False,
    )
    return job, initial_weights(model, captured, seed=0, dtype="float32")
