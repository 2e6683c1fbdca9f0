"""A worker that trains when it is told to: a step, an evaluation, its weights, the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, TextIO

import torch

from gpp.graph.captured import is_loss
from gpp.runtime.hang_detection.status import SILENT
from gpp.runtime.live.fed import Fed, hear, tell
from gpp.runtime.worker.process import Lines
from gpp.runtime.worker.worker import Worker

Answer = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]


class LiveWorker(Worker):
    """A device's share of a training whose steps come one by one."""

    rows: Fed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, rows=Fed)

    def serve(self, feed: Connection, out: TextIO) -> None:
        """Do what comes through `feed` until the end comes; a line of each step goes to `out`."""
        lines = self._lines = Lines(out, holds=False)
        todo: dict[str, Callable[[dict[str, torch.Tensor]], Answer]] = {
            "step": lambda batch: (self._step(batch, lines), {}),
            "evaluate": lambda batch: (self._evaluated(batch), {}),
            "weights": lambda _: ({}, self._own()),
        }
        with self.search, ExitStack() as stack:
            stack.callback(self.memory.end)
            stack.callback(lines.flush)
            self._listens = self.card is None
            read = {name for module in self.modules.values() for name in module.inputs}
            tell(feed, {"reads": sorted(read), "notes": self._notes})
            while (order := hear(feed))[0]["do"] != "end":
                tell(feed, *todo[order[0]["do"]](order[1]))
                self.status.enter(SILENT)
            if self.kept:
                self.finish()

    def _step(self, batch: dict[str, torch.Tensor], lines: Lines) -> dict[str, float]:
        """One optimizer step; the device's share of its losses."""
        self.rows.batch, found = batch, dict[str, float]()

        def log(record: dict[str, Any]) -> None:
            lines.step(record)
            found.update({name: value for name, value in record.items() if is_loss(name)})

        self.train(self._stop, 1, log)
        return found

    def _evaluated(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        """The device's share of the results on a batch."""
        self.rows.batch = batch
        return self.evaluate()

    def _own(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of the device's stages."""
        whole = self.teams.split.whole
        states = {s: {n: whole(n, tensor) for n, tensor in module.state_dict().items()} for s, module in self.modules.items()}
        return {name: tensor for state in self.teams.led(states) for name, tensor in state.items()}
