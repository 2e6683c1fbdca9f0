"""MLP: a chain of equal blocks, the model on which the cost of a runtime is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_choice, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(AbstractModel):
    """Blocks of two square linear layers, each with a ReLU: equal in time, in parameters and in what they pass on.

    Args:
        num_blocks: how many.
        width: of every layer, of the input and of the output.
    """

    name: str = "mlp"
    loss: str = "mse"
    metric: str | None = None
    num_blocks: int = 4
    width: int = 256

    def __post_init__(self) -> None:
        check_positive(self, "num_blocks", "width")
        check_choice(self, "loss", ("mse", "cross_entropy"))

    def build(self) -> nn.Module:
        from gpp.models.networks.mlp import MLPNetwork

        return MLPNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(shape=(self.width,))}

    def targets(self) -> dict[str, TensorSpec]:
        if self.loss == "mse":
            return {"y": TensorSpec(shape=(self.width,))}
        return {"y": TensorSpec(dtype="int", high=self.width)}

    def source(self) -> str:
        return networks_hash()
