"""BridgeTower (AAAI '23, arXiv 2206.08657): text and image towers with a bridge from every upper layer to a cross layer.

Its operator graph is not series-parallel: each cross layer reads both towers in the middle, and the towers go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeTower(AbstractModel):
    """The wiring of BridgeTower with layers of our own: pre-norm towers and cross layers, additive bridges.

    The defaults are the base model's widths and depths.

    Args:
        num_layers: layers of each tower.
        num_cross_layers: the last so many layers of the towers each feed a cross layer.
        hidden, num_heads, ffn: width, attention heads and inner width of a layer.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
        num_classes: width of the output.
        dropout: rate after attention and MLP, and inside attention.
    """

    name: str = "bridge_tower"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    num_layers: int = 12
    num_cross_layers: int = 6
    hidden: int = 768
    num_heads: int = 12
    ffn: int = 3072
    vocabulary: int = 50265
    text_sequence: int = 50
    image_size: int = 288
    patch_size: int = 16
    num_classes: int = 1000
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "num_cross_layers", "hidden", "num_heads", "ffn", "vocabulary", "text_sequence")
        check_positive(self, "image_size", "patch_size", "num_classes")
        check_fraction(self, "dropout")
        if self.num_cross_layers > self.num_layers:
            rule = f"must not exceed model.num_layers={self.num_layers}"
            raise InvalidConfig("model.num_cross_layers", self.num_cross_layers, rule, "as many or fewer")
        check_divides(self, "num_heads", "hidden")
        check_divides(self, "patch_size", "image_size")

    def build(self) -> nn.Module:
        from gpp.models.networks.bridge_tower import BridgeTowerNetwork

        return BridgeTowerNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {
            "text": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary),
            "image": TensorSpec(shape=(3, self.image_size, self.image_size)),
        }

    def targets(self) -> dict[str, TensorSpec]:
        return {"answer": TensorSpec(dtype="int", high=self.num_classes)}

    def source(self) -> str:
        return networks_hash()
