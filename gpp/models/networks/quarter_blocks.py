"""Vision Transformers (ViT, DeiT) and BERT, every block of which is four modules one behind the other.

A block is cut into quarters as in PipeEdge (Hu et al., DSD 2022):

    attend   (norm and) self-attention without its output projection      hands on its result, and the block's input
    project  the output projection, and the sum with the block's input    hands on the sum
    widen    (norm and) the first layer of the MLP                        hands on its result, and the sum
    narrow   the second layer of the MLP, and the sum with the sum        hands on the block's result

so what is handed on behind `project` and `narrow` is 2 to 5 times smaller than behind the others. ViT has its norms before
attention and MLP, BERT behind each sum. Parameters are those of google/vit-{base,large}-patch16-224,
google/vit-huge-patch14-224-in21k with its 21,843 classes, facebook/deit-{base,small,tiny}-distilled-patch16-224 and
bert-{base,large}-uncased with a head of two classes.

Shapes: B micro-batch, L sequence, D hidden width, F width of the MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import divides
from gpp.settings import Count, arguments

EPS = 1e-12
"""Of the norms, in all of these models."""


class Attend(nn.Module):
    """Self-attention before its output projection: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, norm: nn.Module) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = norm
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x = self.norm(x_BLD)
        q, k, v = (own(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for own in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Widen(nn.Module):
    """The first layer of the MLP: [B, L, D] -> [B, L, F]."""

    def __init__(self, hidden: int, ffn: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(hidden, ffn)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x_BLD)))


class Joined(nn.Module):
    """A linear layer and the sum with what went past it: [B, L, D or F], [B, L, D] -> [B, L, D]."""

    def __init__(self, width: int, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.norm = norm

    def forward(self, y: Tensor, x_BLD: Tensor) -> Tensor:
        return self.norm(self.linear(y) + x_BLD)


class QuarterBlock(nn.Module):
    """Four quarters: [B, L, D] -> [B, L, D].

    Args:
        before: whether the norms stand before attention and MLP, as in ViT, or behind the sums, as in BERT.
    """

    def __init__(self, hidden: int, num_heads: int, *, before: bool) -> None:
        super().__init__()

        def norm(wanted: bool) -> nn.Module:
            return nn.LayerNorm(hidden, eps=EPS) if wanted else nn.Identity()

        self.attend = Attend(hidden, num_heads, norm(before))
        self.project = Joined(hidden, hidden, norm(not before))
        self.widen = Widen(hidden, 4 * hidden, norm(before))
        self.narrow = Joined(4 * hidden, hidden, norm(not before))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.project(self.attend(x_BLD), x_BLD)
        return self.narrow(self.widen(x_BLD), x_BLD)


class Patches(nn.Module):
    """Pixels [B, 3, S, S] -> [B, tokens + (S / patch)^2, D]: learned tokens, then the patches, all with positions."""

    def __init__(self, size: int, patch: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.tokens = nn.Parameter(torch.randn(tokens, hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(tokens + (size // patch) ** 2, hidden) * 0.02)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        return torch.cat([self.tokens.expand(image.shape[0], -1, -1), patches], dim=1) + self.positions


class ViT(nn.Module):
    """A Vision Transformer (Dosovitskiy et al., ICLR '21), or with `heads=2` a distilled DeiT (Touvron et al., ICML '21).

    Pixels [B, 3, S, S] -> class logits [B, C]; a DeiT's are the mean of those of its class token and its distillation token.

    Args:
        num_layers, hidden, num_heads: blocks, their width and attention heads; the MLP is four times as wide.
        heads: learned tokens, each with a classifier of its own.
        image_size, patch_size: pixels per side.
        num_classes: of each classifier.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        heads: Count,
        image_size: Count,
        patch_size: Count,
        num_classes: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(patch_size=patch_size, image_size=image_size)
        self.embed = Patches(image_size, patch_size, heads, hidden)
        self.blocks = nn.Sequential(*(QuarterBlock(hidden, num_heads, before=True) for _ in range(num_layers)))
        self.head = Classifiers(heads, hidden, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(image)))


class Classifiers(nn.Module):
    """A norm, and a classifier on each of the first tokens, of which the mean is taken: [B, L, D] -> [B, C]."""

    def __init__(self, heads: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=EPS)
        self.classifiers = nn.ModuleList(nn.Linear(hidden, num_classes) for _ in range(heads))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x = self.norm(x_BLD)
        logits = [classify(x[:, i]) for i, classify in enumerate(self.classifiers)]
        return logits[0] if len(logits) == 1 else torch.stack(logits).mean(dim=0)


class WordEmbedding(nn.Module):
    """Token ids [B, L] -> [B, L, D]: tokens, positions and the type of the first sentence, normed."""

    def __init__(self, vocabulary: int, sequence: int, types: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(sequence, hidden) * 0.02)
        self.types = nn.Parameter(torch.randn(types, hidden) * 0.02)
        self.norm = nn.LayerNorm(hidden, eps=EPS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.tokens(ids) + self.positions + self.types[0])


class BERT(nn.Module):
    """BERT (Devlin et al., NAACL '19) with its pooler and a classifier: token ids [B, L] -> class logits [B, C].

    Args:
        num_layers, hidden, num_heads: blocks, their width and attention heads; the MLP is four times as wide.
        vocabulary, sequence: token ids and their number.
        types: sentences that the embedding tells apart; ids are all of the first one.
        num_classes: of the classifier.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        vocabulary: Count,
        sequence: Count,
        types: Count,
        num_classes: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.embed = WordEmbedding(vocabulary, sequence, types, hidden)
        self.blocks = nn.Sequential(*(QuarterBlock(hidden, num_heads, before=False) for _ in range(num_layers)))
        self.pooler = nn.Linear(hidden, hidden)
        self.classify = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.blocks(self.embed(tokens))
        return self.classify(torch.tanh(self.pooler(x_BLD[:, 0])))
