"""A loss for two-tower models that leaves the samples of a batch independent.

CLIP's contrastive loss compares every text with every image of the mini-batch, so cutting the mini-batch
changes it. Judging each pair by itself, as the diagonal of SigLIP's loss does, does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.1  # cosines lie in -1..1; their logits should reach confident probabilities


def _logits(outputs: Mapping[str, Tensor]) -> Tensor:
    return F.cosine_similarity(outputs["text_embeds"], outputs["image_embeds"], dim=-1) / TEMPERATURE


def pair_loss(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Binary cross entropy of `text and image belong together`.

    Args:
        outputs: `text_embeds` and `image_embeds`, [B, D] each.
        matched: [B], bool.
    """
    logits = _logits(outputs)
    return F.binary_cross_entropy_with_logits(logits, matched.to(logits.dtype))


def pair_accuracy(outputs: Mapping[str, Tensor], matched: Tensor) -> Tensor:
    """Share of pairs judged rightly; arguments as of `pair_loss`."""
    return ((_logits(outputs).detach() > 0) == matched).float().mean()
