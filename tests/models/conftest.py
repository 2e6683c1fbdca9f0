from __future__ import annotations

import pytest
import torch

from gpp.models.base import TensorSpec


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
