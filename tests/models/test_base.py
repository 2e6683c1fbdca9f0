from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpp.errors import InvalidConfig
from gpp.models.base import TensorSpec
from tests.support.conf import model_named, network_named

SPECS = """
import sys
from gpp.data import digits, imported, sampler, text, translation
from gpp.models import imported as imported_model, network, profile, random_graph
pair = {"dtype": "int", "high": "tokens", "shape": [12]}
specs = {"input_specs": {"source": pair, "previous": pair}, "target_specs": {"target": pair}}
model = network.flat(name="mine", network="gpp.models.networks.translator.Translator", loss="mse", tokens=24, **specs)
image, digit = {"image": {"shape": [8, 8]}}, {"digit": {"dtype": "int", "high": 10}}
theirs = imported_model.Imported(factory="transformers.CLIPModel", loss="mse", input_specs=image, target_specs=digit)
for each in (model, theirs):
    each.key(), each.inputs(), each.targets()
translation.Translation().check(model)
digits.Digits().check(theirs)
imported.Imported(factory="transformers.CLIPModel").check(theirs)
sampler.minibatch(3, 4, 20, 0)
print(sorted({"torch", "transformers", "scipy", "hydra", "omegaconf"} & set(sys.modules)))
"""


def test_settings_import_no_torch():
    done = subprocess.run([sys.executable, "-c", SPECS], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float32"}, "float, int, bool"),
        ({"dtype": "int"}, "high"),
        ({"high": 3}, "high"),
        ({"shape": (3, 0)}, "at least 1"),
    ],
)
def test_tensor_spec_refuses(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        TensorSpec(**settings)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("mmt", {"num_heads": 3}, "must divide model.hidden=1024.* set model.num_heads=2"),
        ("mmt", {"num_layers": "eight"}, "model.num_layers=eight: must be an integer of at least 1"),
        ("mmt", {"hidden": "wide"}, "model.hidden=wide: must be an integer of at least 1"),
        ("mmt", {"sequence": 0}, "model.sequence=0: must be an integer of at least 1"),
        ("mmt", {"dropout": 1.0}, "model.dropout"),
        ("mmt", {"dropout": float("nan")}, "model.dropout"),
        ("mmt", {"num_layer": 3}, "did you mean model.num_layers"),
        ("dlrm", {"bag": 0}, "model.bag=0"),
        ("candle_uno_small", {"features": {"dose1": 0}}, "dose1"),
        ("digits", {"hidden": True}, "model.hidden"),
        ("digits", {"parity": 1}, "model.parity=1"),
        ("bridge_tower", {"num_cross_layers": 13}, "must not exceed"),
        ("bridge_tower", {"patch_size": 7}, "must divide model.image_size"),
        ("clip", {"text_heads": 5}, "must divide model.text_hidden=768"),
        ("vgg16", {"kind": "lenet"}, "must be one of alexnet, vgg, resnet, googlenet"),
        ("vgg16", {"kind": "resnet"}, "must be 4 integers of at least 1 for model.kind=resnet"),
        ("vgg16", {"blocks": (1, 1, 1, 1, 0)}, "model.blocks"),
        ("alexnet", {"image_size": 62}, "at least 63"),
        ("vgg16", {"shrink": 32}, "from 1 to 16"),
        ("digits_deep", {"num_layers": 0}, "model.num_layers=0"),
        ("evoformer", {"pair_heads": 3}, "must divide model.pair_hidden=128"),
        ("flava", {"multimodal_layers": 0}, "model.multimodal_layers=0"),
        ("gpt", {"num_heads": 16, "hidden": 1000}, "must divide model.hidden=1000"),
        ("imagebind", {"towers": {"image": (1, 8, 2), "sound": (1, 8, 2)}}, "model.towers.*image, text, audio"),
        ("imagebind", {"towers": {"text": (1, 8, 2), "audio": (1, 8, 2)}}, "need the image"),
        ("imagebind", {"towers": {"image": (1, 8, 2), "text": (1, 8, 3)}}, "model.towers.text"),
        ("inception", {"norm": "layer"}, "batch or group"),
        ("inception", {"image_size": 64}, "at least 75"),
        ("llava", {"frozen": "tower"}, "set model.frozen=towers"),
        ("residual_lstm", {"hidden": 0}, "model.hidden=0"),
        ("translator", {"num_heads": 3}, "must divide model.hidden=512"),
        ("unet", {"widths": (320, 650)}, "model.widths"),
        ("unet", {"attention": (True,)}, "model.attention"),
        ("unet", {"size": 20}, "multiple of 8"),
        ("unet", {"context": 0}, "model.context"),
    ],
)
def test_settings_refuse_what_makes_no_model(name, arguments, words):
    with torch.device("meta"), pytest.raises(InvalidConfig, match=words):
        network_named(name, **arguments).build()


def test_a_setting_that_is_left_out_is_named():
    model = model_named("mlp")
    with pytest.raises(InvalidConfig, match=r"model\.num_blocks=null: MLP needs it"):
        replace(model, arguments={"width": 4}).build()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"shape": ["widht"]}, "neither a number nor a setting of the model.*did you mean width"),
        ({"shape": [0]}, "model.input_specs.x=0: must be an integer of at least 1"),
        ({"shap": [4]}, "did you mean shape"),
        ({"dtype": "int"}, "model.input_specs.x.high"),
        ({"dtype": "complex"}, "model.input_specs.x.dtype=complex"),
        ("wide", "takes shape, dtype, high"),
    ],
)
def test_inputs_that_mean_no_tensor_are_refused(spec, words):
    with pytest.raises(InvalidConfig, match=words):
        replace(model_named("mlp"), input_specs={"x": spec})


def test_inputs_by_number_by_count_and_optional():
    specs = {"x": 7, "branch": {"count": "num_blocks", "shape": ["width", 2]}, "none": {"shape": [0, "width"], "optional": True}}
    model = replace(network_named("mlp", num_blocks=2, width=5), input_specs=specs)
    pair = TensorSpec(shape=(5, 2))
    assert model.inputs() == {"x": TensorSpec(shape=(7,)), "branch_0": pair, "branch_1": pair}


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        model_named("mlp").network = "another.Net"
