"""The captured model of a run, from the cache or made now, and its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.app.made import MadeOnce
from gpp.cluster import machine_memory_bytes
from gpp.data.base import Samples
from gpp.graph.captured import LOSS, WITHOUT_WEIGHTS, Captured, capture_key, load_cached, store
from gpp.models.base import AbstractModel
from gpp.models.dotted import import_named, origin
from gpp.models.profile import AbstractProfile
from gpp.serialization import check_sealable

if TYPE_CHECKING:
    import torch

    from gpp.runtime.checkpoint.origin import ToMake

SHARE = 0.25
"""Of this machine's memory: the largest weights that one process makes by itself. To compare the model with its capture takes four
times as much: weights and gradients of both."""

LOOKED_AT = 64
"""Samples of a run whose targets are looked at."""


def captured_model(model: AbstractModel, dtype: str, cache_dir: str, microbatch_size: int | None, minibatch_size: int) -> Captured:
    """A model with its loss; from the cache, without torch, if it was captured before."""
    if isinstance(model, AbstractProfile):
        return model.captured()
    found = _captured_at(model, dtype, cache_dir, None)
    if found.batch is None:
        return found
    b = only_size(microbatch_size, minibatch_size)
    return found if found.batch == b else _captured_at(model, dtype, cache_dir, b)


def only_size(microbatch_size: int | None, minibatch_size: int) -> int:
    """The size at which to capture a model that runs at one batch size only: its micro-batches must have it."""
    return microbatch_size or next(b for b in (4, 2, 3, 1, minibatch_size) if minibatch_size % b == 0)


def _captured_at(model: AbstractModel, dtype: str, cache_dir: str, batch: int | None) -> Captured:
    own = model.captured()
    if own is not None:
        return own
    import_named(model.imports, "model.imports")
    key, folder = _key(model, dtype, batch), Path(cache_dir) / "graphs"
    found = load_cached(key, folder)
    if found is not None and any(node.home for node in found.nodes):
        from gpp.capture.homes import import_homes

        import_homes(found)
    if found is None:
        check_sealable(folder.expanduser() / key, "cache_dir")
        from gpp.capture.examples import capture_model

        found = capture_model(model, dtype=dtype, batch=batch)
        store(key, found, folder)
    return found


def _key(model: AbstractModel, dtype: str, batch: int | None) -> str:
    """The key of a capture and of its comparison with the network: settings, and the source of the network and of the loss."""
    measures = {"model.loss": model.loss, "model.metric": model.metric}
    own = [origin(path, field=field) for field, path in measures.items() if path and "." in path]
    own += [origin(f"{module}.operators", field="model.imports") for module in model.imports]
    return capture_key({**model.key(), "measures": own, "dtype": dtype, **({"batch": batch} if batch else {})})


def must_compare(captured: Captured) -> bool:
    """Whether a captured model is still to be compared with its network: it had no weights."""
    return captured.checked is not None and captured.checked.unknown == WITHOUT_WEIGHTS


def compared_model(
    model: AbstractModel, captured: Captured, samples: Samples, cache_dir: str, *, seed: int, dtype: str
) -> tuple[Captured, torch.nn.Module]:
    """The captured model after its comparison with the network, which the cache keeps; and the network with its first weights."""
    from gpp.capture.examples import built, compare
    from gpp.data.sampler import minibatch

    network = built(model, seed=seed, dtype=dtype)
    size = min(len(samples), max(captured.batch or 0, 4))
    found = compare(model, captured, network, samples.fetch(minibatch(0, size, len(samples), seed), captured.inputs), dtype=dtype)
    store(_key(model, dtype, captured.batch), found, Path(cache_dir) / "graphs")
    return found, network


def makes_whole(asked: str, captured: Captured) -> bool:
    """Whether one process makes all initial weights, and compares the model with its capture, as `initial_weights` has it."""
    size = sum(param.num_bytes for param in captured.graph.params)
    return asked == "whole" or (asked == "auto" and size <= SHARE * machine_memory_bytes())


def uneven_targets(captured: Captured, samples: Samples, minibatch_size: int, seed: int, *, weighs: bool) -> bool:
    """Whether some samples of the first mini-batch count for more in its loss than others (`gpp.capture.coupling.uneven`).

    Args:
        weighs: whether the engine gives micro-batches what their losses are divided by.
    """
    from gpp.capture.coupling import uneven
    from gpp.data.sampler import minibatch

    first = minibatch(0, min(minibatch_size, LOOKED_AT), len(samples), seed)
    return uneven(captured, samples.fetch(first, captured.inputs), weighs=weighs)


def weights_of(
    model: AbstractModel, captured: Captured, source: str | None, *, seed: int, dtype: str, network: torch.nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Weights by full name: those of a run or a file, else those that the model is built with.

    Args:
        network: the model as it was built with this seed; None to build it.
    """
    from gpp.capture.examples import built, state_of
    from gpp.runtime.checkpoint.stored import read_weights

    network = network or built(model, seed=seed, dtype=dtype)
    first = state_of(model, captured, network, dtype=dtype)
    return read_weights(source, first, captured, unread(network)) if source else first


