"""CANDLE-Uno, drug response from seven inputs (GraphPipe, ASPLOS '25, appendix A.2; FlexFlow's candle_uno.cc).

Shapes: B micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import FeedForward
from gpp.settings import Count, arguments


class CandleUno(nn.Module):
    """One feed-forward tower per input, concatenated, then a feed-forward head.

    Inputs [B, width] by name -> predicted growth [B, 1]. Depth and width of the towers are the paper's. Inputs and head
    are those of FlexFlow's example, except that the two doses have towers, too: the paper counts seven branches, while
    the example joins the doses raw.

    Args:
        features: width of each input, by name.
        num_layers, hidden: layers of a tower and their width.
        num_head_layers, head_hidden: layers of the head before the output and their width.
    """

    @arguments("model")
    def __init__(
        self, *, features: dict[str, Count], num_layers: Count, hidden: Count, num_head_layers: Count, head_hidden: Count
    ) -> None:
        super().__init__()
        tower = [hidden] * num_layers
        self.towers = nn.ModuleDict({name: FeedForward([width, *tower]) for name, width in features.items()})
        self.head = FeedForward([len(features) * hidden] + [head_hidden] * num_head_layers)
        self.growth = nn.Linear(head_hidden, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        encoded = [tower(inputs[name]) for name, tower in self.towers.items()]
        return self.growth(self.head(torch.cat(encoded, dim=-1)))
