from __future__ import annotations

import pytest
import torch
from torch import nn

from gpp.errors import InvalidConfig
from gpp.models import dotted
from gpp.models.imported import Imported
from tests.support.conf import model_named

SPECS = {"input_specs": {"input": {"shape": [4]}}, "target_specs": {"y": {"shape": [], "dtype": "int", "high": 3}}}


class Pair(nn.Module):
    """Returns two fields."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 3), nn.Linear(width, 5)

    def forward(self, input):
        return {"left": self.left(input), "right": self.right(input)}


def model(**settings):
    return Imported(**{"factory": "torch.nn.Linear", "loss": "cross_entropy", **SPECS, **settings})


def test_function_with_args():
    network = model(args={"in_features": 4, "out_features": 3}).build()
    assert network(input=torch.ones(2, 4)).shape == (2, 3)


def test_outputs_are_chosen_and_names_stay():
    network = model(factory=f"{__name__}.Pair", outputs=["right"]).build()
    assert {name: tuple(y.shape) for name, y in network(input=torch.ones(2, 4)).items()} == {"right": (2, 5)}
    assert set(network.state_dict()) == set(Pair().state_dict())


def test_unknown_output_names_the_nearest():
    with pytest.raises(InvalidConfig, match="did you mean right"):
        model(factory=f"{__name__}.Pair", outputs=["rigth"]).build()(input=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"factory": "torch.nn.Liner"}, "did you mean torch.nn.Linear"),
        ({"factory": "no_such_package.Model"}, "no module named 'no_such_package'"),
        ({"args": {"in_feature": 4}}, "did you mean in_features"),
        ({"args": {"in_features": 4}}, "missing a required argument: 'out_features'"),
    ],
)
def test_build_refuses(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        model(**settings).build()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"factory": "Linear"}, "dotted path"),
        ({"config_args": {"a": 1}}, "model.config"),
        ({"input_specs": {}}, "at least one tensor"),
        ({"input_specs": {"x": {"shap": [3]}}}, "did you mean shape"),
        ({"input_specs": {"x": {"dtype": "int"}}}, "high"),
    ],
)
def test_settings_refuse(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        model(**settings)


def test_clip_keeps_its_own_names_and_couples_no_samples(draw):
    pytest.importorskip("transformers")
    clip = model_named("clip_imported")
    network, inputs = clip.build().eval(), draw(clip.inputs(), 4)
    outputs = network(**inputs)
    assert {name: tuple(y.shape) for name, y in outputs.items()} == {"text_embeds": (4, 32), "image_embeds": (4, 32)}
    assert any(name.startswith("text_model.encoder.layers.0.") for name in network.state_dict())
    alone = network(**{name: value[1:2] for name, value in inputs.items()})
    torch.testing.assert_close(alone["text_embeds"], outputs["text_embeds"][1:2])


def test_clip_config_with_an_unknown_class():
    pytest.importorskip("transformers")
    with pytest.raises(InvalidConfig, match=r"did you mean transformers\.CLIPConfig"):
        model_named("clip_imported", "model.config=transformers.ClipConfig").build()


def test_origin_of_installed_code_is_its_version():
    assert dotted.origin("torch.nn.Linear", field="model.factory").startswith("torch 2.")
    assert dotted.origin("yaml.safe_load", field="data.factory").startswith("PyYAML ")


def test_origin_of_own_code_follows_its_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "towers_of_mine" / "parts"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "layers.py").write_text("a = 1")
    before = dotted.origin("towers_of_mine.net.Net", field="model.factory")
    assert before == dotted.origin("towers_of_mine.net.Net", field="model.factory")
    (package / "layers.py").write_text("a = 2")
    assert dotted.origin("towers_of_mine.net.Net", field="model.factory") != before
    (tmp_path / "net_of_mine.py").write_text("raise RuntimeError('imported')")
    alone = dotted.origin("net_of_mine.Net", field="model.factory")
    (tmp_path / "beside.py").write_text("b = 1")
    assert dotted.origin("net_of_mine.Net", field="model.factory") != alone


def test_error_inside_the_users_module_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import not_there_at_all")
    with pytest.raises(InvalidConfig, match="needs 'not_there_at_all'"):
        dotted.resolve("needs_more.Net", field="model.factory")
