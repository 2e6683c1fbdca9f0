"""Options of conf/ as objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.app.composing import _Once, quicken
from gpp.models.network import Network

CONF = Path(__file__).resolve().parents[2] / "conf"
SWEEPS = f"hydra.searchpath=[file://{CONF.parent / 'sweeps'}]"
"""What makes the models of sweeps/ options, too: `-cd sweeps` of the command line."""


def option(group: str, name: str, *overrides: str) -> Any:
    """The object that `group=name` builds, under further overrides."""
    quicken()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[SWEEPS, f"{group}={name}", *overrides])
    return instantiate(cfg[group], _convert_="all")


def options(group: str, names: Iterable[str]) -> dict[str, Any]:
    """The objects that some options of a group build, from one composition, which takes a fifth of the time of one each."""
    quicken()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=["name=test", *(f"+{group}@each.{name}={name}" for name in names)])
    return {name: instantiate(cfg.each[name], _convert_="all") for name in names}


@cache
def model_named(name: str, *overrides: str) -> Any:
    """The model that `model=name` builds, with other settings as in `model.num_layers=2`; made once, since nobody can change it.

    The option is composed without a configuration around it, which takes a tenth of the time.
    """
    quicken()
    # Some options of models choose their data.
    cfg = _Once(create_config_search_path(str(CONF))).options([SWEEPS, "+data=synthetic", f"+model@own={name}"]).own
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        OmegaConf.update(cfg, override.get_key_element().removeprefix("model."), override.value())
    return instantiate(cfg, _convert_="all")


def network_named(name: str, **arguments: object) -> Network:
    """The network that `model=name` builds, with other arguments."""
    model = model_named(name)
    return replace(model, arguments={**model.arguments, **arguments})
