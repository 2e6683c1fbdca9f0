from __future__ import annotations

import pytest

from gpp.data.sampler import epoch_order, minibatch
from gpp.errors import InvalidConfig


@pytest.mark.parametrize(("num_samples", "size"), [(20, 4), (23, 4), (7, 7), (5, 1)])
def test_an_epoch_shows_every_sample_at_most_once(num_samples, size):
    steps = num_samples // size
    for epoch in range(3):
        seen = [index for step in range(epoch * steps, (epoch + 1) * steps) for index in minibatch(step, size, num_samples, 0)]
        assert len(seen) == steps * size == len(set(seen))
        assert set(seen) <= set(range(num_samples))
        assert seen == epoch_order(num_samples, 0, epoch)[: steps * size].tolist()


def test_a_step_does_not_depend_on_those_before():
    later = minibatch(37, 4, 23, seed=2)
    for step in range(37):
        minibatch(step, 4, 23, seed=2)
    epoch_order.cache_clear()
    assert minibatch(37, 4, 23, seed=2) == later


def test_seeds_and_epochs_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_plain_ints():
    assert all(type(index) is int for index in minibatch(0, 3, 9, 0))


@pytest.mark.parametrize("size", [0, 10])
def test_a_minibatch_must_fit(size):
    with pytest.raises(InvalidConfig, match="minibatch_size"):
        minibatch(0, size, 9, 0)
