"""Layers of torch, and ways to wrap and to call a model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import namedtuple
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.flop_counter
from torch import Tensor, nn

from tests.idioms.case import SIZE, D, Made, batches, idiom, rows
from tests.idioms.parameters import Between

on = partial(idiom, theme="Layers, calls, inputs and outputs")


class Words(nn.Module):
    """Tokens [B, 5] through a layer over sequences [B, 5, D]."""

    def __init__(self, mid: nn.Module, **embedding: Any) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(10, D, **embedding), mid, nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.mid(self.embed(ids))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


def words(mid: nn.Module | None = None, **embedding: Any) -> Made:
    return Made(Words(mid or nn.Tanh(), **embedding), batches(lambda: torch.randint(10, (SIZE, 5))))


@on("`nn.Embedding(padding_idx=0)`", "equal")
def padding() -> Made:
    return words(padding_idx=0)


@on(
    "`nn.Embedding(max_norm=1)`, which changes its weights in `forward`",
    "warned",
    "updated by every micro-batch",
    "one micro-batch a mini-batch, or `F.normalize` of what is read",
)
def max_norm() -> Made:
    return words(max_norm=1.0)


@on("`nn.Embedding(sparse=True)`", "equal")
def sparse() -> Made:
    made = words(sparse=True)
    made.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return made


@on("`nn.Embedding(scale_grad_by_freq=True)`", "warned", "scale_grad_by_freq", "one micro-batch a mini-batch")
def by_frequency() -> Made:
    return words(scale_grad_by_freq=True)


@on("`nn.LSTM`, several layers, both directions", "equal")
def lstm() -> Made:
    return words(nn.LSTM(D, D // 2, num_layers=2, bidirectional=True, batch_first=True))


@on("`nn.GRU`", "equal")
def gru() -> Made:
    return words(nn.GRU(D, D, batch_first=True))


@on("`nn.LSTMCell` in a loop, with a first state of zeros", "equal")
def cell() -> Made:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = c = torch.zeros(len(x), D, dtype=x.dtype)
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
            return h.unsqueeze(1)

    return words(Loop())


@on("`pack_padded_sequence`, whose sizes depend on values", "refused", "pack_padded_sequence at", "padded sequences and a mask")
def packed() -> Made:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(D, D, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), 3)
            given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(given)[0], batch_first=True)[0]

    return words(Packed())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]


@on("`nn.MultiheadAttention` with a mask", "equal")
def attention() -> Made:
    return words(Attention())


@on("`F.scaled_dot_product_attention(is_causal=True)`", "equal")
def causal() -> Made:
    class Causal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(2, (2, D // 2)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    return words(Causal())


@on("`nn.TransformerEncoderLayer`, with dropout", "equal")
def encoder() -> Made:
    made = words(nn.TransformerEncoderLayer(D, 2, 12, dropout=0.1, batch_first=True))
    made.whole = True
    return made


@on("layer, group and instance norm; convolutions, pooling, `channels_last`", "equal")
def images() -> Made:
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.AdaptiveAvgPool2d(2),
        nn.ConvTranspose2d(4, 2, 2),
        nn.Flatten(),
        nn.LayerNorm(18),
        nn.Linear(18, 3),
    )
    return Made(body.to(memory_format=torch.channels_last), batches(lambda: rows(2, 6, 6)))  # type: ignore[call-overload]


@on("a model of `torch.compile`", "warned", "torch.compile of the model is left out", "engine=Distributed(compile='inductor')")
def compiled() -> Made:
    return Made(torch.compile(Between(nn.Linear(D, D)), backend="eager"))  # type: ignore[arg-type]


@on("`nn.DataParallel` around the model", "equal")
def data_parallel() -> Made:
    return Made(nn.DataParallel(Between(nn.Linear(D, D))))


@on("`torch.fx.symbolic_trace` of the model", "equal")
def traced() -> Made:
    return Made(torch.fx.symbolic_trace(Between(nn.Linear(D, D))))


@on("`torch.jit.script` of the model", "refused", "is a script", "pass the module itself")
def scripted() -> Made:
    return Made(torch.jit.script(Between(nn.Linear(D, D)).double()))  # type: ignore[arg-type]


@on("a module with `__call__` overridden", "equal")
def called() -> Made:
    class Called(Between):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    return Made(Called(nn.Linear(D, D)))


@on(
    "an operator of one's own by `torch.library.custom_op`",
    "equal",
)
def custom_operator() -> Made:
    return Made(Between(Doubled()))


@torch.library.custom_op("idioms::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
torch.utils.flop_counter.register_flop_formula(torch.ops.idioms.doubled)(lambda shape, **_: math.prod(shape))
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


class Fusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0, *, flag: bool = True) -> Tensor:
        h = self.a(x) if y is None else self.a(x) + self.b(y) * scale
        return self.head(torch.tanh(h) if flag else h)


@on("inputs by position, keywords left at their defaults", "equal")
def defaults() -> Made:
    return Made(Fusion(), batches(lambda: (rows(D), rows(D))))


@on("inputs by name", "equal")
def by_name() -> Made:
    return Made(Fusion(), batches(lambda: {"y": rows(D), "x": rows(D)}))


@on("an input that is None", "equal")
def none_input() -> Made:
    return Made(Fusion(), batches(lambda: {"x": rows(D), "y": None}))


@on("a number as an input", "equal")
def number_input() -> Made:
    return Made(Fusion(), batches(lambda: {"x": rows(D), "y": rows(D), "scale": 3.0}))


@on("a number as an input, another one in some batches", "equal")
def other_number() -> Made:
    scales = itertools.cycle((3.0, 0.5))
    return Made(Fusion(), batches(lambda: {"x": rows(D), "y": rows(D), "scale": next(scales)}))


@on("`torch.tensor(grid).tolist()`: sizes and an order from numbers of Python, others in some batches", "equal")
def grids() -> Made:
    class Grids(Between):
        def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]
            height, width = torch.tensor(grid).tolist()
            order = torch.arange(height * width).reshape(height, width).T.flatten()
            return super().forward(x[:, order[order >= 0]].cumsum(1).mean(1))

    shapes = itertools.cycle(((2, 3), (3, 2)))
    return Made(Grids(nn.Linear(D, D)), batches(lambda: {"x": rows(6, D), "grid": next(shapes)}))


@on("`nn.Transformer` with `tgt_mask` alone", "equal")
def whole_transformer() -> Made:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Transformer(D, 2, 1, 1, 16, dropout=0.0, batch_first=True), nn.Linear(D, 3)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
            return self.head(self.inner(source, target, tgt_mask=mask)[:, -1])

    return Made(Whole(), batches(lambda: {"source": rows(5, D), "target": rows(4, D)}))


@on("`y = h.transpose(1, 2).contiguous()`, then `y.view(-1).mul_(2)`: writes into copies, views and slices", "equal")
def written() -> Made:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x)).transpose(1, 2) + 1
            copies = h.contiguous(), h.reshape(len(h), -1), h.flatten(1)
            copies[0].view(len(h), -1).mul_(2.0)
            copies[1].add_(1.0)
            copies[2][:, 0] = 0.0
            out = self.second((h + copies[0] + sum(one.view_as(h) for one in copies[1:])).transpose(1, 2))
            out[:, 0].mul_(0.5)
            return self.head(F.relu(out, inplace=True)).mean(1)

    return Made(Written(), batches(lambda: rows(4, D)))


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor | None = None
    words: tuple[str, ...] = ("left", "right")


@on("a dataclass as the input, with words and None in it", "equal")
def dataclass_input() -> Made:
    class Reads(Between):
        def forward(self, sample: Sample, *, negate: bool = False) -> Tensor:  # type: ignore[override]
            assert sample.words == ("left", "right") and sample.y is None
            return super().forward(-sample.x if negate else sample.x)

    return Made(Reads(nn.Linear(D, D)), batches(lambda: {"sample": Sample(rows(D)), "negate": True}))


@on("a dict within the inputs", "equal")
def nested() -> Made:
    class Nested(Between):
        def forward(self, x: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x["a"] + x["b"])

    return Made(Nested(nn.Linear(D, D)), batches(lambda: {"x": {"a": rows(D), "b": rows(D)}}))


@on("an input changed in place (`x[x.isnan()] = 0`)", "warned", "writes into x", "`torch.nan_to_num`")
def written_input() -> Made:
    class Cleaned(Between):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 0.0
            return super().forward(x)

    return Made(Cleaned(nn.Linear(D, D)))


@on("`torch.distributions`, `torch.cdist`, `F.gaussian_nll_loss`, complex numbers in the code", "equal")
def checked_values() -> Made:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        spread = F.softplus(outputs) + 0.1
        given = torch.distributions.Normal(outputs, spread).log_prob(targets).mean()
        far = torch.cdist(outputs[:, None], targets[:, None], compute_mode="donot_use_mm_for_euclid_dist").mean()
        return F.gaussian_nll_loss(outputs, targets, spread) - given + far + (outputs * (1 + 2j)).abs().mean()

    return Made(Between(nn.Linear(D, D)), loss=loss)


@on("inputs that are not batch first", "refused", "must all have as many samples", "transpose in the model")
def time_first() -> Made:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][-1])

    return Made(Last(), batches(lambda: torch.randn(5, SIZE, D, dtype=torch.float64)))


Pair = namedtuple("Pair", ["logits", "hidden"])


@on("outputs as a named tuple, a dict or a list, read by the loss", "equal")
def outputs() -> Made:
    class Several(Between):
        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.mid(self.first(x)))
            return Pair(self.last(hidden), {"deep": [hidden, x]})

    def loss(found: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(found.logits, targets) + found.hidden["deep"][0].pow(2).mean()

    return Made(Several(nn.Linear(D, D)), loss=loss)
