"""MMT, the multi-modal Transformer of GraphPipe (ASPLOS '25, appendix A.2).

Shapes: B micro-batch, L sequence, D hidden width, P branches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import Rate, TransformerLayer, divides
from gpp.settings import Count, arguments


class ModalityBranch(nn.Module):
    """One modality: [B, L, D] -> [B, D]."""

    def __init__(self, num_layers: int, hidden: int, num_heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(TransformerLayer(hidden, num_heads, ffn, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.norm(self.layers(x_BLD)).mean(dim=1)


class MMT(nn.Module):
    """Branches of pre-norm Transformer layers over embedded sequences; pooled, concatenated, one linear head.

    P sequences [B, L, D] -> [B, num_outputs]. The paper does not say what follows the concatenation: the head and the
    loss (mean squared error, as in FlexFlow's examples) are ours.

    Args:
        num_branches: modalities, each with an input `branch_I`.
        num_layers: Transformer layers of a branch.
        hidden, num_heads, ffn: width, attention heads and inner width of a layer.
        num_outputs: width of the regressed target.
        dropout: rate after attention and MLP, and inside attention.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_branches: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        num_outputs: Count,
        dropout: Rate,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.branches = nn.ModuleList(ModalityBranch(num_layers, hidden, num_heads, ffn, dropout) for _ in range(num_branches))
        self.head = nn.Linear(num_branches * hidden, num_outputs)

    def forward(self, **inputs: Tensor) -> Tensor:
        pooled = [branch(inputs[f"branch_{i}"]) for i, branch in enumerate(self.branches)]
        return self.head(torch.cat(pooled, dim=-1))