def unread(network: torch.nn.Module) -> frozenset[str]:
    """Patterns of the names in files that a network of Hugging Face's passes over: earlier versions stored masks."""
    own = (getattr(module, "_keys_to_ignore_on_load_unexpected", None) for module in network.modules())
    return frozenset(pattern for patterns in own for pattern in patterns or ())


def to_make(model: AbstractModel, captured: Captured, source: str | None, *, seed: int, dtype: str) -> ToMake:
    """How workers come by initial weights that this process does not make: the same numbers as `weights_of`.

    Raises:
        NotRecorded: the model cannot be built without numbers, or the loss has weights of its own.
        InvalidConfig: `source` has no weights of this model.
    """
    from gpp.capture.recipe.recorded import NotRecorded, record
    from gpp.capture.stage import initial_state
    from gpp.runtime.checkpoint.origin import Origin, ToMake
    from gpp.runtime.checkpoint.stored import TensorForm, stored_weights

    if any(node.target.startswith(f"{LOSS}.") for node in captured.nodes if node.kind in ("param", "buffer")):
        raise NotRecorded(f"the loss {model.loss} has weights of its own")
    bare = replace(captured, constants={name: data for name, data in captured.constants.items() if data is None})
    passed_over: set[str] = set()

    def wanted(network: torch.nn.Module) -> dict[str, torch.Tensor]:
        passed_over.update(unread(network))
        return initial_state(network, bare)

    recipe, given = record(model.build, wanted, seed=seed, dtype=dtype)
    forms = {name: TensorForm(view.shape, view.dtype) for name, view in recipe.tensors.items()}
    files = stored_weights(source, forms, captured, passed_over) if source else {}
    return ToMake(Origin(recipe=recipe, files=files), given)


def weights_or_origin(
    made: MadeOnce, model: AbstractModel, captured: Captured, source: str | None, *, seed: int, dtype: str, whole: bool
) -> dict[str, torch.Tensor] | ToMake:
    """A run's initial weights, once: as `weights_of`; unless they are to be made `whole`, as `to_make` where that can be."""
    from gpp.capture.recipe.recorded import NotRecorded

    network, made.network = made.network, None
    if made.weights is None and not whole:
        does = f"workers make the weights of their stages, so {model.name} is not compared with its capture"
        try:
            made.weights = to_make(model, captured, source, seed=seed, dtype=dtype)
            made.notes = (f"{does}; initial_weights=whole does",)
        except NotRecorded as error:
            made.notes = (f"one process makes all initial weights, because {error}",)
    if made.weights is None:
        made.weights = weights_of(model, captured, source, seed=seed, dtype=dtype, network=network)
    return made.weights
