"""The capture and the initial weights of a model, from its settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpp.capture.blocks import capture_blocks
from gpp.capture.build import capture
from gpp.capture.codec import default_dtype
from gpp.capture.faithful.compared import compared
from gpp.capture.stage import initial_state
from gpp.graph.captured import Captured
from gpp.models.base import AbstractModel, TensorSpec
from gpp.models.blocks import Blocks
from gpp.models.losses import loss, metric, module_of

EXAMPLE_BATCH = 4
"""Samples of an example: at least 2, because torch.export specialises sizes 0 and 1."""


def example(spec: TensorSpec, dtype: str, device: str) -> torch.Tensor:
    """A tensor of zeros [EXAMPLE_BATCH, *shape] of the kind that `spec` describes."""
    kind = {"float": getattr(torch, dtype), "int": torch.int64, "bool": torch.bool}[spec.dtype]
    return torch.zeros((EXAMPLE_BATCH, *spec.shape), dtype=kind, device=device)


def capture_model(model: AbstractModel, *, dtype: str, batch: int | None = None) -> Captured:
    """Capture a model with its loss and metric, on the meta device where possible: its weights then take no memory.

    Args:
        batch: size to capture at if the model runs at one batch size only.

    Raises:
        CaptureError: the model cannot be captured; the message names the operation and the user's line.
    """
    device = "cpu" if isinstance(model, Blocks) else "meta"  # a block may look at its data
    with default_dtype(dtype):
        # An unknown loss is refused before the network is built.
        measure, metrics = loss(model.loss), {model.metric: metric(model.metric)} if model.metric else {}
        inputs = {name: example(spec, dtype, device) for name, spec in model.inputs().items()}
        targets = {name: example(spec, dtype, device) for name, spec in model.targets().items()}
        if isinstance(model, Blocks):
            return capture_blocks(model.listed(), inputs, targets, measure, metrics, name=model.name, imports=model.imports)
        with torch.device("meta"):
            network = model.build()
        return capture(network, inputs, targets, measure, metrics, name=model.name, batch=batch, imports=model.imports)


def built(model: AbstractModel, *, seed: int, dtype: str) -> nn.Module:
    """A freshly built model with its weights."""
    torch.manual_seed(seed)
    with default_dtype(dtype):
        return model.build()


def initial_weights(model: AbstractModel, captured: Captured, *, seed: int, dtype: str) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants of a freshly built model and its loss."""
    return state_of(model, captured, built(model, seed=seed, dtype=dtype), dtype=dtype)


def state_of(model: AbstractModel, captured: Captured, network: nn.Module, *, dtype: str) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants of a network, and of the model's loss as it is when it is made."""
    with default_dtype(dtype):
        return initial_state(network, captured, module_of(loss(model.loss)))


def compare(
    model: AbstractModel, captured: Captured, network: nn.Module, rows: Mapping[str, torch.Tensor], *, dtype: str
) -> Captured:
    """A captured model, compared with its network (`gpp.capture.faithful.compared`).

    Args:
        network: as built.
        rows: samples of the run by name, targets as `target:NAME`.
    """
    inputs = {name: rows[name] for name in model.inputs()}
    targets = {name: rows[f"target:{name}"] for name in model.targets()}
    capture_s = captured.checked.capture_s if captured.checked else 0.0
    with default_dtype(dtype):
        return compared(captured, network, inputs, targets, loss(model.loss), capture_s=capture_s)
