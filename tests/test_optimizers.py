"""What an optimizer says of itself is what torch's does."""

from __future__ import annotations

import pytest
import torch

from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, RMSprop
from gpp.runtime.checkpoint.state import static_bytes

OPTIMIZERS = [
    SGD(lr=0.1, momentum=0.0),
    SGD(lr=0.1),
    Adam(lr=0.1),
    Adam(lr=0.1, decoupled=True),
    RMSprop(lr=0.1),
    RMSprop(lr=0.1, momentum=0.9),
]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=repr)
def test_state_factor_is_the_state_that_torch_keeps(settings: AbstractOptimizer) -> None:
    weight = torch.nn.Parameter(torch.ones(8, 4))
    weight.grad = torch.ones_like(weight)
    optimizer = settings.build([weight])
    optimizer.step()
    assert static_bytes([weight], [optimizer]) == (2 + settings.state_factor) * 8 * 4 * 4


def test_rmsprop_is_the_published_rule() -> None:
    weight, value = (
        torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64)),
        torch.tensor([2.0, -1.0], dtype=torch.float64),
    )
    optimizer = RMSprop(lr=0.1, alpha=0.9, eps=1e-3, momentum=0.5, weight_decay=0.01).build([weight])
    square, momentum = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(3):
        weight.grad = torch.tensor([1.0 + step, -3.0], dtype=torch.float64)
        gradient = weight.grad + 0.01 * value
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        momentum = 0.5 * momentum + gradient / (square.sqrt() + 1e-3)
        value = value - 0.1 * momentum
        torch.testing.assert_close(weight.detach(), value)


@pytest.mark.parametrize(
    ("cls", "settings", "field"),
    [
        (SGD, {"momentum": 1.0}, "optimizer.momentum"),
        (Adam, {"betas": (0.9,)}, "optimizer.betas"),
        (RMSprop, {"alpha": 1.0}, "optimizer.alpha"),
        (RMSprop, {"momentum": -0.1}, "optimizer.momentum"),
        (RMSprop, {"weight_decay": -1.0}, "optimizer.weight_decay"),
        (RMSprop, {"clip_norm": 0}, "optimizer.clip_norm"),
        (RMSprop, {"lr": 0}, "optimizer.lr"),
    ],
)
def test_refusals_name_the_field(cls: type, settings: dict, field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        cls(**{"lr": 0.1, **settings})
    assert caught.value.field == field
