"""GPT-2 (Radford et al., 2019): a deep decoder without branches, where graph pipelining has nothing to gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPT(AbstractModel):
    """A plain chain of causal pre-norm Transformer layers that predicts each next token; the defaults are GPT-2 XL's.

    GPT-2 ties the head to the token embedding. Ours is its own matrix unless `tied`: the tie joins the first and
    the last stage by an all-reduce of 322 MB each step, which has nothing to do with the shape of the graph.

    Args:
        num_layers, hidden, num_heads: layers, their width and attention heads; the MLP is four times as wide.
        vocabulary, sequence: token ids and their number.
        tied: the head's matrix is the token embedding.
        dropout: rate after attention and MLP, and inside attention.
    """

    name: str = "gpt"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 48
    hidden: int = 1600
    num_heads: int = 25
    vocabulary: int = 50257
    sequence: int = 1024
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "num_heads", "vocabulary", "sequence")
        check_fraction(self, "dropout")
        check_divides(self, "num_heads", "hidden")

    def build(self) -> nn.Module:
        from gpp.models.networks.gpt import GPTNetwork

        return GPTNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"tokens": TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)}

    def targets(self) -> dict[str, TensorSpec]:
        return {"next_tokens": TensorSpec(shape=(self.sequence,), dtype="int", high=self.vocabulary)}

    def source(self) -> str:
        return networks_hash()
