"""Frozen towers: no backward passes, no gradients, no messages backwards, nothing kept; neither run nor predicted."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpp import SGD, GPipe, OneFOneB
from gpp.cost.regime import Regime
from gpp.data.synthetic import Synthetic
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.runtime.worker.messages import most_sends
from gpp.schedules.base import AbstractSchedule
from gpp.simulate.recurrence import can_score, score
from gpp.simulate.simulator import simulate
from tests.support import inprocess
from tests.support.bills import peak_bytes
from tests.support.fake_transport import FakeTransport
from tests.support.graphs import chain, problem
from tests.support.programs import lower
from tests.support.staged import captured, parts_of, problem_of

DATA, OPTIMIZER = Synthetic(num_samples=32, num_test_samples=8), SGD(lr=0.05, momentum=0.9)
FROZEN = (0, 1, 2)
"""Stages of the plan below: two of the image tower, one of the token embedding."""


def planned(schedule: AbstractSchedule, *, chain: bool = False):
    model, found, weights = inprocess.captured_named("llava_small", "model.frozen=towers")
    of = inprocess.problem_of(found, 4, 8, max_ops=24, regime=Regime(holds=schedule.holds))
    frozen = [i for i in range(of.graph.num_ops) if not of.graph.differentiated >> i & 1]
    image = [i for i in frozen if of.graph.ops[i].name.startswith("image")]
    tokens = [i for i in frozen if i not in image]
    half = len(image) // 2
    rest = of.graph.all_mask & ~mask_of(frozen)
    assert half and tokens
    parts = [mask_of(image[:half]), mask_of(image[half:]), mask_of(tokens), rest]
    plan = make_plan(of, "test", [(mask, 1) for mask in parts], 2, ordered=True, chain=chain)
    return model, found, weights, of, plan


@pytest.mark.parametrize(("schedule", "chained"), [(OneFOneB(), False), (GPipe(), True)], ids=["1F1B", "GPipe, chained"])
def test_frozen_towers_of_llava_send_nothing_back_and_keep_nothing(
    schedule: AbstractSchedule, chained: bool, tmp_path: Path
) -> None:
    model, found, weights, of, plan = planned(schedule, chain=chained)
    job = inprocess.make_job(found, of, plan, schedule, model=model, data=DATA, optimizer=OPTIMIZER, steps=2)
    for s in FROZEN:
        kinds = {action.kind for action in job.program.actions[s]}
        assert not kinds & {"B", "SB", "RB", "R"}, kinds
    assert {"F", "B"} <= {action.kind for action in job.program.actions[3]}
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    (tmp_path / "ranks").mkdir()
    records = [record for record in inprocess.courses(workers) if "step" in record]
    predicted = simulate(job.program, plan, of)
    sent = 0
    for worker in workers:
        events = worker.kept[-1]["events"]
        sent += sum(event.num_bytes for event in events if event.kind in ("SF", "SB"))
        if worker.device_id in FROZEN:
            assert not [event for event in events if event.kind in ("B", "SB")]
            assert all(p.grad is None for p in worker.params.values())
            held = worker.training.runners[worker.device_id]
            assert not held.train and not held._passes, "nothing is kept for a backward"
    assert sent == predicted.metrics.communication_bytes > 0
    losses = [sum(r.get("loss", 0.0) for r in records if r["step"] == step) for step in range(2)]
    expected, params = inprocess.reference_of(job, weights)
    assert losses == pytest.approx(expected, abs=1e-9)
    for worker in workers:
        for name, param in worker.params.items():
            torch.testing.assert_close(param.detach(), params[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=lambda s: type(s).__name__)
def test_the_prediction_has_no_backward_of_frozen_stages(schedule: AbstractSchedule) -> None:
    *_, of, plan = planned(schedule)
    program = lower(plan, of.graph, schedule)
    timeline = simulate(program, plan, of)
    assert {event.stage for event in timeline.events if event.kind == "B"} == {3}
    held = timeline.metrics.max_in_flight_samples
    assert [held[s] for s in FROZEN] == [2, 2, 2]
    for s in FROZEN:
        # one micro-batch's boundary, whatever the number of micro-batches
        one = peak_bytes(of, plan.stages[s].ops, 2, 1, 2)
        assert timeline.metrics.peak_memory_bytes[s] == round(one) == round(peak_bytes(of, plan.stages[s].ops, 2, 1, 8))
        assert of.stage_times(plan.stages[s].ops, 2, (s,))[1] == 0
    warmups = [schedule.warmup(plan, s, 4) for s in range(4)]
    assert can_score(plan, warmups)
    fast = score(plan, of, [w for w in warmups if w is not None]).metrics
    assert fast.max_in_flight_samples == held and fast.peak_memory_bytes == timeline.metrics.peak_memory_bytes
    assert fast.communication_bytes == timeline.metrics.communication_bytes
    assert fast.iteration_s == pytest.approx(timeline.metrics.iteration_s, rel=1e-9)


def test_a_frozen_start_of_a_chain_streams() -> None:
    """A frozen first stage of time 1 runs ahead of a trained second one of 1 + 2, into the next step too: a step takes 3 m."""
    base = chain(2)
    ops = (replace(base.ops[0], backward_flops=0.0, saved_bytes=0.0), base.ops[1])
    frozen = replace(base, ops=ops, tensors=(replace(base.tensors[0], differentiable=False),))
    assert frozen.differentiated == 0b10 and base.differentiated == 0b11
    of = problem(frozen, 2, 6)
    plan = make_plan(of, "test", [(1, 1), (2, 1)], 1)
    assert simulate(lower(plan, frozen, OneFOneB()), plan, of).metrics.iteration_s == pytest.approx(3 * 6)
    # what a pass costs at the least is not charged for one that there is not
    fixed = problem(frozen, 2, 6, fixed_s=0.5)
    metrics = [simulate(lower(plan, frozen, OneFOneB()), plan, fixed).metrics, score(plan, fixed, [2, 1]).metrics]
    assert metrics[0] == metrics[1] and metrics[0].iteration_s == pytest.approx(4.0 * 6)


def test_an_output_that_others_save_is_not_a_backward_of_its_own() -> None:
    """The frozen layer's activation is saved by the trained layer that reads it."""
    _, found, _ = captured("FrozenSkip")
    first = parts_of(found.graph)[0]
    assert any(op.saved_bytes > 0 for i, op in enumerate(found.graph.ops) if first >> i & 1)
    assert not first & found.graph.differentiated and found.graph.all_mask & ~first == found.graph.differentiated


