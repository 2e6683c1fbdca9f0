"""English prose that ships with Python, a character a token."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import final

import numpy as np

from gpp.data.base import TARGET, AbstractData, HeldOut, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec
from gpp.serialization import read_text
from gpp.settings import Count, settings

RARE = 0  # the token of all characters that are not among the most frequent


@final
@settings("data")
class Text(AbstractData):
    """Windows of characters, of the model's length, one behind the other; the target is each next character.

    The text is Python's own language reference, as `help()` knows it: 465,000 characters in Python 3.11, a few more in
    later ones. The split is the same for every seed: the end of the text is held out. Tokens follow the frequencies in
    the training text.

    Args:
        vocabulary: number of tokens: the most frequent characters, and one token for all others.
        test_fraction: share of the text held out.
        file: another text to read, UTF-8; null for Python's.
    """

    vocabulary: Count = 64
    test_fraction: HeldOut = 0.1
    file: str | None = None

    def check(self, model: AbstractModel) -> None:
        _, spec, _ = _specs(model)
        if (spec.high or 0) < self.vocabulary:
            rule = f"must be at least data.vocabulary={self.vocabulary}, the tokens of the text"
            fix = f"model.vocabulary={self.vocabulary}, or data.vocabulary={spec.high}"
            raise InvalidConfig("model.vocabulary", spec.high, rule, fix)

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import ColumnSamples

        check_split(split)
        self.check(model)
        name, spec, target = _specs(model)
        (length,) = spec.shape
        tokens = self._tokens(split)
        count = (len(tokens) - 1) // length
        if not count:
            rule = f"must not exceed the {len(tokens) - 1} characters of the {split} text that have a next one"
            raise InvalidConfig("model.sequence", length, rule, "a shorter sequence, or a longer text")
        given, following = (tokens[start : start + count * length].reshape(count, length) for start in (0, 1))
        return ColumnSamples(count, {name: lambda: given, TARGET + target: lambda: following}, dtype)

    def _tokens(self, split: str) -> np.ndarray:
        """The split's part of the text: [num_characters], int64."""
        text = self._read()
        cut = len(text) - round(len(text) * self.test_fraction)
        ranked = sorted(Counter(text[:cut]).items(), key=lambda pair: (-pair[1], pair[0]))[: self.vocabulary - 1]
        token = {character: 1 + i for i, (character, _) in enumerate(ranked)}
        part = text[:cut] if split == "train" else text[cut:]
        return np.fromiter((token.get(character, RARE) for character in part), dtype=np.int64, count=len(part))

    def _read(self) -> str:
        if self.file is not None:
            return read_text(self.file, setting="data.file")
        try:
            topics = import_module("pydoc_data.topics").topics
        except ImportError as error:
            rule = "is none, and this Python ships without the topics of its help()"
            raise InvalidConfig("data.file", None, rule, "data.file=PATH of a text") from error
        return "".join(topics[name] for name in sorted(topics))


def _specs(model: AbstractModel) -> tuple[str, TensorSpec, str]:
    """The model's name for the characters, their spec, and its name for the characters that follow."""
    inputs, targets = model.inputs(), model.targets()
    specs = [*inputs.values(), *targets.values()]
    alike = all(spec == specs[0] for spec in specs) and specs[0].dtype == "int" and len(specs[0].shape) == 1
    if len(inputs) != 1 or len(targets) != 1 or not alike:
        rule = f"takes {', '.join(inputs)} and {', '.join(targets)}, but data=text has tokens and those that follow"
        raise InvalidConfig("model", model.name, rule, "model=char_gpt_small, or data=synthetic, which fits every model")
    return next(iter(inputs)), specs[0], next(iter(targets))
