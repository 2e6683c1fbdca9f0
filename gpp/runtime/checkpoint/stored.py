"""`load_weights`: which tensor of which safetensors file is which of the model's; no tensor is read before all names fit.

RUN_DIR, or its checkpoints/final       the weights of an earlier run (`gpp.runtime.checkpoint.final`)
a folder of Hugging Face's models       model.safetensors, or model.safetensors.index.json and the files that it names
a file, or any other folder of files    safetensors of whatever origin
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ConfigDict, with_config

from gpp.errors import InvalidConfig, InvalidFile, readable
from gpp.models.dotted import nearest
from gpp.runtime.checkpoint.final import INDEX as FINAL_INDEX
from gpp.runtime.checkpoint.final import final_files
from gpp.runtime.run_dir import CHECKPOINTS, FINAL
from gpp.serialization import read_json

if TYPE_CHECKING:
    import torch

    from gpp.graph.captured import Captured

FIELD = "load_weights"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of Hugging Face's models, the one that counts first."""

OTHER = "name weights of this model"
AGAIN = "copy or save the folder again"


class TensorForm(NamedTuple):
    """What a tensor is without its numbers: sizes, and a type as torch or safetensors names it."""

    shape: tuple[int, ...]
    dtype: str


class StoredPlace(NamedTuple):
    """Where a tensor lies."""

    file: Path
    form: TensorForm


class Naming(NamedTuple):
    """What stored names begin with, and the model's in its place: GPT-2's own files lack `transformer.`."""

    stored: str = ""
    own: str = ""

    def name(self, stored: str, known: Mapping[str, str]) -> str | None:
        """The model's tensor of a stored name, which may have no prefix as in a head beside the base model; None: there is none."""
        other = self.own + stored.removeprefix(self.stored) if stored.startswith(self.stored) else stored
        return known.get(other) or known.get(stored)


@with_config(ConfigDict(extra="ignore"))
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Contents of model.safetensors.index.json.

    Args:
        weight_map: name of a tensor -> path of its file within the folder.
    """

    weight_map: dict[str, str]


def read_weights(
    source: str, built: Mapping[str, torch.Tensor], captured: Captured, unread: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The tensors that `source` has, in place of those of the model.

    Args:
        built: those of the freshly built model. A tensor that a state dict leaves out (a constant, a buffer that is not persistent)
            stays.
        unread: as of `stored_weights`.

    Raises:
        InvalidConfig: as `stored_weights`.
    """
    from safetensors import safe_open

    forms = {name: TensorForm(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in built.items()}
    found: dict[str, torch.Tensor] = {}
    for path, names in stored_weights(source, forms, captured, unread).items():
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(stored).to(built[name].dtype) for name, stored in names.items()}
    return {**built, **found}


