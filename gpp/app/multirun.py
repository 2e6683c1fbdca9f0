"""The folders of the command line: Hydra makes none before a run has been checked, and a sweep knows its jobs.

A job is its configuration. Its folder is named by a hash of it, its result.json repeats the hash, and a job whose result
is there does not run again, whatever words asked for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from gpp.app.launch import refuse_start
from gpp.app.several import SEVERAL
from gpp.app.stopping import Stopped, held_back
from gpp.app.vocabulary import CONF, at, invocation
from gpp.errors import InvalidConfig, InvalidFile
from gpp.files import link
from gpp.private import keep
from gpp.runtime.controller.place import world_of
from gpp.runtime.run_dir import RunDir
from gpp.serialization import read_json

if TYPE_CHECKING:
    from gpp.report.sweep.figure import SweepFigure
    from gpp.report.sweep.jobs import AskedJob, SweepJob

SPARED = 20
"""A job that ends makes a sweep's table again if as many times as long has passed as the last one took."""

LABELS = ("name", "logger", "cache_dir", "optimized_metric", "hydra")
"""Settings that change nothing in a result."""


def digest_of(config: Any) -> str:
    """Hash of all that decides a job's result: its resolved settings, and the files that they name."""
    keys = [key for key in config if key not in LABELS]
    chosen = OmegaConf.masked_copy(config, keys)
    try:
        settings: Any = OmegaConf.to_container(chosen, resolve=True)
    except OmegaConfBaseException:
        settings = OmegaConf.to_container(chosen)  # the job will be refused by the same error
    # Data sets are too large to be read for a hash.
    named = _paths({key: value for key, value in settings.items() if key != "data"})
    files = [settings.get("plan"), *sorted(path for path in named if isinstance(path, str))]
    if config.get("mode") in SEVERAL:
        # The strategies are composed when the job runs.
        files += [path for folder in _folders() for path in sorted((folder / "strategy").rglob("*.yaml"))]
    said = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for file in files:
        # A file that a setting names is part of it.
        said.update(Path(file).read_bytes() if isinstance(file, str | Path) and os.path.isfile(file) else b"")
    return said.hexdigest()[:16]


def _paths(node: Any) -> list[Any]:
    """The values of all settings called `path`, wherever they stand."""
    if isinstance(node, list):
        return [path for inner in node for path in _paths(inner)]
    if not isinstance(node, dict):
        return []
    return [path for key, inner in node.items() for path in ([inner] if key == "path" else _paths(inner))]


