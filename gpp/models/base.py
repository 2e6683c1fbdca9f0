"""The description of a model before any network exists; free of torch.

Planning from a cached operator graph reads only this description. The network itself lives in `gpp/models/networks/`
(or in the user's own package) and is imported by `build()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpp.errors import InvalidConfig
from gpp.models.dotted import source_hash
from gpp.settings import Count, settings

if TYPE_CHECKING:
    from torch import nn

    from gpp.graph.captured import Captured


@settings("")
class TensorSpec:
    """Shape and kind of one input or target, for one sample.

    Args:
        shape: sizes without the batch dimension; `()` for a scalar per sample.
        dtype: `float` (the run's dtype), `int` (int64) or `bool`.
        high: values of an `int` are 0 .. high - 1 (vocabulary, rows of a table, classes); None otherwise.
    """

    shape: tuple[Count, ...] = ()
    dtype: Literal["float", "int", "bool"] = "float"
    high: Count | None = None

    def __post_init__(self) -> None:
        if (self.dtype == "int") != (self.high is not None):
            raise InvalidConfig("high", self.high, "must be given for dtype int, and only there", "the number of values")

    @property
    def num_elements(self) -> int:
        """Numbers per sample."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractModel(ABC):
    """A model as its settings.

    The network that `build` returns is called with the inputs by name, `network(**inputs)`, each of shape
    [B, *spec.shape] for any batch B, and returns a tensor, a tuple or a dict of tensors whose first dimension
    is B. No operation may couple the samples of a batch: the mini-batch is cut into micro-batches freely.

    Args:
        name: the model's name in reports.
        loss: see `gpp.models.losses.loss`.
        metric: see `gpp.models.losses.metric`; None for no metric but the loss.
        whole: paths of modules that are one operator each for planners, as `blocks.*.attend` (`gpp.graph.coarsen.whole`).
        imports: modules that register operators of the user's own, where those are not found (`gpp.capture.homes`).
    """

    name: str
    loss: str
    metric: str | None = None
    whole: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @abstractmethod
    def build(self) -> nn.Module:
        """A fresh network on the caller's default device (meta too) and dtype, drawn from torch's global seed."""

    @abstractmethod
    def inputs(self) -> dict[str, TensorSpec]:
        """Keyword arguments of the network."""

    @abstractmethod
    def targets(self) -> dict[str, TensorSpec]:
        """Targets that the loss compares the outputs with."""

    @abstractmethod
    def source(self) -> str:
        """A word that changes when the network's code changes; found without importing the code."""

    def captured(self) -> Captured | None:
        """The graph of a model that is planned only; None for a model whose network is captured."""
        return None

    def key(self) -> dict[str, Any]:
        """Plain content that decides the captured graph: class, settings, source.

        `gpp.runtime.job.restore(model.key()) == model`.
        """
        return describe(self) | {"source": self.source()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractPlanned(AbstractModel):
    """A graph in a model's place: it is planned and simulated, and there is no network to train."""

    @abstractmethod
    def captured(self) -> Captured:
        """The graph, with no computation behind it."""

    @abstractmethod
    def untrained(self) -> InvalidConfig:
        """The error for a run that needs a network."""

    def build(self) -> nn.Module:
        raise self.untrained()

    def inputs(self) -> dict[str, TensorSpec]:
        return {}

    def targets(self) -> dict[str, TensorSpec]:
        return {}


def as_module(made: object, *, field: str, path: str) -> nn.Module:
    """The network that a factory made.

    Args:
        field, path: the setting that names the factory, and its value.

    Raises:
        InvalidConfig: the factory made something else.
    """
    from torch import nn

    if not isinstance(made, nn.Module):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        rule = f"returned {what}, and a network is a torch.nn.Module"
        raise InvalidConfig(field, path, rule, "name a class or a function that makes one")
    return made


def describe(settings: Any) -> dict[str, Any]:
    """Class path and fields of a settings object as JSON-able data; tuples become lists."""
    cls = type(settings)
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}"} | {name: _plain(value) for name, value in asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def networks_hash() -> str:
    """A hash over all of `gpp/models/networks/`: the models shipped here, and the layers that others are made of."""
    return source_hash((Path(__file__).parent / "networks").glob("*.py"))
