"""checkpoints/final: the weights and buffers after the last step, by full name.

RUN_DIR/checkpoints/.final/  being written: each worker leaves the tensors of its stages, and a mark of each file
        checkpoints/final/   whole: the run's controller gives it this name once all workers have ended
            weights.json     the mark of each file, and a digest of itself
            stage_N.safetensors

Weights for `load_weights` are read from there, or from any file, in place of those that a model is built with.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.errors import InvalidConfig, InvalidFile
from gpp.files import complete, write_tensors, write_text
from gpp.runtime.checkpoint.manifest import Mark, check_marks, digest_of, sealed
from gpp.runtime.run_dir import CHECKPOINTS, FINAL, run_of
from gpp.serialization import from_json, read_json, read_text, write_value

if TYPE_CHECKING:
    import torch

    from gpp.graph.captured import Captured
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


def drop_final(run_dir: Path) -> None:
    """Remove what an earlier run did not write to its end. Workers must not have started."""
    shutil.rmtree(run_dir / CHECKPOINTS / UNDER_WAY, ignore_errors=True)


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


FIELD = "load_weights"


def read_weights(source: str, built: Mapping[str, torch.Tensor], captured: Captured) -> dict[str, torch.Tensor]:
    """The tensors of a run's checkpoints/final, or of safetensors files, by full name.

    Args:
        built: those of the freshly built model. A tensor that a state dict leaves out (a constant, a buffer that is not persistent)
            stays.

    Raises:
        InvalidConfig: as `stored_weights`.
    """
    from safetensors import safe_open

    forms = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in built.items()}
    found = dict[str, torch.Tensor]()
    for path, names in stored_weights(source, forms, captured).items():
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(stored).to(built[name].dtype) for name, stored in names.items()}
    return {**built, **found}


def stored_weights(source: str, forms: Mapping[str, tuple[tuple[int, ...], str]], captured: Captured) -> dict[str, dict[str, str]]:
    """Where the tensors of a run's checkpoints/final lie, or of a safetensors file, or of a folder of them; none is read.

    Args:
        source: a run directory, the folder of its final weights, a file, or the folder of a model of Hugging Face.
        forms: name -> shape and type of the freshly built model's.
        captured: the model, all of whose parameters must be there; tied ones under any of their names.

    Returns:
        Absolute path of a file -> full name -> name in the file.

    Raises:
        InvalidConfig: there are no weights, they are damaged, or they are another model's.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(source)
    files = [path] if path.is_file() else _files(path)
    if not files:
        rule = "must be a run directory with checkpoints/final, or safetensors: a file, or a folder of them"
        raise InvalidConfig(FIELD, source, rule, "name one, as in load_weights=outputs/latest, or leave it out")
    places: dict[str, dict[str, str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                own = {stored: opened.get_slice(stored) for stored in opened.keys()}  # noqa: SIM118  # it is no mapping
                heads = {stored: (tuple(part.get_shape()), part.get_dtype()) for stored, part in own.items()}
        except (SafetensorError, OSError) as error:
            which = "" if file == path else f"has {file.name}, which "
            raise InvalidConfig(FIELD, source, f"{which}is no whole safetensors file ({error})", "name another file") from None
        for stored, (shape, kind) in heads.items():
            name = captured.aliases.get(stored) or stored
            _check_form(source, stored, (shape, kind), forms.get(name))
            places.setdefault(str(file.resolve()), {})[name] = stored
    found = {name for names in places.values() for name in names}
    wanted = {node.target for node in captured.nodes if node.kind == "param"}
    if missing := sorted(wanted - found):
        raise InvalidConfig(FIELD, source, f"lacks {missing[0]}, which the model reads", "name weights of this model")
    return places


def _check_form(source: str, name: str, stored: tuple[tuple[int, ...], str], own: tuple[tuple[int, ...], str] | None) -> None:
    """Refuse a tensor that is not the model's.

    Raises:
        InvalidConfig
    """
    if own is None:
        raise InvalidConfig(FIELD, source, f"has {name}, which the model does not", "name weights of this model")
    (shape, kind), (wanted, dtype) = stored, own
    if ("F" in kind) != ("float" in dtype):
        rule = f"has {name} of {kind}, and the model's is of {dtype}"
        raise InvalidConfig(FIELD, source, rule, "name weights of this model")
    if shape != wanted:
        rule = f"has {name} of shape {shape}, and the model's is {wanted}"
        raise InvalidConfig(FIELD, source, rule, "name weights of this model")


def _files(folder: Path) -> list[Path]:
    """The files of a run's final weights, whose bytes have been compared with their digests; or those of any other folder.

    Raises:
        InvalidConfig: final weights are not as they were written.
    """
    for final in (folder / CHECKPOINTS / FINAL, folder):
        if (final / INDEX).exists() or (final.name == FINAL and final.is_dir()):
            try:
                return final_files(final, setting=FIELD)
            except InvalidFile as error:
                raise InvalidConfig(FIELD, folder, f"{error.path}: {error.rule}", error.fix) from None
    return sorted(folder.glob("*.safetensors"))
