"""The zoo: networks that are no chain of layers, trained by a pipeline and by a plain loop in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

import gpp
from gpp import Plan, Progress
from gpp.graph.op_graph import OpGraph
from gpp.models.base import TensorSpec
from gpp.models.losses import loss, loss_terms
from gpp.models.network import Network
from gpp.stage import EdgeTensors
from tests.support.conf import model_named

SIZE, MICROBATCH, STEPS, RATE = 16, 4, 3, 0.05
"""Samples of a mini-batch and of a micro-batch; steps, and the rate of plain SGD."""
TOLERANCE = 1e-12

ROWS: Final = {
    "gpt_small": ("layers.3", "layers.6"),
    "gpt_tied_small": ("layers.3", "layers.6"),
    "block_residuals_small": ("attentions.3", "attentions.6"),
    "hyper_connections_small": ("attentions.1", "attentions.3"),
    "multi_token_small": ("layers.2", "ahead.0"),
    "experts_small": ("layers.1", "layers.3"),
    "unet_small": ("middle", "up.1"),
    "zamba_small": ("layers.2", "layers.4"),
    "flamingo_small": ("layers.2", "layers.5"),
    "translator_small": ("encoder.2", "decoder.1"),
    "whisper_small": ("decoder.0", "decoder.2"),
    "llava_small": ("layers.0", "layers.2"),
    "macaw_small": ("layers.0", "layers.2"),
    "cross_batch_small": ("image", "texts"),
}
"""The networks, the first a plain chain to compare with; and where the second and the third of three stages of a peer begin."""

Batch = tuple[dict[str, Tensor], Tensor]


class Row(NamedTuple):
    """What was found of a network on some workers.

    Args:
        loss, weights: the largest differences from the plain loop, over all steps and at the end.
        apart: bytes of a step, sums of shared weights included, if every stage were sent what it reads.
        predicted, measured: bytes of a step as they are sent.
    """

    model: str
    devices: int
    stages: int
    loss: float
    weights: float
    apart: int
    predicted: int
    measured: int

    @property
    def equal(self) -> bool:
        """Whether losses and weights are those of the plain loop, and the bytes those that were predicted, but for a fraction."""
        return max(self.loss, self.weights) <= TOLERANCE and abs(self.measured - self.predicted) <= 1


def drawn(spec: TensorSpec, samples: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """[samples, *shape] of random values."""
    shape = (samples, *spec.shape)
    if spec.dtype == "float":
        return torch.randn(shape, dtype=dtype, generator=generator)
    found = torch.randint(spec.high or 2, shape, generator=generator)
    return found.bool() if spec.dtype == "bool" else found


def batches(model: Network) -> Iterator[Batch]:
    """A mini-batch for each step; the networks have one target each."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = {name: drawn(spec, SIZE, generator) for name, spec in model.inputs().items()}
        (target,) = (drawn(spec, SIZE, generator) for spec in model.targets().values())
        yield inputs, target


def plain(network: nn.Module, name: str, data: list[Batch]) -> list[float]:
    """Losses of a loop that adds up the gradients of micro-batches; the network is trained by it."""
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=RATE), []
    measure = loss(name)
    for inputs, target in data:
        optimizer.zero_grad()
        total = 0.0
        for lo in range(0, SIZE, MICROBATCH):
            rows = slice(lo, lo + MICROBATCH)
            terms = loss_terms(measure(network(**{key: value[rows] for key, value in inputs.items()}), target[rows]))
            value = torch.stack(list(terms.values())).sum() * (MICROBATCH / SIZE)
            value.backward()
            total += value.item()
        optimizer.step()
        losses.append(total)
    return losses


def trained(name: str, devices: int, folder: Path, strategy: gpp.Strategy | None = None, *overrides: str) -> Row:
    """Train a network both ways.

    Args:
        folder: of the run.
        strategy: 1F1B by GraphPipe without replicas if None, so that each device has stages of its own.
    """
    model = model_named(name, *overrides)
    torch.manual_seed(0)
    network = model.build().double()
    other, data, said = copy.deepcopy(network), list(batches(model)), list[str]()
    planned = gpp.Strategy(name="zoo", planner=gpp.GraphPipe(replication=False), schedule=gpp.OneFOneB())
    with gpp.parallelize(
        network,
        *data[0],
        loss=loss(model.loss),
        devices=devices,
        strategy=gpp.Planning(strategy=strategy or planned, cost=gpp.Analytical(), microbatch_size=MICROBATCH),
        optimizer=gpp.SGD(lr=RATE),
        run=gpp.Run(folder=folder, progress=Progress(warn=said.append)),
    ) as pipeline:
        losses = [pipeline.step(*batch) for batch in data]
    expected = plain(other, model.loss, data)
    plan, graph = pipeline.plan, pipeline.problem.graph
    record = json.loads((folder / "result.json").read_text())
    predicted = record["predicted"]["communication_bytes"]
    assert len(plan.stages_of_device) == devices, f"{name}: the plan leaves devices out"
    pairs = zip([*network.parameters(), *network.buffers()], [*other.parameters(), *other.buffers()], strict=True)
    return Row(
        model=name,
        devices=devices,
        stages=len(plan.stages),
        loss=max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        weights=max((a - b).abs().max().item() for a, b in pairs),
        apart=predicted + sent(plan, graph, plan.edge_tensors(graph)) - sent(plan, graph, plan.carried(graph)),
        predicted=predicted,
        measured=record["measured"]["communication_bytes"],
    )


def sent(plan: Plan, graph: OpGraph, carried: EdgeTensors) -> int:
    """Bytes of a step between stages of different devices, both ways."""
    total = 0.0
    for (s, t), tensors in carried.items():
        if plan.stages[s].devices != plan.stages[t].devices:
            back = plan.runs_backward(s, graph) and plan.runs_backward(t, graph)
            total += sum(tensor.bytes_per_sample * (1 + (back and tensor.differentiable)) for tensor in tensors)
    return round(total * plan.minibatch_size)
