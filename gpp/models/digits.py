"""Digits: four towers, one per quadrant of an 8 x 8 image of a handwritten digit. The model of the first run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Digits(AbstractModel):
    """Each tower sees one quadrant (4 x 4 pixels) through residual layers; a head joins them.

    Small enough to learn in seconds on one core, wide enough that a stage has something to compute.

    Args:
        num_layers: residual layers of a tower.
        hidden: width of the towers and of the head.
        parity: a second head tells even digits from odd ones; its loss is `networks.digits.digit_and_parity`.
    """

    name: str = "digits"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 3
    hidden: int = 192
    parity: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden")

    def build(self) -> nn.Module:
        from gpp.models.networks.digits import DigitsNetwork

        return DigitsNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"image": TensorSpec(shape=(8, 8))}

    def targets(self) -> dict[str, TensorSpec]:
        return {"digit": TensorSpec(dtype="int", high=10)}

    def source(self) -> str:
        return networks_hash()
