"""Workers that tell each other which of their values are not finite, once one of them has seen such a loss.

ranks/nonfinite.json        samples of the micro-batch whose loss is not finite; the first to see one writes it
      rank_N.finite.json    findings of another worker

Each worker looks for the question four times a second, in a thread of its own: a training whose values are finite pays
nothing else. The one who asks stands still until all have answered, and so does the pipeline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from gpp.errors import NonFinite
from gpp.files import claim_text
from gpp.runtime.job import Settings
from gpp.runtime.nonfinite import Finding, Seen, told, told_of_weights
from gpp.runtime.worker.stage import OnNonFinite, StageRunner
from gpp.serialization import from_json, write_value

EVERY_S = 0.25
PATIENCE_S = 3.0
"""Seconds to wait for the answers; workers on machines that share no folder give none."""


class Search:
    """One worker's part; answers as long as its context lasts.

    What `told` gives, and `weights`, raise `NonFinite` with `on_nonfinite=stop`, and warn once otherwise.

    Args:
        ranks: folder of the run that all workers share.
        warn: is told the sentence.

    `runners` are the worker's own stages.
    """

    def __init__(self, ranks: Path, settings: Settings, *, rank: int, world: int, warn: Callable[[str], None]) -> None:
        self._ranks, self._settings, self._rank, self._world, self._warn = ranks, settings, rank, world, warn
        self.runners: tuple[StageRunner, ...] = ()
        self._told = False
        self._question = ranks / "nonfinite.json"
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._answer, name="nonfinite", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def told(self, *, train: bool, late: bool) -> OnNonFinite:
        """The function to call with a loss that is not finite.

        Args:
            late: the losses of a step are read at its end, when the update is over and nothing of the passes is left.
        """

        def where_unknown(seen: Seen, lo: int, hi: int) -> None:
            if not self._told:
                on_card = f"{seen}; where it began is not known on a card. Fix: engine=reference finds it"
                self._end(on_card if train else seen.held_out())

        return self.training if train and not late else where_unknown

    def training(self, seen: Seen, lo: int, hi: int) -> None:
        """Answer to a training loss that is not finite: that of the samples [lo, hi) of the pass."""
        if not self._told:
            answer = self.ask(lo, hi)
            findings, silent = answer or (self._look(lo, hi), ())
            self._end(told(seen, findings, silent=silent, first_step=self._settings.first_step), answer is not None)

    def weights(self, step: int) -> None:
        """Look at the weights after the last step, which no loss has seen."""
        findings = self._look(0, 0)
        if not self._told and any(finding.weights for finding in findings):
            answer = self.ask(0, 0)
            self._end(told_of_weights(answer[0] if answer else findings, step=step), answer is not None)

    def _end(self, text: str, first: bool = True) -> None:
        """Fail, or warn and go on.

        Args:
            first: whether no other worker has asked before; one that has knows as much, and is to fail first.
        """
        if self._settings.on_nonfinite != "warn":
            time.sleep(0.0 if first else PATIENCE_S)
            raise NonFinite(text)
        self._told = True
        if first:
            self._warn(text)
            return
        # Its backward would change what the other one asks for: it stands still until it has answered.
        until = time.monotonic() + PATIENCE_S
        while not self._path(self._rank).exists() and time.monotonic() < until:
            time.sleep(0.01)

    def _look(self, lo: int, hi: int) -> tuple[Finding, ...]:
        return tuple(finding for runner in self.runners for finding in runner.look(lo, hi))

    def ask(self, lo: int, hi: int) -> tuple[tuple[Finding, ...], tuple[int, ...]] | None:
        """Findings of all workers on the samples [lo, hi) of the pass, and the ranks that gave none in time.

        None if another worker has asked before.
        """
        if not claim_text(self._question, json.dumps({"rank": self._rank, "lo": lo, "hi": hi})):
            return None
        until, found = time.monotonic() + PATIENCE_S, list(self._look(lo, hi))
        silent = [rank for rank in range(self._world) if rank != self._rank]
        while silent and time.monotonic() < until:
            for rank in list(silent):
                path = self._path(rank)
                if path.exists():
                    found += from_json(tuple[Finding, ...], path.read_text())
                    silent.remove(rank)
            time.sleep(0.01)
        return tuple(found), tuple(silent)

    def _path(self, rank: int) -> Path:
        return self._ranks / f"rank_{rank}.finite.json"

    def _answer(self) -> None:
        while not self._over.wait(EVERY_S):
            if not self._question.exists() or not (text := self._question.read_text()):
                continue
            asked = json.loads(text)
            if asked["rank"] != self._rank:
                write_value(self._path(self._rank), self._look(asked["lo"], asked["hi"]))
            return
