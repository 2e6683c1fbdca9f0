"""The peak that the allocator's events give, against tensors whose lives are known."""

import threading
from pathlib import Path

import torch

from gpp import Adam, GPipe
from gpp.cost.regime import Regime
from gpp.plan.build import make_plan
from gpp.runtime.worker.allocator import MemoryEvents, storage_bytes
from tests.support import inprocess

KIB = 256  # float32 numbers


def test_the_peak_is_that_of_what_was_alive_at_once() -> None:
    lent: list[bool] = []
    held = torch.zeros(3 * KIB)
    events = MemoryEvents(lent.append)
    events.end()
    assert not lent, "nobody listened"
    # A storage counts once and as a whole, whoever looks at a part of it.
    events.begin([held, held[:KIB], held.view(3, KIB)])
    assert lent == [False]
    first = torch.zeros(10 * KIB)
    del first
    second, third = torch.zeros(4 * KIB), torch.zeros(5 * KIB)
    del second
    fourth = torch.zeros(4 * KIB)
    events.end()
    fifth = torch.zeros(100 * KIB)
    assert events.peak_bytes == (3 + 10) * 1024 and lent == [False, True]
    events.end()
    assert events.peak_bytes == (3 + 10) * 1024, "the end comes once"
    assert storage_bytes([third, fourth[1:], fifth]) == 109 * 1024


def test_what_goes_on_apart_is_not_counted() -> None:
    """The copy that a checkpoint is written from stays, and what is let go of later is heard."""
    events = MemoryEvents(lambda allowed: None)
    with events.apart():
        assert len(torch.zeros(KIB)), "nobody listens"
    events.begin([])
    first = torch.zeros(4 * KIB)
    with events.apart():
        copy = torch.zeros(100 * KIB)
    del first
    second = torch.zeros(3 * KIB)
    assert events.drain() and events.held_bytes == 3 * 1024
    events.end()
    assert events.peak_bytes == 4 * 1024 and storage_bytes([copy, second]) == 103 * 1024


def test_a_backward_counts_with_its_temporaries() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(32, 64)
    events = MemoryEvents(lambda allowed: None)
    events.begin([weight])
    (x @ weight).relu().sum().backward()
    events.end()
    # Fullest when the product's backward makes the weight's gradient: both, and the product's; some scalars.
    assert 0 <= events.peak_bytes - 4 * (2 * 64 * 64 + 32 * 64) <= 256


def test_each_thread_hears_its_own() -> None:
    peaks: dict[int, int] = {}
    together = threading.Barrier(2)

    def listen(size: int) -> None:
        events = MemoryEvents(lambda allowed: None)
        together.wait(30)
        events.begin([])
        kept = torch.zeros(size * KIB)
        together.wait(30)
        events.end()
        peaks[size] = events.peak_bytes
        assert len(kept)

    threads = [threading.Thread(target=listen, args=(size,)) for size in (3, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peaks == {3: 3 * 1024, 50: 50 * 1024}


def test_a_worker_holds_what_its_bill_says(tmp_path: Path) -> None:
    """All micro-batches in flight: a loss holds a number, though PyTorch makes it in the memory of all squared errors, and the sums
    of gradients are not there yet."""
    model, captured, weights = inprocess.captured_named("mlp")
    schedule = GPipe()
    problem = inprocess.problem_of(captured, 1, 64, regime=Regime(holds=schedule.holds), optimizer_state_factor=2.0)
    plan = make_plan(problem, "test", [(problem.graph.all_mask, 1)], 8)
    job = inprocess.make_job(captured, problem, plan, schedule, model=model, optimizer=Adam(lr=1e-3))
    job.save(tmp_path, weights)
    (worker,) = inprocess.workers_of(job, tmp_path)
    worker._listens = True
    for step in range(2):
        worker.train(step, 1, lambda record: None)
    (bill,) = plan.bills(problem)
    # The last step has no mini-batch after it, whose rows would be there.
    most = bill.memory.peak(8) - problem.minibatch_size * problem.sums(problem.graph.all_mask).rows
    assert 0.99 * most <= worker.memory.peak_bytes <= most + 1000
