"""Inputs of models in containers, and constants among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.app.batches import same_constants
from gpp.capture.build import capture
from gpp.capture.given import given
from gpp.errors import CaptureError, InvalidConfig


@dataclass
class Clip:
    wave: Tensor
    rate: int = 3


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Takes(nn.Module):
    """Arguments of every kind, some of them by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, clip: Clip, *, pair: Any = None, deep: Any = None, scale: float = 1.0, on: bool = False) -> Tensor:
        y = self.inner(x) + clip.wave * clip.rate * scale
        if on:
            y = y + deep["a"]["b"][1] - pair.second
        return self.outer(y)


def inputs(batch: int) -> dict[str, Any]:
    x, wave, first, second, one, two = (torch.randn(batch, 4, dtype=torch.float64) for _ in range(6))
    return {"x": x, "clip": Clip(wave), "pair": Pair(first, second), "deep": {"a": {"b": [one, two]}}, "scale": 0.5, "on": True}


def test_containers_are_taken_apart_and_put_together() -> None:
    asked = inputs(3)
    found = given(Takes(), asked)
    assert list(found.tensors) == ["x", "clip.wave", "pair.first", "pair.second", "deep.a.b.0", "deep.a.b.1"]
    assert found.constants == {"clip.rate": 3, "scale": 0.5, "on": True}
    positional, named = found.arguments(found.tensors)
    assert not positional and named == asked and type(named["clip"]) is Clip and type(named["pair"]) is Pair
    assert (
        given(Takes(), (asked["x"], asked["clip"])).arguments({"x": asked["x"], "clip.wave": asked["x"]})[0][1].wave is asked["x"]
    )

    @dataclass
    class Whole:
        x: Tensor
        clip: Clip

    assert list(given(Takes(), Whole(asked["x"], asked["clip"])).tensors) == ["x", "clip.wave"]
    assert list(given(nn.Linear(4, 2), asked["clip"]).tensors) == ["input.wave"]  # no parameter has the names of its fields


def test_a_model_with_such_inputs_is_captured() -> None:
    """At any batch size, and equal to the module in two steps of a training."""
    captured = capture(Takes().double(), inputs(2), torch.zeros(2, 2, dtype=torch.float64), F.mse_loss, name="takes")
    assert captured.batch is None and captured.checked and captured.checked.unknown is None
    # One that the model does not read is an input that no operator needs.
    assert captured.inputs == ("x", "clip.wave", "pair.first", "pair.second", "deep.a.b.0", "deep.a.b.1", "target:target")
    assert not any("pair.first" in op.inputs for op in captured.graph.ops)


def test_what_is_no_input_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"inputs=object: 'x' must be a tensor, batch first, a boolean, a number"):
        given(Takes(), {"x": object()})
    with pytest.raises(InvalidConfig, match="takes 2"):
        given(Takes(), tuple(inputs(2).values()))
    with pytest.raises(InvalidConfig, match="have no tensor"):
        capture(nn.Linear(4, 2), {"input": 3}, {}, lambda outputs, targets: outputs.mean(), name="none")
    with pytest.raises(InvalidConfig, match=r"batch.scale=0.7: must be 0.5, as in the examples: it is a constant"):
        same_constants({"scale": 0.5}, {"scale": 0.7})
    with pytest.raises(InvalidConfig, match=r"batch.on=left out: must be True"):
        same_constants({"on": True}, {})


class Patches(nn.Module):
    """It walks over the grids of its pictures, as vision towers do that take pictures of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        grids, order, start = torch.tensor([grid] * len(x)), [], 0
        for height, width in grids.tolist():
            places = start + torch.arange(int(height) * int(width)).reshape(int(height), int(width))
            order.append(places.T[places.T >= 0])
            start += height * width
        y = self.inner(x.flatten(0, 1))[torch.cat(order)]
        parts = torch.split(y, grids.prod(-1).tolist())
        return self.outer(torch.stack([part.cumsum(0).mean(0) for part in parts]))


def test_code_that_looks_at_values_of_numbers_alone_has_them() -> None:
    """At one batch size, and equal to the module; values of a tensor among the inputs are refused with the line, and this way."""
    x, y = torch.randn(4, 6, 4, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    captured = capture(Patches().double(), {"x": x, "grid": (2, 3)}, y, F.mse_loss, name="patches", batch=2)
    assert captured.batch == 2 and captured.checked and captured.checked.unknown is None

    class Looks(Patches):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, tuple(grid[0].tolist()))  # type: ignore[arg-type]

    with pytest.raises(CaptureError, match=rf"{__file__.replace('.', '[.]')}:\d+: .*Fix: .* hand its result in: .* or numbers"):
        capture(Looks().double(), {"x": x, "grid": torch.tensor([[2, 3]] * 4)}, y, F.mse_loss, name="looks", batch=2)
