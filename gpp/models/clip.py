"""CLIP (ICML '21, arXiv 2103.00020): an image tower and a shorter, narrower text tower that meet only in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_divides, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CLIP(AbstractModel):
    """Two pre-norm Transformer towers with projections into one space; the defaults are ViT-L/14's.

    The contrastive loss is that of a micro-batch (of a replica's share of one, where the loss has replicas): fewer
    negatives than CLIP had with its whole batch, and another loss for another plan. `pair_loss` of the same module judges
    each pair alone and is the same for every plan. The temperature is fixed, and the last token stands for the text.

    Args:
        image_layers, image_hidden, image_heads: layers of the image tower, their width and heads.
        text_layers, text_hidden, text_heads: the same of the text tower.
        embedding: width of the shared space.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
    """

    name: str = "clip"
    loss: str = "gpp.models.networks.clip.contrastive_loss"
    metric: str | None = "gpp.models.networks.clip.pair_accuracy"
    image_layers: int = 24
    image_hidden: int = 1024
    image_heads: int = 16
    text_layers: int = 12
    text_hidden: int = 768
    text_heads: int = 12
    embedding: int = 768
    vocabulary: int = 49408
    text_sequence: int = 77
    image_size: int = 224
    patch_size: int = 14

    def __post_init__(self) -> None:
        check_positive(self, "image_layers", "image_hidden", "image_heads", "text_layers", "text_hidden", "text_heads")
        check_positive(self, "embedding", "vocabulary", "text_sequence", "image_size", "patch_size")
        check_divides(self, "image_heads", "image_hidden")
        check_divides(self, "text_heads", "text_hidden")
        check_divides(self, "patch_size", "image_size")

    def build(self) -> nn.Module:
        from gpp.models.networks.clip import CLIPNetwork

        return CLIPNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {
            "text": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary),
            "image": TensorSpec(shape=(3, self.image_size, self.image_size)),
        }

    def targets(self) -> dict[str, TensorSpec]:
        return {"matched": TensorSpec(dtype="bool")}

    def source(self) -> str:
        return networks_hash()
