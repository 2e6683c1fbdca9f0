"""answers.safetensors: what a model has answered, by request, in order.

    NAME            [samples, ...]  the answers of node NAME; a row of floats that nobody has answered is NaN, any other is 0
    answered.NAME   [samples]       whether the row is an answer

The number of samples is known before the first one, so the file has its final size from the start, and every worker writes its
rows where they belong, as soon as it has them: nothing is gathered in memory. A row's mark follows the row, so that a process that
is killed leaves no mark without an answer. Meanwhile the file has a hidden name; `finish` gives it its own, whatever has ended the
stream, and the counts in its metadata, `samples` and `answered`.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from gpp.errors import InvalidConfig
from gpp.files import descriptor
from gpp.mechanisms.serving.course import requests_of
from gpp.mechanisms.serving.model import ANSWER
from gpp.runtime.job import Job
from gpp.runtime.run_dir import ANSWERS, ANSWERS_UNDER_WAY
from gpp.runtime.transport.form import Form

MARK = "answered."
"""In front of the name of the marks of an answer."""

_ROOM = len(json.dumps({"samples": "9" * 19, "answered": "9" * 19}))

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's types by their names in the format."""

_NAN = {
    name: torch.full((1,), math.nan, dtype=dtype).view(torch.uint8).numpy().tobytes()
    for dtype, name in _TYPES.items()
    if dtype.is_floating_point
}
"""Bytes of a NaN."""


def _header(forms: dict[str, Form], num_samples: int) -> tuple[bytes, dict[str, int]]:
    """The bytes in front of the data, with room for the counts, and where each tensor begins behind them."""
    marks = {f"{MARK}{name}": Form((), torch.bool) for name in forms}
    table: dict[str, object] = {"__metadata__": {"samples": str(num_samples), "answered": ""}}
    places, at = dict[str, int](), 0
    for name, form in (*sorted(forms.items()), *sorted(marks.items())):
        places[name], end = at, at + num_samples * form.num_bytes
        table[name] = {"dtype": _TYPES[form.dtype], "shape": [num_samples, *form.shape], "data_offsets": [at, end]}
        at = end
    return _packed(table, len(json.dumps(table)) + _ROOM + 8), places


def _packed(table: dict[str, Any], most: int) -> bytes:
    """A header of a certain length, whatever the counts in it are."""
    text = json.dumps(table).encode().ljust(most + -most % 8)
    return len(text).to_bytes(8, "little") + text


class Answers:
    """The file, as one worker writes to it.

    Args:
        path: of the file; workers of other devices write to it, too.
        forms: of all answers of the model, so that all workers have the same header.
        num_samples: of all requests.
    """

    def __init__(self, path: Path, forms: dict[str, Form], num_samples: int) -> None:
        self.forms = forms
        head, places = _header(forms, num_samples)
        self._at = {name: len(head) + place for name, place in places.items()}
        self._file = descriptor(path, os.O_RDWR)
        size = len(head) + num_samples * sum(form.num_bytes + 1 for form in forms.values())
        # All workers write the same bytes to the same place; those of a plan that follows find the answers of the one before.
        os.truncate(self._file, size)
        os.pwrite(self._file, head, 0)

    def write(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Put answers of the samples from number `first` on where they belong: [samples, ...] of the form's type."""
        form = self.forms[name]
        raw = rows.detach().cpu().contiguous().view(-1).view(torch.uint8)
        os.pwrite(self._file, raw.numpy().data, self._at[name] + first * form.num_bytes)
        os.pwrite(self._file, b"\1" * len(rows), self._at[f"{MARK}{name}"] + first)

    def close(self) -> None:
        os.close(self._file)


def finish(run_dir: Path) -> dict[str, int] | None:
    """Mark the rows that were not answered, say how many were, and give the file its name.

    No worker may be left that writes to it.

    Returns:
        `samples` of all requests, and how many of them are `answered`; None where there is no file.
    """
    path = run_dir / ANSWERS_UNDER_WAY
    if not path.is_file():
        return None
    file = descriptor(path, os.O_RDWR)
    try:
        head = os.pread(file, 8, 0)
        length = int.from_bytes(head, "little")
        table = json.loads(os.pread(file, length, 8))
        samples = int(table["__metadata__"]["samples"])
        whole = b"\1" * samples
        for name, entry in table.items():
            if name.startswith(MARK):
                marks = os.pread(file, samples, 8 + length + entry["data_offsets"][0])
                _mark(file, 8 + length, table[name.removeprefix(MARK)], marks)
                whole = (int.from_bytes(whole) & int.from_bytes(marks)).to_bytes(samples)
        table["__metadata__"]["answered"] = str(whole.count(1))
        os.pwrite(file, _packed(table, length), 0)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(path, run_dir / ANSWERS)
    return {"samples": samples, "answered": whole.count(1)}


BLOCK = 1 << 20
"""Bytes that are marked at a time."""


def _mark(file: int, at: int, entry: dict[str, Any], marks: bytes) -> None:
    """Write NaN into the rows without a mark, where the type has one."""
    begin, end = entry["data_offsets"]
    if (nan := _NAN.get(entry["dtype"])) is None or not marks:
        return
    row_bytes = (end - begin) // len(marks)
    for gap in re.finditer(rb"\0+", marks):
        place, stop = (at + begin + row_bytes * sample for sample in gap.span())
        while place < stop:
            size = min(BLOCK, stop - place)
            os.pwrite(file, nan * (size // len(nan)), place)
            place += size


def answers_of(job: Job, run_dir: Path) -> Answers:
    """The file of a job's answers."""
    return Answers(run_dir / ANSWERS_UNDER_WAY, _forms(job), job.settings.steps * job.plan.minibatch_size)


def _forms(job: Job) -> dict[str, Form]:
    """The form of a sample's answers, by name."""
    forms = dict[str, Form]()
    for name, node in job.captured.results.items():
        made = job.captured.node_of[node]
        shape = tuple(int(extent) for i, extent in enumerate(made.shape or ()) if i != made.batch_dim)
        forms[name.removeprefix(ANSWER)] = Form(shape, getattr(torch, made.dtype or "float32"))
    return forms


def check_room(job: Job, folder: Path) -> None:
    """Refuse answers for which the disk has no room, before anybody computes them.

    Raises:
        InvalidConfig: says how much is free.
    """
    if not requests_of(job.settings.course).answers:
        return
    samples = job.settings.steps * job.plan.minibatch_size
    num_bytes = float(samples * sum(form.num_bytes for form in _forms(job).values()))
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if num_bytes > free:
        rule = f"would take {num_bytes:.2e} bytes, and {folder} has {free:.2e}"
        raise InvalidConfig("engine.answers", True, rule, "set engine.answers=false, or ask for fewer requests (steps)")
