"""A model written by hand as blocks and edges, for code that torch.export cannot take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, as_module
from gpp.models.dotted import call, check_dotted, nearest, origin
from gpp.models.specs import read_specs
from gpp.settings import settings

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One hand-written block.

    Args:
        name: unique; its parameters are called `NAME.PARAMETER`.
        factory: dotted path of the class or function that makes its module.
        args, kwargs: arguments of the factory; JSON values.
        inputs: names of earlier blocks and of model inputs, in the order of its `forward`. A block that returns a tuple
            passes on every tensor of it.
    """

    name: str
    factory: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


KEYS = ("factory", "args", "kwargs", "inputs")


@final
@settings("model")
class Blocks(AbstractModel):
    """Modules that are called in order, each on outputs of earlier ones; every block is one operator of the graph.

    Args:
        blocks: by name, `{factory: package.module.Name, args: [64], kwargs: {depth: 2}, inputs: [x]}`, the fields of
            `Block`. The loss is computed on the last block's output.
        input_specs, target_specs: declarations by name; see `gpp.models.specs.read_specs`.
    """

    blocks: dict[str, dict[str, Any]]
    input_specs: dict[str, Any]
    target_specs: dict[str, Any]

    def __post_init__(self) -> None:
        self.targets()  # refuses declarations that mean no tensor, as `inputs` does
        known = list(self.inputs())
        if not self.blocks:
            raise InvalidConfig(
                "model.blocks", {}, "must name at least one block", "head: {factory: torch.nn.Linear, args: [16, 10], inputs: [x]}"
            )
        for name, given in self.blocks.items():
            if unknown := sorted(set(given) - set(KEYS)):
                raise InvalidConfig(
                    f"model.blocks.{name}.{unknown[0]}", given[unknown[0]], f"takes {', '.join(KEYS)}", nearest(unknown[0], KEYS)
                )
            check_dotted(given.get("factory", ""), field=f"model.blocks.{name}.factory")
            for source in given.get("inputs") or ():
                if source not in known:
                    rule = "must be a model input or an earlier block"
                    raise InvalidConfig(f"model.blocks.{name}.inputs", source, rule, nearest(str(source), known))
            known.append(name)

    def listed(self) -> tuple[Block, ...]:
        """The blocks in the order in which they are called."""
        made = []
        for name, given in self.blocks.items():
            args, inputs = tuple(given.get("args") or ()), tuple(given.get("inputs") or ())
            made.append(
                Block(name=name, factory=given["factory"], args=args, kwargs=dict(given.get("kwargs") or {}), inputs=inputs)
            )
        return tuple(made)

    def build(self) -> nn.Module:
        from gpp.models.networks.blocks import Called

        modules = {}
        for block in self.listed():
            setting = f"model.blocks.{block.name}"
            made = call(block.factory, block.args, block.kwargs, field=f"{setting}.factory", arguments=f"{setting}.kwargs")
            modules[block.name] = (as_module(made, field=f"{setting}.factory", path=block.factory), block.inputs)
        return Called(modules)

    def inputs(self) -> dict[str, TensorSpec]:
        return read_specs("model.input_specs", self.input_specs, {}, group="model")

    def targets(self) -> dict[str, TensorSpec]:
        return read_specs("model.target_specs", self.target_specs, {}, group="model")

    def source(self) -> str:
        paths = {block.factory: f"model.blocks.{block.name}.factory" for block in self.listed()}
        return ", ".join(origin(path, field=setting) for path, setting in paths.items())