def _folders() -> list[Path]:
    """The folders with groups of options: ours first, then those of the command line."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    own = [Path(source.path) for source in sources if source.schema == "file"]
    return list(dict.fromkeys([CONF, *own]))


def done(folder: Path, digest: str) -> str | None:
    """The status of a job that need not run again: its result is there."""
    from gpp.report.sweep.jobs import ResultFile

    try:
        result = read_json(ResultFile, folder / "result.json")
    except InvalidFile:
        return None
    return result["status"] if result.get("configuration") == digest and result["status"] != "failed" else None


def sweep_id(*, _root_: Any) -> str:
    """A name for a sweep that the same words give again, in whatever order."""
    name = _root_.hydra.job.config_name
    name = "sweep" if name in (None, "config") else str(name).removesuffix(".yaml")
    words = sorted(word for word in sys.argv[1:] if "=" in word and not word.startswith(("hydra.", "-")))
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
    return f"{name}-{digest}" if words else name


class RunFolder(Callback):
    """The folder of a single run, kept from Hydra, which would make it at once; `timed` if its name is that of the instant."""

    path: ClassVar[Path]
    timed: ClassVar[bool] = False

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)
        try:
            folder = os.path.abspath(config.hydra.run.dir)
        except OmegaConfBaseException:
            return  # Hydra reads it next, and raises the error for the user
        written: Any = OmegaConf.to_container(config.hydra.run)
        RunFolder.timed = "${now:" in str(written["dir"])
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.run.dir = "."
        RunFolder.path = Path(folder)


class Sweep(Callback):
    """A multirun: all its jobs are composed before a file is written, and end in a table, even if a signal stops them.

    Args:
        figures: the sweep's figures; the keys of each are the fields of `gpp.report.sweep.figure.SweepFigure`.
    """

    running: ClassVar[Sweep | None] = None
    exit_code: ClassVar[int | None] = None
    """Of the sweep that has ended; None where there was none."""

    def __init__(self, figures: Any = ()) -> None:
        declared: Any = OmegaConf.to_container(figures, resolve=True) if OmegaConf.is_config(figures) else figures
        self.figures: list[SweepFigure] = []
        if declared:  # a single run has none
            from gpp.report.sweep.figure import SweepFigure

            self.figures += [SweepFigure.of(figure) for figure in declared]
        self.jobs: list[AskedJob] = []
        self.known = True
        """Whether all jobs are known before the first runs, as those of a search are not."""
        self.loggers: dict[str, Any] = {}
        self._due_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # For a launcher that runs jobs in other processes: they are to know the command line that asked for them.
        return {"argv": sys.argv, "figures": self.figures, "jobs": [], "known": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sys.argv = state.pop("argv")
        self.__dict__.update(state)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Compose every job, and keep other sweeps out of the directory.

        Raises:
            Refused: one cannot be composed, a logger's package is missing, or another sweep is under way there.
        """
        HydraConfig.instance().set_config(config)
        self.known = config.hydra.sweeper._target_.endswith(f".{BasicSweeper.__name__}")
        try:
            self.jobs = _jobs(config) if self.known else []
            self.loggers = instantiate(config.get("logger") or {}, _convert_="all")
            for logger in self.loggers.values():
                logger.check()
            self.directory = RunDir(Path(os.path.abspath(config.hydra.sweep.dir)), field="hydra.sweep.dir")
            self.directory.claim()
        except Exception as error:
            raise Refused(error) from error
        self.directory.begun = True  # it has no files of a run
        Sweep.running = self
        if self.known:
            # Hydra would compose every job once more before it composes it to run it. It makes the classes of its plugins anew
            # after this module has imported them; their base stays.
            Sweeper.validate_batch_is_legal = lambda self, batch: None

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Keep a job of a search, whose next job depends on the results of those before."""
        if not self.known:
            overrides = OmegaConf.to_container(config.hydra.overrides.task)
            assert isinstance(overrides, list)
            self.jobs.append(_asked(config, [str(word) for word in overrides]))

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Write the files of the sweep as they are by now: a sweep that is killed writes no others."""
        if Sweep.running is self and (began := time.monotonic()) >= self._due_s:
            with held_back():
                self._write("the sweep was under way when this was written")
            ended = time.monotonic()
            self._due_s = ended + SPARED * (ended - began)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        self.end()

    def _write(self, why: str) -> list[SweepJob]:
        from gpp.report.sweep.files import write_sweep

        return write_sweep(self.directory.path, self.jobs, figures=self.figures, why=why)

    def end(self, stopped: Stopped | None = None) -> None:
        """Write the table, results.csv, summary.json, report.html and the figures of this sweep's jobs.

        Args:
            stopped: the signal that has stopped it before its end.
        """
        from gpp.app.sweep_tracking import track_sweep
        from gpp.loggers.base import End
        from gpp.report.run.console import make_console
        from gpp.report.sweep.terminal import results_table, show_figures

        folder, Sweep.running = self.directory.path, None
        with held_back(), self.directory:
            why = f"the sweep was {stopped}" if stopped else ""
            jobs = self._write(why)
            results = [job.result for job in jobs]
            console = make_console()
            console.print(results_table(results, console.width))
            console.print(f"sweep   {os.path.relpath(folder / 'report.html')}", soft_wrap=True)
            show_figures(console, [figure.evaluate(jobs) for figure in self.figures])
            for svg in sorted(folder.glob("figure*.svg")):
                console.print(f"figure  {os.path.relpath(svg)}", soft_wrap=True)
            code = int(any(result["status"] not in ("ok", "infeasible") for result in results))
            reason = why or next(
                (f"{job.name}: {job.result.get('reason')}" for job in jobs if job.result["status"] == "failed"), None
            )
            end = End(exit_code=stopped.exit_code if stopped else code, reason=reason)
            words = shlex.join([*invocation(), *sys.argv[1:]])
            hints, warnings = track_sweep(folder, jobs, self.loggers, command=words, end=end)
            for line in [*(f"warning: {warning}" for warning in warnings), *hints]:
                console.print(line, soft_wrap=True, markup=False)
            if stopped:
                console.print(f"{stopped}: the same command goes on with the jobs that have no result", soft_wrap=True)
            latest(folder)
            Sweep.exit_code = code


