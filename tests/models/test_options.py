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

# Graphs without a network have tests of their own: test_random_graph.py, test_profile.py.
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


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # 32 layers of 12.6M, which are the 403M of GraphPipe's appendix A.2, the norms of the four branches, a head of 4097
        ("mmt", 32 * (12 * 1024**2 + 13 * 1024) + 4 * 2048 + 4 * 1024 + 1),
        # towers 470M, tables 448M, first top layer 301M, three more
        ("dlrm", 28 * (4096**2 + 4096) + 7 * 64_000_000 + 73_472 * 4096 + 4096 + 3 * (4096**2 + 4096) + 4097),
        # towers: first layers of 15580 inputs in all, then three of 4096; head 28672 -> 4192 four times -> 1
        ("candle_uno", 15_580 * 4096 + 21 * 4096**2 + 28 * 4096 + 28_672 * 4192 + 3 * 4192**2 + 4 * 4192 + 4193),
    ],
)
def test_paper_sizes(name, total):
    model = model_named(name)
    with torch.device("meta"):
        network = model.build()
        inputs = {
            key: torch.zeros((2, *spec.shape), dtype=torch.int64 if spec.dtype == "int" else None)
            for key, spec in model.inputs().items()
        }
    assert sum(parameter.numel() for parameter in network.parameters()) == total
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network(**inputs).shape[0] == 2


@pytest.mark.parametrize(
    ("name", "published", "rel"),
    [
        ("clip", 427.6e6, 0.001),  # ViT-L/14 as released
        ("imagebind", 1200e6, 0.01),  # imagebind_huge as released
        ("flava", 241e6, 0.02),  # flava-full without the codebook, which also has three poolers
        ("gpt", 1557.6e6 + 50257 * 1600, 0.001),  # GPT-2 XL, and a head of its own
        ("llama", 8.030e9, 0.001),  # Llama 3 8B, and 70B
        pytest.param(
            "llama model.num_layers=80 model.hidden=8192 model.num_heads=64 model.ffn=28672", 70.55e9, 0.001, marks=pytest.mark.long
        ),
        ("llava", 7.063e9, 0.001),  # Llama-7B's 6,738M, the tower's 303M, the MLP's 21M
        ("unet", 859.5e6, 0.001),  # Stable Diffusion 1's
        ("inception", 23.83e6, 0.001),  # torchvision's without the auxiliary head's 3.3M
        ("evoformer", 88e6, 0.01),  # of AlphaFold's 93M
        ("alexnet", 61_100_840, 0),  # torchvision's, as are the next three
        ("vgg16", 138_357_544, 0),
        ("resnet101", 44_549_160, 0),
        ("googlenet", 6_624_904, 0),  # without auxiliary heads
        ("translator", 44.1e6 + 3 * 37000 * 512, 0.002),  # the base model's 63M with three matrices in place of one
        ("amoebanet model.num_filters=208", 81.5e6, 0.0005),  # torchgpipe's benchmarks, as are the next four
        pytest.param("amoebanet model.num_filters=416", 319.0e6, 0.0005, marks=pytest.mark.long),
        pytest.param("amoebanet model.num_cells=72 model.num_filters=512", 1.84e9, 0.005, marks=pytest.mark.long),
        ("segmentation_unet model.num_convs=6 model.channels=72", 362.2e6, 0.0005),
        pytest.param("segmentation_unet model.num_convs=24 model.channels=160", 7.80e9, 0.005, marks=pytest.mark.long),
        ("case_study", 8 * 12.6e6, 0.005),
        ("transformer", 403e6, 0.005),
    ],
)
def test_published_sizes(name, published, rel):
    model = model_named(*name.split())
    with torch.device("meta"):
        network = model.build()
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(published, rel=rel)


def test_published_size_of_a_second_head():
    with torch.device("meta"):
        network = model_named("inception", "model.auxiliary=true").build()
    assert sum(parameter.numel() for parameter in network.parameters()) == 27_161_264  # torchvision's


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
