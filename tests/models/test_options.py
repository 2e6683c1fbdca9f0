"""Every option of conf/model and sweeps/model builds, and does what its spec says."""

from __future__ import annotations

import json

import pytest
import torch

from gpp.models.base import describe
from gpp.models.losses import loss, loss_terms, metric
from gpp.runtime.job import restore
from tests.support.conf import CONF, model_named
from tests.support.long import thinned

# Graphs without a network have tests of their own: test_graphs_alone.py.
OPTIONS = sorted(file.stem for file in (CONF / "model").glob("*.yaml") if file.stem not in ("base", "random", "profile"))
PUBLISHED = CONF.parent / "sweeps" / "model"  # models of published tables alone
ABSTRACT = ["imported", "blocks", "pipeedge"]  # have no default factory
PAPER = ["bridge_tower", "candle_uno", "case_study", "clip", "dlrm", "evoformer", "flava", "gpt", "imagebind", "inception"]
PAPER += ["llava", "mmt", "transformer", "unet", "alexnet", "vgg16", "resnet101", "googlenet"]
PAPER += ["residual_lstm", "gnmt8", "translator", "amoebanet", "segmentation_unet"]
PAPER += ["bert_base", "bert_large", "bert_mlm", "cpm", "deit_base", "deit_small", "deit_tiny", "gpt2_medium", "t5_large"]
PAPER += ["vit_base", "vit_large", "vit_huge", "llama"]
PAPER += ["block_residuals", "hyper_connections", "multi_token", "experts", "zamba", "flamingo", "whisper", "macaw", "cross_batch"]
SMALL = sorted([name for name in OPTIONS if name not in PAPER + ABSTRACT] + [file.stem for file in PUBLISHED.glob("*_small.yaml")])
STATELESS = [name for name in SMALL if name != "cross_batch_small"]  # whose queue every batch changes


def needs(name: str) -> None:
    if name == "clip_imported":
        pytest.importorskip("transformers")


@pytest.mark.parametrize("name", thinned(SMALL, 4))
def test_small_sizes_run_forward_and_backward(name, draw):
    needs(name)
    model = model_named(name)
    torch.manual_seed(0)
    network = model.build()
    assert sum(parameter.numel() for parameter in network.parameters()) < 5e6
    inputs, targets = draw(model.inputs(), 6), draw(model.targets(), 6)
    terms = loss_terms(loss(model.loss)(network(**inputs), targets))
    assert all(value.shape == () and value.isfinite() for value in terms.values())
    torch.autograd.backward(list(terms.values()))
    trained = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert trained and all(grad.isfinite().all() for grad in trained)
    if model.metric is not None:
        assert 0 <= metric(model.metric)(network(**inputs), targets) <= 1


@pytest.mark.parametrize("name", thinned(STATELESS, 6))
def test_loss_of_a_minibatch_is_the_mean_over_its_microbatches(name, draw):
    needs(name)
    model = model_named(name)
    torch.manual_seed(0)
    network = model.build().double()
    inputs, targets = draw(model.inputs(), 6), draw(model.targets(), 6)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}

    def part(rows: slice) -> torch.Tensor:
        outputs = network(**{key: value[rows] for key, value in inputs.items()})
        terms = loss_terms(loss(model.loss)(outputs, {key: value[rows] for key, value in targets.items()}))
        return torch.stack(list(terms.values()))

    torch.testing.assert_close(part(slice(0, 6)), (2 * part(slice(0, 2)) + 4 * part(slice(2, 6))) / 6)


@pytest.mark.parametrize("name", thinned(SMALL, 8))
def test_initial_weights_follow_the_seed(name):
    needs(name)
    model = model_named(name)
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(model.build().state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", thinned(PAPER + SMALL, 9))
def test_description_reads_back_equal(name):
    needs(name)
    model = model_named(name)
    key = json.loads(json.dumps(model.key()))
    assert restore(key) == model
    assert key == model.key()
    assert set(key) == set(describe(model)) | {"source"}
    assert model.name == name


def test_module_paths_read_as_the_model_does():
    paths = dict(model_named("mmt_small").build().named_modules())
    assert {"branches.0.layers.3.attention", "head"} <= set(paths)


def test_default_dtype_is_the_callers():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        dtypes = {parameter.dtype for parameter in model_named("digits").build().parameters()}
    finally:
        torch.set_default_dtype(before)
    assert dtypes == {torch.float64}


def test_dropout_acts_in_training_only(draw):
    model = model_named("mmt_small", "model.dropout=0.5")
    network, inputs = model.build(), draw(model.inputs(), 2)
    assert not torch.equal(network(**inputs), network(**inputs))
    network.eval()
    assert torch.equal(network(**inputs), network(**inputs))


def test_first_line_of_every_option_says_what_it_is():
    for file in [*(CONF / "model").glob("*.yaml"), *PUBLISHED.glob("*.yaml"), *(CONF / "data").glob("*.yaml")]:
        assert file.read_text().startswith("# "), file
