"""CANDLE-Uno, drug response from seven inputs (GraphPipe, ASPLOS '25, appendix A.2; FlexFlow's candle_uno.cc)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec, check_positive, networks_hash

if TYPE_CHECKING:
    from torch import nn


def _flexflow_features() -> dict[str, int]:
    return {
        "dose1": 1,
        "dose2": 1,
        "cell_rnaseq": 942,
        "drug1_descriptors": 5270,
        "drug1_fingerprints": 2048,
        "drug2_descriptors": 5270,
        "drug2_fingerprints": 2048,
    }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CandleUno(AbstractModel):
    """One feed-forward tower per input, concatenated, then a feed-forward head.

    Depth and width of the towers are the paper's. Inputs and head are those of FlexFlow's example, except that
    the two doses have towers, too: the paper counts seven branches, the example joins the doses raw.

    Args:
        features: width of each input, by name.
        num_layers, hidden: layers of a tower and their width.
        num_head_layers, head_hidden: the same of the head, before the output.
    """

    name: str = "candle_uno"
    loss: str = "mse"
    features: dict[str, int] = field(default_factory=_flexflow_features)
    num_layers: int = 4
    hidden: int = 4096
    num_head_layers: int = 4
    head_hidden: int = 4192

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "num_head_layers", "head_hidden")
        wrong = {name: width for name, width in self.features.items() if not isinstance(width, int) or width < 1}
        if wrong or not self.features:
            raise InvalidConfig("model.features", wrong or {}, "must give each input a positive width", "dose1: 1, and so on")

    def build(self) -> nn.Module:
        from gpp.models.networks.candle_uno import CandleUnoNetwork

        return CandleUnoNetwork(self)

    def inputs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(shape=(width,)) for name, width in self.features.items()}

    def targets(self) -> dict[str, TensorSpec]:
        return {"growth": TensorSpec(shape=(1,))}

    def source(self) -> str:
        return networks_hash()
