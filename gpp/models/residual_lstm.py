"""A translator of residual LSTM layers with attention, as GNMT (Wu et al., 2016, arXiv 1609.08144)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualLSTM(AbstractModel):
    """An encoder and a decoder of LSTM layers with shortcuts; every decoder layer sees what the first one attends to.

    Taught with the true tokens before each one, so a layer is one operator over the whole sequence. As in the reference
    implementation of MLPerf, the attention's queries are the first decoder layer's outputs, not those of the step before.

    Args:
        num_layers: of the encoder, and as many of the decoder.
        hidden: width of all of them.
        vocabulary, sequence: token ids and their number, of both languages.
        bidirectional: the encoder's first layer reads both ways; shortcuts then begin at the third layers, else at the second.
        tied: both languages have one embedding; it joins two stages by an all-reduce.
        dropout: rate before each layer.
    """

    name: str = "residual_lstm"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 4
    hidden: int = 1024
    vocabulary: int = 32000
    sequence: int = 50
    bidirectional: bool = False
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "vocabulary", "sequence")
        check_fraction(self, "dropout")

    def build(self) -> nn.Module:
        from gpp.models.networks.residual_lstm import ResidualLSTMNetwork

        return ResidualLSTMNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        tokens = TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)
        return {"source": tokens, "previous": tokens}

    def targets(self) -> dict[str, TensorSpec]:
        return {"target": TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)}

    def source(self) -> str:
        return networks_hash()
