"""A dual encoder with a queue of what it made before (cross-batch memory, CVPR '20, arXiv 1912.06798), on CLIP's two towers.

Shapes: B micro-batch, Q places of the queue, E width of the shared embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.clip import TEMPERATURE, TextTower, Tower
from gpp.models.networks.layers import PatchEmbedding, divides
from gpp.settings import Count, arguments


class Queue(nn.Module):
    """The last Q embeddings, without their gradients: [B, E] -> those before this batch [Q, E]; training adds the batch."""

    kept: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("kept", F.normalize(torch.randn(size, width), dim=-1))

    def forward(self, new: Tensor) -> Tensor:
        before = self.kept.clone()
        if self.training:
            self.kept.copy_(torch.cat([before, new.detach()])[new.shape[0] :])
        return before


class CrossBatch(nn.Module):
    """Token ids [B, L] and pixels [B, 3, S, S] -> the logits of each pair and of the queues' others, [B, 1 + Q], both ways.

    The queue is a state that every micro-batch changes, in the order of the micro-batches.

    Args:
        queue: embeddings kept of either side.
        image_layers, image_hidden, image_heads: layers of the image tower, their width and heads.
        text_layers, text_hidden, text_heads: layers of the text tower, their width and heads.
        embedding: width of the shared space.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        queue: Count,
        image_layers: Count,
        image_hidden: Count,
        image_heads: Count,
        text_layers: Count,
        text_hidden: Count,
        text_heads: Count,
        embedding: Count,
        vocabulary: Count,
        text_sequence: Count,
        image_size: Count,
        patch_size: Count,
    ) -> None:
        super().__init__()
        divides(image_heads=image_heads, image_hidden=image_hidden)
        divides(text_heads=text_heads, text_hidden=text_hidden)
        divides(patch_size=patch_size, image_size=image_size)
        self.text = TextTower(vocabulary, text_sequence, text_layers, text_hidden, text_heads, embedding)
        patches = PatchEmbedding(3, (image_size, image_size), patch_size, image_hidden)
        self.image = Tower(patches, (image_layers, image_hidden, image_heads), embedding)
        self.texts, self.images = Queue(queue, embedding), Queue(queue, embedding)

    def forward(self, text: Tensor, image: Tensor) -> dict[str, Tensor]:
        one, other = F.normalize(self.text(text), dim=-1), F.normalize(self.image(image), dim=-1)
        pair, texts, images = (one * other).sum(-1, keepdim=True), self.texts(one), self.images(other)
        return {
            "to_image": torch.cat([pair, one @ images.T], dim=-1) / TEMPERATURE,
            "to_text": torch.cat([pair, other @ texts.T], dim=-1) / TEMPERATURE,
        }


def queue_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Cross entropy of finding the partner among the queue's, both ways; pairs that do not belong together are no examples."""
    found = sum(logits.log_softmax(-1)[:, 0] for logits in outputs.values())
    return -(found * matched.to(outputs["to_image"].dtype)).mean() / 2
