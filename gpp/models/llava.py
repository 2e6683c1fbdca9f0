"""LLaVA-1.5 (arXiv 2310.03744): a vision branch beside the embedding of the text, then a long language trunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.models.base import AbstractModel, TensorSpec, check_choice, check_divides, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LLaVA(AbstractModel):
    """CLIP's image tower, a two-layer MLP, and Llama over image tokens followed by text tokens; the defaults are LLaVA-1.5-7B's.

    Ours: the image comes first, the features are those of the tower's last layer (LLaVA reads the one before and leaves
    the last idle), and only text positions are predicted. Image and text together make 2048 positions.

    Args:
        image_layers, image_hidden, image_heads: layers of the image tower, their width and heads.
        image_size, patch_size: pixels per side.
        num_layers, hidden, num_heads, ffn: layers of the trunk, their width, heads and inner width.
        vocabulary, text_sequence: token ids and their number.
        frozen: what is not trained: `none`; `image`, the image tower, as in LLaVA's second stage; `towers`, the
            image tower and the trunk, all but the MLP, as in its first. A frozen image tower has no backward pass; a frozen
            trunk has one, for the MLP's sake, but no gradients of weights.
    """

    name: str = "llava"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    image_layers: int = 24
    image_hidden: int = 1024
    image_heads: int = 16
    image_size: int = 336
    patch_size: int = 14
    num_layers: int = 32
    hidden: int = 4096
    num_heads: int = 32
    ffn: int = 11008
    vocabulary: int = 32000
    text_sequence: int = 1472
    frozen: str = "none"

    def __post_init__(self) -> None:
        check_positive(self, "image_layers", "image_hidden", "image_heads", "image_size", "patch_size")
        check_positive(self, "num_layers", "hidden", "num_heads", "ffn", "vocabulary", "text_sequence")
        check_divides(self, "image_heads", "image_hidden")
        check_divides(self, "patch_size", "image_size")
        check_divides(self, "num_heads", "hidden")
        check_choice(self, "frozen", ("none", "image", "towers"))

    def build(self) -> nn.Module:
        from gpp.models.networks.llava import LLaVANetwork

        return LLaVANetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {
            "image": TensorSpec(shape=(3, self.image_size, self.image_size)),
            "text": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary),
        }

    def targets(self) -> dict[str, TensorSpec]:
        return {"next_tokens": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary)}

    def source(self) -> str:
        return networks_hash()
