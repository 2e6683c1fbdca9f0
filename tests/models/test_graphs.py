"""The small models have the full ones' wiring: what their operator graphs look like."""

from __future__ import annotations

import pytest
import torch

from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.graph.series_parallel import Parallel, Series
from gpp.models.networks.clip import contrastive_loss, pair_loss
from sweeps.networks.inception import heads_loss
from tests.support.conf import model_named
from tests.support.inprocess import captured_named
from tests.support.long import thinned
from tests.support.series_parallel import decompose


def graph_of(name: str, *overrides: str) -> OpGraph:
    _, captured, _ = captured_named(name, *overrides)
    assert captured.batch is None and not captured.warnings
    return captured.graph


def under(graph: OpGraph, prefix: str) -> int:
    found = mask_of(i for i, op in enumerate(graph.ops) if op.name.startswith(prefix))
    assert found, prefix
    return found


def independent(graph: OpGraph, one: int, other: int) -> bool:
    return not any(graph.descendants[i] & other for i in range(graph.num_ops) if one >> i & 1) and not any(
        graph.descendants[i] & one for i in range(graph.num_ops) if other >> i & 1
    )


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("clip_small", ["text.", "image."]),
        pytest.param("flava_small", ["text.", "image."], marks=pytest.mark.long),
        pytest.param(
            "imagebind_small",
            [f"towers.{name}." for name in ("image", "text", "audio", "depth", "thermal", "motion")],
            marks=pytest.mark.long,
        ),
        pytest.param("llava_small", ["image.", "tokens"], marks=pytest.mark.long),
        pytest.param("inception_small", [f"cells.0.branches.{i}." for i in range(4)], marks=pytest.mark.long),
    ],
)
def test_branches_are_independent_and_the_graph_series_parallel(name, branches):
    graph = graph_of(name)
    masks = [under(graph, branch) for branch in branches]
    assert all(independent(graph, a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert decompose(graph) is not None and decompose(coarsen(graph, 64)) is not None


@pytest.mark.parametrize("words", thinned(["gpt_small", "vgg_small", "mlp model.num_blocks=3 model.width=8"]))
def test_chains_have_no_branches(words):
    tree = decompose(coarsen(graph_of(*words.split()), 32))
    assert isinstance(tree, Series) and not any(isinstance(child, Parallel) for child in tree.children)


def test_a_tied_head_is_the_embedding():
    tied = model_named("gpt_small", "model.tied=true").build()
    assert tied.head.weight is tied.embed.tokens.weight


def test_blocks_of_a_chain_are_equal():
    graph = graph_of("mlp", "model.num_blocks=3", "model.width=8")
    linear = [op for op in graph.ops if len(op.params) == 2]
    assert len(linear) == 6 and len({op.forward_flops for op in linear}) == 1
    assert sum(param.num_bytes for param in graph.params) == 6 * (8 * 8 + 8) * 8


def test_the_deep_chain_of_digits_has_a_linear_layer_for_each_stage():
    graph = graph_of("digits_deep", "model.num_layers=4")
    sizes = {param.name: param.num_bytes // 8 for param in graph.params}
    found = [sorted(sizes[name] for name in op.params) for op in graph.ops if op.params]
    assert found == [[48, 64 * 48], [48, 48 * 48], [48, 48 * 48], [10, 480]]


@pytest.mark.long
def test_residual_networks_have_shortcuts():
    graph = graph_of("resnet_small")
    assert any(len(t.consumers) == 2 for t in graph.tensors) and decompose(graph) is not None


@pytest.mark.long
def test_every_decoder_layer_reads_the_end_of_the_encoder():
    graph = graph_of("translator_small", "model.num_layers=2")
    norm = next(i for i, op in enumerate(graph.ops) if op.name == "encoder_norm")
    (memory,) = [t for t in graph.tensors if t.producer == norm]
    assert sorted(graph.ops[i].name.split(".")[1] for i in memory.consumers) == ["0", "1"]


@pytest.mark.long
def test_a_layer_of_lstms_is_one_operator_and_the_decoder_begins_beside_the_encoder():
    graph = graph_of("gnmt8", "model.hidden=8", "model.vocabulary=11", "model.sequence=5", "model.num_layers=2")
    layers = {op.name: i for i, op in enumerate(graph.ops) if op.kind == "recurrent"}
    assert set(layers) == {f"{part}.{i}.lstm" for part in ("encoder", "decoder") for i in range(2)}
    assert all(graph.ops[i].forward_flops * 2 == graph.ops[i].backward_flops > 0 for i in layers.values())
    assert not graph.descendants[layers["encoder.1.lstm"]] >> layers["decoder.0.lstm"] & 1
    assert graph.descendants[layers["encoder.0.lstm"]] >> layers["decoder.1.lstm"] & 1
    assert decompose(graph) is not None


@pytest.mark.long
@pytest.mark.parametrize("name", ["unet_small", "evoformer_small"])
def test_streams_that_meet_again_and_again_are_no_tree(name):
    assert decompose(graph_of(name)) is None


def test_without_a_context_the_picture_is_all_there_is(draw):
    model = model_named("unet_small", "model.context=0", "model.context_length=0")
    assert set(model.inputs()) == {"noisy", "step"}
    assert model.build()(**draw(model.inputs(), 2)).shape == (2, 4, 16, 16)


@pytest.mark.long
def test_the_skips_of_the_unet_reach_the_way_up():
    graph = graph_of("unet_small")
    enter = next(t for t in graph.tensors if graph.ops[t.producer].name == "enter")
    joins = [op for op in enter.consumers if graph.predecessors[op] & under(graph, "up.2.")]
    assert len(joins) == 1 and graph.descendants[joins[0]] & under(graph, "up.3.")
    assert enter.bytes_per_sample == 16 * 16 * 16 * 8


@pytest.mark.long
def test_frozen_parts_of_llava_have_no_gradients():
    free, frozen = graph_of("llava_small"), graph_of("llava_small", "model.frozen=towers")
    assert all(param.trainable for param in free.params)
    assert {p.name.split(".")[0] for p in frozen.params if p.trainable} == {"project"}
    second_stage = model_named("llava_small", "model.frozen=image").build()
    assert {n.split(".")[0] for n, p in second_stage.named_parameters() if not p.requires_grad} == {"image"}

    def backward(graph: OpGraph, prefix: str) -> float:
        return sum(op.backward_flops for op in graph.ops if op.name.startswith(prefix))

    assert backward(frozen, "image") == 0 < backward(free, "image")
    assert 0 < backward(frozen, "layers") < backward(free, "layers")


def test_inception_with_both_heads(draw):
    model = model_named("inception_small", "model.auxiliary=true")
    outputs = model.build()(**draw(model.inputs(), 2))
    assert {name: logits.shape for name, logits in outputs.items()} == {"logits": (2, 10), "auxiliary": (2, 10)}
    label = torch.tensor([1, 2])
    both, one = heads_loss(outputs, label), heads_loss({"logits": outputs["logits"]}, label)
    torch.testing.assert_close(both - one, 0.4 * torch.nn.functional.cross_entropy(outputs["auxiliary"], label))


def test_contrast_depends_on_the_micro_batch_and_pairs_do_not():
    torch.manual_seed(0)
    outputs, matched = {"text_embeds": torch.randn(6, 4), "image_embeds": torch.randn(6, 4)}, torch.ones(6, dtype=torch.bool)
    for loss, same in ((contrastive_loss, False), (pair_loss, True)):
        halves = [loss({k: v[i : i + 3] for k, v in outputs.items()}, matched[:3]) for i in (0, 3)]
        assert torch.allclose(sum(halves) / 2, loss(outputs, matched)) == same
    text, image = (torch.nn.functional.normalize(v, dim=-1) for v in outputs.values())
    logits, pairs = text @ image.T / 0.1, torch.arange(6)
    both = (torch.nn.functional.cross_entropy(logits, pairs) + torch.nn.functional.cross_entropy(logits.T, pairs)) / 2
    torch.testing.assert_close(contrastive_loss(outputs, matched), both)
