"""MMT, the multi-modal Transformer of GraphPipe (ASPLOS '25, appendix A.2): parallel branches, joined at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MMT(AbstractModel):
    """Branches of pre-norm Transformer layers over embedded sequences; pooled, concatenated, one linear head.

    The defaults are the paper's. The paper does not say what follows the concatenation: the head and the loss
    (mean squared error, as in FlexFlow's examples) are ours.

    Args:
        num_branches: modalities, each with an input `branch_I` of shape [sequence, hidden].
        num_layers: Transformer layers of a branch.
        hidden, num_heads, ffn: width, attention heads and inner width of a layer.
        num_outputs: width of the regressed target.
        dropout: rate after attention and MLP, and inside attention.
    """

    name: str = "mmt"
    loss: str = "mse"
    num_branches: int = 4
    num_layers: int = 8
    hidden: int = 1024
    sequence: int = 256
    num_heads: int = 16
    ffn: int = 4096
    num_outputs: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_branches", "num_layers", "hidden", "sequence", "num_heads", "ffn", "num_outputs")
        check_fraction(self, "dropout")
        check_divides(self, "num_heads", "hidden")

    def build(self) -> nn.Module:
        from gpp.models.networks.mmt import MMTNetwork

        return MMTNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {f"branch_{i}": TensorSpec(shape=(self.sequence, self.hidden)) for i in range(self.num_branches)}

    def targets(self) -> dict[str, TensorSpec]:
        return {"score": TensorSpec(shape=(self.num_outputs,))}

    def source(self) -> str:
        return networks_hash()
