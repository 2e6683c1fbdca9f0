"""A model of your own, in one file: two branches that meet in a head, and a loss of two terms.

Shapes: B micro-batch, W width, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.settings import Count, arguments


class TwoEyes(nn.Module):
    """What the left and the right eye see, [B, W] each, through layers of their own: scores [B, C] and both views [B, W].

    Args:
        width: width of both pictures and of every layer.
        depth: layers of each branch.
        num_classes: classes that are told apart.
    """

    @arguments("model")
    def __init__(self, *, width: Count, depth: Count, num_classes: Count) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))) for _ in range(2)
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        left, right = self.left(left), self.right(right)
        return {"scores": self.head(torch.cat([left, right], dim=-1)), "left": left, "right": right}


def seen_alike(outputs: dict[str, Tensor], label: Tensor) -> dict[str, Tensor]:
    """Cross entropy of the scores, and a tenth of how far the two views are apart; means over the samples."""
    apart = F.mse_loss(outputs["left"], outputs["right"])
    return {"label": F.cross_entropy(outputs["scores"], label), "apart": 0.1 * apart}
