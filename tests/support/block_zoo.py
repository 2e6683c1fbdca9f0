"""Blocks that torch.export could not take, reached by dotted path."""

import torch
from torch import nn


class Deciding(nn.Module):
    """Takes one of two branches by its data."""

    def __init__(self, size, scale=2.0):
        super().__init__()
        self.inner, self.scale = nn.Linear(size, size, dtype=torch.float64), scale
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        y = self.inner(x)
        return y * self.scale if y.sum().item() > 0 else -y


class Encoder(nn.Module):
    def __init__(self, num, size):
        super().__init__()
        self.emb, self.drop = nn.Embedding(num, size, dtype=torch.float64), nn.Dropout(0.5)

    def forward(self, ids):
        h = self.drop(self.emb(ids))
        return h.mean(1), h.transpose(0, 1).contiguous()


class Head(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.out = nn.Linear(size, 3, dtype=torch.float64)

    def forward(self, x, pooled, sequence):
        return self.out(x + pooled + sequence.sum(0))
