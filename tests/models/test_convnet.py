"""AlexNet, VGG, ResNet and GoogLeNet at sizes that are quick to make."""

from __future__ import annotations

import pytest
import torch

from gpp.graph.series_parallel import Parallel, Series
from gpp.models.networks.convnet import SMALLEST
from tests.support.conf import model_named
from tests.support.inprocess import captured_named
from tests.support.long import thinned
from tests.support.series_parallel import decompose

NAMES = {"alexnet": "alexnet", "vgg": "vgg_small", "resnet": "resnet_small", "googlenet": "googlenet"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("more", thinned([0, 1, 37], 3))
def test_any_size_from_the_smallest_on(kind: str, more: int) -> None:
    size = SMALLEST[kind] + more
    words = [f"model.image_size={size}", "model.shrink=16", "model.num_classes=5", "model.norm=group"]
    network = model_named(NAMES[kind], *words).build()
    assert network(image=torch.randn(2, 3, size, size)).shape == (2, 5)


def test_vgg_is_a_chain() -> None:
    _, chain, _ = captured_named("vgg_small")
    tree = decompose(chain.graph)
    assert isinstance(tree, Series) and not any(isinstance(child, Parallel) for child in tree.children)


@pytest.mark.long
def test_residual_networks_have_shortcuts() -> None:
    _, residual, _ = captured_named("resnet_small")
    assert any(len(t.consumers) == 2 for t in residual.graph.tensors)
    assert decompose(residual.graph) is not None


def test_dropout_stands_before_the_last_layers_only() -> None:
    for name, count in (("alexnet", 2), ("vgg_small", 2), ("googlenet", 1), ("resnet_small", 0)):
        with torch.device("meta"):
            network = model_named(name, "model.dropout=0.5").build()
        assert sum(isinstance(module, torch.nn.Dropout) for module in network.modules()) == count
