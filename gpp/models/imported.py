"""A model of the user's own, or of any library, named by the dotted path of its factory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, as_module
from gpp.models.dotted import call, check_dotted, nearest, origin
from gpp.models.specs import read_specs
from gpp.settings import settings

if TYPE_CHECKING:
    from torch import Tensor, nn


@final
@settings("model")
class Imported(AbstractModel):
    """`factory(config(**config_args), **args)`, or `factory(**args)` without a config class.

    Args:
        factory: dotted path of a class or function that returns an nn.Module.
        config: dotted path of a configuration class, whose object is the factory's first argument.
        config_args, args: keyword arguments of the two; null for none.
        input_specs, target_specs: declarations by name, as `{shape: [3, 32, 32], dtype: float}`; integers also say
            `high`. See `gpp.models.specs.read_specs`; sizes may be names of `args`. Input names are the keyword
            arguments of the network's forward.
        outputs: fields of the returned object to keep; null keeps everything that the network returns. Operators that
            only make other fields are not in the graph.
    """

    name: str = "imported"
    factory: str
    config: str | None = None
    config_args: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    input_specs: dict[str, Any]
    target_specs: dict[str, Any]
    outputs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_dotted(self.factory, field="model.factory")
        if self.config is not None:
            check_dotted(self.config, field="model.config")
        elif self.config_args:
            raise InvalidConfig("model.config_args", self.config_args, "need model.config", "name the configuration class")
        self.inputs()  # both refuse declarations that mean no tensor
        self.targets()

    def build(self) -> nn.Module:
        positional: tuple[Any, ...] = ()
        if self.config is not None:
            positional = (call(self.config, (), self.config_args or {}, field="model.config", arguments="model.config_args"),)
        made = call(self.factory, positional, self.args or {}, field="model.factory", arguments="model.args")
        network = as_module(made, field="model.factory", path=self.factory)
        return network if self.outputs is None else keep_outputs(network, self.outputs)

    def inputs(self) -> dict[str, TensorSpec]:
        return read_specs("model.input_specs", self.input_specs, self.args or {}, group="model.args")

    def targets(self) -> dict[str, TensorSpec]:
        return read_specs("model.target_specs", self.target_specs, self.args or {}, group="model.args")

    def source(self) -> str:
        paths = {"model.factory": self.factory, "model.config": self.config}
        return ", ".join(origin(path, field=setting) for setting, path in paths.items() if path is not None)


def keep_outputs(network: nn.Module, names: Sequence[str]) -> nn.Module:
    """The same network, returning a dict of the named fields [B, ...] only.

    This is a hook rather than a wrapper module, so that parameters and operators keep their author's names.
    """

    def keep(_module: nn.Module, _inputs: Any, outputs: Any) -> dict[str, Tensor]:
        return {name: _field(outputs, name) for name in names}

    network.register_forward_hook(keep)
    return network


def _field(outputs: Any, name: str) -> Tensor:
    known = list(outputs.keys()) if hasattr(outputs, "keys") else [known for known in dir(outputs) if not known.startswith("_")]
    if name not in known:
        raise InvalidConfig("model.outputs", name, f"{type(outputs).__name__} has no such field", nearest(name, known))
    return outputs[name] if hasattr(outputs, "keys") else getattr(outputs, name)
