"""Text, a character a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpp.data.text import RARE, Text
from gpp.errors import InvalidConfig
from gpp.models.network import Network
from tests.support.conf import network_named

MODEL = network_named("gpt", num_layers=1, hidden=8, num_heads=1, vocabulary=64, sequence=32)


def whole(data: Text, split: str, model: Network = MODEL, seed: int = 0) -> dict[str, torch.Tensor]:
    samples = data.load(split, model, seed=seed, dtype="float32")
    return samples.fetch(range(len(samples)))


def test_every_target_is_the_next_character() -> None:
    train = whole(Text(), "train")
    tokens, following = train["tokens"], train["target:next_tokens"]
    assert tokens.shape == following.shape and tokens.shape[0] > 10_000 and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], following[:, :-1]) and torch.equal(tokens[1:, 0], following[:-1, -1])
    assert {int(t) for t in tokens.unique()} == set(range(64))
    counts = tokens.flatten().bincount()[1:]
    assert counts[0] == counts.max() and counts[-1] < counts[0] / 100


def test_the_end_is_held_out_and_seeds_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ab" * 40 + "ccbé" * 5)
    data = Text(vocabulary=4, test_fraction=0.2, file=str(file))
    model = network_named("gpt", num_layers=1, hidden=8, num_heads=1, vocabulary=4, sequence=4)
    train, test = (whole(data, split, model) for split in ("train", "test"))
    assert train["tokens"].tolist() == [[1, 2, 1, 2]] * 19 and train["target:next_tokens"][0].tolist() == [2, 1, 2, 1]
    # c and é do not occur in what is trained on
    assert test["tokens"].tolist() == [[RARE, RARE, 2, RARE]] * 4 and test["target:next_tokens"][0].tolist() == [
        RARE,
        2,
        RARE,
        RARE,
    ]
    assert torch.equal(whole(data, "train", model, seed=5)["tokens"], train["tokens"])


def test_refusals_say_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"model\.vocabulary=60.*data\.vocabulary=64.*data\.vocabulary=60"):
        Text().check(network_named("gpt", vocabulary=60))
    with pytest.raises(InvalidConfig, match="takes image and digit"):
        Text().check(network_named("digits"))
    with pytest.raises(InvalidConfig, match=r"data\.vocabulary=0"):
        Text(vocabulary=0)
    with pytest.raises(InvalidConfig, match=r"data\.test_fraction"):
        Text(test_fraction=0)
    with pytest.raises(InvalidConfig, match=r"data\.file.*cannot be read"):
        Text(file=str(tmp_path / "none")).load("train", MODEL, seed=0, dtype="float32")
    file = tmp_path / "short"
    file.write_text("x" * 30)
    with pytest.raises(InvalidConfig, match=r"model\.sequence=32.*26 characters of the train text"):
        Text(file=str(file)).load("train", MODEL, seed=0, dtype="float32")
