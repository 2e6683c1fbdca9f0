"""The command line: Hydra's configuration becomes an `Experiment` and a `Recorder`. No other module imports Hydra."""

from __future__ import annotations

import gc
import os
import platform
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gpp.app import stopping
from gpp.app.command_line import flags_of_command, folders, hold_back, replacing
from gpp.app.new_project import write_project
from gpp.app.refusals import Refusal, check_words, ended
from gpp.app.several import SEVERAL
from gpp.app.stopping import Stopped, listen
from gpp.app.streams import steady_streams
from gpp.app.vocabulary import ALL_SETTINGS, BASE, CONF, Vocabulary, help_text, invocation, nearest, paths
from gpp.errors import GppError, InvalidConfig
from gpp.private import keep, masked

COMPARED = ("graphpipe", "pipedream_flush", "piper", "sequential", "even", "pipedream", "pipedream_2bw", "spectrain", "pipeoptim")
"""Strategies that mode=compare and mode=max_batch plan with by default, as far as conf/ has them."""

Story = Callable[[Any, Any], None]


def main(story: Story) -> None:
    """Run `story(experiment, recorder)` for one configuration, or for each of a multirun; exits the process."""
    # Modules, configurations and events live to the end: looking for garbage there takes a tenth of a short run.
    gc.set_threshold(200_000, 50, 100)
    steady_streams()
    try:
        check_words(sys.argv[1:])
        if "mode=explore" in sys.argv[1:]:
            rule = "is gone: a page that plans live has taken its place"
            raise InvalidConfig("mode", "explore", rule, "make a run with mode=plan, and start gpp ui on its directory")
        if "mode=new" in sys.argv[1:]:
            print(write_project(sys.argv[1:]))
            return
    except InvalidConfig as error:
        _stop(str(error))
    if {"-h", "--help"} & set(sys.argv[1:]):
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(help_text(Vocabulary(folders=folders()), width))
        return
    # Hydra prints its own message for a bad configuration; with this it raises, and our message names the fix.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra
    from omegaconf import DictConfig

    from gpp.app.composing import quicken
    from gpp.app.multirun import Refused, Sweep, metric_of

    quicken()
    codes: list[int] = []
    sys.argv[1:] = replacing(sys.argv[1:])
    held_back = hold_back(sys.argv)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def task(cfg: DictConfig) -> float | None:
        """Returns what a search asks for."""
        asked = cfg.get("optimized_metric")
        try:
            codes.append(_run(story, cfg, held_back))
        except Exception:
            codes.append(_defect())
        return None if asked is None else metric_of(str(asked))

    try:
        listen()
        task()
    except Exception as error:
        # The jobs keep their own errors: this one came from the words, or from a YAML file that they name.
        _stop(str(_composition_error(error, flags_of_command().words)))
    except Refused as refused:
        error = refused.error
        _stop(str(error if isinstance(error, GppError) else _composition_error(error, flags_of_command().words)))
    except Stopped as stopped:
        if Sweep.running is not None:
            Sweep.running.end(stopped)
        print(f"error: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    sys.exit(Sweep.exit_code if Sweep.exit_code is not None else max(codes, default=0))


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _defect() -> int:
    """Show the exception at hand, which is no fault of the user's; returns the exit code."""
    traceback.print_exc()
    words = f"Python {platform.python_version()}, {platform.platform()}"
    print(f"error: this is a defect of gpp, not of your settings. Please report the lines above, with {words}.", file=sys.stderr)
    return 1


def _composed(words: list[str]) -> Any:
    """The configuration of some overrides under this command's folders, with Hydra's own settings."""
    from hydra import compose, initialize_config_dir

    flags, known = flags_of_command(), folders()
    home = next((folder for folder in (*known[1:], CONF) if (folder / f"{flags.config_name}.yaml").is_file()), CONF)
    others = [word for word in words if not word.startswith("hydra.searchpath")]
    search = ",".join(f"'file://{folder}'" for folder in known if folder != home)
    with initialize_config_dir(str(home), version_base="1.3"):
        return compose(flags.config_name, overrides=[f"hydra.searchpath=[{search}]", *others], return_hydra_config=True)


def _composition_error(error: Exception, words: list[str]) -> GppError:
    """The error for a command line that makes no configuration: as it is without the words that are wrong."""

    def plain(chosen: list[str]) -> Any:
        try:
            return _plain(_composed(chosen))
        except Exception:
            return None

    @cache
    def whole() -> Any:
        return plain(words)

    @cache
    def right() -> Any:
        return plain([word for word in words if _chooses(word)]) or plain([]) or {}

    def culprit() -> str | None:
        return next((word for word in words if plain([other for other in words if other != word])), None)

    vocabulary = Vocabulary(folders=folders(), config=right)
    return Refusal(error=error, words=words, vocabulary=vocabulary, config=whole, culprit=culprit).explained()


def _chooses(word: str) -> bool:
    """Whether a word chooses an option that exists."""
    group, _, option = word.lstrip("+").partition("=")
    return option in Vocabulary(folders=folders()).options(group.partition("@")[0])


def _compared(cfg: Any, words: list[str]) -> list[Any]:
    """The configurations of the strategies to compare, composed together.

    Args:
        words: overrides of `strategy`; each applies to the strategies that have the setting.

    Raises:
        InvalidConfig: a strategy is unknown, or no strategy has a setting.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import DictConfig, OmegaConf

    from gpp.app.composing import OTHER_GROUPS, options

    names, known = cfg.strategies, Vocabulary(folders=folders()).options("strategy")
    if names is None:
        names = [name for name in COMPARED if name in known]
    if not OmegaConf.is_list(names) and not isinstance(names, str | list):
        names = _plain(names) if OmegaConf.is_config(names) else names
        raise InvalidConfig("strategies", names, "must be a list of strategies", "set strategies=[graphpipe,sequential]")
    names = list(dict.fromkeys(str(name) for name in ([names] if isinstance(names, str) else names)))
    for name in names:
        if name not in known:
            near = nearest(name, known)
            fix = f"use {f'{near}, or another' if near else 'one'} of {', '.join(known)}"
            raise InvalidConfig("strategies", name, "there is no such strategy", fix)
    groups = [*OTHER_GROUPS, *(f"+strategy@compared.{name}={name}" for name in names)]
    parsed = OverridesParser.create().parse_overrides(words)
    for override in parsed:
        group = override.key_or_group
        if group == "strategy/planner":
            raise InvalidConfig(group, override.value(), "would make all compared strategies one", "name strategies=[...] instead")
        if group.startswith("strategy/"):
            groups += [f"{group}@compared.{name}.{group.partition('/')[2]}={override.value()}" for name in names]
    found = options(groups).compared if names else {}
    absent = object()
    for override in parsed:
        path = override.key_or_group.partition(".")[2]
        fitting = [name for name in names if path and OmegaConf.select(found[name], path, default=absent) is not absent]
        for name in fitting:
            OmegaConf.update(found[name], path, override.value())
        if path and not fitting:
            near = nearest(path, {key for name in names for key in paths(OmegaConf.to_container(found[name]))})
            rule = f"none of {', '.join(names)} has this setting"
            fix = f"use strategy.{near}" if near else ALL_SETTINGS
            raise InvalidConfig(override.key_or_group, override.value(), rule, fix)
    assert isinstance(found, dict | DictConfig)
    return [found[name] for name in names]


def _run(story: Story, cfg: Any, held_back: list[str]) -> int:
    """Run one job; returns its exit code."""
    from hydra.core.hydra_config import HydraConfig

    from gpp.app.launch import ENV, refuse_start, run_together

    keep(_plain(cfg))  # before its words are printed; what they refer to follows
    launch = cfg.engine.get("launch") if hasattr(cfg.engine, "get") else None
    try:
        refuse_start(launch, sweep=False)
        if launch != ENV:
            return _tell(story, cfg, held_back)[0]
        hydra_cfg = HydraConfig.get()
        choices: Any = hydra_cfg.runtime.choices  # a dict to the type checker, in truth a DictConfig
        engine = _made(cfg, choices, _plain(hydra_cfg.overrides.task), part="engine")
    except GppError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return refused.exit_code
    return run_together(engine, [masked(word) for word in sys.argv[1:]], lambda before: _tell(story, cfg, held_back, before))


def _tell(story: Story, cfg: Any, held_back: list[str], before: Path | None = None) -> tuple[int, str | None]:
    """Instantiate, record, run; returns the exit code, and the reason where it is not 0.

    Args:
        before: the run directory of the attempt before this one, if a launcher starts it again; a checkpoint there counts.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from rich.text import Text

    from gpp.app.multirun import RunFolder, digest_of, done, latest, refused_job
    from gpp.report.run.console import make_console
    from gpp.runtime.checkpoint.resume import AUTO, continues
    from gpp.runtime.run_dir import RunDir

    hydra_cfg, digest = HydraConfig.get(), digest_of(cfg)
    multirun = hydra_cfg.mode == RunMode.MULTIRUN
    run_dir = Path(hydra_cfg.runtime.output_dir) if multirun else RunFolder.path
    again = before is not None and continues(before)
    run_dir = before if before is not None and again else run_dir
    console = make_console()
    overrides = [*_plain(hydra_cfg.overrides.task), *held_back]  # not resolved: a word may hold ${...}
    if multirun and (status := done(run_dir, digest)) is not None:
        console.print(Text(f"skip {' '.join(overrides)}: {status} in {os.path.relpath(run_dir)}", style="dim"), soft_wrap=True)
        return (3 if status == "infeasible" else 0), None
    directory = RunDir(run_dir, command=shlex.join([*invocation(), *_config_options(), *overrides]))
    if multirun:
        console.rule(Text(f"job {hydra_cfg.job.num}: {' '.join(overrides)}"), align="left")
    choices: Any = hydra_cfg.runtime.choices  # a dict to the type checker, in truth a DictConfig
    try:
        experiment = experiment_of(cfg, choices, overrides).going_on(run_dir, again=again)
    except GppError as refused:
        message = str(refused)
        print(f"error: {message}", file=sys.stderr)
        if multirun:
            refused_job(directory, digest, message, {**choices, "seed": _plain(cfg).get("seed", 0)})
        return 2, message
    with stopping.held_back():  # a signal that comes while they are imported ends the command here, before there is a run
        from gpp.app.launch import check_started
        from gpp.app.recording import Recorder

    recorder = Recorder(
        experiment=experiment,
        directory=directory,
        console=console,
        digest=digest,
        config=OmegaConf.to_container(cfg, resolve=True),  # pyright: ignore[reportArgumentType]  # a mapping, as cfg is
        group=Path(hydra_cfg.sweep.dir).name if multirun else None,
        # The link is set at the first step, so that a run whose controller is killed is found under outputs/latest too.
        on_start=lambda: None if multirun else latest(run_dir),
    )
    with recorder:
        try:
            if before is not None and not again and experiment.trains:
                recorder.warn(f"the attempt before this one left no checkpoint in {before}: begins anew (see checkpoint.every)")
            elif cfg.get("resume") == AUTO and RunFolder.timed and not multirun and not again:
                recorder.warn("resume=auto goes on in the run's own directory, which is a new one at each start: set hydra.run.dir")
            for logger in experiment.logger.values():
                logger.check()
            check_started(experiment)
            story(experiment, recorder)
        except SystemExit as end:
            raise ended(end.code) from end
    # A refused command has trained nothing: the corrected command may say resume=outputs/latest again.
    if not multirun and recorder.exit_code != 2:
        latest(run_dir)
    return recorder.exit_code, recorder.run.reason


def experiment_of(cfg: Any, choices: Any, overrides: list[str]) -> Any:
    """The experiment that a configuration describes.

    Raises:
        GppError: the configuration describes none.
    """
    from omegaconf import OmegaConf, open_dict

    def prepare() -> None:
        with open_dict(cfg):
            for key in (key for key, name in choices.items() if name == BASE):
                group = str(key).partition("@")[0]
                fix = f"use one of {', '.join(Vocabulary(folders=folders()).options(group))}"
                raise InvalidConfig(group, BASE, "holds what the options share and is none of them", fix)
            if cfg.strategies and cfg.mode not in SEVERAL:
                rule = f"is for {' and '.join(f'mode={mode}' for mode in SEVERAL)}; mode={cfg.mode} plans with one"
                raise InvalidConfig("strategies", _plain(cfg.strategies), rule, "set mode=compare, or strategy=graphpipe")
            settings = [word for word in overrides if re.match(r"\+{0,2}strategy[./]", word)]
            cfg.strategies = _compared(cfg, settings) if cfg.mode in SEVERAL else []
        keep(OmegaConf.to_container(cfg, resolve=True))

    return _made(cfg, choices, overrides, prepare=prepare)


def _made(
    cfg: Any, choices: Any, overrides: list[str], *, part: str | None = None, prepare: Callable[[], None] = lambda: None
) -> Any:
    """The object that a configuration describes, or one section of it.

    Args:
        prepare: what comes before, whose errors are explained likewise.

    Raises:
        GppError: it describes nothing.
    """
    from hydra.utils import instantiate

    try:
        prepare()
        return instantiate(cfg[part] if part else cfg, _convert_="all")
    except SystemExit as end:
        raise ended(end.code, _plain(cfg)) from end
    except Exception as error:
        vocabulary = Vocabulary(folders=folders(), config=lambda: {**_plain(cfg), "hydra": {"runtime": {"choices": dict(choices)}}})
        raise Refusal(error=error, words=overrides, vocabulary=vocabulary, config=lambda: _plain(cfg)).explained() from error


def _plain(cfg: Any) -> Any:
    """A configuration as plain data, its references as they are written."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cfg, resolve=False)


def _config_options() -> list[str]:
    """`-cd DIR -cn NAME` of this command line, which a job's overrides do not repeat."""
    flags = flags_of_command()
    out = ["-cd", flags.config_dir] if flags.config_dir else []
    out += ["-cn", flags.config_name] if flags.config_name != "config" else []
    return [*out, "hydra.mode=RUN"] if out else out
