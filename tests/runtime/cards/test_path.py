"""The real workers on cards of the stream model: one device's losses and weights, and no wait of a host inside a step.

`python -m tests.checks.card_path` runs every case under every schedule, rule and policy of the model; here each runs once.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import SGD, Adam, Flush
from gpp.runtime.job import Job
from gpp.runtime.transport.cards import CardTransport
from gpp.runtime.transport.channels import Handle
from gpp.runtime.worker import worker as worker_module
from gpp.runtime.worker.stage import Span, StageRunner
from gpp.runtime.worker.worker import Worker
from gpp.weights.base import AbstractWeights
from tests.mechanisms.tensor_parallel import test_worker as tensor_parallel
from tests.mechanisms.weight_versions.test_async_equality import POLICIES, followed
from tests.runtime import test_equality as equality
from tests.support import asynchronous, inprocess, on_cards
from tests.support.cards.card import ModelCard
from tests.support.cards.machine import Machine, Policy, Rule
from tests.support.long import thinned
from tests.support.staged import OPTIMIZER, SCHEDULES

WAYS: list[tuple[Rule, Policy]] = [(rule, policy) for rule in ("streams", "one_queue") for policy in ("random", "lazy", "eager")]
STEPS = 2
READ = "result of _local_scalar_dense"


def check_drained(name: str, schedule: str, machine: Machine, folder: Path, *, clip: bool = False) -> None:
    """A case of the equality matrix, with evaluations, equals one device."""
    optimizer = replace(OPTIMIZER, clip_norm=0.05 if clip else None)
    job, weights = equality.CASES[name].job(schedule, optimizer=optimizer, settings={"held_out": 8, "device_kind": "cuda"})
    out = on_cards.train(job, folder, weights, machine)
    draws = equality.CASES[name].network == "Dropping"
    expected, params = (inprocess.staged_reference if draws else inprocess.reference_of)(job, weights)
    assert out.losses == pytest.approx(expected, abs=1e-9)
    assert set(out.evaluations) == {STEPS}
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(out.weights[tensor_name], tensor, rtol=0, atol=1e-8, msg=lambda m, n=tensor_name: f"{n}: {m}")
    assert not machine.findings


def check_continuous(
    network: str, policy: AbstractWeights, replicas: tuple[int, ...] | None, machine: Machine, folder: Path
) -> None:
    """A pipeline that does not drain but for an evaluation equals the loop in one process, bit for bit."""
    settings = {"steps": 7, "held_out": asynchronous.HELD_OUT, "evaluate_every": 4}
    job, weights = asynchronous.make_job(network, policy, Adam(lr=0.01), replicas=replicas, sizes=2, device_kind="cuda", **settings)
    out, expected = on_cards.train(job, folder, weights, machine), followed(job, weights)
    assert out.losses == expected.losses
    assert out.evaluations == {e["step"]: {k: v for k, v in e.items() if k != "step"} for e in expected.evaluations}
    for name, tensor in out.weights.items():
        assert torch.equal(tensor, expected.state[name]), name
    assert not machine.findings


def _rotated(names: Iterable[str], others: Iterable[str]) -> list[tuple[str, str, Rule, Policy]]:
    """Every name once, with the next of the others and the next way of the model."""
    return [(name, other, *way) for name, other, way in zip(names, cycle(others), cycle(WAYS), strict=False)]


# One in seven: every schedule, and every way of the model; the others differ in what these have, too.
@pytest.mark.parametrize(("name", "schedule", "rule", "policy"), thinned(_rotated(equality.CASES, SCHEDULES), 7))
def test_pipelines_that_drain_equal_one_device(name: str, schedule: str, rule: Rule, policy: Policy, tmp_path: Path) -> None:
    check_drained(name, schedule, Machine(rule=rule, policy=policy), tmp_path)


@pytest.mark.parametrize(
    ("name", "rule"),
    thinned(
        product(
            ("two stages on replicated devices", "tied weights, replicas", "in turn, unequal micro-batches"),
            ("streams", "one_queue"),
        ),
        3,
    ),
)
def test_clipping_by_the_norm_of_all_stages_equals_one_device(name: str, rule: Rule, tmp_path: Path) -> None:
    check_drained(name, "1F1B", Machine(rule=rule), tmp_path, clip=True)


SHAPES = {"chain": ("Chain4", None), "fork": ("Fork", None), "replicas": ("Chain", (1, 2, 1))}


@pytest.mark.parametrize(("name", "shape", "rule", "policy"), thinned(_rotated(POLICIES, SHAPES), 5))
def test_pipelines_that_do_not_drain_equal_the_loop(name: str, shape: str, rule: Rule, policy: Policy, tmp_path: Path) -> None:
    network, replicas = SHAPES[shape]
    check_continuous(network, POLICIES[name], replicas, Machine(rule=rule, policy=policy), tmp_path)


@pytest.mark.parametrize("name", thinned(["stash", "flush"]))
def test_a_resumed_run_is_equal_bit_for_bit(name: str, tmp_path: Path) -> None:
    def job_of(**settings: Any) -> tuple[Job, dict[str, torch.Tensor]]:
        policy = POLICIES.get(name, Flush())
        return asynchronous.make_job("Fork", policy, Adam(lr=0.01), sizes=2, steps=6, device_kind="cuda", **settings)

    whole, weights = job_of(checkpoint_every=3, checkpoint_keep=5)
    out = on_cards.train(whole, tmp_path / "whole", weights)
    rest, _ = job_of(resume=str(tmp_path / "whole" / "checkpoints" / "step_3"), first_step=3)
    again = on_cards.train(rest, tmp_path / "rest", weights, Machine(rule="one_queue"))
    assert again.losses == out.losses[3:]
    assert out.weights.keys() == again.weights.keys()
    assert all(torch.equal(tensor, again.weights[key]) for key, tensor in out.weights.items())


def test_no_host_waits_inside_a_step(tmp_path: Path) -> None:
    """From the first action of a step to the last one that is issued; then one number is read, however many passes there were."""
    inside: list[int] = []
    between: list[int] = []

    def counted(worker: Worker) -> None:
        interpreter, card = worker.training, worker.card
        assert isinstance(card, ModelCard)
        run, issued = interpreter.run, interpreter.beside.issued
        before, read = [0], [-1]

        def begin(*words: Any) -> None:
            before[0] = card.host.waits.total()
            if read[0] >= 0:
                between.append(card.host.waits[READ] - read[0])
            run(*words)

        def end() -> None:
            inside.append(card.host.waits.total() - before[0])
            read[0] = card.host.waits[READ]
            assert issued
            issued()

        interpreter.run, interpreter.beside = begin, replace(interpreter.beside, issued=end)

    for size in (1, 4):
        job, weights = asynchronous.make_job(
            "Fork", Flush(), SGD(lr=0.1, momentum=0.9, clip_norm=0.1), sizes=size, steps=4, device_kind="cuda"
        )
        on_cards.train(job, tmp_path / str(size), weights, change=counted)
    assert len(inside) == 2 * 4 * 4 and not any(inside)
    assert max(between) <= 2  # the norm of the gradients, which the clipping has made, and the loss on the device that has one


@pytest.mark.parametrize(("rule", "policy"), thinned([("streams", "random"), ("one_queue", "lazy")]))
@pytest.mark.parametrize("name", thinned(["unequal replicas", "tied weights, replicas", "two stages on replicated devices"], 3))
def test_sums_begin_inside_the_backward_that_completes_them(
    name: str, rule: Rule, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[bool] = []
    reduce, backward = CardTransport.reduce, StageRunner.backward
    running: set[int] = set()

    def noted_reduce(self: CardTransport, group: int, tensor: torch.Tensor) -> Handle:
        inside.append(threading.get_ident() in running)
        return reduce(self, group, tensor)

    def noted_backward(self: StageRunner, microbatch: int) -> Span | None:
        running.add(threading.get_ident())
        try:
            return backward(self, microbatch)
        finally:
            running.discard(threading.get_ident())

    monkeypatch.setattr(CardTransport, "reduce", noted_reduce)
    monkeypatch.setattr(StageRunner, "backward", noted_backward)
    monkeypatch.setattr(worker_module, "BUCKET_BYTES", 64)
    check_drained(name, "1F1B", Machine(rule=rule, policy=policy), tmp_path, clip=True)
    assert any(inside)


def check_split(case: str, machine: Machine, folder: Path) -> None:
    """Stages whose operators are split: passes add up tensors in their midst, on communicators of their own."""
    job, weights = tensor_parallel.prepared(*tensor_parallel.CASES[case], device_kind="cuda")
    out = on_cards.train(job, folder, weights, machine)
    expected, params = inprocess.reference_of(job, weights)
    assert out.losses == pytest.approx(expected, abs=1e-12)
    for name, tensor in params.items():
        torch.testing.assert_close(out.weights[name], tensor, rtol=0, atol=1e-11)
    assert not machine.findings


@pytest.mark.parametrize(
    ("case", "rule"), thinned([("mlp, 4", "one_queue"), ("a chain, replicas", "one_queue"), ("towers, replicas", "streams")], 3)
)
def test_split_stages_equal_one_device(case: str, rule: Rule, tmp_path: Path) -> None:
    check_split(case, Machine(rule=rule), tmp_path)
