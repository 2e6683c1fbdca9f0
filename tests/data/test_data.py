"""Data sets, and the order of their samples."""

from __future__ import annotations

import bz2
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gpp
from gpp.data.digits import DigitsData
from gpp.data.imported import ImportedData
from gpp.data.sampler import epoch_order, minibatch
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidConfig
from gpp.models.base import TensorSpec, describe
from gpp.models.losses import loss
from gpp.runtime.job import restore
from tests.support.conf import model_named, network_named, option
from tests.support.long import thinned

DIGITS = model_named("digits")
SMALL_DLRM = network_named(
    "dlrm_small",
    num_dense=2,
    num_sparse=2,
    num_dense_features=8,
    hidden=32,
    num_rows=50,
    embedding=4,
    bag=3,
    num_layers=4,
    num_top_layers=1,
)
SMALL_MMT = network_named("mmt_small", num_branches=2, num_layers=1, hidden=32, sequence=6, num_heads=2, ffn=64)
SMALL_BRIDGE = network_named(
    "bridge_tower_small",
    num_layers=2,
    num_cross_layers=1,
    hidden=32,
    num_heads=2,
    ffn=64,
    vocabulary=40,
    text_sequence=5,
    image_size=8,
    patch_size=4,
    num_classes=4,
)


class Pairs(torch.utils.data.Dataset):
    """Items of several forms for the digits model."""

    def __init__(self, form: str, length: int = 6, size: int = 8) -> None:
        self.form, self.length, self.size = form, length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        image = np.full((self.size, self.size), index, dtype=np.float64)
        forms = {
            "pair": (image, index),
            "tuples": ((image,), (index,)),
            "dicts": ({"image": image, "more": 0}, {"digit": index}),
            "flat": {"image": torch.from_numpy(image), "target:digit": index},
            "bare": image,
            "lacking": {"image": image},
        }
        return forms[self.form]


SEQUENCES = {
    "text": network_named("gpt", num_layers=1, hidden=8, num_heads=1, vocabulary=64, sequence=32),
    "translation": network_named("translator", vocabulary=9, sequence=6),
}


@pytest.mark.parametrize("name", ["synthetic", "digits", "imported", *SEQUENCES])
def test_options_build(name):
    extra = [f"data.factory={__name__}.Pairs", "data.args={form: pair}"] if name == "imported" else []
    data, model = option("data", name, *extra), SEQUENCES.get(name, DIGITS)
    assert restore(json.loads(json.dumps(describe(data)))) == data and (name == "imported" or data == type(data)())
    data.check(model)
    assert len(data.load("train", model, seed=0, dtype="float32")) > 0


