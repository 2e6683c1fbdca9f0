"""The captured model of a run, from the cache or made now, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpp.data.base import Samples
from gpp.graph.captured import Captured, capture_key, load_cached, store
from gpp.models.base import AbstractModel
from gpp.models.profile import AbstractProfile

if TYPE_CHECKING:
    import torch

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
    key = capture_key({**model.key(), "dtype": dtype, **({"batch": batch} if batch else {})})
    folder = Path(cache_dir) / "graphs"
    found = load_cached(key, folder)
    if found is not None and any(node.home for node in found.nodes):
        from gpp.capture.homes import import_homes

        import_homes(found)
    if found is None:
        from gpp.capture.examples import capture_model

        found = capture_model(model, dtype=dtype, batch=batch)
        store(key, found, folder)
    return found


def uneven_targets(captured: Captured, samples: Samples, minibatch_size: int, seed: int) -> bool:
    """Whether some samples of the first mini-batch count for more in its loss than others (`gpp.capture.coupling.uneven`)."""
    from gpp.capture.coupling import uneven
    from gpp.data.sampler import minibatch

    return uneven(captured, samples.fetch(minibatch(0, min(minibatch_size, LOOKED_AT), len(samples), seed), captured.inputs))


def weights_of(model: AbstractModel, captured: Captured, source: str | None, *, seed: int, dtype: str) -> dict[str, torch.Tensor]:
    """Weights by full name: those of a run or a file, else those that the model is built with."""
    from gpp.capture.examples import initial_weights
    from gpp.runtime.checkpoint.weights import read_weights

    built = initial_weights(model, captured, seed=seed, dtype=dtype)
    return read_weights(source, built, captured) if source else built
