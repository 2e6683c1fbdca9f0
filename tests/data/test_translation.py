"""The made-up language."""

from __future__ import annotations

import pytest
import torch

from gpp.data.translation import START, Translation
from gpp.errors import InvalidConfig
from tests.support.conf import network_named

MODEL = network_named("translator", vocabulary=9, sequence=6)


def whole(split: str, seed: int = 0, **settings: int) -> dict[str, torch.Tensor]:
    samples = Translation(**settings).load(split, MODEL, seed=seed, dtype="float32")
    return samples.fetch(range(len(samples)))


def test_targets_are_reversed_and_exchanged() -> None:
    seen = []
    for split in ("train", "test"):
        batch = whole(split)
        source, previous, target = batch["source"], batch["previous"], batch["target:target"]
        assert torch.equal(previous[:, 1:], target[:, :-1]) and (previous[:, 0] == START).all()
        pairs = set(zip(source.flip(1).flatten().tolist(), target.flatten().tolist(), strict=True))
        assert len(pairs) == 8 and {a for a, _ in pairs} == {b for _, b in pairs} == set(range(1, 9))
        seen.append(pairs)
    assert seen[0] == seen[1]


def test_samples_follow_the_seed() -> None:
    first = whole("train")
    assert all(torch.equal(value, whole("train")[name]) for name, value in first.items())
    other = whole("train", seed=1)
    assert not torch.equal(other["source"], first["source"])
    exchanged = [
        dict(zip(b["source"].flip(1).flatten().tolist(), b["target:target"].flatten().tolist(), strict=True))
        for b in (first, other)
    ]
    assert exchanged[0] != exchanged[1]
    assert not torch.equal(whole("test")["source"], first["source"][:512])
    assert len(whole("train", num_samples=7)["source"]) == 7


def test_refusals_say_what_does_not_fit() -> None:
    with pytest.raises(InvalidConfig, match="takes tokens and next_tokens"):
        Translation().check(network_named("gpt"))
    with pytest.raises(InvalidConfig, match=r"model\.vocabulary=2"):
        Translation().check(network_named("translator", vocabulary=2))
    with pytest.raises(InvalidConfig, match=r"data\.num_samples=0"):
        Translation(num_samples=0)