@pytest.mark.parametrize("model", [SMALL_DLRM, SMALL_MMT, SMALL_BRIDGE], ids=["dlrm", "mmt", "bridge_tower"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_synthetic_has_the_models_shapes(model, dtype):
    samples = Synthetic(num_samples=40).load("train", model, seed=1, dtype=dtype)
    batch = samples.fetch([3, 1, 4])
    specs = model.inputs() | {f"target:{name}": spec for name, spec in model.targets().items()}
    kinds = {"float": getattr(torch, dtype), "int": torch.int64, "bool": torch.bool}
    assert set(batch) == set(specs)
    for name, spec in specs.items():
        assert batch[name].shape == (3, *spec.shape) and batch[name].dtype == kinds[spec.dtype]
        if spec.dtype == "int":
            everything = samples.fetch(range(40), {name})[name]
            assert everything.min() >= 0 and everything.max() < spec.high


def test_synthetic_is_a_function_of_seed_and_index():
    data = Synthetic(num_samples=40)
    first, again = (data.load("train", SMALL_DLRM, seed=1, dtype="float32") for _ in range(2))
    part = again.fetch(torch.tensor([7, 9]), {"dense_1"})
    assert set(part) == {"dense_1"}
    torch.testing.assert_close(part["dense_1"], first.fetch(range(5, 10))["dense_1"][[2, 4]], rtol=0, atol=0)
    longer = Synthetic(num_samples=60).load("train", SMALL_DLRM, seed=1, dtype="float32").fetch([7])
    for name, value in first.fetch([7]).items():
        torch.testing.assert_close(longer[name], value)
    for other in (data.load("train", SMALL_DLRM, seed=2, dtype="float32"), data.load("test", SMALL_DLRM, seed=1, dtype="float32")):
        assert not torch.equal(other.fetch([7])["dense_1"], first.fetch([7])["dense_1"])


@pytest.mark.parametrize("model", thinned([SMALL_DLRM, SMALL_MMT, SMALL_BRIDGE], 3), ids=["dlrm", "mmt", "bridge_tower"])
def test_synthetic_can_be_learned(model):
    samples = Synthetic(num_samples=1024).load("train", model, seed=0, dtype="float32")
    held_out = Synthetic().load("test", model, seed=0, dtype="float32").fetch(range(256))
    torch.manual_seed(0)
    network, measure = model.build(), loss(model.loss)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def value(batch):
        targets = {name.removeprefix("target:"): t for name, t in batch.items() if name.startswith("target:")}
        return measure(network(**{name: t for name, t in batch.items() if not name.startswith("target:")}), targets)

    before = value(held_out).item()
    for step in range(64):
        optimizer.zero_grad()
        value(samples.fetch(range(step % 32 * 32, step % 32 * 32 + 32))).backward()
        optimizer.step()
    assert value(held_out).item() < 0.8 * before


def test_digits_split():
    train, test = (DigitsData().load(split, DIGITS, seed=0, dtype="float64") for split in ("train", "test"))
    assert (len(train), len(test)) == (1437, 360)
    everything = [samples.fetch(range(len(samples))) for samples in (train, test)]
    images = torch.cat([part["image"] for part in everything])
    assert images.dtype == torch.float64 and images.shape == (1797, 8, 8)
    assert images.min() == 0 and images.max() == 1
    counts = everything[1]["target:digit"].bincount()
    assert counts.min() >= 34 and counts.max() <= 37
    other_seed = DigitsData().load("test", DIGITS, seed=5, dtype="float64").fetch(range(360))
    assert torch.equal(other_seed["image"], everything[1]["image"])


def test_digits_are_those_of_the_uci_repository():
    """Its page says how many images of each digit the test set has; scikit-learn's page, which digit the first ones show."""
    file = Path(gpp.__file__).parent / "data" / "digits.csv.bz2"
    lines = [[int(float(word)) for word in line.split(",")] for line in bz2.decompress(file.read_bytes()).decode().split()]
    counts = Counter(line[-1] for line in lines)
    assert [counts[digit] for digit in range(10)] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert [line[-1] for line in lines[:20]] == [*range(10), *range(10)]
    assert lines[0][:8] == [0, 0, 5, 13, 9, 1, 0, 0]
    parts = [DigitsData().load(split, DIGITS, seed=0, dtype="float32") for split in ("train", "test")]
    batches = [part.fetch(range(len(part))) for part in parts]
    pairs = [pair for batch in batches for pair in zip(batch["image"], batch["target:digit"], strict=True)]
    rows = {(*image.flatten().mul(16).int().tolist(), int(digit)) for image, digit in pairs}
    assert rows == {tuple(line) for line in lines}


def test_digits_refuse_other_models():
    with pytest.raises(InvalidConfig, match="data=synthetic"):
        DigitsData().check(SMALL_MMT)


@pytest.mark.parametrize("form", ["pair", "tuples", "dicts", "flat"])
def test_imported_items(form):
    data = ImportedData(factory=f"{__name__}.Pairs", args={"form": form}, train_args={"length": 9})
    train, test = (data.load(split, DIGITS, seed=0, dtype="float32") for split in ("train", "test"))
    assert (len(train), len(test)) == (9, 6)
    batch = train.fetch([2, 5])
    assert batch["image"].dtype == torch.float32 and batch["image"][:, 0, 0].tolist() == [2, 5]
    assert batch["target:digit"].dtype == torch.int64 and batch["target:digit"].tolist() == [2, 5]
    assert set(train.fetch(torch.tensor([1]), {"target:digit"})) == {"target:digit"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"form": "bare"}, "must be a dict or"),
        ({"form": "lacking"}, "target:digit"),
        ({"form": "pair", "size": 7}, r"shape \[7, 7\]"),
    ],
)
def test_imported_items_that_do_not_fit(args, words):
    samples = ImportedData(factory=f"{__name__}.Pairs", args=args).load("train", DIGITS, seed=0, dtype="float32")
    with pytest.raises(InvalidConfig, match=words):
        samples.fetch([0])


