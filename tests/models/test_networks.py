"""What single networks and their layers compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hydra.errors import InstantiationException

from gpp.errors import InvalidConfig
from gpp.models.networks.convnet import SMALLEST
from gpp.models.networks.layers import GroupedAttention, Rotary
from tests.support.conf import model_named
from tests.support.long import thinned

CONVNETS = {"alexnet": "alexnet", "vgg": "vgg_small", "resnet": "resnet_small", "googlenet": "googlenet"}


@pytest.mark.parametrize("kind", CONVNETS)
@pytest.mark.parametrize("more", thinned([0, 1, 37], 3))
def test_a_network_of_convolutions_takes_any_size_from_the_smallest_on(kind: str, more: int) -> None:
    size = SMALLEST[kind] + more
    words = [f"model.image_size={size}", "model.shrink=16", "model.num_classes=5", "model.norm=group"]
    network = model_named(CONVNETS[kind], *words).build()
    assert network(image=torch.randn(2, 3, size, size)).shape == (2, 5)


def test_dropout_stands_before_the_last_layers_only() -> None:
    for name, count in (("alexnet", 2), ("vgg_small", 2), ("googlenet", 1), ("resnet_small", 0)):
        with torch.device("meta"):
            network = model_named(name, "model.dropout=0.5").build()
        assert sum(isinstance(module, torch.nn.Dropout) for module in network.modules()) == count


def test_each_tower_of_the_digits_sees_one_quadrant():
    torch.manual_seed(0)
    network = model_named("digits", "model.num_layers=1", "model.hidden=8").build()
    seen = []
    for tower in network.towers:
        image = torch.zeros(1, 8, 8, requires_grad=True)
        tower(image)[0, 0].backward()
        seen.append(image.grad[0] != 0)
    assert [int(pixels.sum()) for pixels in seen] == [16] * 4
    assert torch.stack(seen).any(0).all()


def test_several_heads_of_queries_read_one_of_keys() -> None:
    """Beside torch's own attention."""
    torch.manual_seed(0)
    layer, rotary = GroupedAttention(hidden=24, num_heads=6, num_kv_heads=2).double(), Rotary(length=5, width=4).double()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    q, k = (rotary(part.unsqueeze(2)).squeeze(2) for part in (layer.query(x).view(3, 5, 6, 4), layer.key(x).view(3, 5, 2, 4)))
    v = layer.value(x).view(3, 5, 2, 4)
    y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x, rotary), layer.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("name", ["translator_small", "gnmt_small"])
def test_no_token_sees_those_behind_it(name: str, draw) -> None:
    model = model_named(name)
    torch.manual_seed(0)
    network, inputs = model.build(), draw(model.inputs(), 2)
    logits = network(**inputs)
    inputs["previous"][:, 5:] = (inputs["previous"][:, 5:] + 1) % 24
    changed = (network(**inputs) - logits).abs().amax(dim=-1) > 1e-5
    assert not changed[:, :5].any() and changed[:, 5:].all()


def test_tied_languages_share_one_matrix() -> None:
    tiny = ("model.hidden=8", "model.vocabulary=11", "model.sequence=5", "model.num_layers=2")
    for tied, count in (("true", 1), ("false", 2)):
        network = model_named("gnmt8", *tiny, f"model.tied={tied}").build()
        assert sum(name.startswith("embed") for name, _ in network.named_parameters()) == count


def test_equal_blocks_take_only_losses_that_fit_their_targets() -> None:
    assert model_named("mlp", "model.loss=cross_entropy", "model.width=5").targets()["y"].high == 5
    with pytest.raises(InstantiationException) as caught:
        model_named("mlp", "model.loss=bce_with_logits")
    assert isinstance(caught.value.__cause__, InvalidConfig) and caught.value.__cause__.field == "model.loss"
