"""A loss of several terms: each is a result and an operator of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpp.capture.build import capture
from gpp.capture.stage import build_stage
from gpp.errors import CaptureError
from gpp.graph.captured import with_total


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        h = self.stem(x).relu()
        return {"a": self.a(h), "b": self.b(h)}


def terms(outputs, targets):
    return {"class": F.cross_entropy(outputs["a"], targets["a"]), "value": 0.3 * F.mse_loss(outputs["b"], targets["b"])}


def right(outputs, targets):
    return (outputs["a"].detach().argmax(-1) == targets["a"]).float().mean()


def captured(loss=terms, metrics=None):
    targets = {"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, 2)}
    return capture(TwoHeads(), {"x": torch.zeros(2, 6)}, targets, loss, metrics or {}, name="two_heads")


def test_terms_are_sinks_of_their_own():
    graph = captured(metrics={"right": right}).graph
    sinks = [graph.ops[i].name for i in range(graph.num_ops) if not graph.successors[i]]
    assert sorted(sinks) == ["loss.class", "loss.value"]
    assert [op.kind for op in graph.ops if op.name.startswith("loss")] == ["loss", "loss"]


def test_a_metric_joins_the_term_that_reads_the_same():
    found = captured(metrics={"right": right})
    assert list(found.results) == ["loss:class", "loss:value", "metric:right"]
    of_class = next(op for op in found.graph.ops if op.name == "loss.class")
    stage = build_stage(found, of_class.nodes, device="cpu")
    assert stage.results == ("loss:class", "metric:right") and set(stage.inputs) == {"target:a"}
    logits, digit = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    made = stage(4, {"target:a": digit, stage.receives[0]: logits})
    torch.testing.assert_close(made, {"loss:class": F.cross_entropy(logits, digit)})


def test_every_term_is_differentiated():
    assert all(tensor.differentiable for tensor in captured().graph.tensors)


@pytest.mark.parametrize("empty", [{}, {"": 1}, {3: 1}])
def test_terms_need_names(empty):
    with pytest.raises(CaptureError, match="dict of named scalars"):
        captured(lambda outputs, targets: {name: outputs["a"].mean() for name in empty})


def test_the_total_is_the_sum():
    assert with_total({"loss:a": 1.0, "metric:x": 5.0, "loss:b": 2.0})["loss"] == 3.0
    assert with_total({"loss": 1.0, "metric:x": 5.0}) == {"loss": 1.0, "metric:x": 5.0}
