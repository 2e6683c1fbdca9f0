"""Options of conf/ as objects."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONF = Path(__file__).resolve().parents[2] / "conf"


def option(group: str, name: str, *overrides: str) -> Any:
    """The object that `group=name` builds, under further overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"{group}={name}", *overrides])
    return instantiate(cfg[group], _convert_="all")


@cache
def model_named(name: str, *overrides: str) -> Any:
    """The model that `model=name` builds; composed once, since nobody can change it."""
    return option("model", name, *overrides)
