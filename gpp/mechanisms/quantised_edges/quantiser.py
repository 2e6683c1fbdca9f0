"""Values of a message as few bits: levels between a sample's least and its largest value, several in a word.

Shapes, for a tensor x of N samples with D values each, at q bits: V = floor(32/q) values in a word, W = ceil(D/V) words.

    encode(x)  [N, H + W] int32: the least value, the distance of two levels (H words), then the levels
    decode     [N, D]: least + level x distance, so that no value is off by more than half a distance, and rounding

Level k of a sample lies in bits [q (k div W), q (k div W) + q) of word k mod W: the levels of one word are W apart, so that a word
is put together from slices that lie side by side in memory. Every sample is coded by itself, so micro-batches and replicas may be
cut in any way. A sample with a value that is not finite is decoded as one without finite values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch

from gpp.mechanisms.quantised_edges.sizes import WORD_BYTES, clip_factor, header_words, per_word, words

GELU_MEAN = 0.0
"""Nearly all values of a GELU are above zero: its clipping takes them for the positive half of a distribution around zero."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """The coding of one tensor of a message.

    Args:
        bits: of a value.
        clip: whether values are clipped before, as for values of a Laplace distribution.
        gelu: whether they are a GELU's.
        dtype: of the values.
        shape: of one sample.
    """

    bits: int
    clip: bool
    gelu: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        """Values of a sample (D)."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """Words of a coded sample (H + W)."""
        return words(self.values, self.bits, _name(self.dtype))

    @property
    def _exact(self) -> torch.dtype:
        """In which levels are computed, and headers sent: narrow types would add errors of their own."""
        return self.dtype if self.dtype.itemsize >= WORD_BYTES else torch.float32

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, *shape] -> [N, H + W] int32."""
        flat, top = tensor.reshape(tensor.shape[0], -1).to(self._exact), (1 << self.bits) - 1
        if self.clip:
            flat = self._clipped(flat)
        low, high = torch.aminmax(flat, dim=1, keepdim=True)
        step = (high - low) / top
        # Of equal values every level is 0. Where no level can be told (a value is not finite), decoding does not read it.
        inverse = step.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
        levels = (flat - low).mul_(inverse).round_().to(torch.int32)
        out = levels.new_empty(len(levels), self.words)
        head, slots = header_words(_name(self.dtype)), per_word(self.bits)
        out[:, :head] = torch.cat((low, step), dim=1).view(torch.int32)
        body, width = out[:, head:], self.words - head
        body.copy_(levels[:, :width])
        for slot in range(1, slots):
            part = levels[:, slot * width : (slot + 1) * width]
            if part.shape[1]:
                body[:, : part.shape[1]].bitwise_or_(part << (slot * self.bits))
        return out

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """[N, H + W] int32 -> [N, *shape]."""
        head, slots, top = header_words(_name(self.dtype)), per_word(self.bits), (1 << self.bits) - 1
        low, step = coded[:, :head].contiguous().view(self._exact).split(1, dim=1)
        body, width = coded[:, head:], coded.shape[1] - head
        flat = torch.empty(len(coded), self.values, dtype=self._exact, device=coded.device)
        for slot in range(slots):
            part = flat[:, slot * width : (slot + 1) * width]
            if part.shape[1]:
                # The word's sign is a bit like the others.
                part.copy_((body[:, : part.shape[1]] >> (slot * self.bits)) & top)
        return flat.mul_(step).add_(low).to(self.dtype).view(len(coded), *self.shape)

    def _clipped(self, flat: torch.Tensor) -> torch.Tensor:
        """Without what lies further from the mean than pays (`clip_factor`); [N, D] in and out."""
        if self.gelu:
            # The other half of the bell, which is not there, has as much of the square.
            spread, mean = (flat * flat).mean(dim=1, keepdim=True).sqrt_(), GELU_MEAN
        else:
            variance, mean = torch.var_mean(flat, dim=1, keepdim=True, correction=0)
            spread = variance.mul_(0.5).sqrt_()
        reach = spread * clip_factor(self.bits + self.gelu)
        return torch.minimum(torch.maximum(flat, mean - reach), mean + reach)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
