"""The command line: Hydra's configuration becomes an `Experiment` and a `Recorder`. No other module imports Hydra."""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gpp.app.stopping import Stopped, listen
from gpp.app.streams import steady_streams
from gpp.errors import GppError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
BASE = "base"
GROUPS = {
    "model": "Models",
    "strategy": "Strategies",
    "cluster": "Clusters",
    "engine": "Engines",
    "data": "Data",
    "cost": "Cost models",
    "optimizer": "Optimizers",
    "logger": "Loggers",
    "experiment": "Presets (+experiment=NAME)",
}
EXAMPLES = """\
Examples:
  python run.py                                                  plan and train the default model on this machine
  python run.py model=mmt_small strategy=sequential              pick parts
  python run.py -m strategy=graphpipe,sequential model=mmt_small,digits      every combination, one table
  python run.py model=mmt cluster=summit_8x4 mode=plan           plan the paper's model for 32 devices, and say why; needs none
  python run.py model=mmt cluster=summit_8x4 mode=compare 'strategies=[graphpipe,sequential,even]'      their plans side by side
  python run.py -cd sweeps -cn compare_local                     four models x all strategies, with a report
"""

COMPARED = ("graphpipe", "pipedream_flush", "piper", "sequential", "even", "pipedream", "pipedream_2bw", "spectrain", "pipeoptim")
"""Strategies that mode=compare plans with by default, as far as conf/ has them."""

Story = Callable[[Any, Any], None]


