"""The U-Net of Stable Diffusion 1 (CVPR '22, arXiv 2112.10752): down and up again, with a skip edge at every height."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(AbstractModel):
    """Residual blocks that know the time step, Transformer blocks that attend to a context; predicts the noise.

    The defaults are Stable Diffusion 1's. The activations at the skips wait until the way up has come back to their height.

    Args:
        size, channels: of the noisy latent picture [channels, size, size].
        widths: channels at each height; the picture is halved between two.
        num_blocks: residual blocks of a height on the way down; one more on the way up.
        attention: whether the blocks of a height attend, one truth for each height.
        num_heads, num_groups: of every attention, and of every group norm.
        context, context_length: width and number of the vectors to attend to (a text's); 0 and 0 attend to the picture alone.
        num_steps: time steps of the diffusion.
    """

    name: str = "unet"
    loss: str = "mse"
    size: int = 64
    channels: int = 4
    widths: tuple[int, ...] = (320, 640, 1280, 1280)
    num_blocks: int = 2
    attention: tuple[bool, ...] = (True, True, True, False)
    num_heads: int = 8
    num_groups: int = 32
    context: int = 768
    context_length: int = 77
    num_steps: int = 1000

    def __post_init__(self) -> None:
        for name in ("widths", "attention"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_positive(self, "size", "channels", "num_blocks", "num_heads", "num_groups", "num_steps")
        wrong = [w for w in self.widths if not isinstance(w, int) or w < 1 or w % self.num_groups or w % self.num_heads]
        if wrong or not self.widths:
            rule = f"must be multiples of model.num_heads={self.num_heads} and of model.num_groups={self.num_groups}"
            raise InvalidConfig("model.widths", wrong or self.widths, rule, "multiples of both")
        if len(self.attention) != len(self.widths):
            raise InvalidConfig("model.attention", self.attention, "must say yes or no for each width", "true or false for each")
        if self.size % 2 ** (len(self.widths) - 1):
            fix = f"a multiple of {2 ** (len(self.widths) - 1)}"
            raise InvalidConfig("model.size", self.size, "must be halved between any two widths", fix)
        if self.context or self.context_length:
            check_positive(self, "context", "context_length")

    def build(self) -> nn.Module:
        from gpp.models.networks.unet import UNetNetwork

        return UNetNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        specs = {
            "noisy": TensorSpec(shape=(self.channels, self.size, self.size)),
            "step": TensorSpec(dtype="int", high=self.num_steps),
        }
        return specs | ({"context": TensorSpec(shape=(self.context_length, self.context))} if self.context else {})

    def targets(self) -> dict[str, TensorSpec]:
        return {"noise": TensorSpec(shape=(self.channels, self.size, self.size))}

    def source(self) -> str:
        return networks_hash()
