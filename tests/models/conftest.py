from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from gpp.models.base import TensorSpec

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def model_option():
    """The object that `model=NAME` with overrides gives."""

    def build(name: str, *overrides: str):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return instantiate(compose("config", overrides=[f"model={name}", *overrides]).model, _convert_="all")

    return build


@pytest.fixture
def draw():
    """Random tensors [batch, *shape] for specs by name."""

    def tensors(specs: dict[str, TensorSpec], batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        drawn = {}
        for name, spec in specs.items():
            shape = (batch, *spec.shape)
            if spec.dtype == "float":
                drawn[name] = torch.randn(shape, generator=generator, dtype=torch.get_default_dtype())
            else:
                drawn[name] = torch.randint(spec.high or 2, shape, generator=generator)
                drawn[name] = drawn[name].bool() if spec.dtype == "bool" else drawn[name]
        return drawn

    return tensors
