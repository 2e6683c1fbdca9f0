"""Hydra's compositions, quicker: what is read and composed stays the same."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import hydra._internal.hydra
import omegaconf._utils
import pytest
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import basic_sweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import OmegaConf

from gpp.app import composing
from gpp.app.multirun import Sweep
from gpp.app.vocabulary import CONF, ROOT
from tests.support.long import thinned


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    # Another test of this process may have made Hydra quicker already.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf._utils, "get_yaml_loader", composing._python_loader)
        patch.setattr(hydra._internal.hydra, "ConfigLoaderImpl", ConfigLoaderImpl)
        patch.setattr(defaults_list, "_create_interpolation_map", composing._all_choices)
        GlobalHydra.instance().clear()
        yield
        GlobalHydra.instance().clear()


def test_both_parsers_read_the_same() -> None:
    files = [path for folder in (CONF, ROOT / "sweeps") for path in folder.rglob("*.yaml")]
    assert len(files) > 200 and yaml.__with_libyaml__
    for path in files:
        text = path.read_text()
        found, expected = composing._parsed(text), yaml.load(text, Loader=composing._in_python())
        assert repr(found) == repr(expected), path


@pytest.mark.parametrize("text", ["a: 1\nb: [1, 2\n", "a: 1\na: 2\n", "a: 1\n\tb: 2\n", "a: \x07\n"])
def test_what_is_wrong_is_said_as_before(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)

    def said() -> str:
        with pytest.raises(yaml.YAMLError) as caught:
            OmegaConf.load(path)
        return str(caught.value)

    before = said()
    composing.quicken()
    assert said() == before and "wrong.yaml" in before
    stream = io.StringIO("a: 1e3\nb: 2020-01-01\nc: 0o7\nd: ~\n")  # OmegaConf's own rules for scalars
    assert OmegaConf.load(stream) == {"a": 1000.0, "b": "2020-01-01", "c": "0o7", "d": None}


def composed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """What Hydra runs with for some words, and how many times it has composed for that."""
    count, plain = [0], ConfigLoaderImpl._load_configuration_impl

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return plain(*args, **kwargs)

    GlobalHydra.instance().clear()
    with monkeypatch.context() as patched:
        patched.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
        patched.setattr("sys.argv", ["run.py", *words])
        main = hydra._internal.hydra.Hydra.create_main_hydra2("run", create_config_search_path(f"file://{CONF}"))
        words = list(words)
        mode = main.get_mode("config", words)
        if mode is None:
            words.append("hydra.mode=RUN")
        cfg = main.compose_config("config", words, RunMode.RUN if mode != RunMode.MULTIRUN else mode)
    return OmegaConf.to_container(cfg, resolve=False), count[0]


COMPOSED = thinned([["model=mmt_small", "steps=3"], ["hydra.mode=RUN"], ["hydra.mode=MULTIRUN", "steps=1,2"]])


@pytest.mark.parametrize("words", COMPOSED)
def test_a_single_run_is_composed_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, twice = composed(words, monkeypatch)
    composing.quicken()
    after, count = composed(words, monkeypatch)
    single = "hydra.mode=MULTIRUN" not in words
    assert after == before and twice == 2
    assert count == 1 if single else count >= 2


def test_hydra_does_not_compose_the_jobs_that_a_sweep_has_composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", Sweeper.validate_batch_is_legal)
    composing.quicken()
    main = hydra._internal.hydra.Hydra.create_main_hydra2("run", create_config_search_path(f"file://{CONF}"))
    cfg = main.compose_config("config", ["steps=1,2", f"hydra.sweep.dir={tmp_path}"], RunMode.MULTIRUN)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(Sweep, "running", None)
    (sweep := Sweep()).on_multirun_start(cfg)
    with sweep.directory:
        assert [job.overrides for job in sweep.jobs] == [("steps=1",), ("steps=2",)]
        # Hydra's search for plugins makes their classes anew; this one has nothing with which to compose a job.
        importlib.reload(basic_sweeper).BasicSweeper(max_batch_size=None).validate_batch_is_legal([["steps=1"], ["steps=2"]])


def test_a_run_that_cannot_be_composed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            composed(["model=mmt_smal"], monkeypatch)
        errors.append((type(caught.value), str(caught.value)))
        composing.quicken()
    assert errors[0] == errors[1]


@pytest.mark.parametrize("named", ["/strategy/schedule@own: ${strategy}", "/strategy/${strategy}/one"])
def test_interpolated_defaults_are_chosen_as_before(named: str, tmp_path: Path) -> None:
    for folder in ("strategy/schedule", "strategy/gpipe"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "strategy" / "gpipe.yaml").write_text("a: 1\n")
    (tmp_path / "strategy" / "gpipe" / "one.yaml").write_text("chosen: 1\n")
    (tmp_path / "strategy" / "schedule" / "gpipe.yaml").write_text("chosen: 2\n")
    (tmp_path / "config.yaml").write_text(f"defaults:\n- strategy: gpipe\n- {named}\n- _self_\n")
    found = []
    for _ in range(2):
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            found.append(OmegaConf.to_container(hydra.compose("config")))
        composing.quicken()
    assert found[0] == found[1] and "chosen" in str(found[0])


def test_options_alone_are_what_they_are_in_a_configuration() -> None:
    composing.quicken()
    hydra._internal.hydra.Hydra.create_main_hydra2("run", create_config_search_path(f"file://{CONF}"))
    choices = ["+cost=analytical", "+engine=simulate", "+strategy/schedule@strategy.schedule=1f1b"]
    choices += [f"+strategy@compared.{name}={name}" for name in ("graphpipe", "piper")]
    whole = hydra.compose(overrides=choices).compared
    assert composing.options(choices).compared == whole and set(whole) == {"graphpipe", "piper"}
