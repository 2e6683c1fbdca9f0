"""The translator of LSTM layers."""

from __future__ import annotations

import pytest
import torch

from gpp.graph.op_graph import OpGraph
from gpp.optimizers import Adam
from tests.support.conf import model_named, option
from tests.support.inprocess import captured_named
from tests.support.series_parallel import decompose
from tests.support.training import trained

TINY = ("model.hidden=8", "model.vocabulary=11", "model.sequence=5", "model.num_layers=2")


def graph_of(*overrides: str) -> OpGraph:
    _, captured, _ = captured_named("gnmt8", *TINY, *overrides)
    assert captured.batch is None and not captured.warnings
    return captured.graph


@pytest.mark.long
def test_a_layer_is_one_operator_and_the_decoder_begins_beside_the_encoder() -> None:
    graph = graph_of()
    layers = {op.name: i for i, op in enumerate(graph.ops) if op.kind == "recurrent"}
    assert set(layers) == {f"{part}.{i}.lstm" for part in ("encoder", "decoder") for i in range(2)}
    assert all(graph.ops[i].forward_flops * 2 == graph.ops[i].backward_flops > 0 for i in layers.values())
    assert not graph.descendants[layers["encoder.1.lstm"]] >> layers["decoder.0.lstm"] & 1
    assert graph.descendants[layers["encoder.0.lstm"]] >> layers["decoder.1.lstm"] & 1
    assert decompose(graph) is not None


def test_tied_languages_share_one_matrix() -> None:
    for tied, count in (("true", 1), ("false", 2)):
        network = model_named("gnmt8", *TINY, f"model.tied={tied}").build()
        assert sum(name.startswith("embed") for name, _ in network.named_parameters()) == count


def test_published_size() -> None:
    """MLPerf's reference, PipeDream's GNMT-8: 33.1M of embedding and as many at the end, 46.2M, 48.3M with the attention."""
    with torch.device("meta"):
        network = model_named("gnmt8", "model.num_layers=4", "model.tied=true", "model.vocabulary=32320").build()
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(160.7e6, rel=0.001)


def test_no_token_sees_those_behind_it(draw) -> None:
    model = model_named("gnmt_small")
    torch.manual_seed(0)
    network, inputs = model.build(), draw(model.inputs(), 2)
    logits = network(**inputs)
    inputs["previous"][:, 5:] = (inputs["previous"][:, 5:] + 1) % 24
    changed = (network(**inputs) != logits).any(dim=-1)
    assert not changed[:, :5].any() and changed[:, 5:].all()


@pytest.mark.long
def test_it_learns_to_translate() -> None:
    accuracy = trained(
        model_named("residual_lstm_small"), option("data", "translation"), Adam(lr=0.003), steps=120, minibatch_size=64
    )
    assert accuracy > 0.95
