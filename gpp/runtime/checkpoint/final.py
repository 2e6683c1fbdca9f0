"""checkpoints/final: the weights and buffers after the last step, by full name.

RUN_DIR/checkpoints/.final/  being written: each worker leaves the tensors of its stages, and a mark of each file
        checkpoints/final/   whole: the run's controller gives it this name once all workers have ended
            weights.json     the mark of each file, and a digest of itself
            stage_N.safetensors

`gpp.runtime.checkpoint.stored` reads them for `load_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.errors import InvalidFile
from gpp.files import complete, write_tensors, write_text
from gpp.runtime.checkpoint.manifest import Mark, check_marks, digest_of, sealed
from gpp.runtime.run_dir import CHECKPOINTS, FINAL, run_of
from gpp.serialization import from_json, read_json, read_text, write_value

if TYPE_CHECKING:
    import torch

    from gpp.runtime.job import Job

UNDER_WAY = f".{FINAL}"
INDEX = "weights.json"
NAMES = r"stage_\d{1,9}\.safetensors"
AGAIN = "name another run's weights, or a checkpoint of this one by resume=, or train again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Contents of weights.json.

    Args:
        files: the mark of each file.
        run: `Run.id` of the run that wrote it; empty for a job that was run outside a run directory.
        digest: SHA-256 of this value's text with an empty digest.
    """

    files: dict[str, Mark]
    run: str = ""
    digest: str = ""


def save_final(run_dir: Path, stage: int, state: Mapping[str, torch.Tensor]) -> None:
    """Write a stage's tensors, and a mark of them: a stage without tensors has a mark of no file."""
    folder, marks = run_dir / CHECKPOINTS / UNDER_WAY, dict[str, Mark]()
    if state:
        path = folder / f"stage_{stage}.safetensors"
        write_tensors(path, {name: t.detach().cpu().contiguous() for name, t in state.items()}, synced=True)
        marks[path.name] = Mark.of(path)
    write_value(folder / f"stage_{stage}.json", marks)


def finish_final(job: Job, run_dir: Path) -> bool:
    """Give the final weights their name, once all workers have ended; whether all of them are here.

    They are not where workers have written to another machine's folder, of which only `ranks/` was copied back.
    """
    folder = run_dir / CHECKPOINTS / UNDER_WAY
    notes = [folder / f"stage_{stage}.json" for stage in range(len(job.plan.stages))]
    if not all(note.is_file() for note in notes):
        return False
    marks = [read_json(dict[str, Mark], note) for note in notes]
    run = run_of(run_dir)
    index = Index(files={name: mark for found in marks for name, mark in found.items()}, run=run.id if run else "")
    write_text(folder / INDEX, sealed(index), exact=True, synced=True)
    for note in notes:
        note.unlink()
    complete(folder, folder.with_name(FINAL))
    return True


def load_final(run_dir: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run, by full name.

    Raises:
        InvalidFile: there are none, or a byte of them has changed.
    """
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in final_files(run_dir / CHECKPOINTS / FINAL):
        state.update(load_file(path))
    return state


def final_files(folder: Path, *, setting: str = "") -> list[Path]:
    """The files of a folder of final weights, every byte of which is as it was written.

    Args:
        setting: that names the folder, for errors.

    Raises:
        InvalidFile: names the file, and what is wrong with it.
    """
    path = folder / INDEX
    index = from_json(Index, read_text(path, setting=setting), path, AGAIN, setting)
    if index.digest != digest_of(index):
        raise InvalidFile(path, "", "is not as it was written (its SHA-256 is another)", AGAIN, setting=setting)
    if wrong := check_marks(folder, index.files, NAMES, INDEX):
        raise InvalidFile(folder, "", f"is damaged: {wrong}", AGAIN, setting=setting)
    return [folder / name for name in sorted(index.files)]
