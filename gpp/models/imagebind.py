"""ImageBind (CVPR '23, arXiv 2305.05665): six towers of very unequal size, each modality bound to the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash
from gpp.models.dotted import nearest

if TYPE_CHECKING:
    from torch import nn

MODALITIES = ("image", "text", "audio", "depth", "thermal", "motion")


def _huge() -> Mapping[str, tuple[int, int, int]]:
    return {
        "image": (32, 1280, 16),
        "text": (24, 1024, 16),
        "audio": (12, 768, 12),
        "depth": (12, 384, 8),
        "thermal": (12, 768, 12),
        "motion": (6, 512, 8),
    }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBind(AbstractModel):
    """Pre-norm Transformer towers with projections into one space; the defaults are those of the released `imagebind_huge`.

    Ours: one image instead of a clip of two frames, one piece of sound instead of three, and all modalities in
    every sample, where ImageBind's batches hold pairs of two. As in `gpp.models.clip`, the contrastive loss
    (here the mean over the modalities beside the image) is that of a micro-batch, and `pair_loss` is the same for every plan.

    Args:
        towers: layers, width and heads by modality; any of `MODALITIES`, the image and one more at least.
        embedding: width of the shared space.
        image_size, image_patch: pixels per side of image, depth and thermal picture; of a patch of the image.
        patch: pixels per side of a patch of depth, thermal picture and spectrogram.
        audio_bins, audio_frames, audio_stride: size of the spectrogram, and from patch to overlapping patch.
        motion_steps, motion_patch: samples of the six motion channels, and how many make a token.
        vocabulary, text_sequence: token ids and their number.
    """

    name: str = "imagebind"
    loss: str = "gpp.models.networks.imagebind.contrastive_loss"
    towers: Mapping[str, tuple[int, int, int]] = field(default_factory=_huge)
    embedding: int = 1024
    image_size: int = 224
    image_patch: int = 14
    patch: int = 16
    audio_bins: int = 128
    audio_frames: int = 204
    audio_stride: int = 10
    motion_steps: int = 2000
    motion_patch: int = 8
    vocabulary: int = 49408
    text_sequence: int = 77

    def __post_init__(self) -> None:
        object.__setattr__(self, "towers", {name: tuple(sizes) for name, sizes in self.towers.items()})
        check_positive(self, "embedding", "image_size", "image_patch", "patch", "audio_bins", "audio_frames", "audio_stride")
        check_positive(self, "motion_steps", "motion_patch", "vocabulary", "text_sequence")
        if unknown := sorted(set(self.towers) - set(MODALITIES)):
            raise InvalidConfig("model.towers", unknown, f"may be {', '.join(MODALITIES)}", nearest(unknown[0], MODALITIES))
        if "image" not in self.towers or len(self.towers) < 2:
            raise InvalidConfig("model.towers", sorted(self.towers), "need the image and one more", "image: [12, 768, 12]")
        for name, sizes in self.towers.items():
            whole = len(sizes) == 3 and all(isinstance(size, int) and size > 0 for size in sizes)
            if not whole or sizes[1] % sizes[2]:
                rule = "must be layers, width and heads, and heads must divide the width"
                raise InvalidConfig(f"model.towers.{name}", sizes, rule, f"{name}: [12, 768, 12]")

    def build(self) -> nn.Module:
        from gpp.models.networks.imagebind import ImageBindNetwork

        return ImageBindNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        size = (self.image_size, self.image_size)
        specs = {
            "image": TensorSpec(shape=(3, *size)),
            "text": TensorSpec(shape=(self.text_sequence,), dtype="int", high=self.vocabulary),
            "audio": TensorSpec(shape=(1, self.audio_bins, self.audio_frames)),
            "depth": TensorSpec(shape=(1, *size)),
            "thermal": TensorSpec(shape=(1, *size)),
            "motion": TensorSpec(shape=(6, self.motion_steps)),
        }
        return {name: specs[name] for name in self.towers}

    def targets(self) -> dict[str, TensorSpec]:
        return {"matched": TensorSpec(dtype="bool")}

    def source(self) -> str:
        return networks_hash()
