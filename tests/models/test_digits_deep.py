"""The deep chain on which methods of pipelining are compared."""

from __future__ import annotations

import pytest

from gpp.data.digits import DigitsData
from gpp.optimizers import SGD, LearningRate
from tests.support.conf import model_named
from tests.support.inprocess import captured_named
from tests.support.long import thinned
from tests.support.training import trained


def test_a_linear_layer_for_each_stage() -> None:
    _, captured, _ = captured_named("digits_deep", "model.num_layers=4")
    linear = [op for op in captured.graph.ops if op.params]
    sizes = {param.name: param.num_bytes // 8 for param in captured.graph.params}
    assert [sorted(sizes[name] for name in op.params) for op in linear] == [[48, 64 * 48], [48, 48 * 48], [48, 48 * 48], [10, 480]]


@pytest.mark.parametrize("seed", thinned([0, 1]))
def test_ten_epochs_in_order_reach_94_percent(seed: int) -> None:
    """What asynchronous methods are compared with."""
    optimizer = SGD(lr=0.04, momentum=0.9, learning_rate=LearningRate(shape="linear"))
    assert (
        trained(model_named("digits_deep"), DigitsData(standardize=True), optimizer, steps=890, minibatch_size=16, seed=seed)
        >= 0.94
    )
