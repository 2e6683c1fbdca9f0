"""TensorBoard: an event file in the run directory; no account, no network, nothing to upload.

Scalars of steps and evaluations are charts, tables and the console are texts (Markdown), and the settings with the end of
the run are in the HPARAMS tab, where the jobs of a sweep stand side by side. TensorBoard shows no HTML and no SVG: pages
and drawings stay files of the run, and their names are in the text `files`.

The events are written with tensorboard's own messages: torch's writer would load torch for a run that only plans.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from gpp.files import folder, open_binary
from gpp.loggers.back_end import BackEndRecord, from_here, need, prefixed
from gpp.loggers.base import AbstractLogger, End, RunInfo
from gpp.serialization import flatten
from gpp.settings import settings


class TensorBoardRecord(BackEndRecord):
    """One event file.

    Args:
        folder: that it is in.
        info: of the run.
    """

    back_end: ClassVar[str] = "tensorboard"

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self._folder, self._step = folder, info.first_step
        self._lines: list[str] = []
        self._files: list[str] = []
        super().__init__(self._writer)
        named = {"name": info.name, "kind": info.kind, "group": info.group, "tags": ", ".join(info.tags), "commit": info.commit}
        told = {**named, **info.facts}
        self._try("start", lambda writer: self._begin(writer, told, info.config))

    def _writer(self) -> Any:
        writer_of = _module("summary.writer.record_writer").RecordWriter
        folder(self._folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # Not by tensorboard's EventFileWriter: that writes in a thread, whose errors come late, and with a traceback.
        writer = writer_of(open_binary(self._folder / name))
        event = _module("compat.proto.event_pb2").Event
        writer.write(event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        return writer

    def _where(self, run: Any) -> tuple[str, ...]:
        return (f"tensorboard --logdir {from_here(self._folder.parent)}",)

    def _abandon(self, run: Any) -> None:
        run.close()

    def _add(self, writer: Any, values: Sequence[Any], step: int) -> None:
        event, summary = _module("compat.proto.event_pb2").Event, _module("compat.proto.summary_pb2").Summary
        writer.write(event(wall_time=time.time(), step=step, summary=summary(value=values)).SerializeToString())
        writer.flush()  # the dashboard reads while the run goes on

    def _begin(self, writer: Any, told: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write the settings, as a table and for the HPARAMS tab."""
        data, tag = _module("plugins.hparams.plugin_data_pb2"), _module("plugins.hparams.metadata").SESSION_START_INFO_TAG
        known = {key: value for key, value in (*told.items(), *flatten(config).items()) if value is not None}
        start = data.SessionStartInfo(start_time_secs=time.time())
        for key, value in known.items():
            if isinstance(value, bool):
                start.hparams[key].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[key].number_value = value
            else:
                start.hparams[key].string_value = str(value)
        self._add(writer, [_session(tag, data.HParamsPluginData(session_start_info=start))], 0)
        self._add(writer, [_text("config", markdown(("setting", "value"), list(known.items())))], 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._try("log", lambda writer: self._add(writer, _scalars(values), step))

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._try("log_eval", lambda writer: self._add(writer, _scalars(prefixed("eval", values)), step))

    def log_console(self, words: str) -> None:
        self._lines += words.splitlines()

    def log_page(self, name: str, path: Path) -> None:
        self._files.append(f"{name}: {path}")

    def log_file(self, path: Path) -> None:
        self._files.append(str(path))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._try("log_table", lambda writer: self._add(writer, [_text(name, markdown(columns, rows))], self._step))

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        end, values = end or End(), dict(summary or {})

        def action(writer: Any) -> None:
            data, tag = _module("plugins.hparams.plugin_data_pb2"), _module("plugins.hparams.metadata").SESSION_END_INFO_TAG
            ends = _module("plugins.hparams.api_pb2")
            numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
            texts = [_text("summary", markdown(("name", "value"), list(values.items())))] if values else []
            texts += [_text("files", "\n".join(f"* {file}" for file in self._files))] if self._files else []
            texts += [_text("console", "\n".join(f"    {line}" for line in self._lines))] if self._lines else []
            self._add(writer, [*_scalars(prefixed("summary", numbers)), *texts], self._step)
            status = ends.STATUS_FAILURE if end.exit_code else ends.STATUS_SUCCESS
            found = data.SessionEndInfo(status=status, end_time_secs=time.time())
            self._add(writer, [_session(tag, data.HParamsPluginData(session_end_info=found))], self._step)
            writer.close()

        self._try("finish", action)
        self._run = None


def _module(name: str) -> Any:
    """A module of tensorboard. Classes of messages are made when one is imported, so that no type checker knows them."""
    return import_module(f"tensorboard.{name}")


def _scalars(values: Mapping[str, float]) -> list[Any]:
    value_of = _module("compat.proto.summary_pb2").Summary.Value
    # A tag may not have the colon of `loss:contrastive`.
    return [value_of(tag=name.replace(":", "/"), simple_value=float(value)) for name, value in values.items()]


def _text(name: str, words: str) -> Any:
    """A text in Markdown."""
    summaries, shapes = _module("compat.proto.summary_pb2"), _module("compat.proto.tensor_shape_pb2")
    of = summaries.SummaryMetadata
    shape = shapes.TensorShapeProto(dim=[shapes.TensorShapeProto.Dim(size=1)])
    tensor = _module("compat.proto.tensor_pb2").TensorProto(dtype="DT_STRING", string_val=[words.encode()], tensor_shape=shape)
    return summaries.Summary.Value(tag=name, metadata=of(plugin_data=of.PluginData(plugin_name="text")), tensor=tensor)


def _session(tag: str, data: Any) -> Any:
    """The record that the HPARAMS tab reads."""
    metadata = _module("plugins.hparams.metadata")
    value_of = _module("compat.proto.summary_pb2").Summary.Value
    return value_of(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; None is an empty cell."""
    lines = [["" if cell is None else str(cell) for cell in line] for line in (columns, ["---"] * len(columns), *rows)]
    lines = [[word.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for word in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@settings("logger.tensorboard")
class TensorBoard(AbstractLogger):
    """Event files in the run directory.

    Args:
        folder: below the run directory; `tensorboard --logdir outputs` finds every run by itself.
    """

    folder: str = "tensorboard"

    def check(self) -> None:
        need("tensorboard", "run pip install 'gpp[tensorboard]'")

    def start(self, run: RunInfo) -> TensorBoardRecord:
        folder, number = run.run_dir / self.folder, 1
        # Events of an earlier run in the same directory are another run's, unless this one goes on from it.
        while not run.first_step and folder.exists():
            folder, number = folder.with_name(f"{Path(self.folder).name}_{number + 1}"), number + 1
        return TensorBoardRecord(folder, run)
