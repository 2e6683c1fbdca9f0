"""FLAVA (CVPR '22, arXiv 2112.04482): a text and an image encoder, then a shorter encoder over both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FLAVA(AbstractModel):
    """Two pre-norm Transformer encoders, projected and concatenated for a third; the defaults are the paper's.

    Of its five losses the image-text matching remains: whether text and image belong together, told from the class
    token of the multimodal encoder.

    Args:
        text_layers, image_layers, multimodal_layers: layers of the three encoders.
        hidden, num_heads: their width and attention heads.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
    """

    name: str = "flava"
    loss: str = "bce_with_logits"
    metric: str | None = "accuracy"
    text_layers: int = 12
    image_layers: int = 12
    multimodal_layers: int = 6
    hidden: int = 768
    num_heads: int = 12
    vocabulary: int = 30522
    text_sequence: int = 77
    image_size: int = 224
    patch_size: int = 16

    def __post_init__(self) -> None:
        check_positive(self, "text_layers", "image_layers", "multimodal_layers", "hidden", "num_heads")
        check_positive(self, "vocabulary", "text_sequence", "image_size", "patch_size")
        check_divides(self, "num_heads", "hidden")
        check_divides(self, "patch_size", "image_size")

    def build(self) -> nn.Module:
        from gpp.models.networks.flava import FLAVANetwork

        return FLAVANetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {
            "text": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary),
            "image": TensorSpec(shape=(3, self.image_size, self.image_size)),
        }

    def targets(self) -> dict[str, TensorSpec]:
        return {"matched": TensorSpec(dtype="bool")}

    def source(self) -> str:
        return networks_hash()
