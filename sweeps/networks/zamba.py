"""A hybrid of state-space layers and attention whose weights many places share (Zamba2, arXiv 2411.15242; Mamba-2, 2405.21060).

Shapes: B micro-batch, L sequence, D hidden width, H heads of a state-space layer, P width of a head, S width of a head's
state, C positions of a chunk, K chunks, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import GatedMlp, Rotary, RotaryAttention, divides
from gpp.settings import Count, arguments


def decays(logs: Tensor) -> Tensor:
    """[..., C] logarithms of decay -> [..., C, C]: the sum of those behind the second position up to the first; -inf before it."""
    total = logs.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    ahead = torch.ones(between.shape[-2:], dtype=torch.bool, device=logs.device).triu(1)
    return between.masked_fill(ahead, -torch.inf)


def state_space(x_BLHP: Tensor, logs_BLH: Tensor, write_BLS: Tensor, read_BLS: Tensor, chunk: int) -> Tensor:
    """What a state that decays and is written to gives back at each position: [B, L, H, P], by chunks of positions.

    Args:
        logs_BLH: logarithms of what is left of the state, at most 0.
        write_BLS, read_BLS: the directions in which all heads write to their states and read them.
    """
    x = x_BLHP.unflatten(1, (-1, chunk))
    write, read = write_BLS.unflatten(1, (-1, chunk)), read_BLS.unflatten(1, (-1, chunk))
    logs = logs_BLH.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)
    total = logs.cumsum(-1)
    within = torch.einsum("bkis,bkjs,bhkij,bkjhp->bkihp", read, write, decays(logs).exp(), x)
    left = torch.einsum("bkjs,bhkj,bkjhp->bkhps", write, (total[..., -1:] - total).exp(), x)
    before = F.pad(left, (0, 0, 0, 0, 0, 0, 1, 0))
    carried = torch.einsum("bhkm,bmhps->bkhps", decays(F.pad(total[..., -1], (1, 0))).exp()[:, :, :-1], before)
    return (within + torch.einsum("bkis,bkhps,bhki->bkihp", read, carried, total.exp())).flatten(1, 2)


class StateSpaceLayer(nn.Module):
    """Mamba-2: [B, L, D] -> [B, L, D]. A short convolution over positions, the state-space sum, and a gate."""

    def __init__(self, hidden: int, head: int, state: int, chunk: int) -> None:
        super().__init__()
        self.inner, self.head, self.state, self.chunk = 2 * hidden, head, state, chunk
        heads, mixed = self.inner // head, self.inner + 2 * state
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.enter = nn.Linear(hidden, self.inner + mixed + heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.rate = nn.Parameter(torch.arange(1.0, heads + 1).log())
        self.bias, self.skip = nn.Parameter(torch.full((heads,), -4.0)), nn.Parameter(torch.ones(heads))
        self.leave_norm, self.leave = nn.RMSNorm(self.inner, eps=1e-5), nn.Linear(self.inner, hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        mixed = self.inner + 2 * self.state
        gate, y, step = self.enter(self.norm(x_BLD)).split([self.inner, mixed, self.rate.shape[0]], dim=-1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., :-3].transpose(1, 2))
        y, write, read = y.split([self.inner, self.state, self.state], dim=-1)
        step, y = F.softplus(step + self.bias), y.unflatten(-1, (-1, self.head))
        made = state_space(y * step[..., None], -step * self.rate.exp(), write, read, self.chunk) + y * self.skip[:, None]
        return x_BLD + self.leave(self.leave_norm(made.flatten(2) * F.silu(gate)))


class SharedBlock(nn.Module):
    """Attention and an MLP over the state beside the embedding: twice [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(2 * hidden, eps=1e-5), RotaryAttention(hidden, num_heads, source=2 * hidden)
        self.mlp_norm, self.mlp = nn.RMSNorm(hidden, eps=1e-5), GatedMlp(hidden, ffn)

    def forward(self, x_BLD: Tensor, embedded_BLD: Tensor, rotary: Rotary) -> Tensor:
        return self.mlp(self.mlp_norm(self.attention(self.norm(torch.cat([x_BLD, embedded_BLD], dim=-1)), rotary)))


class Zamba(nn.Module):
    """State-space layers, and now and then a shared block: token ids [B, L] -> logits [B, L, V] of the next tokens.

    The shared blocks take turns. Each place reads the embedding of the tokens beside the state, and has a matrix of its own
    behind the block; what Zamba2 adds to the shared weights in low rank is left out. The head is the embedding's matrix.

    Args:
        num_layers: state-space layers.
        every: layers between two shared blocks.
        num_shared: blocks that take turns.
        hidden, num_heads, ffn: width, and attention heads and inner width of the shared blocks.
        head, state, chunk: width of a state-space layer's heads and of their states; positions that it handles at once.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        every: Count,
        num_shared: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        head: Count,
        state: Count,
        chunk: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(head=head, hidden=hidden)
        divides(chunk=chunk, sequence=sequence)
        self.every = every
        self.tokens = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.rotary = Rotary(sequence, 2 * hidden // num_heads)
        self.layers = nn.ModuleList(StateSpaceLayer(hidden, head, state, chunk) for _ in range(num_layers))
        self.shared = nn.ModuleList(SharedBlock(hidden, num_heads, ffn) for _ in range(num_shared))
        self.places = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(num_layers // every))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = x_BLD = self.tokens(tokens)
        for i, layer in enumerate(self.layers, start=1):
            if i % self.every == 0:
                place = i // self.every - 1
                x_BLD = x_BLD + self.places[place](self.shared[place % len(self.shared)](x_BLD, embedded, self.rotary))
            x_BLD = layer(x_BLD)
        return self.head(self.norm(x_BLD))
