"""Every published network has the number of parameters that was published."""

from __future__ import annotations

import pytest
import torch

from tests.support.conf import model_named

DLRM = 28 * (4096**2 + 4096) + 7 * 64_000_000 + 73_472 * 4096 + 4096 + 3 * (4096**2 + 4096) + 4097
"""Towers 470M, tables 448M, first top layer 301M, three more."""
CANDLE_UNO = 15_580 * 4096 + 21 * 4096**2 + 28 * 4096 + 28_672 * 4192 + 3 * 4192**2 + 4 * 4192 + 4193
"""Towers: first layers of 15580 inputs in all, then three of 4096; head 28672 -> 4192 four times -> 1."""


@pytest.mark.parametrize(
    ("words", "published", "rel"),
    [
        # 32 layers of 12.6M, which are the 403M of GraphPipe's appendix A.2, the norms of the four branches, a head of 4097
        ("mmt", 32 * (12 * 1024**2 + 13 * 1024) + 4 * 2048 + 4 * 1024 + 1, 0),
        ("dlrm", DLRM, 0),
        ("candle_uno", CANDLE_UNO, 0),
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
        ("inception model.auxiliary=true", 27_161_264, 0),  # torchvision's
        ("evoformer", 88e6, 0.01),  # of AlphaFold's 93M
        ("alexnet", 61_100_840, 0),  # torchvision's, as are the next three
        ("vgg16", 138_357_544, 0),
        ("resnet101", 44_549_160, 0),
        ("googlenet", 6_624_904, 0),  # without auxiliary heads
        ("translator", 44.1e6 + 3 * 37000 * 512, 0.002),  # the base model's 63M with three matrices in place of one
        # MLPerf's reference, PipeDream's GNMT-8: 33.1M of embedding and as many at the end, 46.2M, 48.3M with the attention
        ("gnmt8 model.num_layers=4 model.tied=true model.vocabulary=32320", 160.7e6, 0.001),
        ("amoebanet model.num_filters=208", 81.5e6, 0.0005),  # torchgpipe's benchmarks, as are the next four
        pytest.param("amoebanet model.num_filters=416", 319.0e6, 0.0005, marks=pytest.mark.long),
        pytest.param("amoebanet model.num_cells=72 model.num_filters=512", 1.84e9, 0.005, marks=pytest.mark.long),
        ("segmentation_unet model.num_convs=6 model.channels=72", 362.2e6, 0.0005),
        pytest.param("segmentation_unet model.num_convs=24 model.channels=160", 7.80e9, 0.005, marks=pytest.mark.long),
        ("case_study", 8 * 12.6e6, 0.005),
        ("transformer", 403e6, 0.005),
        ("vit_base", 86_567_656, 0),  # google/vit-base-patch16-224
        ("vit_large", 304_326_632, 0),
        ("vit_huge", 630_764_800 + 21_843 * 1281, 0),  # google/vit-huge-patch14-224-in21k without its pooler, and its head
        ("deit_base", 87_338_192, 0),  # facebook/deit-base-distilled-patch16-224
        ("deit_small", 22_436_432, 0),
        ("deit_tiny", 5_910_800, 0),
        ("bert_base", 109_482_240 + 2 * 769, 0),  # bert-base-uncased, and a head of two classes
        ("bert_large", 335_141_888 + 2 * 1025, 0),
        ("block_residuals", 6.738e9, 0.001),  # Llama 7B's, and 65 queries
        ("hyper_connections", 6.738e9, 0.005),  # Llama 7B's, and 64 connections
        ("experts", 6.92e9, 0.001),  # OLMoE-1B-7B
        ("zamba", 2.7e9, 0.03),  # Zamba2-2.7B, which adds matrices of low rank, too
        ("whisper", 1550e6, 0.01),  # Whisper large
        ("cross_batch", 427.6e6, 0.001),  # CLIP ViT-L/14
        ("flamingo", 9.0e9, 0.05),  # OpenFlamingo-9B
    ],
)
def test_published_sizes(words, published, rel):
    with torch.device("meta"):
        network = model_named(*words.split()).build()
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(published, rel=rel)


@pytest.mark.parametrize("name", ["mmt", "dlrm", "candle_uno"])
def test_a_network_on_the_meta_device_runs_there(name):
    model = model_named(name)
    with torch.device("meta"):
        network = model.build()
        types = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}
        inputs = {key: torch.zeros((2, *spec.shape), dtype=types[spec.dtype]) for key, spec in model.inputs().items()}
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network(**inputs).shape[0] == 2
