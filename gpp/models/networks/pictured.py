"""Texts with up to P pictures each, a small vision-language model whose vision tower computes only the pictures there are.

Each layer of the tower is one operator of our own, `gpp::picture_layer`: torch's own operators have fixed shapes and would compute
absent pictures, too. It takes all P places, computes those that the mask says are there, and leaves the others as they are.

Shapes: B micro-batch, P places for pictures, M patches of a picture, L tokens, D hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gpp.models.networks.layers import TransformerLayer, divides
from gpp.settings import Count, arguments

_LIBRARY = torch.library.Library("gpp", "FRAGMENT")
_LIBRARY.define("picture_layer(Tensor x, Tensor there, Tensor[] params, int heads) -> Tensor")


@torch.library.impl(_LIBRARY, "picture_layer", "CompositeImplicitAutograd")
def picture_layer(x: Tensor, there: Tensor, params: list[Tensor], heads: int) -> Tensor:
    """A Transformer layer on the pictures that are there: [B, P, M, D], [B, P] -> [B, P, M, D].

    Args:
        params: weights in the order of `PictureLayer`.
    """
    # Shapes that follow from values cannot be traced: a tensor without values stands for the full amount.
    traced = isinstance(x, FakeTensor) or x.is_meta
    rows = x.flatten(0, 1) if traced else x[there]
    norm, qkv, out, mlp_norm, up, down = zip(params[::2], params[1::2], strict=True)
    width = (x.shape[-1],)
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in F.linear(F.layer_norm(rows, width, *norm), *qkv).chunk(3, -1)
    )
    # The math of attention runs on no picture at all, too.
    scores = (q @ k.transpose(-1, -2)) * (width[0] // heads) ** -0.5
    rows = rows + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), *out)
    rows = rows + F.linear(F.gelu(F.linear(F.layer_norm(rows, width, *mlp_norm), *up)), *down)
    return rows.unflatten(0, there.shape) if traced else x.index_put((there,), rows)


class PictureLayer(nn.Module):
    """A pre-norm Transformer layer, on the pictures that are there: [B, P, M, D], [B, P] -> [B, P, M, D]."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BPMD: Tensor, there_BP: Tensor) -> Tensor:
        modules = (self.norm, self.qkv, self.out, self.mlp_norm, self.up, self.down)
        params = [p for module in modules for p in (module.weight, module.bias)]
        return torch.ops.gpp.picture_layer(x_BPMD, there_BP, params, self.num_heads)


class PicturedText(nn.Module):
    """Patches [B, P, M, C], the pictures that are there [B, P], and token ids [B, L] -> logits of a class [B, classes].

    A picture becomes one token before the text's; absent ones are zeros.

    Args:
        image_layers, image_hidden, image_heads: of the vision tower.
        patches, patch_values: of a picture, and numbers of a patch.
        num_layers, hidden, num_heads: of the language trunk.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        image_layers: Count,
        image_hidden: Count,
        image_heads: Count,
        patches: Count,
        patch_values: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        vocabulary: Count,
        classes: Count,
    ) -> None:
        super().__init__()
        divides(image_heads=image_heads, image_hidden=image_hidden)
        divides(num_heads=num_heads, hidden=hidden)
        self.embed = nn.Linear(patch_values, image_hidden)
        self.place = nn.Parameter(torch.randn(patches, image_hidden) * 0.02)
        self.tower = nn.ModuleList(PictureLayer(image_hidden, image_heads) for _ in range(image_layers))
        self.project = nn.Linear(image_hidden, hidden)
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.Sequential(*(TransformerLayer(hidden, num_heads, 4 * hidden) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, pictures: Tensor, there: Tensor, text: Tensor) -> Tensor:
        x_BPMD = self.embed(pictures) + self.place
        for layer in self.tower:
            x_BPMD = layer(x_BPMD, there)
        seen_BPD = self.project(x_BPMD.mean(2)) * there.unsqueeze(-1)
        x_BLD = torch.cat([seen_BPD, self.tokens(text)], dim=1)
        return self.head(self.norm(self.layers(x_BLD)).mean(1))
