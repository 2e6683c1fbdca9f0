"""The first Transformer (Vaswani et al., 2017, arXiv 1706.03762): an encoder, and a decoder of which every layer sees its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Translator(AbstractModel):
    """Pre-norm encoder and decoder layers, taught with the true tokens before each one; the defaults are the base model's.

    The paper's one matrix for both embeddings and the head is three here, as it would join three stages by an all-reduce; positions
    are learned.

    Args:
        num_layers: of the encoder, and as many of the decoder.
        hidden, num_heads, ffn: width, attention heads, width of the MLPs.
        vocabulary, sequence: token ids and their number, of both languages.
        dropout: rate after attention and MLP, and inside attention.
    """

    name: str = "translator"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 6
    hidden: int = 512
    num_heads: int = 8
    ffn: int = 2048
    vocabulary: int = 37000
    sequence: int = 50
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "num_heads", "ffn", "vocabulary", "sequence")
        check_fraction(self, "dropout")
        check_divides(self, "num_heads", "hidden")

    def build(self) -> nn.Module:
        from gpp.models.networks.translator import TranslatorNetwork

        return TranslatorNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        tokens = TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)
        return {"source": tokens, "previous": tokens}

    def targets(self) -> dict[str, TensorSpec]:
        return {"target": TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)}

    def source(self) -> str:
        return networks_hash()
