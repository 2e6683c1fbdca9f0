"""What is in the trackers' files: every offline wandb run and TensorBoard folder below a folder, against what users look for.

    python -m tests.checks.trackers FOLDER            read what is there
    python -m tests.checks.trackers FOLDER --make     make a plan, a training, a failure, an interrupted run and a sweep there first

wandb's files are read by wandb itself (`wandb leet inspect`), TensorBoard's by its own EventAccumulator. The exit code is 1 where
something is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cli import run_cold, start

PLANNED = ("stages", "depth", "lower_bound_s", "optimality_gap", "predicted/bubble_fraction", "speedup_over_sequential")
WORKERS = ("worker/0/busy_share", "worker/0/peak_memory_bytes", "worker/1/busy_share", "worker/1/peak_memory_bytes")
COLUMNS = {"stage", "modules", "devices", "micro-batch", "in flight", "forward s", "backward s", "peak bytes"}


@dataclass
class Found:
    """One record, whatever its back end."""

    path: Path
    kind: str = ""
    name: str = ""
    group: str | None = None
    commit: str | None = None
    exit_code: int | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    media: dict[str, str] = field(default_factory=dict)
    console: str = ""
    alerts: list[str] = field(default_factory=list)


def wandb_runs(folder: Path) -> list[Found]:
    """Every offline run below a folder, as wandb reads it, in the order of their starts."""
    return [_wandb_run(path) for path in sorted(folder.rglob("offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)]


def _wandb_run(path: Path) -> Found:
    # The module, because the command of that name need not be on the path of who calls this Python.
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(inspect, capture_output=True, text=True, check=True)
    found = Found(path=path.parent)
    for record in map(json.loads, done.stdout.splitlines()):
        about = record[record["type"]]
        match record["type"]:
            case "run":
                found.kind, found.name, found.group = about["job_type"], about["display_name"], about.get("run_group")
                found.tags, found.commit = about.get("tags", []), about.get("git", {}).get("commit")
                found.config = about["config"]["update"]
            case "summary":
                found.summary |= about.get("update", {})
            case "history":
                names = {key.partition("._")[0] for key in about["item"]} | set(about["item"])
                for name in names:
                    found.history[name] = found.history.get(name, 0) + 1
                _note_media(found, about["item"])
            case "output_logger":
                found.console += about["line"]
            case "alert":
                found.alerts.append(f"{about['level']}: {about['title']}: {about['text']}")
            case "exit":
                found.exit_code = about.get("exit_code", 0)
    return found


def _note_media(found: Found, item: dict[str, Any]) -> None:
    """Open the files that a line of the history names."""
    for key, kind in item.items():
        if key.endswith("._type"):
            name = key.removesuffix("._type")
            file = found.path / "files" / item[f"{name}.path"]
            if kind == "table-file":
                table = json.loads(file.read_text())
                found.tables[name] = table["columns"], len(table["data"])
            else:
                found.media[name] = file.read_text()


def boards(folder: Path) -> list[Found]:
    """Every TensorBoard folder below a folder."""
    return [_board(path) for path in sorted({events.parent for events in folder.rglob("events.out.tfevents.*")})]


def _board(path: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import (
        SESSION_END_INFO_TAG,
        SESSION_START_INFO_TAG,
        parse_session_end_info_plugin_data,
        parse_session_start_info_plugin_data,
    )

    events = EventAccumulator(str(path)).Reload()
    found = Found(path=path)

    def content(tag: str) -> bytes:
        return events.SummaryMetadata(tag).plugin_data.content

    if SESSION_START_INFO_TAG in events.Tags()["tensors"]:
        start_info = parse_session_start_info_plugin_data(content(SESSION_START_INFO_TAG))
        found.config = {key: getattr(value, value.WhichOneof("kind")) for key, value in start_info.hparams.items()}
        found.kind, found.name, found.commit = (found.config.get(key) for key in ("kind", "name", "commit"))
        found.group, found.tags = found.config.get("group"), found.config["tags"].split(", ")
    if SESSION_END_INFO_TAG in events.Tags()["tensors"]:
        found.exit_code = int(parse_session_end_info_plugin_data(content(SESSION_END_INFO_TAG)).status != 1)
    for tag in events.Tags()["scalars"]:
        values = events.Scalars(tag)
        if tag.startswith("summary/"):
            found.summary[tag.removeprefix("summary/")] = values[-1].value
        else:
            found.history[tag] = len(values)
    for tag in events.Tags()["tensors"]:
        words = b"".join(events.Tensors(tag)[-1].tensor_proto.string_val).decode()
        if tag == "console":
            found.console = words
        elif tag == "summary":
            rows = [line.split(" | ") for line in words.splitlines()[2:]]
            found.summary |= {
                row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows if row[0][2:] not in found.summary
            }
        elif words.startswith("| "):
            found.tables[tag] = words.splitlines()[0].strip("| ").split(" | "), len(words.splitlines()) - 2
        elif words:
            found.media[tag] = words
    return found


def missing(found: Found, *, draws: bool) -> Iterator[str]:
    """What users look for and do not find in a record, in words.

    Args:
        draws: whether the back end shows pages and drawings.
    """
    if found.exit_code is None:
        yield "the end"
    for name in ("model_name", "strategy_name", "cluster_name", "engine_name", "command"):
        if not found.config.get(name):
            yield f"config {name}"
    if not found.commit:
        yield "the git commit"
    failed = bool(found.exit_code)
    if failed and not found.summary.get("reason"):
        yield "the reason of the failure"
    if failed != (found.summary.get("status") != "ok"):
        yield f"a status that fits the exit code: {found.summary.get('status')}"
    if found.kind == "sweep":
        yield from _missing_of_sweep(found, draws=draws)
        return
    if not found.console:
        yield "the console"
    yield from _missing_of_run(found, draws=draws, failed=failed)


def _missing_of_sweep(found: Found, *, draws: bool) -> Iterator[str]:
    wanted = {"jobs", "groups"}
    yield from (f"table {name}" for name in wanted - set(found.tables))
    if draws:
        yield from (f"drawing {name}" for name in {"figure", "report"} - set(found.media))
    if not found.group:
        yield "the group"


def _missing_of_run(found: Found, *, draws: bool, failed: bool) -> Iterator[str]:
    planned = "stages" in found.summary and found.summary["stages"] is not None
    if not planned:
        if not failed:
            yield "the plan"
        return
    yield from (f"summary {name}" for name in PLANNED + WORKERS if name not in found.summary)
    columns, rows = found.tables.get("plan", ([], 0))
    if not set(columns) >= COLUMNS or rows != found.summary["stages"]:
        yield f"the plan's table: {columns}, {rows} rows"
    trained = found.kind == "train" and not failed
    if draws:
        shown = {"report", "stage_graph", "timeline_predicted"} | ({"timeline_measured"} if trained else set())
        yield from (f"drawing {name}" for name in shown if "<svg" not in found.media.get(name, ""))
    if not failed:
        yield from (f"summary {name}" for name in ("iteration_s", "samples_per_s", "bubble_fraction") if name not in found.summary)
    if trained:
        yield from (f"history {name}" for name in ("loss", "learning_rate", "samples_per_s") if not found.history.get(name))
        if "prediction_error" not in found.summary:
            yield "summary prediction_error"


def show(found: Found, *, draws: bool) -> bool:
    """Print a record; whether anything is missing."""
    lacks = sorted(missing(found, draws=draws))
    end = "no end" if found.exit_code is None else "finished" if not found.exit_code else f"failed ({found.exit_code})"
    print(f"\n{found.name}  kind {found.kind}  group {found.group}  tags {', '.join(found.tags)}  {end}\n  {found.path}")
    names = ("model_name", "strategy_name", "cluster_name", "engine_name", "command")
    print(f"  commit   {found.commit}\n  config   {', '.join(f'{name}={found.config.get(name)}' for name in names)}")
    print(f"           and {len(found.config)} keys")
    for name, (columns, rows) in found.tables.items():
        print(f"  table    {name}: {rows} rows of {', '.join(columns[:12])}{' ...' if len(columns) > 12 else ''}")
    for name, words in found.media.items():
        print(f"  media    {name}: {len(words)} characters{', with a drawing' if '<svg' in words else ''}")
    files = {*found.tables, *found.media}
    own = {key: value for key, value in found.summary.items() if not key.startswith("_") and key.partition(".")[0] not in files}
    print(f"  summary  {', '.join(f'{key}={_short(value)}' for key, value in own.items())}")
    steps = {key: count for key, count in found.history.items() if key.partition(".")[0] not in files}
    print(f"  history  {', '.join(f'{key} ({count})' for key, count in sorted(steps.items()) if not key.startswith('_'))}")
    lines = found.console.splitlines()
    print(f"  console  {len(lines)} lines, the last: {lines[-1].strip() if lines else None}")
    for alert in found.alerts:
        print(f"  alert    {alert}")
    print(f"  MISSING  {'; '.join(lacks)}" if lacks else "  complete")
    return bool(lacks)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ")[:120]


BOTH = "logger=[wandb,tensorboard]"


def make(folder: Path) -> None:
    """A plan, a training, a failure, an interrupted training and a sweep, each recorded by both loggers."""
    small = ("model=mmt_small", "model.num_branches=2", "model.num_layers=2", "cost=analytical", "cluster.num_devices=2", BOTH)
    train = ("model=mlp", "cluster.num_devices=2", "cost=analytical", "minibatch_size=32", "microbatch_size=8", BOTH)
    split = ("strategy.planner.replication=false", "optimizer.log_gradient_norm=true", "evaluate_every=20")
    ends = {
        "plan": run_cold(folder / "plan", *small, "mode=plan", "explain_s=0.5").code,
        "compare": run_cold(folder / "compare", *small, "mode=compare", "strategies=[graphpipe,sequential,even]").code,
        "train": run_cold(folder / "train", *train, *split, "steps=40").code,
        "failure": run_cold(folder / "failure", *train, "optimizer=sgd", "optimizer.lr=1e30", "logger.wandb.alert=true").code,
        "interrupted": _interrupted(folder / "interrupted", *train, "steps=100000"),
        "sweep": run_cold(folder / "sweep", "-m", *small, "engine=simulate", "strategy=graphpipe,sequential,even").code,
    }
    print("exit codes:", ends)


def _interrupted(run_dir: Path, *words: str) -> int:
    """A training that Ctrl-C ends once it has done steps."""
    process = start(run_dir, *words)
    metrics, until = run_dir / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="make the runs first")
    asked = parser.parse_args()
    if asked.make:
        make(asked.folder)
    records = [(found, True) for found in wandb_runs(asked.folder)] + [(found, False) for found in boards(asked.folder)]
    lacking = sum([show(found, draws=draws) for found, draws in records])
    print(f"\n{len(records)} records, {lacking} with something missing")
    return int(bool(lacking) or not records)


if __name__ == "__main__":
    sys.exit(main())
