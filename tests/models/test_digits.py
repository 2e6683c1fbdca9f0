"""The model of the first run learns."""

from __future__ import annotations

import pytest
import torch

from gpp.data.digits import DigitsData
from gpp.data.sampler import minibatch
from gpp.models.losses import loss, metric
from tests.support.conf import model_named


@pytest.mark.long
def test_digits_reach_97_percent():
    model = model_named("digits")
    train, test = (DigitsData().load(split, model, seed=0, dtype="float32") for split in ("train", "test"))
    torch.manual_seed(0)
    network, measure, accuracy = model.build(), loss(model.loss), metric(model.metric)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    for step in range(400):
        batch = train.fetch(minibatch(step, 64, len(train), 0))
        optimizer.zero_grad()
        measure(network(image=batch["image"]), batch["target:digit"]).backward()
        optimizer.step()
    held_out = test.fetch(range(len(test)))
    assert accuracy(network(image=held_out["image"]), held_out["target:digit"]) >= 0.97


def test_each_tower_sees_one_quadrant():
    torch.manual_seed(0)
    network = model_named("digits", "model.num_layers=1", "model.hidden=8").build()
    seen = []
    for tower in network.towers:
        image = torch.zeros(1, 8, 8, requires_grad=True)
        tower(image)[0, 0].backward()
        seen.append(image.grad[0] != 0)
    assert [int(pixels.sum()) for pixels in seen] == [16] * 4
    assert torch.stack(seen).any(0).all()
