"""Heads that share keys and values, beside torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpp.models.networks.layers import GroupedAttention, Rotary


def test_several_heads_of_queries_read_one_of_keys() -> None:
    torch.manual_seed(0)
    layer, rotary = GroupedAttention(hidden=24, num_heads=6, num_kv_heads=2).double(), Rotary(length=5, width=4).double()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    q, k = (rotary(part.unsqueeze(2)).squeeze(2) for part in (layer.query(x).view(3, 5, 6, 4), layer.key(x).view(3, 5, 2, 4)))
    v = layer.value(x).view(3, 5, 2, 4)
    y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x, rotary), layer.out(y.transpose(1, 2).flatten(2)))
