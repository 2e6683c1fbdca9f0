"""The Evoformer of AlphaFold 2 (Nature 2021): two streams that meet in every block, so there is no long branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evoformer(AbstractModel):
    """Blocks over a stream of aligned sequences and a stream of residue pairs, with AlphaFold 2's wiring and sizes.

    In a block the sequences attend along the row, biased by the pairs, then along the column; a transition; their outer
    product goes to the pairs; these go through two triangle multiplications, two triangle attentions, a transition. Left
    out: dropout, masks, recycling, templates, the extra sequences and the structure module. The head predicts the distance
    of each pair in bins (the distogram), so the last block's pair stream is all that the loss sees.

    Args:
        num_blocks: blocks of both streams.
        num_rows, num_residues: aligned sequences and residues of a crop.
        row_hidden, row_heads: width of the sequences' stream and its attention heads.
        pair_hidden, pair_heads: the same of the pairs' stream.
        outer: width of each factor of the outer product.
        row_features, target_features: of a residue in an aligned sequence, and in the sequence to fold.
        num_bins: of the distance.
    """

    name: str = "evoformer"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_blocks: int = 48
    num_rows: int = 128
    num_residues: int = 256
    row_hidden: int = 256
    row_heads: int = 8
    pair_hidden: int = 128
    pair_heads: int = 4
    outer: int = 32
    row_features: int = 49
    target_features: int = 22
    num_bins: int = 64

    def __post_init__(self) -> None:
        check_positive(self, "num_blocks", "num_rows", "num_residues", "row_hidden", "row_heads", "pair_hidden", "pair_heads")
        check_positive(self, "outer", "row_features", "target_features", "num_bins")
        check_divides(self, "row_heads", "row_hidden")
        check_divides(self, "pair_heads", "pair_hidden")

    def build(self) -> nn.Module:
        from gpp.models.networks.evoformer import EvoformerNetwork

        return EvoformerNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {
            "rows": TensorSpec(shape=(self.num_rows, self.num_residues, self.row_features)),
            "target": TensorSpec(shape=(self.num_residues, self.target_features)),
        }

    def targets(self) -> dict[str, TensorSpec]:
        return {"distance": TensorSpec(shape=(self.num_residues, self.num_residues), dtype="int", high=self.num_bins)}

    def source(self) -> str:
        return networks_hash()
