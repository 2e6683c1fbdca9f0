"""The objects that a run's config.yaml describes, made again: settings alone, and no code that the file chooses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from gpp.app.experiment import Experiment
from gpp.cluster import Cluster
from gpp.errors import InvalidConfig
from gpp.export.base import AbstractExporter
from gpp.formats.pipeedge.yaml import read_yaml
from gpp.models.dotted import resolve
from gpp.runtime.mode import mode_named
from gpp.serialization import read_json

CONFIG = "config.yaml"
OURS = ("gpp", "baselines")
FACTORIES = frozenset(
    {
        "gpp.cluster.flat",
        "gpp.cluster.local",
        "gpp.cluster.mixed",
        "gpp.cluster.uniform",
        "gpp.formats.pipeedge.graph.cluster",
        "gpp.models.network.flat",
        "gpp.models.pipeedge.from_files",
        "gpp.models.specs.by_loss",
        "gpp.runtime.cards.local.local_gpus",
    }
)
"""Functions that a configuration may name: those of `conf/`. Any other name must be a dataclass."""

AGAIN = "{} in that file, or run the command of run.json again"
"""What to do with a file of another version."""

LEFT_OUT = ("logger", "plan", "resume", "confirm", "optimized_metric")
"""Settings that say nothing of the planning problem."""


def restored(described: Any, trusted: Collection[str] = (), at: str = "") -> Any:
    """The object of a plain value, in which a mapping with `_target_` stands for a settings object.

    Args:
        trusted: packages beside gpp whose classes may be made.
        at: the dotted path of the value, for messages.

    Raises:
        InvalidConfig: a `_target_` is no settings object, or is code of another package; or a value is wrong.
    """
    if isinstance(described, list):
        return [restored(each, trusted, at) for each in described]
    if not isinstance(described, dict):
        return described
    values = {
        name: restored(each, trusted, f"{at}.{name}" if at else name) for name, each in described.items() if name != "_target_"
    }
    if (target := described.get("_target_")) is None:
        return values
    field, package = f"{CONFIG}: _target_", str(target).partition(".")[0]
    if package not in (*OURS, *trusted):
        rule = "is code of another package, and a page runs none that a file names"
        raise InvalidConfig(field, target, rule, f"if the folder is your own, start with --trust {package}")
    made = resolve(str(target), field=field)
    if not (dataclasses.is_dataclass(made) if isinstance(made, type) else target in FACTORIES):
        raise InvalidConfig(field, target, "must name a class of settings", "use a folder that a run has written")
    wanted = inspect.signature(made).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = set[str]() if any(each.kind in variable for each in wanted.values()) else values.keys() - wanted.keys()
    for name in sorted(unknown):
        rule = f"was written by another version: this one's {target} has no such setting"
        raise InvalidConfig(f"{CONFIG}: {at}.{name}", values[name], rule, AGAIN.format(f"delete {name}"))
    for name, each in wanted.items():
        if name not in values and each.default is each.empty and each.kind not in variable:
            rule = f"was written by another version: this one's {target} needs it"
            raise InvalidConfig(f"{CONFIG}: {at}.{name}", None, rule, AGAIN.format(f"set {name}"))
    return made(**values)


class DescribedRun(NamedTuple):
    """What a run's config.yaml describes.

    Args:
        experiment: as one that plans.
        exporter: the engine of others that the run planned or wrote for; None where it had none.
        ruled: whether the run could plan under that engine's rules: no plan was given, and its mode allows it.
    """

    experiment: Experiment
    exporter: AbstractExporter | None
    ruled: bool


def settings_of(run_dir: Path, trusted: Collection[str] = ()) -> DescribedRun:
    """The settings of a run directory.

    Args:
        trusted: as `restored` has it.

    Raises:
        InvalidConfig: its config.yaml is missing, or describes none.
    """
    config: dict[str, Any] = read_yaml(dict, run_dir / CONFIG, setting="RUN_DIR")
    known = {each.name for each in dataclasses.fields(Experiment)} - set(LEFT_OUT)
    described = {name: value for name, value in config.items() if name in known}
    if (run_dir / "job" / "cluster.json").exists():
        described["cluster"] = None
    values = restored(described, trusted)
    # The devices of the run: a local cluster would be made of the memory that this machine has now.
    values["cluster"] = values["cluster"] or read_json(Cluster, run_dir / "job" / "cluster.json")
    exporter, mode = values.pop("export", None), values.get("mode", "train")
    own = mode_named(exporter.mode if exporter else mode)
    ruled = exporter is not None and config.get("plan") is None and (mode == "plan" or exporter.nearest)
    return DescribedRun(Experiment(**values | {"mode": own.name if own else "plan"}), exporter, ruled)
