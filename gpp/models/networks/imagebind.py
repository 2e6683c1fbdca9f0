"""The network of ImageBind and its losses.

Shapes: B micro-batch, L tokens, D hidden width of a tower, E width of the shared embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.clip import TextTower, contrast, pair_logits
from gpp.models.networks.layers import Encoder, PatchEmbedding

if TYPE_CHECKING:
    from gpp.models.imagebind import ImageBind


class MotionEmbedding(nn.Module):
    """Pieces of six motion channels, with learned positions: [B, 6, steps] -> [B, L, D]."""

    def __init__(self, num_steps: int, patch: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv1d(6, hidden, patch, patch, bias=False)
        self.positions = nn.Parameter(torch.randn(num_steps // patch, hidden) * 0.02)

    def forward(self, motion: Tensor) -> Tensor:
        return self.patches(motion).transpose(1, 2) + self.positions


class Tower(nn.Module):
    """One modality as its embedding makes tokens of it -> the first token's embedding [B, E]."""

    def __init__(self, embed: nn.Module, sizes: tuple[int, int, int], embedding: int) -> None:
        super().__init__()
        self.embed = embed
        self.norm = nn.LayerNorm(sizes[1])
        self.encoder = Encoder(*sizes)
        self.project = nn.Linear(sizes[1], embedding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encoder(self.norm(self.embed(x)))[:, 0])


def tower(name: str, settings: ImageBind) -> nn.Module:
    """The tower of a modality."""
    sizes, square = settings.towers[name], (settings.image_size, settings.image_size)
    hidden = sizes[1]
    if name == "text":
        return TextTower(settings.vocabulary, settings.text_sequence, *sizes, settings.embedding)
    if name == "motion":
        embed = MotionEmbedding(settings.motion_steps, settings.motion_patch, hidden)
    elif name == "audio":
        spectrogram = (settings.audio_bins, settings.audio_frames)
        embed = PatchEmbedding(1, spectrogram, settings.patch, hidden, stride=settings.audio_stride)
    elif name == "image":
        embed = PatchEmbedding(3, square, settings.image_patch, hidden)
    else:
        embed = PatchEmbedding(1, square, settings.patch, hidden)
    return Tower(embed, sizes, settings.embedding)


class ImageBindNetwork(nn.Module):
    """Inputs by modality -> embeddings [B, E] by modality."""

    def __init__(self, settings: ImageBind) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: tower(name, settings) for name in settings.towers})

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {name: tower(inputs[name]) for name, tower in self.towers.items()}


def beside_image(outputs: Mapping[str, Tensor]) -> Tensor:
    """The embeddings of the other M modalities: [M, B, E]. Stacked before they meet the image's, so they join at one place."""
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
    """InfoNCE of every other modality with the image, within the micro-batch; arguments as of `pair_loss`."""
    losses = contrast(beside_image(outputs), outputs["image"])
    return (losses * matched.to(losses.dtype)).mean()
