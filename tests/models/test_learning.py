"""Small models learn on their data, on one device."""

from __future__ import annotations

import pytest

from gpp.data.base import AbstractData
from gpp.data.digits import DigitsData
from gpp.data.text import Text
from gpp.data.translation import Translation
from gpp.optimizers import SGD, AbstractOptimizer, Adam, LearningRate
from tests.support.conf import model_named
from tests.support.training import trained

# What asynchronous methods are compared with: ten epochs in order.
IN_ORDER = (DigitsData(standardize=True), SGD(lr=0.04, momentum=0.9, learning_rate=LearningRate(shape="linear")))


@pytest.mark.parametrize(
    ("words", "data", "optimizer", "steps", "size", "seed", "least"),
    [
        ("digits_deep", *IN_ORDER, 890, 16, 0, 0.94),
        pytest.param("digits_deep", *IN_ORDER, 890, 16, 1, 0.94, marks=pytest.mark.long),
        pytest.param("digits", DigitsData(), Adam(lr=5e-4), 400, 64, 0, 0.97, marks=pytest.mark.long),
        pytest.param("residual_lstm_small", Translation(), Adam(lr=0.003), 120, 64, 0, 0.95, marks=pytest.mark.long),
        pytest.param("translator_small", Translation(), Adam(lr=0.002), 180, 64, 0, 0.9, marks=pytest.mark.long),
        # A quarter of the characters are spaces.
        pytest.param(
            "char_gpt_small model.num_layers=2 model.sequence=16", Text(), Adam(lr=0.003), 150, 64, 0, 0.4, marks=pytest.mark.long
        ),
    ],
)
def test_a_small_model_learns(
    words: str, data: AbstractData, optimizer: AbstractOptimizer, steps: int, size: int, seed: int, least: float
) -> None:
    assert trained(model_named(*words.split()), data, optimizer, steps=steps, minibatch_size=size, seed=seed) >= least
