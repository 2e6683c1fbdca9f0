"""Initial tensors that are made one by one are those of the whole model, bit for bit, and constructors of which that is not so."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpp.app.capturing import to_make
from gpp.capture.codec import default_dtype
from gpp.capture.recipe.generator import jump
from gpp.capture.recipe.made import made
from gpp.capture.recipe.recorded import NotRecorded, record
from gpp.errors import InvalidConfig
from gpp.runtime.checkpoint.origin import origin_of
from gpp.serialization import read_json, write_value
from tests.checks.shares import filled, save
from tests.support.conf import network_named
from tests.support.inprocess import capture


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Varied(nn.Module):
    """Tensors that come about in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(40, 30), nn.Linear(30, 3), nn.BatchNorm1d(3)
        self.recurrent = nn.GRU(7, 9, 2)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        for parameter in self.recurrent.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
        self.scale = nn.Parameter(torch.ones(5) * rates[2])
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]) * 2)
        self.second.bias.data = torch.randn(3)
        self.first.bias.data[3:9].normal_()
        self.tied = self.first.weight
        self.last = nn.Linear(100, 77)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("build", [Varied, lambda: nn.TransformerEncoderLayer(32, 4)])
def test_parts_are_those_of_the_whole(build: Callable[[], nn.Module], dtype: str) -> None:
    torch.manual_seed(3)
    with default_dtype(dtype):
        whole = tensors(build())
    state = torch.get_rng_state()
    recipe, given = record(build, tensors, seed=3, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    for part in range(3):
        names = list(whole)[part::3]
        found = {name: tensor.clone() for name, tensor in made(recipe, names, given.__getitem__)}
        assert found.keys() == set(names)
        assert all(torch.equal(found[name], whole[name]) and found[name].dtype == whole[name].dtype for name in names)


@pytest.mark.parametrize("before", [0, 5, 624, 10_000])
@pytest.mark.parametrize("count", [1, 623, 624, 99_999])
def test_a_jump_leaves_out_as_many_numbers(before: int, count: int) -> None:
    numbers = []
    for leave_out in (lambda: torch.empty(count).uniform_(), lambda: jump(count)):
        torch.manual_seed(7)
        torch.empty(before).uniform_()
        leave_out()
        numbers.append(torch.rand(1500))
    assert torch.equal(*numbers)


def seeded() -> nn.Module:
    model = nn.Linear(4, 4)
    torch.manual_seed(3)
    nn.init.normal_(model.weight)
    return model


def forked() -> nn.Module:
    with torch.random.fork_rng():
        nn.Linear(4, 4)
    return nn.Linear(4, 4)


def own_generator() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.data.normal_(generator=torch.Generator())
    return model


def from_python() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.data.mul_(random.random())
    return model


def to_numpy() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.detach().numpy()[0] = 0
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (seeded, "sets the state"),
        (forked, "sets the state"),
        (own_generator, "generator of its own"),
        (from_python, "Python's module random"),
        (to_numpy, "fails on tensors without numbers"),
    ],
)
def test_what_cannot_be_recorded_is_said(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(NotRecorded, match=words):
        record(build, tensors, seed=3, dtype="float32")


def test_workers_make_or_read_the_weights_of_their_stages(tmp_path: Path) -> None:
    model = network_named("gpt_tied_small", num_layers=2)
    captured, whole = capture(model, dtype="float64", seed=5)
    making = to_make(model, captured, None, seed=5, dtype="float64")
    save(tmp_path / "made", captured, making)
    stored = {name: tensor + 1 for name, tensor in whole.items()}
    assert captured.aliases, "the head is tied"
    for alias, name in captured.aliases.items():
        stored[alias] = stored.pop(name)
    folder = tmp_path / "model"
    folder.mkdir()
    for n in range(2):
        shard = dict(list(stored.items())[n::2])
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, folder / f"model-{n}.safetensors")
    save(tmp_path / "read", captured, to_make(model, captured, str(folder), seed=5, dtype="float64"))
    for source, more in (("made", 0), ("read", 1)):
        held = [filled(tmp_path / source, rank, 2).wants() for rank in range(2)]
        assert set().union(*held) == {name for name in whole if name in {*held[0], *held[1]}}
        assert set(held[0]) != set(held[1])
        assert all(torch.equal(tensor, whole[name] + more) for own in held for name, tensor in own.items())
    origin = origin_of(tmp_path / "read")
    assert origin is not None
    write_value(tmp_path / "again.json", origin)
    assert read_json(type(origin), tmp_path / "again.json") == origin
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InvalidConfig, match=r"load_weights=.* lacks"):
        to_make(model, captured, str(folder), seed=5, dtype="float64")