class Narrow:
    """A transport whose sends are under way until they have been read, and which counts them."""

    def __init__(self, inner: FakeTransport, device: int) -> None:
        self.inner, self.device, self.most = inner, device, 0
        self.post, self.send, self.reduce, self.prepare = inner.post, inner.send, inner.reduce, inner.prepare
        self.finished = inner.finished

    def waiting(self) -> int:
        queues = self.inner._network.queues
        return sum(queues[channel].qsize() for channel in list(queues) if channel[3] == self.device)

    def flush(self, limit: int = 0) -> None:
        self.most = max(self.most, self.waiting())
        deadline = time.monotonic() + 30
        while self.waiting() > limit:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(1e-4)


@pytest.mark.parametrize(("schedule", "k"), [(OneFOneB(), 1), (OneFOneB(), 2), (GPipe(), 1)])
@pytest.mark.parametrize("network", ["Frozen", "FrozenSkip"])
def test_a_frozen_tower_does_not_run_far_ahead(network: str, schedule: AbstractSchedule, k: int, tmp_path: Path) -> None:
    """24 micro-batches: unbounded, the tower would have them all under way; bounded, nobody starves."""
    model, found, weights = captured(network)
    masks = parts_of(found.graph)
    of = replace(problem_of(found, schedule, len(masks)), minibatch_size=24)
    plan = make_plan(of, "test", [(mask, 1) for mask in masks], 1, k=k, ordered=True)
    data = Synthetic(num_samples=24, num_test_samples=8)
    job = inprocess.make_job(found, of, plan, schedule, model=model, data=data, optimizer=OPTIMIZER)
    limits = [most_sends(job.program.actions[s], plan) for s in range(len(masks))]
    assert limits[0] is not None and limits[-1] is None
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    narrow = []
    for worker in workers:
        assert isinstance(worker.seat.transport, FakeTransport)
        narrow.append(Narrow(worker.seat.transport, worker.device_id))
        for part in (worker, worker.training, *worker.training.mailboxes.values()):
            part.transport = narrow[-1]  # pyright: ignore[reportAttributeAccessIssue]
    inprocess.in_threads([lambda w=w: [w.train(step, 1, lambda record: None) for step in range(2)] for w in workers])
    _, params = inprocess.reference_of(job, weights)
    for worker in workers:
        for name, param in worker.params.items():
            torch.testing.assert_close(param.detach(), params[name], rtol=0, atol=1e-8)
    if not schedule.holds.everything:
        per_microbatch = 2 if network == "FrozenSkip" else 1
        assert limits[0] < 24 * per_microbatch
        assert narrow[0].most <= limits[0] + per_microbatch
