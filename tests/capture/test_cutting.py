"""Random cuts of captured models equal the models, and the towers of CLIP are cut apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpp.capture.build import capture
from tests.support.capture_zoo import CASES, floats, mse
from tests.support.cutting import assert_cuts_exactly
from tests.support.long import thinned


@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_random_cuts_equal_the_model(name):
    """Loss, gradients, buffers; `normed` draws dropout too, in the order of execution, since it is a chain."""
    torch.manual_seed(0)
    kind, make, loss, metrics = CASES[name]
    model = kind().double()
    captured = capture(model, *make(3), loss, metrics, name=name)
    assert captured.batch is None
    assert not captured.warnings or "draws random numbers" in captured.warnings[0]
    # batch statistics need two samples
    assert_cuts_exactly(captured, model, make, loss, batches=(2, 5) if name == "normed" else (1, 2, 5))


def test_take_along_dim_is_captured_at_any_number_of_samples():
    """As the gather that it stands for, with what is broadcast on either side."""

    class Taking(nn.Sequential):
        def forward(self, input):
            h, places = self[0](input), input[..., :1].abs().long() % 4
            return torch.take_along_dim(h, places, dim=1) * h[:, :, :1].take_along_dim(places[:, :2].expand(-1, -1, 3), -2).mean(
                1, True
            )

    model = Taking(nn.Linear(3, 3)).double()
    captured = capture(model, (3.0 * floats(4, 4, 3),), floats(4, 4, 3), mse, name="taking")
    assert captured.batch is None and captured.checked


def test_parameters_without_a_gradient_are_one_warning():
    model = nn.Linear(3, 3).double()
    model.spare = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    (warning,) = capture(model, (floats(2, 3),), floats(2, 3), mse, name="spare").warnings
    names = "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, ..."
    assert warning == f"no operation reads {names}: 6 parameters without a gradient"


def contrastive(outputs, targets):
    logits = outputs.text_embeds @ outputs.image_embeds.T
    return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device)) + 0.0 * targets.sum()


@pytest.fixture(scope="module")
def clip():
    transformers = pytest.importorskip("transformers")
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config={**tower, "image_size": 16, "patch_size": 8}, projection_dim=8)
    torch.manual_seed(0)
    return transformers.CLIPModel(config).double()


def batch_of(batch):
    ids = torch.randint(3, 30, (batch, 8))
    mask = torch.ones(batch, 8, dtype=torch.long)
    mask[:, 6:] = 0
    pixels = torch.randn(batch, 3, 16, 16, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}, torch.zeros(batch, dtype=torch.float64)


def test_towers_are_independent_and_cut_exactly(clip):
    captured = capture(clip, *batch_of(2), contrastive, name="clip")
    graph = captured.graph
    vision = [i for i, op in enumerate(graph.ops) if op.name.startswith("vision_model")]
    text = [i for i, op in enumerate(graph.ops) if op.name.startswith("text_model")]
    assert len(vision) > 10 and len(text) > 10
    for ops, others in ((vision, text), (text, vision)):
        mask = sum(1 << i for i in others)
        assert not any(graph.descendants[i] & mask for i in ops)
    assert any(op.name.startswith("vision_model.encoder.layers.0.self_attn.q_proj") for op in graph.ops)
    # masks and positions are computed where they are needed, so layers are joined by activations only
    assert all(tensor.differentiable for tensor in graph.tensors)
    assert "logit_scale" in captured.warnings[0]
    assert_cuts_exactly(captured, clip, batch_of, contrastive, batches=(1, 3), seeds=(0,))
