"""Digits by a deep, narrow chain: a linear layer for each stage, on which methods of pipelining are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsDeep(AbstractModel):
    """`num_layers` linear layers with tanh between them, from 64 pixels to 10 classes.

    Without residual paths or norms a stale gradient shows: what an asynchronous method costs in accuracy is seen within seconds.
    Inputs and weights are scaled for tanh as in LeCun et al., "Efficient BackProp" (1998).

    Args:
        num_layers: linear layers, the last to the classes included; with as many devices one each.
        width: of the layers between.
    """

    name: str = "digits_deep"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 8
    width: int = 48

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "width")

    def build(self) -> nn.Module:
        from gpp.models.networks.digits_deep import DigitsDeepNetwork

        return DigitsDeepNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"image": TensorSpec(shape=(64,))}

    def targets(self) -> dict[str, TensorSpec]:
        return {"digit": TensorSpec(dtype="int", high=10)}

    def source(self) -> str:
        return networks_hash()
