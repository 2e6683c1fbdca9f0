"""ImageBind (CVPR '23, arXiv 2305.05665) and its losses: six towers of very unequal size, all bound to the image.

Shapes: B micro-batch, L tokens, D hidden width of a tower, E width of the shared embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.networks.clip import TextTower, Tower, contrast, pair_logits
from gpp.models.networks.layers import PatchEmbedding
from gpp.settings import Count, arguments

Modality = Literal["image", "text", "audio", "depth", "thermal", "motion"]


class MotionEmbedding(nn.Module):
    """Pieces of six motion channels, with learned positions: [B, 6, steps] -> [B, L, D]."""

    def __init__(self, num_steps: int, patch: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv1d(6, hidden, patch, patch, bias=False)
        self.positions = nn.Parameter(torch.randn(num_steps // patch, hidden) * 0.02)

    def forward(self, motion: Tensor) -> Tensor:
        return self.patches(motion).transpose(1, 2) + self.positions


class ImageBind(nn.Module):
    """Pre-norm Transformer towers with projections into one space: inputs by modality -> embeddings [B, E] by modality.

    This version has one image instead of a clip of two frames, one piece of sound instead of three, and all modalities
    in every sample, where ImageBind's batches hold pairs of two.

    Args:
        towers: layers, width and heads by modality; the image and one more at least.
        embedding: width of the shared space.
        image_size, image_patch: pixels per side of image, depth and thermal picture; of a patch of the image.
        patch: pixels per side of a patch of depth, thermal picture and spectrogram.
        audio_bins, audio_frames, audio_stride: size of the spectrogram, and from patch to overlapping patch.
        motion_steps, motion_patch: samples of the six motion channels, and how many make a token.
        vocabulary, text_sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        towers: dict[Modality, tuple[Count, Count, Count]],
        embedding: Count,
        image_size: Count,
        image_patch: Count,
        patch: Count,
        audio_bins: Count,
        audio_frames: Count,
        audio_stride: Count,
        motion_steps: Count,
        motion_patch: Count,
        vocabulary: Count,
        text_sequence: Count,
    ) -> None:
        super().__init__()
        if "image" not in towers or len(towers) < 2:
            raise InvalidConfig("model.towers", sorted(towers), "need the image and one more", "image: [12, 768, 12]")
        for name, (_, hidden, num_heads) in towers.items():
            if hidden % num_heads:
                rule = "must be layers, width and heads, and heads must divide the width"
                raise InvalidConfig(f"model.towers.{name}", towers[name], rule, f"{name}: [12, 768, 12]")
        square = (image_size, image_size)
        embeddings: dict[Modality, Callable[[int], nn.Module]] = {
            "image": lambda hidden: PatchEmbedding(3, square, image_patch, hidden),
            "audio": lambda hidden: PatchEmbedding(1, (audio_bins, audio_frames), patch, hidden, stride=audio_stride),
            "depth": lambda hidden: PatchEmbedding(1, square, patch, hidden),
            "thermal": lambda hidden: PatchEmbedding(1, square, patch, hidden),
            "motion": lambda hidden: MotionEmbedding(motion_steps, motion_patch, hidden),
        }

        def tower(name: Modality, sizes: tuple[int, int, int]) -> nn.Module:
            if name == "text":
                return TextTower(vocabulary, text_sequence, *sizes, embedding)
            return Tower(embeddings[name](sizes[1]), sizes, embedding)

        self.towers = nn.ModuleDict({name: tower(name, sizes) for name, sizes in towers.items()})

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {name: tower(inputs[name]) for name, tower in self.towers.items()}


def beside_image(outputs: Mapping[str, Tensor]) -> Tensor:
    """The embeddings of the other M modalities, stacked so that they meet the image's at one place: [M, B, E]."""
    return torch.stack([embedding for name, embedding in outputs.items() if name != "image"])


def pair_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Binary cross entropy of `it belongs to the image`, the mean over the other modalities.

    Args:
        outputs: embeddings [B, E] by modality, `image` among them.
        matched: [B], bool.
    """
    logits = pair_logits(beside_image(outputs), outputs["image"])
    return F.binary_cross_entropy_with_logits(logits, matched.to(logits.dtype).expand_as(logits))


def contrastive_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """InfoNCE of every other modality with the image, within the micro-batch; arguments are those of `pair_loss`."""
    losses = contrast(beside_image(outputs), outputs["image"])
    return (losses * matched.to(losses.dtype)).mean()