def main(story: Story) -> None:
    """Run `story(experiment, recorder)` for one configuration, or for each of a multirun; exits the process."""
    steady_streams()
    listen()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _stop(
            "run.py is the controller and starts the workers itself. Fix: python run.py "
            + " ".join(shlex.quote(word) for word in sys.argv[1:])
            + " (on several machines: torchrun ... -m gpp.runtime.worker RUN_DIR)"
        )
    for word in sys.argv[1:]:
        if re.search(r"\d{1000}", word):  # Hydra would have Python read it, which refuses
            field, _, value = word.partition("=")
            _stop(f"{field}={value[:20]}... ({len(value)} characters): is too long for a number. Fix: set {field}=1000")
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text())
        return
    # Modules, configurations and events live to the end: looking for garbage there takes a tenth of a short run.
    gc.set_threshold(200_000, 50, 100)
    # Hydra prints its own message for a bad configuration; with this it raises, and our message names the fix.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from gpp.app.multirun import Refused, Sweep, job_folder, sweep_id

    OmegaConf.register_new_resolver("sweep_id", sweep_id, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
    OmegaConf.register_new_resolver("or_compare", lambda mode, name: "compare" if mode == "compare" else name, replace=True)
    OmegaConf.register_new_resolver("per_device", samples_per_device, replace=True)
    codes: list[int] = []
    held_back = _hold_back(sys.argv)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def task(cfg: DictConfig) -> None:
        codes.append(_run(story, cfg, held_back))

    try:
        task()
    except (HydraException, OmegaConfBaseException) as error:
        _stop(_explain(error))
    except Refused as refused:
        _stop(str(refused) if isinstance(refused.error, GppError) else _explain(refused.error))
    except Stopped as stopped:
        if Sweep.running is not None:
            Sweep.running.end(stopped)
        print(f"error: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    sys.exit(Sweep.exit_code if Sweep.exit_code is not None else max(codes, default=0))


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _hold_back(argv: list[str]) -> list[str]:
    """Take `strategy.KEY=VALUE` out of the command line of one comparison.

    They are for the compared strategies that have the setting; Hydra would refuse settings that the default one lacks.
    """
    if "mode=compare" not in argv or {"-m", "--multirun"} & set(argv):
        return []
    words = [word for word in argv[1:] if re.match(r"\+{0,2}strategy[./]", word)]
    argv[:] = [word for word in argv if word not in words]
    return words


def _compared(cfg: Any, words: list[str]) -> list[Any]:
    """The configurations of the strategies to compare, composed together: ten times as fast as one by one.

    Args:
        words: overrides of `strategy`; each applies to the strategies that have the setting.

    Raises:
        InvalidConfig: a strategy is unknown, or no strategy has a setting.
    """
    from hydra import compose
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import DictConfig, OmegaConf

    from gpp.errors import InvalidConfig

    names, known = cfg.strategies, options("strategy")
    if names is None:
        names = [name for name in COMPARED if name in known]
    names = list(dict.fromkeys(str(name) for name in ([names] if isinstance(names, str) else names)))
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.3)
            fix = f"use {near[0]}" if near else f"use one of {', '.join(known)}"
            raise InvalidConfig("strategies", name, f"no such strategy; there are {', '.join(known)}", fix)
    # These groups must be present, because a strategy may override them; weights override the schedule of a run.
    groups = ["+cost=analytical", "+engine=simulate", "+strategy/schedule@strategy.schedule=1f1b"]
    groups += [f"+strategy@compared.{name}={name}" for name in names]
    parsed = OverridesParser.create().parse_overrides(words)
    for override in parsed:
        group = override.key_or_group
        if group == "strategy/planner":
            raise InvalidConfig(group, override.value(), "would make all compared strategies one", "name strategies=[...] instead")
        if group.startswith("strategy/"):
            groups += [f"{group}@compared.{name}.{group.partition('/')[2]}={override.value()}" for name in names]
    found = compose(overrides=groups).compared if names else {}
    for override in parsed:
        path = override.key_or_group.split(".")[1:]
        fitting = [name for name in names if path and _has(found[name], path)]
        for name in fitting:
            OmegaConf.update(found[name], ".".join(path), override.value())
        if path and not fitting:
            settings = sorted({key for name in names for key in _paths(found[name])})
            near = get_close_matches(".".join(path), settings, n=1, cutoff=0.3)
            rule = f"none of {', '.join(names)} has this setting"
            fix = f"use strategy.{near[0]}" if near else "see python run.py --cfg job"
            raise InvalidConfig(override.key_or_group, override.value(), rule, fix)
    assert isinstance(found, dict | DictConfig)
    return [found[name] for name in names]


def _has(node: Any, path: list[str]) -> bool:
    """Whether a configuration has the setting at `path`."""
    for key in path:
        if not hasattr(node, "keys") or key not in node:
            return False
        node = node[key]
    return True


def _paths(node: Any, prefix: str = "") -> list[str]:
    """The settings below a configuration, as dotted paths."""
    out = []
    for key in node:
        inner = node[key]
        out += _paths(inner, f"{prefix}{key}.") if hasattr(inner, "keys") else [f"{prefix}{key}"]
    return [path for path in out if not path.endswith("_target_")]


def _run(story: Story, cfg: Any, held_back: list[str]) -> int:
    """Run one job (instantiate, record, run); returns its exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import InstantiationException
    from hydra.types import RunMode
    from hydra.utils import instantiate
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException
    from rich.text import Text

    from gpp.app.multirun import RunFolder, digest_of, done, latest, refused_job
    from gpp.app.private import refuse_secrets
    from gpp.errors import GppError
    from gpp.report.run.console import make_console
    from gpp.runtime.run_dir import RunDir

    hydra_cfg, digest = HydraConfig.get(), digest_of(cfg)
    multirun = hydra_cfg.mode == RunMode.MULTIRUN
    run_dir = Path(hydra_cfg.runtime.output_dir) if multirun else RunFolder.path
    console = make_console()
    overrides = [*hydra_cfg.overrides.task, *held_back]
    if multirun and (status := done(run_dir, digest)) is not None:
        console.print(Text(f"skip {' '.join(overrides)}: {status} in {os.path.relpath(run_dir)}", style="dim"), soft_wrap=True)
        return 3 if status == "infeasible" else 0
    directory = RunDir(run_dir, command=shlex.join(["python", "run.py", *_config_options(), *overrides]))
    if multirun:
        console.rule(Text(f"job {hydra_cfg.job.num}: {' '.join(overrides)}"), align="left")
    choices: Any = hydra_cfg.runtime.choices  # a dict to the type checker, in truth a DictConfig
    try:
        with open_dict(cfg):
            _refuse_bases(choices)
            settings = [word for word in overrides if re.match(r"\+{0,2}strategy[./]", word)]
            cfg.strategies = _compared(cfg, settings) if cfg.mode == "compare" else []
        refuse_secrets(OmegaConf.to_container(cfg, resolve=True))  # pyright: ignore[reportArgumentType]
        experiment = instantiate(cfg, _convert_="all")
    except (InstantiationException, OmegaConfBaseException, GppError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, GppError) else error
        message = str(cause) if isinstance(cause, GppError) else _explain(error)
        print(f"error: {message}", file=sys.stderr)
        if multirun:
            refused_job(directory, digest, message, {**choices, "seed": cfg.get("seed", 0)})
        return 2
    from gpp.app.recording import Recorder

    recorder = Recorder(
        experiment=experiment,
        directory=directory,
        console=console,
        digest=digest,
        config=OmegaConf.to_container(cfg, resolve=True),  # pyright: ignore[reportArgumentType]  # a mapping, as cfg is
        command=directory.command,
        group=Path(hydra_cfg.sweep.dir).name if multirun else None,
        # The link is set at the first step, so that a run whose controller is killed is found under outputs/latest too.
        on_start=lambda: None if multirun else latest(run_dir),
    )
    with recorder:
        story(experiment, recorder)
    # A refused command has trained nothing: the corrected command may say resume=outputs/latest again.
    if not multirun and recorder.exit_code != 2:
        latest(run_dir)
    return recorder.exit_code


def _refuse_bases(choices: Any) -> None:
    """Refuse `GROUP=base`.

    Raises:
        InvalidConfig: always; the message names the group's options.
    """
    from gpp.errors import InvalidConfig

    for key, name in choices.items():
        if name == BASE:
            group = str(key).partition("@")[0]
            known = ", ".join(options(group))
            raise InvalidConfig(group, BASE, "holds what the options share and is none of them", f"use one of {known}")


def _config_options() -> list[str]:
    """`-cd DIR -cn NAME` of this command line, which a job's overrides do not repeat."""
    out: list[str] = []
    words = sys.argv[1:]
    for i, word in enumerate(words):
        if word in ("-cd", "--config-dir", "-cn", "--config-name") and i + 1 < len(words):
            out += [word, words[i + 1]]
    return [*out, "hydra.mode=RUN"] if out else out


def samples_per_device(samples: Any, *, _root_: Any) -> int:
    """`${per_device:{mmt:16,dlrm:32}}`: the mini-batch from the samples for each device, by the model's name."""
    name, cluster = _root_.model.name, _root_.cluster
    if name not in samples:
        raise ValueError(f"minibatch_size: no samples a device for {name}. Fix: add it, or set minibatch_size=...")
    return int(samples[name]) * int(cluster.get("num_devices") or cluster.num_nodes * cluster.devices_per_node)


def _explain(error: BaseException) -> str:
    """A composition error in one line: the word written, the existing ones, the nearest name."""
    text = str(error)
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, name = match.groups()
        known = options(group)
        near = get_close_matches(name, known, n=1, cutoff=0.3)
        return f"{group}={name}: no such option. Fix: {group}={near[0] if near else ' | '.join(known)} (all: {', '.join(known)})"
    if match := re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text):
        key = match.group(1)
        full = re.search(r"full_key: (\S+)", text)
        key = full.group(1) if full and full.group(1).endswith(key) else key
        known = keys()
        near = get_close_matches(key, known, n=1, cutoff=0.4) or get_close_matches(key.split(".")[-1], known, n=1, cutoff=0.4)
        return f"{key}: no such setting. Fix: {near[0] if near else 'see python run.py --cfg job for all settings'}"
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{match.group(1)}: has no default. Fix: give {match.group(1)}=..."
    return " ".join(text.split()).removesuffix(".") + ". Fix: see python run.py --help"


