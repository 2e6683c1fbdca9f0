"""AlexNet, VGG, ResNet and GoogLeNet: chains of convolutions on which methods of pipelining are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_choice, check_fraction, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn

SMALLEST = {"alexnet": 63, "vgg": 32, "resnet": 32, "googlenet": 32}
"""Pixels per side by kind, from which one is left at the top."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNet(AbstractModel):
    """Torchvision's network of that kind, without its auxiliary heads; the defaults are VGG-16's sizes.

    With batch norm (ResNet, GoogLeNet) a plan's statistics are those of its micro-batches; `norm: group` (one group) leaves the
    samples independent.

    Args:
        kind: `alexnet`, `vgg`, `resnet` or `googlenet`.
        blocks: how many at each height: convolutions of VGG (five heights), bottlenecks of ResNet (four); empty for the others.
        image_size: pixels per side.
        num_classes: width of the output.
        shrink: the paper's channels, and the width of its linear layers, divided by so much.
        norm: `batch` or `group`, after each convolution of ResNet and GoogLeNet.
        dropout: rate after each linear layer but the last, GoogLeNet's before its only one; ResNet has none.
    """

    name: str = "vgg16"
    loss: str = "cross_entropy"
    metric: str | None = "accuracy"
    kind: str = "vgg"
    blocks: tuple[int, ...] = (2, 2, 3, 3, 3)
    image_size: int = 224
    num_classes: int = 1000
    shrink: int = 1
    norm: str = "batch"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "image_size", "num_classes", "shrink")
        check_fraction(self, "dropout")
        check_choice(self, "kind", tuple(SMALLEST))
        check_choice(self, "norm", ("batch", "group"))
        heights = {"vgg": 5, "resnet": 4}.get(self.kind, 0)
        if len(self.blocks) != heights or not all(isinstance(count, int) and count >= 1 for count in self.blocks):
            rule = f"must be {heights} integers of at least 1 for kind={self.kind}"
            raise InvalidConfig("model.blocks", list(self.blocks), rule, f"blocks={[1] * heights} or more")
        if self.image_size < SMALLEST[self.kind]:
            rule = "must leave a pixel at the top"
            raise InvalidConfig("model.image_size", self.image_size, rule, f"{SMALLEST[self.kind]} or more")
        if self.shrink > 16:
            raise InvalidConfig("model.shrink", self.shrink, "must leave a channel of 16", "16 or less")

    def build(self) -> nn.Module:
        from gpp.models.networks.convnet import ConvNetNetwork

        return ConvNetNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"image": TensorSpec(shape=(3, self.image_size, self.image_size))}

    def targets(self) -> dict[str, TensorSpec]:
        return {"label": TensorSpec(dtype="int", high=self.num_classes)}

    def source(self) -> str:
        return networks_hash()