def stored_weights(
    source: str, forms: Mapping[str, TensorForm], captured: Captured, unread: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Where the tensors of the model lie; none is read, but for those that are stored under two tied names.

    Stored names may have a prefix that the model's lack, or the reverse, as between a model of Hugging Face and its base.

    Args:
        source: what `load_weights` names.
        forms: name -> shape and type of the freshly built model's.
        captured: the model, all of whose parameters must be there; tied ones under any of their names.
        unread: patterns of stored names that the model has no use for.

    Returns:
        Absolute path of a file -> full name -> name in the file.

    Raises:
        InvalidConfig: there are no weights, they are damaged, or they are another model's.
    """
    with readable(FIELD, source):
        places = _places(source, _files(Path(source)))
    known = {**{alias: name for alias, name in captured.aliases.items() if name in forms}, **{name: name for name in forms}}
    naming = _naming(places, known)
    own = {stored: naming.name(stored, known) for stored in places}
    found: dict[str, str] = {}
    lacking = {node.target for node in captured.nodes if node.kind == "param"} - {*own.values()}
    for stored, name in own.items():
        if name is not None:
            _check_form(source, stored, places[stored].form, forms[name])
            if name in found:
                _check_equal(source, (found[name], stored), places)
            found[name] = stored
        elif not any(re.search(pattern, stored) for pattern in unread):
            fix = f"{nearest(naming.own + stored.removeprefix(naming.stored), lacking or known)}; {_others(Path(source))}"
            raise InvalidConfig(FIELD, source, f"has {stored}, which the model does not", fix)
    if lacking:
        name, more = min(lacking), f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        close = get_close_matches(name.removeprefix(naming.own), places, n=1, cutoff=0)
        rule = f"lacks {name}, which the model reads{more}; the nearest name that it has is {close[0] if close else 'none'}"
        raise InvalidConfig(FIELD, source, rule, OTHER)
    out: dict[str, dict[str, str]] = defaultdict(dict)
    for name, stored in found.items():
        out[str(places[stored].file.resolve())][name] = stored
    return dict(out)


def _others(source: Path) -> str:
    if not (source / "config.json").exists():
        return OTHER
    return f"{OTHER}; where from_pretrained renames them, write its model's own by safetensors.torch.save_model(model, FILE)"


def _naming(stored: Collection[str], known: Collection[str]) -> Naming:
    """The prefix by which most stored names are known; none where that is as good."""
    before: dict[str, list[str]] = defaultdict(list)
    for name in known:
        for prefix, end in _splits(name):
            before[end].append(prefix)
    fits = Counter({Naming(): 0})
    for name in stored:
        fits[Naming()] += name in known
        fits.update(Naming(own=prefix) for prefix in before.get(name, ()))
        fits.update(Naming(stored=prefix) for prefix, end in _splits(name) if end in known)
    return max(fits, key=fits.__getitem__)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()], name[dot.end() :]


def _places(source: str, files: Mapping[Path, Collection[str] | None]) -> dict[str, StoredPlace]:
    """The place of every stored tensor.

    Args:
        files: each with the names that an index places there; None where there is no index.

    Raises:
        InvalidConfig: a file is damaged, two files have the same name, or a file has others than its index says.
    """
    from safetensors import SafetensorError, safe_open

    if not files:
        rule = "must be a run directory with checkpoints/final, or safetensors: a file, or a folder of them"
        raise InvalidConfig(FIELD, source, rule, "name one, as in load_weights=outputs/latest, or leave it out")
    places: dict[str, StoredPlace] = {}
    for file, indexed in files.items():
        try:
            with safe_open(file, framework="pt") as opened:
                own = {stored: opened.get_slice(stored) for stored in opened.keys()}  # noqa: SIM118  # it is no mapping
                heads = {stored: TensorForm(tuple(part.get_shape()), part.get_dtype()) for stored, part in own.items()}
        except (SafetensorError, OSError) as error:
            which = "" if file == Path(source) else f"has {file.name}, which "
            raise InvalidConfig(FIELD, source, f"{which}is no whole safetensors file ({error})", "name another file") from None
        # Of a run's own weights each stage that holds a tied one has written it.
        if (twice := places.keys() & heads) and not (file.parent / FINAL_INDEX).exists():
            name = min(twice)
            rule = f"has {name} in both {places[name].file.name} and {file.name}"
            raise InvalidConfig(FIELD, source, rule, "name one file, or a folder in which each name is once")
        if indexed is not None and (wrong := heads.keys() ^ indexed):
            name = min(wrong)
            rule = f"{'has' if name in heads else 'lacks'} {name} in {file.name}, and its index says otherwise"
            raise InvalidConfig(FIELD, source, rule, AGAIN)
        places |= {stored: StoredPlace(file, form) for stored, form in heads.items()}
    return places


def _check_form(source: str, name: str, stored: TensorForm, own: TensorForm) -> None:
    """Refuse a tensor that is not the model's, by an `InvalidConfig`."""
    if ("F" in stored.dtype) != ("float" in own.dtype):
        raise InvalidConfig(FIELD, source, f"has {name} of {stored.dtype}, and the model's is of {own.dtype}", OTHER)
    if stored.shape != own.shape:
        raise InvalidConfig(FIELD, source, f"has {name} of shape {stored.shape}, and the model's is {own.shape}", OTHER)


def _check_equal(source: str, names: tuple[str, str], places: Mapping[str, StoredPlace]) -> None:
    """Refuse two stored tensors that are one in the model, and differ, by an `InvalidConfig`; mapped, they take no memory."""
    import torch
    from safetensors import safe_open

    first, second = names
    with safe_open(places[first].file, framework="pt") as one, safe_open(places[second].file, framework="pt") as other:
        if places[first].form != places[second].form or not torch.equal(one.get_tensor(first), other.get_tensor(second)):
            raise InvalidConfig(FIELD, source, f"has {first} and {second}, which differ, and the model has them as one", OTHER)


def _files(path: Path) -> Mapping[Path, Collection[str] | None]:
    """The files that `load_weights` means by a path; those of a run's final weights have been compared with their digests.

    Raises:
        InvalidConfig: final weights are not as they were written; an index is damaged, or names a file that is not there.
    """
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else {path: None}
    for final in (path / CHECKPOINTS / FINAL, path):
        if (final / FINAL_INDEX).exists() or (final.name == FINAL and final.is_dir()):
            try:
                return dict.fromkeys(final_files(final, setting=FIELD))
            except InvalidFile as error:
                raise InvalidConfig(FIELD, path, f"{error.path}: {error.rule}", error.fix) from None
    if (path / WHOLE).exists():
        return {path / WHOLE: None}
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    return dict.fromkeys(sorted(path.glob("*.safetensors")))


def _indexed(path: Path) -> dict[Path, set[str]]:
    """The files that an index names, and the tensors that it places there; an `InvalidFile` where one is not."""
    index = read_json(ShardIndex, path, setting=FIELD, fix=AGAIN)
    found: dict[Path, set[str]] = defaultdict(set)
    for name, shard in index.weight_map.items():
        within, file = PurePosixPath(shard), path.parent / shard
        if within.is_absolute() or ".." in within.parts or within.suffix != ".safetensors":
            rule = "must be a safetensors file in the folder"
        elif not file.is_file():
            rule = "is not there"
        else:
            found[file].add(name)
            continue
        raise InvalidFile(path, f"weight_map[{name}]", rule, AGAIN, [shard], setting=FIELD)
    return found
