"""Macaw-LLM (arXiv 2306.09093): encoders of pictures, film and sound beside each other, before one language model.

Shapes: B micro-batch, L positions (those of the encoders, then the text's), D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import CrossAttention, LlamaLayer, Rotary, divides
from gpp.models.networks.llava import ImageFeatures
from gpp.models.networks.whisper import SoundEncoder
from gpp.settings import Count, Natural, arguments


class Aligned(nn.Module):
    """An encoder's features as vectors of the language model, by attention to the embeddings of words: [B, M, width] -> [B, N, D].

    A convolution shortens the features to a `shrink`-th.
    """

    def __init__(self, encoder: nn.Module, width: int, hidden: int, num_heads: int, shrink: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.shorten = nn.Conv1d(width, hidden, shrink, stride=shrink)
        self.attention = CrossAttention(hidden, num_heads)

    def forward(self, x: Tensor, words_VD: Tensor) -> Tensor:
        features_BND = self.shorten(self.encoder(x).transpose(1, 2)).transpose(1, 2)
        return features_BND + self.attention(features_BND, words_VD.expand(features_BND.shape[0], -1, -1))


class Film(nn.Module):
    """Frames of a film [B, T, 3, S, S] -> the features of all of them, one after another [B, T M, width]."""

    def __init__(self, frames: ImageFeatures) -> None:
        super().__init__()
        self.frames = frames

    def forward(self, film: Tensor) -> Tensor:
        return torch.cat([self.frames(frame) for frame in film.unbind(1)], dim=1)


class Macaw(nn.Module):
    """A picture [B, 3, S, S], sound [B, F, 2 M], film [B, T, 3, S, S], token ids [B, L] -> logits [B, L, V] of the next tokens.

    Each encoder attends to the embeddings of a few words, `words` of them here and all in the paper, and so reads the
    embedding that the text reads.

    Args:
        image_layers, image_hidden, image_heads, image_size, patch_size: the image tower, and pixels per side.
        film_frames: pictures of a film, which has a tower of its own of the same size; 0 for no film.
        sound_layers, sound_hidden, sound_heads, bands, sound_frames: the encoder of sound, and its spectrogram.
        shrink: features that become one vector of the language model.
        words: embeddings that the encoders attend to.
        num_layers, hidden, num_heads, ffn: layers of the language model, their width, heads and inner width.
        vocabulary, text_sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        image_layers: Count,
        image_hidden: Count,
        image_heads: Count,
        image_size: Count,
        patch_size: Count,
        film_frames: Natural,
        sound_layers: Count,
        sound_hidden: Count,
        sound_heads: Count,
        bands: Count,
        sound_frames: Count,
        shrink: Count,
        words: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        text_sequence: Count,
    ) -> None:
        super().__init__()
        divides(image_heads=image_heads, image_hidden=image_hidden)
        divides(patch_size=patch_size, image_size=image_size)
        divides(sound_heads=sound_heads, sound_hidden=sound_hidden)
        divides(num_heads=num_heads, hidden=hidden)
        patches, steps = (image_size // patch_size) ** 2, sound_frames // 2
        before = patches // shrink + steps // shrink + film_frames * patches // shrink
        tower, align = (image_size, patch_size, image_layers, image_hidden, image_heads), (hidden, num_heads, shrink)
        self.words, self.text_sequence = words, text_sequence
        self.image = Aligned(ImageFeatures(*tower), image_hidden, *align)
        sound = SoundEncoder(bands, steps, sound_layers, sound_hidden, sound_heads)
        self.sound = Aligned(sound, sound_hidden, *align)
        self.film = Aligned(Film(ImageFeatures(*tower)), image_hidden, *align) if film_frames else None
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(before + text_sequence, hidden // num_heads)
        self.layers = nn.ModuleList(LlamaLayer(hidden, num_heads, ffn) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, image: Tensor, sound: Tensor, text: Tensor, film: Tensor | None = None) -> Tensor:
        words_VD = self.tokens.weight[: self.words]
        seen = [self.image(image, words_VD), self.sound(sound, words_VD)]
        if self.film is not None and film is not None:
            seen.append(self.film(film, words_VD))
        x_BLD = torch.cat([*seen, self.tokens(text)], dim=1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.rotary)
        return self.head(self.norm(x_BLD)[:, -self.text_sequence :])
