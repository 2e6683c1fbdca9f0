"""The chain of equal blocks."""

from __future__ import annotations

import pytest
from hydra.errors import InstantiationException

from gpp.errors import InvalidConfig
from gpp.graph.series_parallel import Parallel, Series
from tests.support.conf import model_named
from tests.support.inprocess import captured_named
from tests.support.series_parallel import decompose


def test_blocks_are_equal_and_in_a_row() -> None:
    _, captured, _ = captured_named("mlp", "model.num_blocks=3", "model.width=8")
    tree = decompose(captured.graph)
    assert isinstance(tree, Series) and not any(isinstance(child, Parallel) for child in tree.children)
    linear = [op for op in captured.graph.ops if len(op.params) == 2]
    assert len(linear) == 6 and len({op.forward_flops for op in linear}) == 1
    assert sum(param.num_bytes for param in captured.graph.params) == 6 * (8 * 8 + 8) * 8


def test_only_losses_that_fit_its_targets() -> None:
    assert model_named("mlp", "model.loss=cross_entropy", "model.width=5").targets()["y"].high == 5
    with pytest.raises(InstantiationException) as caught:
        model_named("mlp", "model.loss=bce_with_logits")
    assert isinstance(caught.value.__cause__, InvalidConfig) and caught.value.__cause__.field == "model.loss"
