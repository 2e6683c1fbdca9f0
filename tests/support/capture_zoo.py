"""Small models in float64, each with (inputs, targets) for a batch size and its loss."""

import torch
import torch.nn.functional as F
from torch import nn


def floats(batch, *shape):
    return torch.randn(batch, *shape, dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.a, self.b, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.inp(x).relu()
        h = h + self.b(F.gelu(self.a(h)))
        h += h.tanh()
        return self.out(h.view(-1, 2, 3).flatten(1))


class TwoTower(nn.Module):
    """Embedding bags (whose offsets are 3 times the batch) and a dense tower."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        self.top = nn.Linear(16, 1)

    def forward(self, dense, sparse):
        parts = [self.dense(dense)]
        for i, bag in enumerate(self.bags):
            indices = sparse[:, i].reshape(-1)
            offsets = torch.arange(0, indices.shape[0], 3, device=sparse.device)
            parts.append(bag(indices, offsets))
        return self.top(torch.cat(parts, 1)).squeeze(1)


class Attention(nn.Module):
    """Has the samples in the second place inside, in views of contiguous tensors."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.drop, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.bn2 = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.bn2(self.b(self.drop(self.bn(self.a(x)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.mid(self.emb(ids)).mean(1))


class ManyOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        a, b = self.trunk(x).chunk(2, dim=-1)
        with torch.no_grad():
            weight = a.softmax(-1).sum(-1, keepdim=True)
        return {"left": self.left(a) * weight, "right": (self.right(b), b.detach() * 2)}


class Transposed(nn.Module):
    """Works on (sequence, batch, hidden)."""

    def __init__(self):
        super().__init__()
        self.proj, self.attention, self.out = nn.Linear(4, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        h = self.proj(x.transpose(0, 1))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(h.relu()).mean(0)


class Masked(nn.Module):
    """Positions, a causal mask written in place, a literal, a buffer, a plain tensor attribute."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos, self.q, self.out = nn.Embedding(9, 8), nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("ids", torch.arange(5), persistent=False)
        self.scale = torch.tensor([0.5, 2.0])

    def forward(self, ids, keep):
        h = self.emb(ids) + self.pos(self.ids)
        mask = torch.zeros(ids.shape[0], 1, 5, 5, dtype=h.dtype, device=h.device)
        mask[:, :, 0, 1:] = -1e9
        mask = mask.masked_fill(~keep[:, None, None, :], -1e9)
        for _ in range(2):
            q = self.q(h).view(-1, 5, 2, 4).transpose(1, 2)
            h = h + F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(-1, 5, 8)
        return self.out(h[:, 0]) * self.scale + torch.tensor(3.0)


class InPlaceResidual(nn.Module):
    """Convolutions whose ReLUs write in place, as torchvision's residual networks do; a running mean kept by hand."""

    def __init__(self):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for i in range(4):
            self.convs.append(nn.Conv2d(2 if i == 0 else 4, 4, 3, padding=1))
            self.norms.append(nn.BatchNorm2d(4))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        h = self.relu(self.norms[0](self.convs[0](x)))
        for conv, norm in list(zip(self.convs, self.norms, strict=True))[1:]:
            y = norm(conv(h))
            y += h
            h = self.relu(y)
        h = h.mean((2, 3))
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h[:, 0] = 1.0
        return self.head(h)


class Auxiliary(nn.Module):
    """An auxiliary loss from the first layer, learned queries, weight normalisation, noise."""

    def __init__(self):
        super().__init__()
        self.gate, self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.queries = nn.Parameter(torch.randn(3, 4))
        self.gain = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        q = self.queries.expand(x.shape[0], -1, -1)
        h = F.scaled_dot_product_attention(q, gate[:, None], x[:, None])
        weight = self.gain * self.mix.weight / self.mix.weight.norm(dim=1, keepdim=True)
        h = F.linear(h, weight, self.mix.bias) + torch.randn(x.shape[0], 1, 1, dtype=x.dtype, device=x.device)
        return self.out(h.tanh().mean(1)), gate.mean(0).pow(2).sum()


class Fixed(nn.Module):
    """Works with its own batch size only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x).view(3, 6).relu())


def mse(outputs, targets):
    return F.mse_loss(outputs, targets)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets)


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).double().mean()


def many(outputs, targets):
    right, detached = outputs["right"]
    return F.mse_loss(outputs["left"], targets["l"]) + right.pow(2).mean() + detached.mean() * targets["r"].mean()


def with_auxiliary(outputs, targets):
    return F.cross_entropy(outputs[0], targets) + 0.1 * outputs[1]


def classes(batch, num):
    return torch.randint(0, num, (batch,))


CASES = {
    "residual": (Residual, lambda b: ((floats(b, 6),), floats(b, 6)), mse, {}),
    "two_tower": (TwoTower, lambda b: ({"dense": floats(b, 5), "sparse": torch.randint(0, 20, (b, 3, 3))}, floats(b)), mse, {}),
    "normed": (Normed, lambda b: ((floats(b, 4),), floats(b, 8)), mse, {}),
    "tied": (Tied, lambda b: ((torch.randint(0, 11, (b, 3)),), classes(b, 11)), cross_entropy, {"accuracy": accuracy}),
    "many_outputs": (ManyOutputs, lambda b: ((floats(b, 4),), {"l": floats(b, 2), "r": floats(b)}), many, {}),
    "transposed": (Transposed, lambda b: ((floats(b, 6, 4),), classes(b, 3)), cross_entropy, {"accuracy": accuracy}),
    "in_place": (InPlaceResidual, lambda b: ((floats(b, 2, 5, 5),), classes(b, 3)), cross_entropy, {"accuracy": accuracy}),
    "auxiliary": (Auxiliary, lambda b: ((floats(b, 4),), classes(b, 2)), with_auxiliary, {}),
    "attention": (Attention, lambda b: ((floats(b, 3, 8),), floats(b, 3, 8)), mse, {}),
    "masked": (Masked, lambda b: ((torch.randint(0, 9, (b, 5)), torch.rand(b, 5) > 0.3), classes(b, 2)), cross_entropy, {}),
}