def options(group: str) -> list[str]:
    """Names of a group's options: its files but for `base`, which holds the settings that options share."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != BASE)


def keys() -> list[str]:
    """Root keys and groups, and the settings inside the default options, as dotted paths."""
    out = set(GROUPS)
    for path in CONF.rglob("*.yaml"):
        prefix = [] if path.parent == CONF else list(path.parent.relative_to(CONF).parts)
        nested: list[str] = []
        for line in path.read_text().splitlines():
            match = re.match(r"^( *)([a-z]\w*):", line)
            if match and prefix[:1] != ["experiment"]:
                nested = [*nested[: len(match.group(1)) // 2], match.group(2)]
                out.add(".".join([*prefix, *nested]))
    return sorted(out)


def help_text() -> str:
    """The text of `--help`: every option with the first line of its file."""
    lines = [
        "Graph pipeline parallelism: plan, simulate, train and compare models with branches.",
        "",
        "usage: python run.py [GROUP=OPTION ...] [KEY=VALUE ...]      -m: every combination of comma lists",
        "",
        EXAMPLES,
    ]
    for group, title in GROUPS.items():
        lines.append(f"{title} ({group}=...)" if group != "experiment" else title)
        for name in options(group):
            lines.append(f"  {name:<20} {_headline(CONF / group / f'{name}.yaml')}")
        lines.append("")
    lines.append("Settings: python run.py --cfg job      Hydra's own help: python run.py --hydra-help")
    return "\n".join(lines)


def _headline(path: Path) -> str:
    """The first comment line of an option's file that is not Hydra's own."""
    for line in path.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""
