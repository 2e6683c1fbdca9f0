"""Inception-v3 (CVPR '16, arXiv 1512.00567): many short branches in every cell, too short to be worth a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_choice, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inception(AbstractModel):
    """The cells of torchvision's Inception-v3; the defaults are its sizes.

    With batch norm a plan's statistics are those of its micro-batches (of a replica's share), so its loss and weights are not
    those of one device with the whole mini-batch. `norm: group` (one group) leaves the samples independent.

    Args:
        image_size: pixels per side; 75 at least.
        num_classes: width of the output.
        shrink: the paper's channels divided by so much.
        norm: `batch` or `group`, after each convolution.
        auxiliary: whether the second head, half-way up, is trained too; its loss counts 0.4, as in the paper.
        dropout: rate before the last layer.
    """

    name: str = "inception"
    loss: str = "gpp.models.networks.inception.heads_loss"
    metric: str | None = "accuracy"
    image_size: int = 299
    num_classes: int = 1000
    shrink: int = 1
    norm: str = "batch"
    auxiliary: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "image_size", "num_classes", "shrink")
        check_choice(self, "norm", ("batch", "group"))
        if self.image_size < 75:
            raise InvalidConfig("model.image_size", self.image_size, "must leave a pixel after five halvings", "75 or more")
        if self.shrink > 32:
            raise InvalidConfig("model.shrink", self.shrink, "must leave a channel of 32", "32 or less")

    def build(self) -> nn.Module:
        from gpp.models.networks.inception import InceptionNetwork

        return InceptionNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {"image": TensorSpec(shape=(3, self.image_size, self.image_size))}

    def targets(self) -> dict[str, TensorSpec]:
        return {"label": TensorSpec(dtype="int", high=self.num_classes)}

    def source(self) -> str:
        return networks_hash()
