"""Every option builds, every preset and sweep composes, and one word stands in four places."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from gpp.app.composing import quicken
from gpp.app.multirun import RunFolder, Sweep, metric_of
from gpp.app.vocabulary import GROUPS, Vocabulary, help_text
from gpp.errors import InvalidConfig
from gpp.graph.captured import load_cached
from tests.support.conf import CONF, model_named, option, options
from tests.support.long import thinned

ROOT = CONF.parent


@pytest.mark.parametrize("group", ["cluster", "cost", "strategy", "engine", "optimizer", "logger"])
def test_every_option_builds(group: str) -> None:
    # But for the cards of this machine, of which there may be none (tests/runtime/cards/test_local.py), and hosts of files
    # (tests/mechanisms/serving/test_edgepipe.py).
    names = {path.stem for path in (CONF / group).glob("*.yaml")} - {"base", "local_gpus", "pipeedge"}
    for name, built in options(group, sorted(names)).items():
        assert built is not None, name


@pytest.mark.parametrize(
    "words", [("mlp", "model.loss=cross_entropy", "model.width=8"), ("unet_small", "model.attention=[false,false]")]
)
def test_a_model_alone_is_the_one_of_a_configuration(words: tuple[str, ...]) -> None:
    assert model_named(*words) == option("model", *words)


PRESETS = [path for group in ("experiment", "debug", "hparams_search") for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_builds(path: Path) -> None:
    # The search is a plug-in's, which need not be here; its settings are those that the preset may set.
    search = {"_target_": "optuna", "direction": "", "n_trials": 1, "n_jobs": 1, "sampler": {"seed": None}, "params": {}}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=search, provider="test")
    quicken()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = [f"{path.parent.name}={path.stem}", "name=test", "strategies=[]"]
        cfg = compose("config", overrides=words, return_hydra_config=path.parent.name == "hparams_search")
    if "hydra" in cfg:
        OmegaConf.to_container(cfg.hydra.sweeper, resolve=True, throw_on_missing=True)
    else:
        assert instantiate(cfg, _convert_="all").name == "test"  # with its other choices as they are unless the user makes them


@pytest.mark.parametrize("path", thinned(sorted((ROOT / "sweeps").glob("*.yaml")), 9), ids=lambda p: p.stem)
def test_every_sweep_composes_and_names_real_options(path: Path) -> None:
    quicken()
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        cfg = compose(path.stem, overrides=[f"hydra.searchpath=[file://{CONF}]", "name=test"], return_hydra_config=True)
    assert str(cfg.hydra.mode) == "RunMode.MULTIRUN"
    for group, words in cfg.hydra.sweeper.params.items():
        if group in GROUPS:
            folders = (CONF / group, ROOT / "sweeps" / group)
            assert all(any((folder / f"{word}.yaml").exists() for folder in folders) for word in words.split(",")), group
    Sweep(cfg.hydra.callbacks.sweep.get("figures", ()))  # raises where a figure is declared wrongly


def test_scripts_that_compose_know_the_functions_that_yaml_files_call() -> None:
    """Alone in a process, too: in this one every test has registered them."""
    scripts = [path for path in (ROOT / "sweeps").rglob("*.py") if "initialize_config_dir(" in path.read_text()]
    assert scripts
    for path in scripts:
        assert "import gpp.app.multirun" in path.read_text(), path


def test_a_sweeps_mini_batch_grows_with_the_devices() -> None:
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        words = [f"hydra.searchpath=[file://{CONF}]", "name=test", "cluster=summit_8x4", "strategy=graphpipe"]
        batches = [compose("figure6", overrides=[*words, f"model={model}"]).minibatch_size for model in ("mmt", "dlrm")]
        unknown = compose("figure6", overrides=[*words, "model=digits"])
    assert batches == [512, 2048]
    with pytest.raises(InterpolationResolutionError, match="digits"):
        _ = unknown.minibatch_size


def test_a_wheel_names_no_model_of_a_checkout() -> None:
    """It has gpp/ and conf/, and no sweeps/."""
    apart = {path.stem for path in (ROOT / "sweeps" / "model").glob("*.yaml")} - {path.stem for path in (CONF / "model").glob("*")}
    named = re.compile(rf"\bmodel[=:] ?({'|'.join(sorted(apart))})\b|sweeps\.networks")
    files = [*(ROOT / "gpp").rglob("*.py"), *(ROOT / "gpp").rglob("*.txt"), *CONF.rglob("*.yaml")]
    assert len(apart) > 20 and not [(path, found.group()) for path in files for found in named.finditer(path.read_text())]


@pytest.mark.parametrize("group", ["strategy/planner", "strategy/schedule", "strategy/weights"])
def test_one_word_four_places(group: str) -> None:
    package = {"strategy/planner": "planners", "strategy/schedule": "schedules", "strategy/weights": "weights"}[group]
    for path in (CONF / group).glob("*.yaml"):
        if path.stem == "base":
            continue
        target = OmegaConf.load(path)._target_
        module, _, cls = target.rpartition(".")
        # A planner whose plans need a mechanism lies beside it.
        assert module.startswith((f"gpp.{package}.", "gpp.mechanisms."))
        assert module.rpartition(".")[2] == {"1f1b": "one_f_one_b"}.get(path.stem, path.stem)
        assert hasattr(importlib.import_module(module), cls)


def test_help_has_a_line_for_every_option() -> None:
    vocabulary = Vocabulary()
    text = help_text(vocabulary)
    assert set(vocabulary.groups) == set(GROUPS)
    for group, title in GROUPS.items():
        lines = text.split(f"\n{title} ({group}=...)\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in lines] == vocabulary.options(group)
        for line in lines:
            assert len(line.split()) > 3, f"{group}/{line.split()[0]} has no comment on top"


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    wide, narrow = (help_text(Vocabulary(), width) for width in (None, 80))
    assert wide.split() == narrow.split()
    assert max(len(line) for line in narrow.splitlines() if not line.startswith("  python")) <= 80


def test_bases_are_shared_and_no_options() -> None:
    bases = sorted(CONF.rglob("base.yaml"))
    assert bases and not re.search(r"^  base ", help_text(Vocabulary()), re.M)
    for path in bases:
        group = str(path.parent.relative_to(CONF))
        assert "base" not in Vocabulary().options(group)
        users = [
            other for other in path.parent.glob("*.yaml") if re.search(r"^(defaults: \[base\]|  - base$)", other.read_text(), re.M)
        ]
        assert len(users) > 1, f"{path} is the base of {len(users)} options"


def test_a_search_is_told_the_number_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        HydraConfig.instance().set_config(compose("config", overrides=["hydra.mode=RUN"], return_hydra_config=True))
    monkeypatch.setattr(RunFolder, "path", tmp_path, raising=False)
    try:
        assert metric_of("predicted.iteration_s") == math.inf  # no run, so no file
        (tmp_path / "result.json").write_text('{"status": "ok", "predicted": {"iteration_s": 0.25}, "measured": null}')
        assert metric_of("predicted.iteration_s") == 0.25
        with pytest.raises(InvalidConfig, match=r"optimized_metric=measured\.iteration_s"):
            metric_of("measured.iteration_s")
        (tmp_path / "result.json").write_text('{"status": "infeasible", "predicted": null}')
        assert metric_of("predicted.iteration_s") == math.inf
    finally:
        HydraConfig.instance().cfg = None


def test_the_cache_needs_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "GPP_CACHE"):
        monkeypatch.delenv(name, raising=False)
    config = OmegaConf.load(CONF / "config.yaml")
    assert config.cache_dir == "~/.cache/gpp"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("gpp.graph.captured.unseal", lambda kind, path: path)
    assert load_cached("key", "~") == tmp_path / "key.json"
    monkeypatch.setenv("GPP_CACHE", "/elsewhere")
    assert config.cache_dir == "/elsewhere"