@pytest.mark.parametrize("splits", [{}, {"train_args": {"length": 40}, "test_args": {"length": 40}}], ids=["none", "equal"])
def test_an_imported_data_set_without_a_split_holds_samples_out(splits):
    data = ImportedData(factory=f"{__name__}.Pairs", args={"form": "pair"} | ({} if splits else {"length": 40}), **splits)

    def rows(split, seed=0, data=data):
        samples = data.load(split, DIGITS, seed=seed, dtype="float32")
        return samples.fetch(range(len(samples)))["image"][:, 0, 0].int().tolist()

    train, test = rows("train"), rows("test")
    assert len(test) == 4 and sorted(train + test) == list(range(40)), "no sample is in both"
    assert (rows("train", seed=7), rows("test", seed=7)) == (train, test)
    assert len(rows("test", data=replace(data, test_fraction=0.5))) == 20
    assert "held out from training" in data.warnings()[0] and "data.test_args" in data.warnings()[0]
    apart = ImportedData(factory=f"{__name__}.Pairs", args={"form": "pair"}, train_args={"length": 9})
    assert not apart.warnings() and rows("train", data=apart) == list(range(9))


def test_refusals():
    with pytest.raises(InvalidConfig, match="split"):
        Synthetic().load("valid", SMALL_MMT, seed=0, dtype="float32")
    with pytest.raises(InvalidConfig, match=r"data\.num_samples"):
        Synthetic(num_samples=0)
    with pytest.raises(InvalidConfig, match=r"data\.test_fraction"):
        DigitsData(test_fraction=1.0)
    with pytest.raises(InvalidConfig, match="give each argument once"):
        ImportedData(factory="a.b", args={"x": 1}, test_args={"x": 2})
    with pytest.raises(InvalidConfig, match="map-style"):
        ImportedData(factory="builtins.object").load("train", DIGITS, seed=0, dtype="float32")
    with pytest.raises(InvalidConfig, match="target:NAME"):
        DigitsData().load("test", DIGITS, seed=0, dtype="float32").fetch([0], {"digit"})


def test_masks_hide_nothing():
    from gpp.data.synthetic import _Draw

    assert _Draw(seed=0, split="train", num_samples=3, noise=0.0).input("mask", TensorSpec(shape=(4,), dtype="bool")).all()


@pytest.mark.parametrize(("num_samples", "size"), [(20, 4), (23, 4), (7, 7), (5, 1)])
def test_an_epoch_shows_every_sample_at_most_once(num_samples, size):
    steps = num_samples // size
    for epoch in range(3):
        seen = [index for step in range(epoch * steps, (epoch + 1) * steps) for index in minibatch(step, size, num_samples, 0)]
        assert len(seen) == steps * size == len(set(seen))
        assert set(seen) <= set(range(num_samples))
        assert seen == epoch_order(num_samples, 0, epoch)[: steps * size].tolist()


def test_a_step_does_not_depend_on_those_before():
    later = minibatch(37, 4, 23, seed=2)
    for step in range(37):
        minibatch(step, 4, 23, seed=2)
    epoch_order.cache_clear()
    assert minibatch(37, 4, 23, seed=2) == later


def test_seeds_and_epochs_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_plain_ints():
    assert all(type(index) is int for index in minibatch(0, 3, 9, 0))


@pytest.mark.parametrize("size", [0, 10])
def test_a_minibatch_must_fit(size):
    with pytest.raises(InvalidConfig, match="minibatch_size"):
        minibatch(0, size, 9, 0)
