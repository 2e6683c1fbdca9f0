from __future__ import annotations

import subprocess
import sys

import pytest

from gpp.errors import InvalidConfig
from gpp.models.base import TensorSpec
from gpp.models.bridge_tower import BridgeTower
from gpp.models.candle_uno import CandleUno
from gpp.models.clip import CLIP
from gpp.models.convnet import ConvNet
from gpp.models.digits import Digits
from gpp.models.digits_deep import DigitsDeep
from gpp.models.dlrm import DLRM
from gpp.models.evoformer import Evoformer
from gpp.models.flava import FLAVA
from gpp.models.gpt import GPT
from gpp.models.imagebind import ImageBind
from gpp.models.inception import Inception
from gpp.models.llava import LLaVA
from gpp.models.mmt import MMT
from gpp.models.residual_lstm import ResidualLSTM
from gpp.models.translator import Translator
from gpp.models.unet import UNet

SPECS = """
import sys
from gpp.models import base, bridge_tower, candle_uno, clip, digits, dlrm, dotted, evoformer, flava, gpt, imagebind, imported
from gpp.models import convnet, digits_deep, inception, llava, mmt, residual_lstm, translator, unet
from gpp.data import base as data_base, digits as data_digits, imported as data_imported, sampler, synthetic, text, translation
model = imported.Imported(factory="transformers.CLIPModel", loss="mse", input_specs={"x": {}}, target_specs={"y": {}})
shipped = [mmt.MMT, dlrm.DLRM, digits.Digits, candle_uno.CandleUno, bridge_tower.BridgeTower, clip.CLIP, evoformer.Evoformer]
shipped += [flava.FLAVA, gpt.GPT, imagebind.ImageBind, inception.Inception, llava.LLaVA, unet.UNet]
shipped += [convnet.ConvNet, digits_deep.DigitsDeep, residual_lstm.ResidualLSTM, translator.Translator]
for each in (model, *(cls() for cls in shipped)):
    each.key(), each.inputs(), each.targets()
data_digits.Digits().check(digits.Digits())
text.Text().check(gpt.GPT())
translation.Translation().check(translator.Translator())
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
        (CLIP, {"text_heads": 5}, "must divide model.text_hidden=768"),
        (ConvNet, {"kind": "lenet"}, "must be one of alexnet, vgg, resnet, googlenet"),
        (ConvNet, {"kind": "resnet"}, "must be 4 integers of at least 1 for kind=resnet"),
        (ConvNet, {"blocks": (1, 1, 1, 1, 0)}, "model.blocks"),
        (ConvNet, {"kind": "alexnet", "blocks": (), "image_size": 62}, "63 or more"),
        (ConvNet, {"shrink": 32}, "16 or less"),
        (DigitsDeep, {"num_layers": 0}, "model.num_layers=0"),
        (Evoformer, {"pair_heads": 3}, "must divide model.pair_hidden=128"),
        (FLAVA, {"multimodal_layers": 0}, "model.multimodal_layers=0"),
        (GPT, {"num_heads": 16, "hidden": 1000}, "must divide model.hidden=1000"),
        (ImageBind, {"towers": {"image": (1, 8, 2), "sound": (1, 8, 2)}}, "may be image, text, audio"),
        (ImageBind, {"towers": {"text": (1, 8, 2), "audio": (1, 8, 2)}}, "need the image"),
        (ImageBind, {"towers": {"image": (1, 8, 2), "text": (1, 8, 3)}}, "model.towers.text"),
        (Inception, {"norm": "layer"}, "must be one of batch, group"),
        (Inception, {"image_size": 64}, "75 or more"),
        (LLaVA, {"frozen": "tower"}, "did you mean towers"),
        (ResidualLSTM, {"hidden": 0}, "model.hidden=0"),
        (Translator, {"num_heads": 3}, "must divide model.hidden=512"),
        (UNet, {"widths": (320, 650)}, "model.widths"),
        (UNet, {"attention": (True,)}, "model.attention"),
        (UNet, {"size": 20}, "multiple of 8"),
        (UNet, {"context": 0}, "model.context"),
    ],
)
def test_settings_refuse_what_makes_no_model(cls, settings, words):
    with pytest.raises(InvalidConfig, match=words):
        cls(**settings)


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        MMT().hidden = 3
