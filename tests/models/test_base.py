from __future__ import annotations

import subprocess
import sys

import pytest

from gpp.errors import InvalidConfig
from gpp.models.base import TensorSpec
from gpp.models.bridge_tower import BridgeTower
from gpp.models.candle_uno import CandleUno
from gpp.models.digits import Digits
from gpp.models.dlrm import DLRM
from gpp.models.mmt import MMT

SPECS = """
import sys
from gpp.models import base, bridge_tower, candle_uno, digits, dlrm, dotted, imported, mmt
from gpp.data import base as data_base, digits as data_digits, imported as data_imported, sampler, synthetic
model = imported.Imported(factory="transformers.CLIPModel", loss="mse", input_specs={"x": {}}, target_specs={"y": {}})
for each in (model, mmt.MMT(), dlrm.DLRM(), digits.Digits(), candle_uno.CandleUno(), bridge_tower.BridgeTower()):
    each.key(), each.inputs(), each.targets()
data_digits.Digits().check(digits.Digits())
data_imported.Imported(factory="transformers.CLIPModel").check(model)
sampler.minibatch(3, 4, 20, 0)
print(sorted({"torch", "transformers", "sklearn", "hydra", "omegaconf"} & set(sys.modules)))
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
        ({"shape": (3, 0)}, "positive"),
    ],
)
def test_tensor_spec_refuses(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        TensorSpec(**settings)


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (MMT, {"num_heads": 3}, "must divide model.hidden=1024"),
        (MMT, {"num_layers": "eight"}, "model.num_layers=eight"),
        (MMT, {"dropout": 1.0}, "model.dropout"),
        (DLRM, {"bag": 0}, "model.bag=0"),
        (CandleUno, {"features": {"dose1": 0}}, "dose1"),
        (CandleUno, {"features": {}}, "model.features"),
        (Digits, {"hidden": True}, "model.hidden"),
        (BridgeTower, {"num_cross_layers": 13}, "must not exceed"),
        (BridgeTower, {"patch_size": 7}, "must divide model.image_size"),
    ],
)
def test_settings_refuse_what_makes_no_model(cls, settings, words):
    with pytest.raises(InvalidConfig, match=words):
        cls(**settings)


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        MMT().hidden = 3