class Refused(BaseException):
    """A sweep that does not start; no `Exception`, which Hydra would turn into a warning."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def refused_job(directory: RunDir, digest: str, reason: str, setup: Mapping[str, Any]) -> None:
    """Write the result of a sweep's job that cannot start.

    Args:
        setup: names of the model, strategy, cluster and engine, and the seed.
    """
    from gpp.report.run.record import Asked, RunRecord
    from gpp.report.run.result import write_json

    names = {key: setup[key] for key in ("model", "strategy", "cluster", "engine", "seed")}
    with directory:
        directory.claim()
        directory.begin()
        run = RunRecord(asked=Asked(**names, configuration=digest), status="failed", reason=reason)
        write_json(directory.path / "result.json", run.result)


def _jobs(config: Any) -> list[AskedJob]:
    """The jobs that Hydra's sweeper makes of a command line, in its order.

    Raises:
        HydraException, OmegaConfBaseException: a job cannot be composed.
        InvalidConfig: a job is to be started by a launcher.
    """
    loader = GlobalHydra.instance().config_loader()
    params = OmegaConf.to_container(config.hydra.sweeper.params) if config.hydra.sweeper.params else {}
    assert isinstance(params, dict)
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(words)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return [_job(loader.load_sweep_config(config, list(overrides)), number, overrides) for number, overrides in enumerate(jobs)]


def _job(config: Any, number: int, overrides: list[str]) -> AskedJob:
    refuse_start(OmegaConf.select(config, "engine.launch"), sweep=True)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(config)
    return _asked(config, overrides)


def _asked(config: Any, overrides: list[str]) -> AskedJob:
    from gpp.report.sweep.jobs import AskedJob

    keep(OmegaConf.to_container(config))  # its words go into the files of the sweep
    return AskedJob(folder=job_folder(_root_=config), overrides=tuple(filter_overrides(overrides)), configuration=digest_of(config))


def job_folder(*, _root_: Any) -> str:
    """The folder of a sweep's job: its name, for people, and the hash of its configuration."""
    try:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(_root_.name))[:60].lstrip(".")
    except OmegaConfBaseException:
        name = "job"
    return f"{name}-{digest_of(_root_)}"


def or_started(count: int | None, *, _root_: Any) -> int | None:
    """`${or_started:4}`: as many as a launcher has started where engine.launch=env says so, else 4."""
    started = world_of(os.environ) if _root_.engine.get("launch") == "env" else None
    return count if started is None else started


def samples_per_device(samples: Any, *, _root_: Any) -> int:
    """`${per_device:{mmt:16,dlrm:32}}`: the mini-batch from the samples for each device, by the model's name."""
    name, cluster = _root_.model.name, _root_.cluster
    if name not in samples:
        raise ValueError(f"minibatch_size: no samples a device for {name}. Fix: add it, or set minibatch_size=...")
    return int(samples[name]) * int(cluster.get("num_devices") or cluster.num_nodes * cluster.devices_per_node)


def where_spared(limits: Any, *, _root_: Any) -> float | None:
    """`${where_spared:{mlp:{2:7e6}}}`: bytes of a device by the model's name and the number of devices, null where the memory
    policy keeps everything and so could not do with less."""
    name, count = _root_.model.name, _root_.cluster.num_devices
    if str(_root_.strategy.memory._target_).endswith(".Keep"):
        return None
    if count not in limits.get(name, {}):
        raise ValueError(f"cluster.memory_bytes: no limit for {name} on {count} devices. Fix: add it, or set memory_bytes=...")
    return float(limits[name][count])


def workers() -> int:
    """`${workers:}`: as many as this machine has cores, at least two and at most four."""
    return max(2, min(4, len(os.sched_getaffinity(0))))


def in_a_run(alone: Any, in_sweep: Any) -> Any:
    """`${in_a_run:15.0,0.0}`: the first value in a single run, the second in a job of a sweep."""
    sweeps = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return in_sweep if sweeps else alone


RESOLVERS = {
    "sweep_id": sweep_id,
    "job_folder": job_folder,
    "or_mode": lambda mode, name: mode if mode in SEVERAL else name,
    "or_started": or_started,
    "in_a_run": in_a_run,
    "workers": workers,
    "per_device": samples_per_device,
    "where_spared": where_spared,
}
"""Functions that YAML files call, as in `${or_started:4}`."""

# At import, so that a sweep's job knows them in whatever process it runs.
for name, function in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, function, replace=True)


def latest(run_dir: Path) -> None:
    """Point outputs/latest at the run, where the run lies below an outputs folder; a link that cannot be set ends no run."""
    outputs = next((parent for parent in run_dir.resolve().parents if parent.name == "outputs"), None)
    if outputs is None:
        return
    try:
        link(outputs / "latest", os.path.relpath(run_dir.resolve(), outputs))
    except OSError as error:
        words = f"{outputs}/latest does not lead to this run ({error}). Fix: name the run by its folder, {run_dir}"
        print(f"warning: {words}", file=sys.stderr)


def metric_of(name: str) -> float:
    """What a search asks for: a number of the result of the run that has just ended, infinite where there is none.

    Args:
        name: keys of result.json, as in `predicted.iteration_s`; a search minimises it.

    Raises:
        InvalidConfig: the run has ended well, and its result has no such number.
    """
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir) if hydra_cfg.mode == RunMode.MULTIRUN else RunFolder.path
    try:
        result = json.loads((folder / "result.json").read_text())
    except OSError:
        return math.inf  # it was refused
    found = at(result, name)
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    if result["status"] == "ok":
        raise InvalidConfig("optimized_metric", name, "is no number of this run's result.json", "set predicted.iteration_s")
    return math.inf
