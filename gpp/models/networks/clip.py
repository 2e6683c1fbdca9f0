"""CLIP (ICML '21, arXiv 2103.00020): an image tower and a shorter, narrower text tower that meet only in the loss.

This module also has the losses of models that compare the two embeddings of a pair.

CLIP's contrastive loss compares every text with every image of a batch. A batch is the part of the mini-batch that one
device has at once: a micro-batch, or a replica's share of it. So cutting the mini-batch changes the pairs that are
compared, and with them the loss, unless `loss.scope=minibatch` keeps the mini-batch whole for the loss. A loss that
judges each pair by itself, like the diagonal of SigLIP's, leaves the samples independent: it is the same for every
plan.

Shapes: B micro-batch, L tokens, D hidden width of a tower, E width of the shared embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import Encoder, PatchEmbedding, TokenEmbedding, divides
from gpp.settings import Count, arguments

TEMPERATURE = 0.1  # cosines lie in -1..1; their logits should reach confident probabilities


class Tower(nn.Module):
    """One modality, whose embedding makes tokens of it -> the first token's embedding [B, E].

    Args:
        sizes: layers, width and heads.
    """

    def __init__(self, embed: nn.Module, sizes: tuple[int, int, int], embedding: int) -> None:
        super().__init__()
        self.embed = embed
        self.norm = nn.LayerNorm(sizes[1])
        self.encoder = Encoder(*sizes)
        self.project = nn.Linear(sizes[1], embedding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encoder(self.norm(self.embed(x)))[:, 0])


class TextTower(nn.Module):
    """Token ids [B, L] -> the last token's embedding [B, E]: by causal attention it has seen all the others."""

    def __init__(self, vocabulary: int, sequence: int, num_layers: int, hidden: int, num_heads: int, embedding: int) -> None:
        super().__init__()
        self.embed = TokenEmbedding(vocabulary, sequence, hidden)
        self.encoder = Encoder(num_layers, hidden, num_heads, causal=True)
        self.project = nn.Linear(hidden, embedding, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.project(self.encoder(self.embed(text))[:, -1])


class CLIP(nn.Module):
    """Two pre-norm Transformer towers with projections into one space; CLIP's last token stands for the text.

    Token ids [B, L] and pixels [B, 3, S, S] -> both embeddings [B, E].

    Args:
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

    def forward(self, text: Tensor, image: Tensor) -> dict[str, Tensor]:
        return {"text_embeds": self.text(text), "image_embeds": self.image(image)}


def pair_logits(one: Tensor, other: Tensor) -> Tensor:
    """Logits of each pair's match: [..., B, E], [B, E] -> [..., B]."""
    return F.cosine_similarity(one, other, dim=-1) / TEMPERATURE


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """Cross entropy of finding each sample's partner in the batch, both ways: [..., B, E], [B, E] -> [..., B]."""
    logits = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T / TEMPERATURE
    both_ways = torch.logsumexp(logits, dim=-1) + torch.logsumexp(logits, dim=-2)
    return both_ways / 2 - logits.diagonal(dim1=-2, dim2=-1)


def pair_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Binary cross entropy of `text and image belong together`.

    Args:
        outputs: `text_embeds` and `image_embeds`, [B, D] each.
        matched: [B], bool.
    """
    logits = pair_logits(outputs["text_embeds"], outputs["image_embeds"])
    return F.binary_cross_entropy_with_logits(logits, matched.to(logits.dtype))


def contrastive_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """CLIP's loss within a batch, with a fixed temperature; pairs that do not belong together are no examples."""
    loss = contrast(outputs["text_embeds"], outputs["image_embeds"])
    return (loss * matched.to(loss.dtype)).mean()


def pair_accuracy(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Share of pairs judged rightly; the arguments are those of `pair_loss`."""
    logits = pair_logits(outputs["text_embeds"], outputs["image_embeds"])
    return ((logits.detach() > 0) == matched).float().mean()
