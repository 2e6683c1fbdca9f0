"""answers.safetensors: what a model has answered, by request, in order.

The number of samples is known before the first one, so the file has its final size from the start, and every worker writes its rows
where they belong, as soon as it has them: nothing is gathered in memory.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from gpp.errors import InvalidConfig
from gpp.graph.inference import ANSWER
from gpp.runtime.job import Job

NAME = "answers.safetensors"

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


class Form(NamedTuple):
    """A kind of answers: sizes of one sample, and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _header(forms: dict[str, Form], num_samples: int) -> tuple[bytes, dict[str, int]]:
    """The bytes in front of the data, and where the rows of each kind of answers begin behind them."""
    table: dict[str, object] = {}
    places, at = dict[str, int](), 0
    for name, form in sorted(forms.items()):
        places[name], end = at, at + num_samples * form.row_bytes
        table[name] = {"dtype": _TYPES[form.dtype], "shape": [num_samples, *form.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


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
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        size = len(head) + sum(num_samples * form.row_bytes for form in forms.values())
        # All workers write the same bytes to the same place.
        os.truncate(self._file, size)
        os.pwrite(self._file, head, 0)

    def write(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Put answers of the samples from number `first` on where they belong: [samples, ...] of the form's type."""
        form = self.forms[name]
        raw = rows.detach().cpu().contiguous().view(-1).view(torch.uint8)
        os.pwrite(self._file, raw.numpy().data, self._at[name] + first * form.row_bytes)

    def close(self) -> None:
        os.close(self._file)


def answers_of(job: Job, run_dir: Path) -> Answers:
    """The file of a job's answers."""
    return Answers(run_dir / NAME, _forms(job), job.settings.steps * job.plan.minibatch_size)


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
    if job.settings.serving is None or not job.settings.serving.answers:
        return
    samples = job.settings.steps * job.plan.minibatch_size
    num_bytes = float(samples * sum(form.row_bytes for form in _forms(job).values()))
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if num_bytes > free:
        rule = f"would take {num_bytes:.2e} bytes, and {folder} has {free:.2e}"
        raise InvalidConfig("engine.answers", True, rule, "set engine.answers=false, or ask for fewer requests (steps)")
