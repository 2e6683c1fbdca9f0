"""Bytes that weight policies move in a real run, and operators that they start, against those that the bill of a stage charges."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from gpp import DoubleBuffer, Naive, PipeMare, PipeOptim, SpecTrain, Stash, VerticalSync
from gpp.cost.stage import StageCost
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.corrections.gap_aware import GapAware
from gpp.mechanisms.weight_versions.corrections.spike import Spike
from gpp.mechanisms.weight_versions.on_worker.base import AbstractVersions
from gpp.optimizers import SGD, AbstractOptimizer, Adam, RMSprop
from tests.support import inprocess
from tests.support.asynchronous import MINIBATCH, make_job
from tests.support.long import thinned
from tests.support.moved import Moved

SGDM = SGD(lr=0.05, momentum=0.9, weight_decay=0.1)
CASES: dict[str, tuple[AbstractVersionPolicy, AbstractOptimizer]] = {
    "naive": (Naive(), SGDM),
    "stash": (Stash(), SGDM),
    "vertical sync": (VerticalSync(), SGDM),
    "double buffer": (DoubleBuffer(), SGDM),
    "spectrain 1": (SpecTrain(), SGDM),
    "spectrain 2": (SpecTrain(form=2), SGDM),
    "spectrain 2, authors": (SpecTrain(form=2, nesterov=True), SGDM),
    "stash, spike": (Stash(correction=Spike()), SGDM),
    "stash, gap-aware": (Stash(correction=GapAware()), SGDM),
    "pipemare": (PipeMare(), SGDM),
    "pipeoptim": (PipeOptim(), Adam(lr=0.01)),
    "pipeoptim, plain rmsprop": (PipeOptim(), RMSprop(lr=0.01)),
    "pipeoptim, offset": (PipeOptim(offset=1), Adam(lr=0.01)),
    "pipeoptim, zero": (PipeOptim(future="zero"), Adam(lr=0.01)),
    "pipeoptim, constant, decay": (
        PipeOptim(horizon_from="constant", decay=True),
        Adam(lr=0.01, weight_decay=0.1, decoupled=True),
    ),
}
STEPS = 10
"""Of these the pipeline of four stages is full from the fifth on."""


Moves = dict[tuple[int, str, int], tuple[int, int]]


def counted(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """(stage's memory, F, B or U, micro-batch or update) -> bytes moved there, operators started; filled while workers run."""
    found: Moves = {}

    def noted(kind: str, original: Callable[..., None], number: Callable[..., int]) -> Callable[..., None]:
        def run(self: AbstractVersions, *args: Any) -> None:
            with Moved() as moved:
                key = id(self), kind, number(self, *args)
                original(self, *args)
            found[key] = moved.bytes, moved.launches
            if kind == "B":
                last[id(self)] = key[2]

        return run

    for kind, name in (("F", "forward"), ("B", "backward")):
        original = getattr(AbstractVersions, name)
        monkeypatch.setattr(AbstractVersions, name, noted(kind, original, AbstractVersions.number))
    done, last = AbstractVersions.done, dict[int, int]()

    def taken(self: AbstractVersions, *args: Any) -> None:
        # What follows a backward counts as part of it.
        with Moved() as moved:
            done(self, *args)
        key = id(self), "B", last[id(self)]
        found[key] = found[key][0] + moved.bytes, found[key][1] + moved.launches

    monkeypatch.setattr(AbstractVersions, "done", taken)
    begin, update = AbstractVersions.begin, AbstractVersions.update

    def begun(self: AbstractVersions, *args: Any) -> None:
        step = self.optimizer.step

        def uncounted() -> None:
            with _disable_current_modes():
                step()

        self.optimizer.step = uncounted  # type: ignore[method-assign]
        begin(self, *args)

    monkeypatch.setattr(AbstractVersions, "begin", begun)
    monkeypatch.setattr(AbstractVersions, "update", noted("U", update, lambda self: self.version))
    return found


@pytest.mark.parametrize(("name", "accumulation"), thinned(product(CASES, (1, 8)), 9))
def test_the_bytes_that_a_policy_moves_are_those_that_are_charged(
    name: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = CASES[name]
    if accumulation < policy.least_accumulation(4):
        accumulation = 4
    if policy.correction and policy.correction.damping:
        accumulation = 1
    job, weights = make_job("Chain4", policy, optimizer, sizes=MINIBATCH // accumulation, steps=STEPS)
    problem = replace(inprocess.problem_of(job.captured, 4, MINIBATCH), graph=job.graph, optimizer=optimizer)
    charging, free = (replace(problem, regime=replace(problem.regime, weights=weights)) for weights in (policy, Naive()))
    found, whole = counted(monkeypatch), 0.0
    _, _, workers = inprocess.run(job, tmp_path, weights)
    last = STEPS - 4
    for worker in workers:
        for s, held in worker.weights.items():
            size, stage = sum(m.numel() * m.element_size() for m in held.masters), job.plan.stages[s]
            batch = range(last * accumulation, (last + 1) * accumulation)
            rows = [[found[id(held), kind, j] for j in batch] for kind in ("F", "B")] + [[found[id(held), "U", last]]]
            moved = [tuple(sum(each) / len(row) for each in zip(*row, strict=True)) for row in rows]
            bill, plain = (StageCost.of(of, stage, job.plan.depth) for of in (charging, free))
            charged = [bill.forward_s - plain.forward_s, bill.backward_s - plain.backward_s, bill.update_s - plain.update_s]
            device = problem.cluster.devices[stage.devices[0]]
            seconds = [problem.cost.move_s(amount, device) + device.kernel_latency_s * launches for amount, launches in moved]
            assert charged == pytest.approx(seconds, rel=1e-9, abs=1e-15), s
            assert bill.static_bytes == plain.static_bytes + policy.kept_factor(optimizer) * size
            assert bill.version_bytes == (held.copies - 1) * size
            whole += sum(amount for amount, _ in moved)
    assert (whole > 0) == (policy != Naive())
