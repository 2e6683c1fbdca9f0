"""The fixed costs of this machine and runtime beside operators, measured once: small chains are rehearsed on two workers.

The chains have almost nothing to compute, messages of three lengths, of one tensor or of several, and one or several
micro-batches, so that each constant shows by itself:

* a send, for its length and its number of tensors: the events of sends;
* a pass, beside the call of its stage, a step, and a tensor taken out of a message: what workers compute outside of
  events, for the numbers of passes and of such tensors;
* the way of a message until its reader goes on: with one micro-batch both workers wait for each other, so a
  period is what both compute, and twice this;
* a sum of gradients: two replicas without messages.

Writing answers to a file needs no workers.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from gpp.cluster import Cluster, Link
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.profiled import Setting
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.data.synthetic import Synthetic
from gpp.files import anonymous
from gpp.graph.captured import Captured
from gpp.graph.op_graph import mask_of
from gpp.models.base import AbstractModel
from gpp.models.dotted import source_hash
from gpp.models.network import flat
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.planners.chains.single import Single
from gpp.runtime.job import Job, assemble
from gpp.runtime.rehearsal.rehearse import DeviceTimes, Rehearsals
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.serialization import to_json, unseal
from gpp.settings import NotNegative, Positive, Share
from gpp.strategy import Strategy

STEPS = 24
"""Steps of each chain; the first two do not count."""

WIRE = 1e12
"""Bytes a second of a message between its two copies, both of which a processor makes: there is no wire."""


ANSWERS, ANSWER_BYTES = 32, 1 << 18
"""Blocks that are written as answers are, and the bytes of each."""


class TwoStageChain(NamedTuple):
    """Two stages in a row, with one tensor or several between them."""

    width: int
    size: int
    """Samples of a micro-batch."""
    microbatches: int
    """Micro-batches."""
    tensors: int = 1
    """Tensors of a message."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return 4 * self.width * self.size * self.tensors


CHAINS = (
    TwoStageChain(16, 8, 1),
    TwoStageChain(16, 8, 16),
    TwoStageChain(16, 8, 16, 8),
    TwoStageChain(256, 64, 1),
    TwoStageChain(256, 64, 8),
    TwoStageChain(512, 256, 1),
)
"""Messages of 512 bytes, of eight tensors of 512 bytes, of 64 KB and of 512 KB."""

REPLICAS = (32, 512)
"""Widths of models on two replicas, whose gradients are summed: 8 KB and 2.1 MB."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """The constants of a machine.

    Args:
        setting: of the measurement.
        fixed: of actions; those of a pass are its seconds outside of its stage.
        latency_s: seconds from the end of a send until its reader, which waits, goes on.
        sum_s, sum_s_per_byte: seconds of an all-reduce between two workers.
        others: share of the machine's processors that other programs had meanwhile.
    """

    setting: Setting
    fixed: Overheads
    latency_s: NotNegative
    sum_s: NotNegative
    sum_s_per_byte: Positive
    others: Share = 0.0

    def overheads(self, pass_s: tuple[float, float]) -> Overheads:
        """Fixed costs for the simulator.

        Args:
            pass_s: seconds of a forward and of a backward of a stage that computes nothing.
        """
        fixed = self.fixed
        return replace(fixed, forward_s=pass_s[0] + fixed.forward_s, backward_s=pass_s[1] + fixed.backward_s)

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


def machine_path(cache_dir: str, setting: Setting, *, shared_memory: bool, crowded: bool) -> Path:
    """The file of the constants. The machine and the runtime's own code make its name."""
    words = f"{to_json(setting)} {shared_memory} {crowded} {_runtime_hash()}"
    return Path(cache_dir).expanduser() / "machines" / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def known(path: Path) -> MachineCosts | None:
    """The constants on disk; None if there are none, or they cannot be read."""
    return unseal(MachineCosts, path)


def measure(rehearsals: Rehearsals, setting: Setting, *, shared_memory: bool, crowded: bool) -> MachineCosts:
    """Rehearse the small chains, and fit the constants.

    Args:
        crowded: whether the two workers share a processor, so that whoever waits sleeps and has to be woken.

    Raises:
        WorkerFailed: a worker failed.
    """
    found: dict[TwoStageChain, tuple[DeviceTimes, ...]] = {}
    processors = 1 if crowded else 0
    for chain in CHAINS:
        job, weights = _job(chain, replicas=1, shared_memory=shared_memory)
        found[chain] = rehearsals.run(job, weights, predicted_s=0.05, processors=processors)
    sums: list[tuple[float, float]] = []
    for width in REPLICAS:
        job, weights = _job(TwoStageChain(width, 8, 1), replicas=2, shared_memory=shared_memory)
        devices = rehearsals.run(job, weights, predicted_s=0.05, processors=processors)
        num_bytes = sum(param.num_bytes for param in job.graph.params)
        sums.append((num_bytes, min(times.waited_s for times in devices)))
    others = max(times.others for devices in found.values() for times in devices)
    costs = fit(found, sums, setting)
    return replace(costs, fixed=replace(costs.fixed, answer_s_per_byte=_written_s_per_byte()), others=others)


