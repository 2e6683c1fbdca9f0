"""What runs tell their trackers, told to a logger that keeps it, and read with the back ends' own readers."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from gpp import SGD, Analytical, Even, OneFOneB, Simulate, Strategy, local
from gpp.app.experiment import Experiment
from gpp.app.recording import Recorder
from gpp.app.stopping import Stopped
from gpp.app.sweep_tracking import track_sweep
from gpp.app.tracked import devices_table, drawings, stages_table, summary
from gpp.app.tracking import commit_of
from gpp.data.synthetic import Synthetic
from gpp.errors import Infeasible, InvalidConfig, WorkerFailed
from gpp.loggers.base import AbstractLogger, AbstractRecord, End, RunInfo
from gpp.loggers.tensorboard import TensorBoard, markdown
from gpp.loggers.wandb import Wandb
from gpp.private import masked
from gpp.program.kinds import COMPUTE
from gpp.report.run.console import make_console
from gpp.report.sweep.files import write_sweep
from gpp.report.sweep.jobs import AskedJob
from gpp.runtime.run_dir import RunDir
from gpp.serialization import to_json
from tests.checks.trackers import COLUMNS, boards, missing, wandb_runs
from tests.support.cli import ROOT, run
from tests.support.conf import model_named
from tests.support.fake_runs import make_run


class Kept(AbstractLogger):
    """A logger that keeps what it is told."""

    records: ClassVar[list[KeptRecord]] = []

    def check(self) -> None:
        pass

    def start(self, run: RunInfo) -> AbstractRecord:
        self.records.append(KeptRecord(run))
        return self.records[-1]


class KeptRecord(AbstractRecord):
    shows: ClassVar[bool] = True

    def __init__(self, info: RunInfo) -> None:
        self.info, self.ends = info, list[tuple[Mapping[str, Any], End | None]]()
        self.steps, self.console = list[dict[str, float]](), ""
        self.shown: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append({"step": step, **values})

    def log_console(self, words: str) -> None:
        self.console += words

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.shown[name] = columns, rows

    def log_drawing(self, name: str, svg: str) -> None:
        self.shown[name] = svg

    def log_page(self, name: str, path: Path) -> None:
        self.shown[name] = path.read_text()

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        self.ends.append((summary or {}, end))


def recorder(run_dir: Path, **settings: Any) -> Recorder:
    experiment = Experiment(
        name="mine",
        model=model_named("mlp"),
        data=Synthetic(num_samples=64),
        cluster=local(num_devices=2),
        cost=Analytical(),
        strategy=Strategy(name="even", planner=Even(), schedule=OneFOneB()),
        optimizer=SGD(lr=0.1, momentum=0.9),
        logger={"kept": Kept()},
        minibatch_size=16,
        cache_dir=str(run_dir),
        **{"engine": Simulate(), "steps": 4, **settings},
    )
    Kept.records.clear()
    return Recorder(experiment=experiment, directory=RunDir(run_dir, command="run.py x=1"), console=make_console(io.StringIO()))


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (WorkerFailed(1, "out of memory"), 1, "failed"),
        (Stopped(2), 130, "failed"),
        (Infeasible("memory", "buy some"), 3, "infeasible"),
    ],
)
def test_an_end_before_the_first_step_is_recorded_with_code_and_reason(
    error: BaseException, code: int, status: str, tmp_path: Path
) -> None:
    recording = recorder(tmp_path / "run")
    try:
        with recording:
            recording.claim()
            recording.warn("the machine is warm")
            raise error
    except Stopped:
        pass
    (record,) = Kept.records
    ((told, end),) = record.ends
    assert end == End(exit_code=code, reason=recording.run.reason) and recording.run.reason and recording.exit_code == code
    assert told["status"] == status and told["reason"] == recording.run.reason
    assert "warning: the machine is warm" in record.console and recording.run.reason in " ".join(record.console.split())
    assert (
        record.info.kind == "simulate" and record.info.facts["model_name"] == "mlp" and record.info.facts["command"] == "run.py x=1"
    )


def test_a_refused_command_is_no_run(tmp_path: Path) -> None:
    with recorder(tmp_path / "run"):
        raise InvalidConfig("steps", 0, "must be more", "set steps=1")
    assert not Kept.records and not (tmp_path / "run").exists()


def test_steps_have_a_learning_rate_and_whatever_workers_say(tmp_path: Path) -> None:
    from gpp.optimizers import LearningRate
    from gpp.runtime.engines.distributed import Distributed

    optimizer = SGD(lr=0.1, momentum=0.9, learning_rate=LearningRate(shape="linear"))
    recording = recorder(tmp_path / "run", engine=Distributed())
    recording.experiment = recording._tracking.experiment = replace(recording.experiment, optimizer=optimizer)
    with recording:
        recording.claim()
        recording.begin()
        progress = recording.progress()
        progress.on_terms({"loss:a": 1.0, "gradient_norm": 3.0})
        progress.on_step(1, 2.0, None)
        progress.on_step(2, 1.5, 64.0)
    (record,) = Kept.records
    first, second = record.steps
    assert first == {"step": 0, "loss": 2.0, "loss:a": 1.0, "gradient_norm": 3.0, "learning_rate": 0.1}
    assert second["samples_per_s"] == 64.0 and second["learning_rate"] == pytest.approx(0.1 * (1 - 1 / 4))
    assert "loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_summary_of_a_run() -> None:
    made = make_run(4)
    assert made.plan is not None and made.predicted is not None and made.measured is not None
    told = summary(made)
    assert (told["stages"], told["depth"], told["devices"]) == (len(made.plan.stages), made.plan.depth, made.plan.num_devices)
    assert told["iteration_s"] == told["measured/iteration_s"] == made.measured.metrics.iteration_s
    assert told["prediction_error"] == made.measured.metrics.iteration_s / made.predicted.metrics.iteration_s - 1
    chain = made.judged.baseline["sequential"].iteration_s
    assert told["speedup_over_sequential"] == chain / made.predicted.metrics.iteration_s
    busy = [e.end_s - e.start_s for e in made.measured.events if e.kind in COMPUTE and e.device == 1]
    assert told["worker/1/busy_share"] == pytest.approx(sum(busy) / made.measured.length_s)
    assert told["worker/1/peak_memory_bytes"] == made.measured.metrics.peak_memory_bytes[1]
    assert all(value is None or isinstance(value, str | int | float) for value in told.values())
    ended = summary(made.knowing(measured=None, status="failed", reason="x"))
    assert "iteration_s" not in ended and ended["predicted/iteration_s"] == made.predicted.metrics.iteration_s


def test_tables_and_drawings_of_a_run() -> None:
    made = make_run(4)
    assert made.plan is not None
    name, columns, rows = stages_table(made)
    assert name == "plan" and set(columns) >= COLUMNS and len(rows) == len(made.plan.stages)
    assert {len(row) for row in rows} == {len(columns)}
    assert [row[columns.index("micro-batch")] for row in rows] == [stage.microbatch_size for stage in made.plan.stages]
    assert len(devices_table(made).rows) == made.plan.num_devices
    drawn = drawings(made)
    assert set(drawn) == {"stage_graph", "timeline_predicted", "timeline_measured"}
    assert all(svg.startswith("<svg") and svg.rstrip().endswith("</svg>") for svg in drawn.values())


def test_a_sweep_has_a_record_with_table_and_figure(tmp_path: Path) -> None:
    made = make_run(4)
    asked = [AskedJob(folder=name, overrides=(f"strategy={name}",), configuration="c") for name in ("even", "sequential")]
    for job in asked[:1]:
        (tmp_path / job.folder).mkdir()
        result = {**made.result, "strategy": job.folder, "configuration": "c"}
        (tmp_path / job.folder / "result.json").write_text(to_json(result))
    jobs = write_sweep(tmp_path, asked)
    Kept.records.clear()
    track_sweep(tmp_path, jobs, {"kept": Kept()}, command="run.py -m", end=End(exit_code=1, reason="sequential: no result"))
    (record,) = Kept.records
    assert (record.info.kind, record.info.group) == ("sweep", tmp_path.name)
    columns, rows = record.shown["jobs"]
    assert [dict(zip(columns, row, strict=True))["status"] for row in rows] == ["ok", "failed"]
    assert record.shown["figure"].startswith("<svg") and "</html>" in record.shown["report"]
    told, end = record.ends[0]
    assert (told["ended/ok"], told["ended/failed"], told["num_jobs"]) == (1, 1, 2) and end and end.exit_code == 1


def test_wandb_is_told_of_the_failure_and_sends_the_alert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[Any] = []

    class Run:
        offline = True
        summary: ClassVar[dict[str, Any]] = {}
        settings = type("Settings", (), {"sync_dir": "/x"})()

        def alert(self, title: str, text: str, level: str) -> None:
            said.append((title, text, level))

        def finish(self, exit_code: int = 0) -> None:
            said.append(exit_code)

    monkeypatch.setattr(Wandb, "_open", lambda self, run, mode: Run())
    for alert in (False, True):
        record = Wandb(alert=alert).start(RunInfo(run_dir=tmp_path, name="mine"))
        record.finish({"status": "failed"}, End(exit_code=130, reason="stopped by SIGINT"))
        record.finish()
    assert said == [130, ("mine failed", "stopped by SIGINT", "ERROR"), 130] and Run.summary == {"status": "failed"}


def test_online_without_an_answer_is_offline_with_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    class Run:
        offline = True
        settings = type("Settings", (), {"sync_dir": "/x"})()

    def opened(self: Wandb, run: RunInfo, mode: str) -> Run:
        asked.append(mode)
        if mode == "online":
            raise ConnectionError("refused")
        return Run()

    monkeypatch.setattr(Wandb, "_open", opened)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    record = Wandb(mode="online").start(RunInfo(run_dir=tmp_path, name="mine"))
    assert asked == ["online", "offline"] and record.hints[-1] == "wandb sync /x"
    assert len(record.warnings) == 1 and "refused" in record.warnings[0]


def test_a_missing_package_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpp.loggers.back_end.find_spec", lambda name: None)
    for logger, fix in ((Wandb(), "pip install wandb"), (TensorBoard(), "gpp\\[tensorboard\\]")):
        with pytest.raises(InvalidConfig, match=f"not installed.*{fix}"):
            logger.check()
    Wandb(mode="disabled").check()


def test_secrets_that_are_printed_are_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", "verysecret1234")
    monkeypatch.setenv("SHORT_TOKEN", "ab")
    assert masked("key verysecret1234, hf_" + "a" * 30 + ", absolute") == "key ***, ***, absolute"
    recording = recorder(tmp_path / "run")
    with recording:
        recording.claim()
        recording.console.print("connecting with verysecret1234")
        raise WorkerFailed(0, "verysecret1234 was wrong")
    (record,) = Kept.records
    told, end = record.ends[0]
    assert "verysecret1234" not in f"{record.console}{told}{end}" and "connecting with ***" in record.console


def test_the_commit_is_that_of_the_folder(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y")
    (tmp_path / "a").write_text("1")
    for words in (("init", "-q"), ("add", "a"), ("commit", "-qm", "x")):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit_of(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{head}-dirty"


def test_a_table_in_markdown_keeps_its_cells() -> None:
    assert markdown(("a", "b"), [["x|y", None], ["two\nlines", 1.5]]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y |  |",
        "| two lines | 1.5 |",
    ]


def test_tensorboard_opens_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    info = RunInfo(run_dir=tmp_path, name="mine", config={"a": {"b": 1.5, "c": True}}, facts={"model_name": "mlp"})
    for _ in range(2):
        record = TensorBoard().start(info)
        record.log(0, {"loss": 2.0, "loss:a": 1.0})
        record.log(1, {"loss": 1.5})
        record.log_eval(1, {"accuracy": 0.5})
        record.log_console("hello\nworld\n")
        record.finish({"stages": 3, "status": "failed", "reason": None}, End(exit_code=1, reason="x"))
        assert record.warnings == () and record.hints[0].startswith("tensorboard --logdir")
    # A second run in the same directory is another one.
    first, second = boards(tmp_path)
    assert (first.path.name, second.path.name) == ("tensorboard", "tensorboard_2")
    assert first.history == {"loss": 2, "loss/a": 1, "eval/accuracy": 1} and first.exit_code == 1
    assert first.config["a.b"] == 1.5 and first.config["a.c"] is True and first.config["model_name"] == "mlp"
    assert first.summary["stages"] == 3 and first.summary["status"] == "failed" and "    world" in first.console


def test_a_plan_is_whole_in_wandbs_own_file(tmp_path: Path) -> None:
    """The other ends, and TensorBoard: `python -m tests.checks.trackers FOLDER --make`."""
    words = ("model=mlp", "model.num_blocks=2", "cost=analytical", "cluster.num_devices=2", "mode=plan", "explain_s=0.2")
    done = run(tmp_path, *words, "logger=wandb", "logger.wandb.system_metrics=false", "logger.wandb.tags=[mine]")
    assert done.code == 0, done.out
    (found,) = wandb_runs(tmp_path)
    assert not list(missing(found, draws=True))
    assert found.kind == "plan" and found.tags == ["mine", "mlp", "graphpipe", "local"] and found.exit_code == 0
    # It would be noticed.
    found.media.pop("stage_graph")
    found.summary.pop("depth")
    assert sorted(missing(found, draws=True)) == ["drawing stage_graph", "summary depth"]


def test_an_agent_of_a_wandb_sweep_gets_words_that_compose() -> None:
    """The command is put together by wandb's own functions, as its agents do it."""
    from hydra import compose, initialize_config_dir
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    asked = yaml.safe_load((ROOT / "sweeps" / "wandb" / "strategies.yaml").read_text())
    for pick in (0, -1):
        args = {name: {"value": of["values"][pick]} for name, of in asked["parameters"].items()}
        given = {**create_sweep_command_args({"args": args}), "program": [asked["program"]], "env": [], "interpreter": []}
        words: list[str] = []
        for word in create_sweep_command(list(asked["command"])):
            words += given[word[2:-1]] if word.startswith("${") else [word]
        assert words[0] == "run.py" and (ROOT / words[0]).is_file()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            found = compose("config", overrides=[*words[1:], "name=test"])
        assert found.logger.wandb.mode == "online" and found.strategy.name == args["strategy"]["value"]
        assert found.microbatch_size == args["microbatch_size"]["value"]
    assert asked["metric"]["name"] in summary(make_run(4))
