"""Weights from a file, in place of those that a model is built with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.errors import InvalidConfig, InvalidFile
from gpp.runtime.checkpoint.final import INDEX, final_files
from gpp.runtime.run_dir import CHECKPOINTS, FINAL

if TYPE_CHECKING:
    import torch

    from gpp.graph.captured import Captured

FIELD = "load_weights"


def read_weights(source: str, built: Mapping[str, torch.Tensor], captured: Captured) -> dict[str, torch.Tensor]:
    """The tensors of a run's checkpoints/final, or of a safetensors file, by full name.

    Args:
        source: a run directory, the folder of its final weights, or a file.
        built: those of the freshly built model: names, shapes and types that are wanted. A tensor that a state dict leaves out (a
            constant, a buffer that is not persistent) stays.
        captured: the model, all of whose parameters must be there.

    Raises:
        InvalidConfig: there are no weights, they are damaged, or they are another model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(source)
    files = [path] if path.is_file() else _files(path)
    if not files:
        rule = "must be a run directory with checkpoints/final, or a safetensors file"
        raise InvalidConfig(FIELD, source, rule, "name one, as in load_weights=outputs/latest, or leave it out")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found.update(load_file(file))
        except (SafetensorError, OSError) as error:
            which = "" if file == path else f"has {file.name}, which "
            raise InvalidConfig(FIELD, source, f"{which}is no whole safetensors file ({error})", "name another file") from None
    unknown = sorted(found.keys() - built.keys())
    if unknown:
        raise InvalidConfig(FIELD, source, f"has {unknown[0]}, which the model does not", "name weights of this model")
    for name, tensor in found.items():
        if tensor.is_floating_point() != built[name].is_floating_point():
            rule = f"has {name} of {tensor.dtype}, and the model's is of {built[name].dtype}"
            raise InvalidConfig(FIELD, source, rule, "name weights of this model")
        if tensor.shape != built[name].shape:
            rule = f"has {name} of shape {tuple(tensor.shape)}, and the model's is {tuple(built[name].shape)}"
            raise InvalidConfig(FIELD, source, rule, "name weights of this model")
    wanted = {node.target for node in captured.nodes if node.kind == "param"}
    if missing := sorted(wanted - found.keys()):
        raise InvalidConfig(FIELD, source, f"lacks {missing[0]}, which the model reads", "name weights of this model")
    return {name: found[name].to(tensor.dtype) if name in found else tensor for name, tensor in built.items()}


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
