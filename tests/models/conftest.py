from __future__ import annotations

import pytest
import torch

from gpp.models.base import TensorSpec
from tests.zoo.rows import drawn


@pytest.fixture
def draw():
    """Random tensors [batch, *shape] for specs by name."""

    def tensors(specs: dict[str, TensorSpec], batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {name: drawn(spec, batch, generator, torch.get_default_dtype()) for name, spec in specs.items()}

    return tensors
