"""Hydra's composition in a third of its time, with the same result.

Hydra reads YAML with a parser written in Python, though libyaml is there, composes the configuration of a single run twice
(once to learn whether it is a sweep, once more to run it), composes its own settings with whatever is composed, and lists all
choices so far for the interpolations of each list of defaults, though hardly any list has one.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import hydra._internal.defaults_list
import hydra._internal.hydra
import omegaconf._utils
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from gpp.app.refusals import causes
from gpp.app.vocabulary import CONF, Vocabulary, nearest, paths
from gpp.errors import GppError, InvalidConfig

if TYPE_CHECKING:
    from hydra._internal.defaults_list import Overrides
    from hydra.core.default_element import InputDefault

    from gpp.strategy import Strategy

OTHER_GROUPS = ("+cost=analytical", "+engine=simulate", "+strategy/schedule@strategy.schedule=1f1b")
"""Groups that must be present, because a strategy may override them; weights override the schedule of a run."""

_python_loader = omegaconf._utils.get_yaml_loader
_all_choices = hydra._internal.defaults_list._create_interpolation_map


def quicken() -> None:
    """Let Hydra, in this process, read YAML with libyaml, compose a single run once, and list choices where they are read."""
    if yaml.__with_libyaml__:
        omegaconf._utils.get_yaml_loader = lambda: _Loader
    hydra._internal.hydra.ConfigLoaderImpl = _Once  # pyright: ignore[reportPrivateImportUsage]
    hydra._internal.defaults_list._create_interpolation_map = _choices


def options(choices: list[str]) -> DictConfig:
    """The options of groups alone, without a configuration around them and without Hydra's own.

    Args:
        choices: words as `+GROUP@PLACE=OPTION`.
    """
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, _Once)
    return loader.options(choices)


def strategy_of(words: str) -> Strategy:
    """The strategy that words of the command line describe, for programs that are not run by Hydra.

    Args:
        words: an option of conf/strategy, and what differs: parts by their options (`schedule=gpipe`, `planner=even`), settings by
            their names (`planner.patience=20`).

    Raises:
        InvalidConfig: there is no such strategy, part or setting, or a value is wrong; or it is for an engine of others.
    """
    name, *more = words.split() or [""]
    vocabulary = Vocabulary()
    if name not in (known := vocabulary.options("strategy")):
        near = nearest(name, known)
        fix = f"say strategy={near!r}" if near else f"say one of {', '.join(known)}"
        raise InvalidConfig("strategy", name, "is no strategy", fix)
    if wrong := next((word for word in more if "=" not in word.strip("=")), None):
        rule = f"{wrong!r} gives no setting a value"
        raise InvalidConfig("strategy", f"{name} {wrong}", rule, "write SETTING=VALUE, as planner.patience=20")
    choices = [*OTHER_GROUPS, f"+strategy@own={name}"]
    settings = list[tuple[str, Any]]()
    for override in OverridesParser.create().parse_overrides(more):
        key, value = override.key_or_group.removeprefix("strategy.").removeprefix("strategy/"), override.value()
        if (CONF / "strategy" / key).is_dir():
            if value not in (parts := vocabulary.options(f"strategy/{key}")):
                near = nearest(str(value), parts)
                fix = f"write {key}={near}" if near else f"write one of {', '.join(parts)}"
                raise InvalidConfig(f"strategy.{key}", value, f"is none of {', '.join(parts)}", fix)
            choices.append(f"strategy/{key}@own.{key}={value}")
        else:
            settings.append((key, value))
    found = _Once(create_config_search_path(str(CONF))).options(choices)
    if not str(found.engine._target_).endswith(".Simulate"):
        rule = f"is planned for engine={found.engine.name}, and your own loop is run by this project's workers"
        raise InvalidConfig("strategy", name, rule, f"say strategy='sequential', or run python run.py strategy={name}")
    known = paths(OmegaConf.to_container(found.own))
    for key, value in settings:
        if key not in known:
            near = nearest(key, known)
            fix = f"write {near}=..." if near else "leave it out"
            raise InvalidConfig(f"strategy.{key}", value, f"is no setting of strategy={name}", fix)
        OmegaConf.update(found.own, key, value)
    try:
        return instantiate(found.own, _convert_="all")
    except Exception as error:
        raise next((cause for cause in causes(error) if isinstance(cause, GppError)), error) from None


def _choices(overrides: Overrides, defaults: list[InputDefault], self_added: bool) -> DictConfig:
    """What interpolations of a list of defaults read: nothing, where it has none. Hydra's list takes a fifth of a composition."""
    names = " ".join(str(getattr(default, name, "")) for default in defaults for name in ("path", "value"))
    return _all_choices(overrides, defaults, self_added) if "${" in names else DictConfig({})


class _Loader:
    """A loader for `yaml.load` that reads what OmegaConf's own one reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def get_single_data(self) -> Any:
        stream, is_text = self._stream, isinstance(self._stream, str | bytes)
        begin = 0 if is_text else stream.tell()
        try:
            return _parsed(stream if is_text else stream.read())
        except yaml.YAMLError:
            if not is_text:
                stream.seek(begin)
            # The Python parser says what is wrong in words of its own, and names the file.
            return yaml.load(stream, Loader=_in_python())

    def dispose(self) -> None:
        """There is nothing to give back."""


@cache
def _in_python() -> Any:
    return _python_loader()


@cache
def _in_c() -> Any:
    """OmegaConf's rules for scalars and mappings, on the parser of libyaml."""
    from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue]

    class ParserInC(CParser, _in_python()):
        def __init__(self, stream: Any) -> None:
            CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return ParserInC


@cache
def _parsed(text: str | bytes) -> Any:
    """The mapping that a text describes, which OmegaConf copies. The key is the content, so a changed file is read anew."""
    return yaml.load(text, Loader=_in_c())


class _Once(ConfigLoaderImpl):
    """Composes a single run when it is asked for the mode, and keeps the configuration until it is asked for that."""

    _kept: tuple[str | None, list[str], DictConfig] | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        kept, self._kept = self._kept, None
        if not validate_sweep_overrides and not {"-m", "--multirun"} & set(sys.argv):
            # Hydra asks for the mode. What is no single run is composed as Hydra would, which raises its errors.
            try:
                cfg = super().load_configuration(config_name, overrides, RunMode.RUN, from_shell)
            except Exception:
                return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
            self._kept = (config_name, list(overrides), cfg)
            return cfg
        if kept is not None and run_mode == RunMode.RUN and kept[0] == config_name:
            cfg, added = kept[2], overrides[len(kept[1]) :]
            if overrides == [*kept[1], *added] and added in ([], [RUN]):
                if added:  # Hydra's own word, for a command that does not say its mode
                    cfg.hydra.mode = RunMode.RUN
                    cfg.hydra.overrides.hydra.append(RUN)
                return cfg
        return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def options(self, choices: list[str]) -> DictConfig:
        parsed, repository = self._parse_overrides_and_create_caching_repo(None, choices)
        settings = {"config_name": None, "prepend_hydra": False, "skip_missing": False}
        found = create_defaults_list(repo=repository, overrides_list=parsed, **settings)
        return self._compose_config_from_defaults_list(found.defaults, repository)


RUN = "hydra.mode=RUN"
