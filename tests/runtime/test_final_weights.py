"""checkpoints/final: whole or not there, and refused where a byte of it has changed."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpp.errors import InvalidConfig, InvalidFile
from gpp.runtime.checkpoint.final import INDEX, finish_final, load_final, save_final
from gpp.runtime.checkpoint.resume import drop_halves
from gpp.runtime.checkpoint.stored import read_weights
from tests.runtime.test_damaged_checkpoints import flipped

STATES = [{"a.weight": torch.randn(7, 5), "a.bias": torch.randn(5)}, {}, {"b.weight": torch.arange(6)}]
JOB: Any = SimpleNamespace(plan=SimpleNamespace(stages=STATES))
CAPTURED: Any = SimpleNamespace(nodes=[SimpleNamespace(kind="param", target="a.weight")], aliases={})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for stage, state in enumerate(STATES):
        assert not finish_final(JOB, tmp_path) and not (tmp_path / "checkpoints" / "final").exists()
        save_final(tmp_path, stage, state)
    assert finish_final(JOB, tmp_path)
    return tmp_path


def weights(source: Path) -> dict[str, torch.Tensor]:
    built = {name: torch.zeros_like(tensor) for state in STATES for name, tensor in state.items()}
    return read_weights(str(source), built, CAPTURED)


def test_what_was_written_is_read(run_dir: Path) -> None:
    expected = {name: tensor for state in STATES for name, tensor in state.items()}
    final = run_dir / "checkpoints" / "final"
    for found in (load_final(run_dir), weights(run_dir), weights(final), weights(Path(shutil.copytree(final, run_dir / "copy")))):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(path.name for path in final.iterdir()) == ["stage_0.safetensors", "stage_2.safetensors", INDEX]


def test_a_tied_weight_is_in_the_file_of_each_stage_that_holds_it(tmp_path: Path) -> None:
    for stage, names in enumerate((("a.weight", "a.bias"), ("a.weight",))):
        save_final(tmp_path, stage, {name: STATES[0][name] for name in names})
    assert finish_final(SimpleNamespace(plan=SimpleNamespace(stages=STATES[:2])), tmp_path)  # type: ignore[arg-type]
    found = weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATES[0].items())


def test_a_hundred_flipped_bits_are_refused(run_dir: Path) -> None:
    rng, files = random.Random(0), sorted((run_dir / "checkpoints" / "final").iterdir())
    for _ in range(100):
        path = rng.choice(files)
        before = path.read_bytes()
        path.write_bytes(flipped(before, rng.randrange(8 * len(before))))
        with pytest.raises(InvalidFile):
            load_final(run_dir)
        for source in (run_dir, run_dir / "checkpoints" / "final"):
            with pytest.raises(InvalidConfig, match=r"load_weights=.*(final|weights\.json)"):
                weights(source)
        path.write_bytes(before)
    weights(run_dir)


def test_what_is_missing_or_strange_is_named(run_dir: Path) -> None:
    final = run_dir / "checkpoints" / "final"
    shutil.copy(final / "stage_0.safetensors", final / "stage_7.safetensors")
    with pytest.raises(InvalidFile, match=r"does not name its file stage_7\.safetensors"):
        load_final(run_dir)
    (final / "stage_7.safetensors").unlink()
    (final / "stage_0.safetensors").write_bytes((final / "stage_0.safetensors").read_bytes()[:-1])
    with pytest.raises(InvalidFile, match=r"stage_0\.safetensors has \d+ bytes, and \d+ were written"):
        load_final(run_dir)
    (final / INDEX).unlink()
    with pytest.raises(InvalidConfig, match=r"weights\.json: cannot be read: no such file"):
        weights(run_dir)


def test_another_run_takes_the_place_of_weights_only_when_it_is_whole(run_dir: Path) -> None:
    save_final(run_dir, 0, {"a.weight": torch.ones(7, 5)})
    drop_halves(run_dir)  # it was killed
    assert not torch.equal(load_final(run_dir)["a.weight"], torch.ones(7, 5))
    for stage, state in enumerate(STATES):
        save_final(run_dir, stage, {name: torch.ones_like(tensor) for name, tensor in state.items()})
    assert finish_final(JOB, run_dir) and torch.equal(load_final(run_dir)["a.weight"], torch.ones(7, 5))
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["final"]