def _written_s_per_byte() -> float:
    """Seconds to write a byte of an answer: the median of blocks that go to fresh places of a file."""
    block, took = os.urandom(ANSWER_BYTES), list[float]()
    with anonymous() as file:
        os.truncate(file.fileno(), ANSWERS * ANSWER_BYTES)
        for number in range(ANSWERS):
            begin = time.perf_counter()
            os.pwrite(file.fileno(), block, number * ANSWER_BYTES)
            took.append(time.perf_counter() - begin)
    return statistics.median(took) / ANSWER_BYTES


def fit(
    chains: Mapping[TwoStageChain, Sequence[DeviceTimes]], sums: Sequence[tuple[float, float]], setting: Setting
) -> MachineCosts:
    """The constants that explain rehearsals of chains of two stages, and of two replicas.

    Args:
        chains: both devices of each.
        sums: (bytes, seconds) of sums over two devices.
    """
    both = [(chain, times) for chain, devices in chains.items() for times in devices]
    message_s, send, send_tensor = _linear(
        ((1.0, num_bytes, chain.tensors - 1), s) for chain, times in both for num_bytes, s in times.sends
    )
    # Each device receives a message a micro-batch: forwards the second, backwards the first.
    step_s, pass_s, receive_tensor = _linear(
        ((1.0, times.passes, (chain.tensors - 1) * chain.microbatches), times.rest_s) for chain, times in both
    )
    ways = []
    for chain, (first, second) in chains.items():
        if chain.microbatches == 1:
            # The first worker's own seconds, and all that it waits for: the second's passes and send, and two messages' ways.
            theirs = second.forward_s[1] + second.backward_s[1] + sum(s for _, s in second.sends) + 2 * pass_s
            ways.append(((1.0, chain.num_bytes), max(first.waited_s - theirs, 0.0) / 2))
    latency_s, receive = _linear(ways)
    sum_s, per_byte = _linear(((1.0, num_bytes), s) for num_bytes, s in sums)
    fixed = Overheads(
        forward_s=pass_s,
        backward_s=pass_s,
        message_s=message_s,
        send_s_per_byte=send,
        receive_s_per_byte=receive,
        send_s_per_tensor=send_tensor,
        receive_s_per_tensor=receive_tensor,
        step_s=step_s,
    )
    return MachineCosts(setting=setting, fixed=fixed, latency_s=latency_s, sum_s=sum_s, sum_s_per_byte=max(per_byte, 1.0 / WIRE))


def _linear(points: Iterable[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Coefficients, none negative, of the linear function of (x, y) with the least sum of squared relative errors."""
    from scipy.optimize import nnls

    rows, y = zip(*points, strict=True)
    table, target = np.array(rows, dtype=float), np.maximum(np.array(y, dtype=float), 1e-9)
    # Bytes and counts differ by orders of magnitude.
    unit = np.maximum(table.max(axis=0), 1e-300)
    return tuple(float(x) for x in nnls(table / unit / target[:, None], np.ones_like(target))[0] / unit)


@cache
def _runtime_hash() -> str:
    """A word that changes when the runtime's code changes."""
    root = Path(__file__).parents[1]
    return source_hash(path for folder in ("worker", "transport", "rehearsal") for path in (root / folder).rglob("*.py"))


@cache
def _model(width: int, tensors: int) -> tuple[AbstractModel, Captured]:
    """The model of chains, whatever their micro-batches, and how it is captured."""
    from gpp.capture.examples import capture_model

    model = flat(
        name="machine",
        network="gpp.models.networks.mlp.Streams",
        loss="mse",
        input_specs={"x": {"shape": [width]}},
        target_specs={"y": {"shape": [width]}},
        num_streams=tensors,
        width=width,
    )
    return model, capture_model(model, dtype="float32")


def _job(chain: TwoStageChain, *, replicas: int, shared_memory: bool) -> tuple[Job, Mapping[str, object]]:
    """A chain on two workers, as two stages or as one with two replicas; and its weights."""
    from gpp.capture.examples import initial_weights
    from gpp.cluster import core, local

    model, captured = _model(chain.width, chain.tensors)
    graph, minibatch = captured.graph, chain.size * chain.microbatches
    first = mask_of(range(next(i for i, op in enumerate(graph.ops) if op.name.startswith("second"))))
    parts = [(first, 1), (graph.all_mask & ~first, 1)] if replicas == 1 else [(graph.all_mask, replicas)]
    cluster = local(num_devices=2, device=core())
    problem = Problem(graph=graph, cluster=cluster, cost=Analytical(), minibatch_size=minibatch)
    plan = make_plan(problem, "machine", parts, chain.size)
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
