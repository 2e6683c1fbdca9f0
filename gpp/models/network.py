"""A model that is a network of ours, or one written like them: a class whose keyword arguments are the settings."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, as_module, networks_hash
from gpp.models.dotted import check_dotted, nearest, origin, resolve, users_code
from gpp.models.specs import named_sizes, read_specs
from gpp.settings import settings

if TYPE_CHECKING:
    from torch import nn

OURS = "gpp.models.networks."


def flat(
    *,
    name: str,
    network: str,
    loss: str,
    input_specs: dict[str, Any],
    target_specs: dict[str, Any],
    metric: str | None = None,
    whole: tuple[str, ...] = (),
    imports: tuple[str, ...] = (),
    **arguments: Any,
) -> Network:
    """A `Network` from one flat list of settings, so that each argument is `model.KEY` on the command line.

    Example, the whole of `conf/model/my_net.yaml` for a class `Net` with the keyword arguments `width` and `depth`:

        defaults: [base]
        name: my_net
        network: mypackage.nets.Net
        loss: cross_entropy
        input_specs: {x: {shape: [width]}}
        target_specs: {label: {dtype: int, high: num_classes}}
        width: 64
        depth: 4
        num_classes: 10
    """
    specs = {"input_specs": input_specs, "target_specs": target_specs}
    return Network(name=name, network=network, loss=loss, metric=metric, whole=whole, imports=imports, arguments=arguments, **specs)


@final
@settings("model")
class Network(AbstractModel):
    """A network as the keyword arguments of its class.

    Types and ranges stand in the signature of the class (`gpp.settings.arguments`) and are checked when the network is
    built; sizes of inputs and targets are checked at once, without torch.

    Args:
        network: dotted path of the class.
        arguments: keyword arguments of the class, and sizes that only the specs name.
        input_specs, target_specs: declarations by name; see `gpp.models.specs.read_specs`. Input names are the keyword
            arguments of the network's forward.
    """

    network: str
    arguments: dict[str, Any]
    input_specs: dict[str, Any]
    target_specs: dict[str, Any]

    def __post_init__(self) -> None:
        check_dotted(self.network, field="model.network")
        self.inputs()  # both refuse declarations that mean no tensor
        self.targets()

    def build(self) -> nn.Module:
        make = resolve(self.network, field="model.network")
        if not callable(make):
            raise InvalidConfig("model.network", self.network, f"is a {type(make).__name__}", "name a class or a function")
        signature = inspect.signature(make).parameters
        parameters = {n: p for n, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
        apart = named_sizes(self.input_specs) | named_sizes(self.target_specs)
        given = {name: value for name, value in self.arguments.items() if name in parameters or name not in apart}
        for name, value in given.items():
            if name not in parameters and not takes_any:
                rule = f"{make.__name__} has no such argument"
                raise InvalidConfig(f"model.{name}", value, rule, nearest(name, parameters, prefix="model."))
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise InvalidConfig(f"model.{name}", None, f"{make.__name__} needs it", f"give model.{name}=VALUE")
        with users_code("model.network", self.network):
            made = make(**given)
        return as_module(made, field="model.network", path=self.network)

    def inputs(self) -> dict[str, TensorSpec]:
        return read_specs("model.input_specs", self.input_specs, self.arguments, group="model")

    def targets(self) -> dict[str, TensorSpec]:
        return read_specs("model.target_specs", self.target_specs, self.arguments, group="model")

    def source(self) -> str:
        # A network of the user's may be made of our layers.
        own = () if self.network.startswith(OURS) else (origin(self.network, field="model.network"),)
        return ", ".join((*own, networks_hash()))
