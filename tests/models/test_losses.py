from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpp.errors import InvalidConfig
from gpp.models.losses import loss, metric


def scaled(outputs, targets):
    return (outputs["a"] * targets["x"] - targets["y"]).mean()


def test_cross_entropy_takes_classes_per_position():
    logits, classes = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    torch.testing.assert_close(loss("cross_entropy")(logits, {"y": classes}), F.cross_entropy(logits.transpose(1, 2), classes))


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y,), lambda y: {"y": y}, lambda y: {"logits": y, "hidden": y + 1}])
def test_the_one_output_is_found(wrap):
    y, target = torch.randn(4, 1), torch.randn(4)
    torch.testing.assert_close(loss("mse")(wrap(y), target), F.mse_loss(y[:, 0], target))


def test_bce_takes_truths():
    y, truths = torch.tensor([3.0, -3.0]), torch.tensor([True, False])
    assert loss("bce_with_logits")(y, {"click": truths}) < 0.05
    assert metric("accuracy")(y, {"click": truths}) == 1
    assert metric("accuracy")(y[:, None], {"click": ~truths}) == 0


def test_accuracy_of_classes():
    assert metric("accuracy")(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 0.75


def test_dotted_path_gets_all_outputs_and_targets():
    value = loss(f"{__name__}.scaled")({"a": torch.ones(2)}, {"x": torch.full((2,), 3.0), "y": torch.ones(2)})
    assert value == 2


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (loss, "cross_entrpy", "did you mean cross_entropy"),
        (loss, "torch.nn.functional.mse_los", "did you mean torch.nn.functional.mse_loss"),
        (loss, "math.pi", "cannot be called"),
        (metric, "acuracy", "did you mean accuracy"),
        (metric, None, "must be one of accuracy"),
    ],
)
def test_unknown_names_say_what_is_near(find, name, words):
    with pytest.raises(InvalidConfig, match=words):
        find(name)


def test_several_outputs_need_a_choice():
    with pytest.raises(InvalidConfig, match="takes one output"):
        loss("mse")((torch.ones(2), torch.ones(2)), torch.ones(2))
