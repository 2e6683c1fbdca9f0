from dataclasses import replace

import pytest
import torch
from torch import nn

from gpp.capture.blocks import capture_blocks
from gpp.capture.examples import capture_model, initial_weights
from gpp.errors import CaptureError, InvalidConfig
from gpp.models.blocks import Block, Blocks
from tests.support.capture_zoo import accuracy, cross_entropy
from tests.support.conf import model_named
from tests.support.cutting import build_stages, named, random_parts, reference, run_pipeline

MODEL = Blocks(
    name="blocks",
    loss="cross_entropy",
    blocks={
        "dense": {"factory": "tests.support.block_zoo.Deciding", "args": [4], "kwargs": {"scale": 3.0}, "inputs": ["x"]},
        "text": {"factory": "tests.support.block_zoo.Encoder", "args": [9, 4], "inputs": ["ids"]},
        "head": {"factory": "tests.support.block_zoo.Head", "args": [4], "inputs": ["dense", "text"]},
    },
    input_specs={"x": 4, "ids": {"shape": [5], "dtype": "int", "high": 9}},
    target_specs={"y": {"dtype": "int", "high": 3}},
)
BLOCKS = MODEL.listed()


class Joined(nn.Module):
    """The blocks called by hand, as the reference."""

    def __init__(self):
        super().__init__()
        self.parts = MODEL.build()

    def forward(self, x, ids):
        return self.parts.head(self.parts.dense(x), *self.parts.text(ids))


def make(batch):
    return {"x": torch.randn(batch, 4, dtype=torch.float64), "ids": torch.randint(0, 9, (batch, 5))}, torch.randint(0, 3, (batch,))


@pytest.fixture(scope="module")
def captured():
    return capture_blocks(BLOCKS, *make(2), cross_entropy, {"accuracy": accuracy}, name="blocks")


def test_every_block_is_one_operator(captured):
    graph = captured.graph
    assert [op.name for op in graph.ops] == ["dense", "text", "head", "loss"]
    assert [op.kind for op in graph.ops] == ["block", "block", "block", "loss"]
    assert graph.predecessors == (0, 0, 0b11, 0b100)
    assert graph.ops[0].params == ("dense.inner.weight", "dense.inner.bias")
    assert graph.ops[0].forward_flops == 2 * 4 * 4 and graph.ops[2].backward_flops == 2 * 2 * 4 * 3
    assert [(t.name, t.bytes_per_sample, t.differentiable) for t in graph.tensors] == [
        ("dense", 32, True),
        ("text.0", 32, True),
        ("text.1", 160, True),
        ("head", 24, True),
    ]
    assert captured.node_of["text.1"].batch_dim == 1 and all(op.saved_bytes > 0 for op in graph.ops)


def test_a_block_answers_for_its_result_where_the_loss_keeps_it():
    inputs, _ = make(2)
    graph = capture_blocks(BLOCKS[:1], {"x": inputs["x"]}, torch.zeros(2, 4), nn.functional.mse_loss, name="dense").graph
    assert graph.tensors[0].saved and graph.ops[0].saved_bytes >= 32 and graph.ops[1].saved_bytes == 0


def test_cut_blocks_equal_the_blocks_called_by_hand(captured):
    for seed, batch in ((0, 1), (1, 4), (2, 2)):
        torch.manual_seed(seed)
        model = Joined()
        inputs, targets = make(batch)
        stages = build_stages(captured, model.parts, random_parts(captured.graph, 2 + seed, seed))
        torch.manual_seed(seed)
        loss, grads = run_pipeline(stages, named(captured, inputs, targets), batch)
        torch.manual_seed(seed)
        want, want_grads = reference(model, inputs, targets, cross_entropy)
        assert torch.equal(loss, want) and {f"parts.{n}" for n in grads} == set(want_grads)
        # A message has other strides, by which sums are added up in another order.
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want_grads[f"parts.{name}"], rtol=1e-12, atol=1e-14)


def test_blocks_evaluate_without_dropout(captured):
    model = Joined()
    (stage,) = build_stages(captured, model.parts, [range(captured.graph.num_ops)])
    inputs, targets = make(3)
    out = stage.eval_module()(3, named(captured, inputs, targets))
    model.eval()
    assert torch.equal(out["loss"], cross_entropy(model(**inputs), targets)) and set(out) == {"loss", "metric:accuracy"}
    assert stage.has_random and set(stage.state_dict()) == set(model.parts.state_dict())


def test_wrong_lists_are_refused():
    inputs, targets = make(2)
    with pytest.raises(InvalidConfig, match="earlier blocks"):
        capture_blocks(BLOCKS[2:], inputs, targets, cross_entropy, name="blocks")
    with pytest.raises(CaptureError, match="cannot be imported"):
        nothing = Block(name="a", factory="tests.support.block_zoo.Nothing", inputs=("x",))
        capture_blocks([nothing], inputs, targets, cross_entropy, name="blocks")
    alone = Block(name="head", factory="tests.support.block_zoo.Head", args=(4,), inputs=("x",))
    with pytest.raises(CaptureError, match=r"block head .*does not run"):
        capture_blocks([alone], inputs, targets, cross_entropy, name="blocks")


def test_named_on_the_command_line_they_are_the_same_model():
    spec = "{dense: {factory: tests.support.block_zoo.Deciding, args: [4], kwargs: {scale: 3.0}, inputs: [x]}, "
    spec += "text: {factory: tests.support.block_zoo.Encoder, args: [9, 4], inputs: [ids]}, "
    spec += "head: {factory: tests.support.block_zoo.Head, args: [4], inputs: [dense, text]}}"
    words = [f"model.blocks={spec}", "model.loss=cross_entropy", "model.target_specs={y: {dtype: int, high: 3}}"]
    model = model_named("blocks", *words, "model.input_specs={x: 4, ids: {shape: [5], dtype: int, high: 9}}")
    assert model == MODEL
    captured = capture_model(model, dtype="float64")
    assert [op.name for op in captured.graph.ops] == ["dense", "text", "head", "loss"]
    weights = initial_weights(model, captured, seed=0, dtype="float64")
    torch.manual_seed(0)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.build().state_dict().items())


def test_blocks_in_order_equal_the_blocks_called_by_hand():
    model = Joined().eval()
    inputs, _ = make(3)
    assert torch.equal(model.parts(**inputs), model(**inputs))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"factory": "block_zoo.Head", "inputs": ["dens"]}, "model.blocks.head.inputs=dens.*did you mean dense"),
        ({"factory": "Head"}, "model.blocks.head.factory=Head: must be a dotted path"),
        ({"factory": "block_zoo.Head", "input": ["x"]}, "model.blocks.head.input.*did you mean inputs"),
    ],
)
def test_settings_that_make_no_blocks_are_refused(head, words):
    with pytest.raises(InvalidConfig, match=words):
        replace(MODEL, blocks={"dense": MODEL.blocks["dense"], "head": head})
