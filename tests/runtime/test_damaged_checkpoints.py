"""Whatever has happened to the files of a checkpoint is seen before a worker starts, and the one before is taken."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp.errors import InvalidConfig, NonFinite
from gpp.optimizers import LearningRate
from gpp.runtime.checkpoint.manifest import Manifest, read_manifest
from gpp.runtime.checkpoint.manifest import sealed as manifest_text
from gpp.runtime.checkpoint.resume import find
from gpp.runtime.run_dir import RUN, RunIdentity
from gpp.serialization import to_json
from tests.support.checkpoints import STEPS, Rank, made

FILE, MANIFEST = "rank_1.safetensors", "checkpoint.json"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 1 and 2 steps."""
    run_dir = tmp_path_factory.mktemp("run")
    for done in (1, 2):
        made(run_dir, done)
    return run_dir


@pytest.fixture
def run_dir(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def flipped(data: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if i == bit // 8 else 0) for i, byte in enumerate(data))


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def sealed(folder: Path, **fields: Any) -> None:
    """Other fields in a manifest, with a digest that fits."""
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    (folder / MANIFEST).write_text(manifest_text(replace(manifest, **fields)))


def json_with(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip": (lambda at: changed(at / FILE, lambda data: flipped(data, 8 * len(data) - 9)), f"the bytes of {FILE} have changed"),
    "header": (lambda at: changed(at / FILE, lambda data: b"\xff" * 8 + data[8:]), f"the bytes of {FILE} have changed"),
    "zeros": (lambda at: changed(at / FILE, lambda data: bytes(len(data))), f"the bytes of {FILE} have changed"),
    "half": (lambda at: changed(at / FILE, lambda data: data[: len(data) // 2]), f"{FILE} has 46 bytes, and 92 were written"),
    "empty": (lambda at: changed(at / FILE, lambda data: b""), f"{FILE} has 0 bytes, and 92 were written"),
    "gone": (lambda at: (at / FILE).unlink(), f"{FILE} is missing"),
    "a folder": (lambda at: ((at / FILE).unlink(), (at / FILE).mkdir()), f"{FILE} is missing"),
    "one more": (lambda at: shutil.copy(at / FILE, at / "rank_2.safetensors"), "does not name its file rank_2.safetensors"),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), f"{MANIFEST} cannot be read: no such file or directory"),
    "not JSON": (lambda at: changed(at / MANIFEST, lambda data: data[:-20]), f"{MANIFEST} is not as it was written"),
    "not text": (lambda at: changed(at / MANIFEST, lambda data: b"\xff\xfe" + data), f"{MANIFEST} is not as it was written"),
    "a list": (lambda at: (at / MANIFEST).write_text("[1]"), f"{MANIFEST} is not as it was written"),
    "deep": (lambda at: (at / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} is not as it was written"),
    "huge step": (lambda at: json_with(at, step=10**400), f"{MANIFEST} is not as it was written (step"),
    "negative step": (lambda at: sealed(at, step=-1), f"{MANIFEST} is not as it was written (step"),
    "step in words": (lambda at: json_with(at, step="two"), f"{MANIFEST} is not as it was written (step"),
    "no step": (lambda at: json_with(at, step=None), f"{MANIFEST} is not as it was written (step"),
    "files": (lambda at: json_with(at, files=[FILE]), f"{MANIFEST} is not as it was written (files"),
    "another step": (lambda at: sealed(at, step=3), f"{MANIFEST} is that of step 3"),
    "edited": (lambda at: json_with(at, steps=77), "its SHA-256 is another"),
    "format": (lambda at: sealed(at, format=3), f"{MANIFEST} has the format 3, and this version reads format 2 only"),
    "no format": (lambda at: json_with(at, format=None), f"{MANIFEST} has the format None"),
    "outside": (lambda at: _outside(at), "names a file '../../outside.safetensors', which no worker writes"),
    "not finite": (lambda at: sealed(at, nonfinite=("w",)), "it holds weights that are not finite (w)"),
}


def _outside(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    shutil.copy(folder / FILE, folder.parent.parent / "outside.safetensors")
    sealed(folder, files={"../../outside.safetensors": manifest.files[FILE]})


@pytest.mark.parametrize("what", DAMAGES)
def test_the_older_one_is_taken_and_the_file_and_the_damage_are_said(run_dir: Path, what: str) -> None:
    last = run_dir / "checkpoints" / "step_2"
    damage, says = DAMAGES[what]
    damage(last)
    found = find(run_dir, STEPS)
    assert (found.manifest.step, found.folder) == (1, last.with_name("step_1"))
    assert str(last) in found.warnings(STEPS, LearningRate())[0] and says in found.warnings(STEPS, LearningRate())[0]
    # Who names the very one gets no other.
    with pytest.raises(InvalidConfig) as caught:
        find(last, STEPS)
    assert caught.value.field == "resume" and says in str(caught.value)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_no_bit_changes_unseen(every: int, two: Path, run_dir: Path) -> None:
    """Every byte of both files, or each fifth; a change of the manifest that leaves its contents as they were is none."""
    last, rng = run_dir / "checkpoints" / "step_2", random.Random(0)
    expected = find(two, STEPS).manifest
    for name in (FILE, MANIFEST):
        whole = (last / name).read_bytes()
        for at in range(0, len(whole), every):
            (last / name).write_bytes(flipped(whole, 8 * at + rng.randrange(8)))
            found = find(run_dir, STEPS)
            assert found.manifest.step == 1 or (name == MANIFEST and found.manifest == expected), at
        (last / name).write_bytes(whole)
    assert find(run_dir, STEPS).manifest.step == 2


def test_a_run_that_went_on_from_itself_ends_the_search(run_dir: Path) -> None:
    for folder in (run_dir / "checkpoints").iterdir():
        (folder / FILE).unlink()
    other = run_dir.parent / "other"
    for here, there in ((run_dir, other), (other, run_dir)):
        here.mkdir(exist_ok=True)
        run = RunIdentity(id=here.name, started="", command="", pid=1, host="", resume=str(there))
        (here / RUN).write_text(to_json(run))
    with pytest.raises(InvalidConfig, match=r"step_2 is damaged: rank_1.safetensors is missing; .*step_1 is damaged"):
        find(other, STEPS)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/" + "y/" * 3000, "~nobody-of-this-name/x"])
def test_what_can_be_no_folder_is_none(path: str) -> None:
    with pytest.raises(InvalidConfig, match="must be a run directory"):
        find(path, STEPS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_make_no_checkpoint(tmp_path: Path, value: float) -> None:
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1, trained=True)]
    ranks[1].value.data[1] = value
    for rank in ranks:
        rank.save(4)
    with pytest.raises(NonFinite, match="tensor_1 are not finite after 4 steps"):
        ranks[1].wait()
    assert not (tmp_path / "checkpoints" / "step_4").exists()


def test_with_warn_they_make_one_from_which_no_run_goes_on(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0, on_nonfinite="warn"), Rank(tmp_path, 1, trained=True, on_nonfinite="warn")]
    # A buffer may hold such values on purpose, as a mask does, and a large sum is none.
    ranks[0].value[0] = float("-inf")
    for done, value in ((3, 3e38), (4, float("nan"))):
        ranks[1].value.data[:] = value
        for rank in ranks:
            rank.save(done)
    for rank in ranks:
        rank.wait()
    found = find(tmp_path, STEPS)
    assert found.manifest.step == 3 and "not finite (tensor_1)" in found.damaged[0]
    assert torch.isfinite(ranks[0].value).sum() == 2
