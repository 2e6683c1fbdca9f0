"""`load_weights` of files that others wrote: each worker reads its own tensors, under the names of transformers; and refusals."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpp import Adam, OneFOneB
from gpp.app.capturing import to_make, weights_of
from gpp.capture.recipe.made import made
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidConfig
from gpp.plan.build import make_plan
from gpp.runtime.checkpoint import origin
from gpp.runtime.checkpoint.resume import find
from gpp.runtime.checkpoint.stored import INDEX, WHOLE, TensorForm, stored_weights
from tests.support import inprocess
from tests.support.cli import run
from tests.support.conf import model_named

STEPS, MINIBATCH = 2, 8
DATA = Synthetic(num_samples=64, num_test_samples=32)


def words(factory: str, config: str, sizes: str) -> tuple[str, ...]:
    return (
        f"model.factory=transformers.{factory}",
        f"model.config=transformers.{config}",
        f"model.config_args={{vocab_size: 96, use_cache: false, bos_token_id: 1, eos_token_id: 2, {sizes}}}",
        "model.input_specs={input_ids: {shape: [8], dtype: int, high: 96}}",
        "model.target_specs={labels: {shape: [8], dtype: int, high: 96}}",
        "model.outputs=[logits]",
        "model.loss=cross_entropy",
    )


WIDTHS = "n_positions: 16, n_embd: 32, n_layer: 2, n_head: 4, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0"
GPT2 = words("GPT2LMHeadModel", "GPT2Config", WIDTHS)
HEADS = "num_attention_heads: 4, num_key_value_heads: 2"
LLAMA = words("LlamaForCausalLM", "LlamaConfig", f"hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, {HEADS}")


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """The tensors of GPT-2 without its head, as its own authors saved them, in several files with an index, and a mask."""
    pytest.importorskip("transformers")
    torch.manual_seed(9)
    network: Any = model_named("imported", *GPT2).build()
    network.transformer.save_pretrained(tmp_path / "gpt2", max_shard_size="20KB")
    index = json.loads((tmp_path / "gpt2" / INDEX).read_text())
    shard = index["weight_map"]["h.1.mlp.c_fc.bias"]
    assert len({*index["weight_map"].values()}) > 3 and not any(name.startswith("transformer.") for name in index["weight_map"])
    save_file({**load_file(tmp_path / "gpt2" / shard), "h.1.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "gpt2" / shard)
    index["weight_map"]["h.1.attn.bias"] = shard
    (tmp_path / "gpt2" / INDEX).write_text(json.dumps(index))
    return tmp_path / "gpt2"


def losses_of(network: Any) -> list[float]:
    """Those of the model that transformers itself reads from a folder, trained by a plain loop."""
    model, initial = model_named("imported", *GPT2), {name: tensor.double() for name, tensor in network.state_dict().items()}
    optimizer = Adam(lr=0.01)
    losses, _ = inprocess.reference(model, DATA, optimizer, initial, steps=STEPS, minibatch_size=MINIBATCH, dtype="float64")
    return losses


def test_two_workers_read_their_own_tensors_of_a_folder_with_an_index(
    gpt2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    model, captured, _ = inprocess.captured_named("imported", *GPT2)
    making = to_make(model, captured, str(gpt2_folder), seed=0, dtype="float64")
    problem = inprocess.problem_of(captured, 2, MINIBATCH, max_ops=12)
    count = len(problem.graph.ops)
    plan = make_plan(problem, "test", [((1 << count // 2) - 1, 1), ((1 << count) - (1 << count // 2), 1)], 4)
    optimizer = Adam(lr=0.01)
    job = inprocess.make_job(captured, problem, plan, OneFOneB(), model=model, data=DATA, optimizer=optimizer, steps=STEPS)
    opened: list[tuple[Path, list[str]]] = []
    original = origin.safe_open

    class Spied:
        def __init__(self, path: str, framework: str) -> None:
            self._file, self._read = original(path, framework=framework), list[str]()
            opened.append((Path(path), self._read))

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def get_tensor(self, name: str) -> torch.Tensor:
            self._read.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(origin, "safe_open", Spied)
    places: dict[str, str] = json.loads((gpt2_folder / INDEX).read_text())["weight_map"]
    losses, _, workers = inprocess.run(job, tmp_path / "run", making)
    at = 0
    for worker in workers:
        own = {name.removeprefix("transformer.") for module in worker.modules.values() for name in module.wants()} & {*places}
        read = list[str]()
        while len(read) < len(own):
            path, names = opened[at]
            assert names and all(places[name] == path.name for name in names)
            read += names
            at += 1
        assert sorted(read) == sorted(own) and 0 < len(own) < len(places) - 1
    assert at == len(opened)
    assert losses == pytest.approx(losses_of(transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder)), abs=1e-12)


@pytest.mark.long
@pytest.mark.dist
def test_processes_train_what_a_folder_has(gpt2_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    more = (f"steps={STEPS}", f"minibatch_size={MINIBATCH}", "microbatch_size=4", "optimizer.lr=0.01", "evaluate_every=0")
    common = ("logger=none", "cost=analytical", "dtype=float64", "strategy=even", "cluster.num_devices=2")
    where = (f"load_weights={gpt2_folder}", "initial_weights=stages", "data.num_samples=64", "data.num_test_samples=32")
    done = run(tmp_path / "run", "model=imported", *GPT2, *common, *more, *where)
    assert done.code == 0, done.out
    expected = losses_of(transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder))
    assert done.result["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", [GPT2, pytest.param(LLAMA, marks=pytest.mark.long)], ids=["gpt2", "llama"])
def test_initial_weights_of_hugging_faces_models_are_recorded_bit_for_bit(family: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    model, captured, _ = inprocess.captured_named("imported", *family)
    whole = weights_of(model, captured, None, seed=3, dtype="float32")
    recipe, given = to_make(model, captured, None, seed=3, dtype="float32")
    for part in range(3):
        names = [name for name in recipe.recipe.tensors if name in whole][part::3]
        found = {name: tensor.clone() for name, tensor in made(recipe.recipe, names, given.__getitem__)}
        assert found.keys() == {*names} and all(torch.equal(found[name], whole[name]) for name in names)
    assert recipe.recipe.tensors.keys() >= {node.target for node in captured.nodes if node.kind == "param"}


OWN = ("base.wte.weight", "base.h.0.weight", "base.h.0.bias", "base.h.1.weight", "head.weight")
CAPTURED: Any = SimpleNamespace(
    nodes=[SimpleNamespace(kind="param", target=name) for name in OWN[:-1]], aliases={"head.weight": "base.wte.weight"}
)


def stored(folder: Path, *shards: tuple[str, ...], unread: tuple[str, ...] = ()) -> dict[str, str]:
    """The name in a file, by that of the model, for files of tensors of these names."""
    for n, names in enumerate(shards):
        save_file({name: torch.ones(2, 3) for name in names}, folder / f"model-{n}.safetensors")
    forms = {name: TensorForm((2, 3), "torch.float32") for name in OWN[:-1]}
    places = stored_weights(str(folder), forms, CAPTURED, unread)
    return {name: own for names in places.values() for name, own in names.items()}


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param(lambda name: name, id="as they are"),
        pytest.param(lambda name: name.removeprefix("base."), id="without the base model's prefix"),
        pytest.param(lambda name: f"model.{name}", id="with another prefix"),
    ],
)
@pytest.mark.parametrize("tied", [("base.wte.weight",), ("head.weight",), ("base.wte.weight", "head.weight")])
def test_one_prefix_and_tied_names(rename: Callable[[str], str], tied: tuple[str, ...], tmp_path: Path) -> None:
    names = [rename(name) for name in (*OWN[1:-1], *tied)]
    found = stored(tmp_path, tuple(names[::2]), tuple(names[1::2]))
    assert found.pop("base.wte.weight") in [rename(name) for name in tied]
    assert found == {name: rename(name) for name in OWN[1:-1]}


def test_what_is_unknown_missing_or_twice_is_named(tmp_path: Path) -> None:
    whole = ("wte.weight", "h.0.weight", "h.0.bias", "h.1.weight")
    assert stored(tmp_path, (*whole, "h.0.mask"), unread=("mask",)).keys() == {*OWN[:-1]}
    for shards, rule in (
        (((*whole[:3], "h.1.wieght"),), r"has h\.1\.wieght, which the model does not. Fix: did you mean base\.h\.1\.weight"),
        (((*whole, "h.0.mask"),), r"has h\.0\.mask, which the model does not"),
        ((whole[:3],), r"lacks base\.h\.1\.weight, which the model reads; the nearest name that it has is h\.0\.weight"),
        ((whole[:2],), "and 1 more"),
        ((whole, ("h.0.bias",)), r"has h\.0\.bias in both model-0\.safetensors and model-1\.safetensors"),
    ):
        with pytest.raises(InvalidConfig, match=f"load_weights=.*{rule}"):
            stored(tmp_path, *shards)
    save_file({name: torch.ones(2, 3) for name in whole} | {"head.weight": torch.zeros(2, 3)}, tmp_path / WHOLE)
    with pytest.raises(InvalidConfig, match=r"has (wte|head)\.weight and (wte|head)\.weight, which differ"):
        stored(tmp_path)


def test_an_index_that_is_not_its_folders_is_refused(tmp_path: Path) -> None:
    whole = {"wte.weight": "model-0", "h.0.weight": "model-0", "h.0.bias": "model-1", "h.1.weight": "model-1"}

    def indexed(places: dict[str, str], text: str = "") -> dict[str, str]:
        weight_map = {name: file if "." in file else f"{file}.safetensors" for name, file in places.items()}
        (tmp_path / INDEX).write_text(text or json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))
        return stored(tmp_path, ("wte.weight", "h.0.weight"), ("h.0.bias", "h.1.weight"), ("h.0.bias",))

    assert indexed(whole).keys() == {*OWN[:-1]}, "and model-2 is none of them"
    for places, rule in (
        ({**whole, "h.1.weight": "model-9"}, r"weight_map\[h\.1\.weight\]=model-9\.safetensors: is not there"),
        ({**whole, "h.1.weight": "../model.safetensors"}, "must be a safetensors file in the folder"),
        ({**whole, "h.1.weight": "/model.safetensors"}, "must be a safetensors file in the folder"),
        ({**whole, "h.1.weight": "model-1.bin"}, "must be a safetensors file in the folder"),
        ({**whole, "h.1.weight": "model-0"}, r"lacks h\.1\.weight in model-0\.safetensors, and its index says otherwise"),
        ({name: file for name, file in whole.items() if name != "h.0.bias"}, r"has h\.0\.bias in model-1\.safetensors, and its"),
        ({**whole, "x": "model-2"}, r"has h\.0\.bias in both model-1\.safetensors and model-2\.safetensors"),
    ):
        with pytest.raises(InvalidConfig, match=f"load_weights=.*{rule}"):
            indexed(places)
    for text in ("{", '{"weight_map": 3}', '{"weight_map": {"a": "b", "a": "c"}}', "{}"):
        with pytest.raises(InvalidConfig, match=r"load_weights=.*index\.json"):
            indexed({}, text)


@pytest.mark.parametrize("asked", [lambda path: find(path, 9), lambda path: stored_weights(str(path), {}, cast(Any, None))])
def test_files_of_another_user_are_refused(
    asked: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(InvalidConfig, match=r"(resume|load_weights)=.*cannot be read by this user .*Permission denied.*chmod"):
        asked(tmp_path)
