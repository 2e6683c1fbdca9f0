"""The Evoformer of AlphaFold 2 (Nature 2021): two streams that meet in every block, so there is no long branch.

Shapes: B micro-batch, S aligned sequences (rows), R residues, D width of a stream, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import divides
from gpp.settings import Count, arguments

FARTHEST = 32  # residues apart, from which on all distances along the chain count the same


class GatedAttention(nn.Module):
    """Attention along the third axis with a gate on its output: [B, X, Y, D], bias [B, 1, H, Y, Y] -> [B, X, Y, D]."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.gate, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(2, 3) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, bias)
        return self.out(y.transpose(2, 3).flatten(3) * self.gate(x).sigmoid())


class PairBias(nn.Module):
    """Bias of the pairs for an attention between residues: [B, R, R, D] -> [B, 1, H, R, R]."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, num_heads, bias=False)

    def forward(self, pair: Tensor) -> Tensor:
        return self.project(self.norm(pair)).permute(0, 3, 1, 2)[:, None]


class TriangleAttention(nn.Module):
    """Attention of each residue's pairs among each other, biased by the third side: [B, R, R, D] -> [B, R, R, D]."""

    def __init__(self, hidden: int, num_heads: int, *, ending: bool) -> None:
        super().__init__()
        self.ending = ending
        self.bias, self.attention = PairBias(hidden, num_heads), GatedAttention(hidden, num_heads)

    def forward(self, pair: Tensor) -> Tensor:
        pair = pair.transpose(1, 2) if self.ending else pair
        y = self.attention(pair, self.bias(pair))
        return y.transpose(1, 2) if self.ending else y


class TriangleMultiplication(nn.Module):
    """Each pair from products of the two other sides, summed over the third residue: [B, R, R, D] -> [B, R, R, D]."""

    def __init__(self, hidden: int, *, incoming: bool) -> None:
        super().__init__()
        self.incoming = incoming
        self.norm, self.norm_out = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.sides, self.gates = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 2 * hidden)
        self.gate, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        a, b = (self.sides(x) * self.gates(x).sigmoid()).permute(0, 3, 1, 2).chunk(2, dim=1)
        products = a.transpose(2, 3) @ b if self.incoming else a @ b.transpose(2, 3)
        return self.out(self.norm_out(products.permute(0, 2, 3, 1))) * self.gate(x).sigmoid()


class Transition(nn.Module):
    """An MLP four times as wide: [..., D] -> [..., D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProduct(nn.Module):
    """Pairs from rows: the outer product of two residues, mean over the rows: [B, S, R, D] -> [B, R, R, D']."""

    def __init__(self, hidden: int, outer: int, pair_hidden: int) -> None:
        super().__init__()
        self.norm, self.factors = nn.LayerNorm(hidden), nn.Linear(hidden, 2 * outer)
        self.out = nn.Linear(outer * outer, pair_hidden)

    def forward(self, rows: Tensor) -> Tensor:
        a, b = self.factors(self.norm(rows)).chunk(2, dim=-1)
        num_rows, width = a.shape[1], a.shape[3]
        products = a.flatten(2).transpose(1, 2) @ b.flatten(2) / num_rows  # [B, R outer, R outer]
        products = products.unflatten(2, (-1, width)).unflatten(1, (-1, width))
        return self.out(products.transpose(2, 3).flatten(3))


class EvoformerBlock(nn.Module):
    """Both streams: rows [B, S, R, D], pairs [B, R, R, D'] -> the same."""

    def __init__(self, rows: int, row_heads: int, pairs: int, pair_heads: int, outer: int) -> None:
        super().__init__()
        self.row_bias, self.row_attention = PairBias(pairs, row_heads), GatedAttention(rows, row_heads)
        self.column_attention, self.row_transition = GatedAttention(rows, row_heads), Transition(rows)
        self.outer_product = OuterProduct(rows, outer, pairs)
        self.outgoing = TriangleMultiplication(pairs, incoming=False)
        self.incoming = TriangleMultiplication(pairs, incoming=True)
        self.starting = TriangleAttention(pairs, pair_heads, ending=False)
        self.ending = TriangleAttention(pairs, pair_heads, ending=True)
        self.pair_transition = Transition(pairs)

    def forward(self, rows: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows + self.row_attention(rows, self.row_bias(pair))
        rows = rows + self.column_attention(rows.transpose(1, 2)).transpose(1, 2)
        rows = rows + self.row_transition(rows)
        pair = pair + self.outer_product(rows)
        for update in (self.outgoing, self.incoming, self.starting, self.ending, self.pair_transition):
            pair = pair + update(pair)
        return rows, pair


class Evoformer(nn.Module):
    """Blocks over a stream of aligned sequences and a stream of residue pairs, with AlphaFold 2's wiring.

    Aligned sequences [B, S, R, F] and the target [B, R, F'] -> logits of the distances [B, R, R, num_bins]. In a block
    the sequences attend along the row, biased by the pairs, then along the column, and pass a transition; their outer
    product goes to the pairs; these pass two triangle multiplications, two triangle attentions and a transition.
    Dropout, masks, recycling, templates, the extra sequences and the structure module are left out. The head predicts
    the distance of each pair in bins (the distogram), so the loss sees only the last block's pair stream.

    Args:
        num_blocks: blocks of both streams.
        num_residues: residues of a crop.
        row_hidden, row_heads: width of the sequences' stream and its attention heads.
        pair_hidden, pair_heads: width of the pairs' stream and its attention heads.
        outer: width of each factor of the outer product.
        row_features, target_features: features of a residue in an aligned sequence, and in the sequence to fold.
        num_bins: bins of the distance.
    """

    offsets: Tensor

    @arguments("model")
    def __init__(
        self,
        *,
        num_blocks: Count,
        num_residues: Count,
        row_hidden: Count,
        row_heads: Count,
        pair_hidden: Count,
        pair_heads: Count,
        outer: Count,
        row_features: Count,
        target_features: Count,
        num_bins: Count,
    ) -> None:
        super().__init__()
        divides(row_heads=row_heads, row_hidden=row_hidden)
        divides(pair_heads=pair_heads, pair_hidden=pair_hidden)
        place = torch.arange(num_residues)
        self.rows = nn.Linear(row_features, row_hidden)
        self.target = nn.Linear(target_features, row_hidden)
        self.left, self.right = nn.Linear(target_features, pair_hidden), nn.Linear(target_features, pair_hidden)
        self.positions = nn.Embedding(2 * FARTHEST + 1, pair_hidden)
        offsets = (place[:, None] - place).clamp(-FARTHEST, FARTHEST) + FARTHEST
        self.register_buffer("offsets", offsets, persistent=False)
        block = (row_hidden, row_heads, pair_hidden, pair_heads, outer)
        self.blocks = nn.ModuleList(EvoformerBlock(*block) for _ in range(num_blocks))
        self.distance = nn.Linear(pair_hidden, num_bins)

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:
        pair = self.left(target)[:, :, None] + self.right(target)[:, None] + self.positions(self.offsets)
        rows = self.rows(rows) + self.target(target)[:, None]
        for block in self.blocks:
            rows, pair = block(rows, pair)
        return self.distance(pair + pair.transpose(1, 2))
