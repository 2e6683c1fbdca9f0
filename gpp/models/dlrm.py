"""DLRM, the recommender of GraphPipe (ASPLOS '25, appendix A.2): dense towers and embedding tables, concatenated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DLRM(AbstractModel):
    """Feed-forward towers beside embedding bags whose rows are concatenated, not summed; then a top MLP.

    The defaults are the paper's. Not in the paper, hence ours: the width of the dense features (that of the
    towers) and the depth of the top MLP (that of the towers).

    Args:
        num_dense: dense features, inputs `dense_I` of shape [num_dense_features].
        num_sparse: sparse features, inputs `sparse_I` of shape [bag] with row numbers.
        num_layers: feed-forward layers of a dense tower, each `hidden` wide.
        num_rows, embedding: size of a table.
        bag: rows looked up per sample and table.
        num_top_layers: layers of the top MLP, each `hidden` wide, before the output.
    """

    name: str = "dlrm"
    loss: str = "bce_with_logits"
    metric: str | None = "accuracy"
    num_dense: int = 7
    num_sparse: int = 7
    num_dense_features: int = 4096
    num_layers: int = 4
    hidden: int = 4096
    num_rows: int = 1_000_000
    embedding: int = 64
    bag: int = 100
    num_top_layers: int = 4

    def __post_init__(self) -> None:
        check_positive(self, "num_dense", "num_sparse", "num_dense_features", "num_layers", "hidden")
        check_positive(self, "num_rows", "embedding", "bag", "num_top_layers")

    def build(self) -> nn.Module:
        from gpp.models.networks.dlrm import DLRMNetwork

        return DLRMNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        dense = {f"dense_{i}": TensorSpec(shape=(self.num_dense_features,)) for i in range(self.num_dense)}
        rows = TensorSpec(shape=(self.bag,), dtype="int", high=self.num_rows)
        return dense | {f"sparse_{i}": rows for i in range(self.num_sparse)}

    def targets(self) -> dict[str, TensorSpec]:
        return {"click": TensorSpec(dtype="bool")}

    def source(self) -> str:
        return networks_hash()
