"""The Transformer that translates."""

from __future__ import annotations

import pytest
import torch

from gpp.optimizers import Adam
from tests.support.conf import model_named, option
from tests.support.inprocess import captured_named
from tests.support.training import trained


@pytest.mark.long
def test_every_decoder_layer_reads_the_end_of_the_encoder() -> None:
    _, captured, _ = captured_named("translator_small", "model.num_layers=2")
    graph = captured.graph
    norm = next(i for i, op in enumerate(graph.ops) if op.name == "encoder_norm")
    (memory,) = [t for t in graph.tensors if t.producer == norm]
    assert sorted(graph.ops[i].name.split(".")[1] for i in memory.consumers) == ["0", "1"]


def test_no_token_sees_those_behind_it(draw) -> None:
    model = model_named("translator_small")
    torch.manual_seed(0)
    network, inputs = model.build(), draw(model.inputs(), 2)
    logits = network(**inputs)
    inputs["previous"][:, 5:] = (inputs["previous"][:, 5:] + 1) % 24
    changed = (network(**inputs) - logits).abs().amax(dim=-1) > 1e-5
    assert not changed[:, :5].any() and changed[:, 5:].all()


@pytest.mark.long
def test_it_learns_to_translate() -> None:
    accuracy = trained(model_named("translator_small"), option("data", "translation"), Adam(lr=0.002), steps=180, minibatch_size=64)
    assert accuracy > 0.9


@pytest.mark.long
def test_a_small_gpt_learns_to_spell() -> None:
    model = model_named("char_gpt_small", "model.num_layers=2", "model.sequence=16")
    # a quarter of the characters are spaces
    assert trained(model, option("data", "text"), Adam(lr=0.003), steps=150, minibatch_size=64) > 0.4
