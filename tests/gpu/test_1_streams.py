"""First on a new card: streams, events, pinned memory and the allocator keep the rules on which the runtime is built.

The same programs run on the model of a card, which the proofs rest on.
"""

from collections.abc import Callable

import pytest
import torch

from gpp.runtime.cards.card import AbstractCard, CudaCard
from tests.gpu.places import CPU, ONE, Place
from tests.support.cards.card import run
from tests.support.cards.machine import Machine

HERE = [CPU, pytest.param(ONE, marks=pytest.mark.gpu)]
SIZE, LARGE = 64, 4096


def on(place: Place, program: Callable[[AbstractCard], None]) -> None:
    """Run a worker's program on a card: a real one, or the model's."""
    if place.on_card:
        torch.cuda.set_device(0)
        program(CudaCard(torch.device("cuda", 0)))
        torch.cuda.synchronize()
    else:
        run(Machine(), [program])


def filled(card: AbstractCard, value: float, size: int = SIZE) -> torch.Tensor:
    return card.upload(card.pinned(torch.full((size, size), value, dtype=torch.float64)))


def read(card: AbstractCard, tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds when everything queued so far on the current stream is done."""
    done = card.event()
    done.record()
    done.synchronize()
    return tensor.cpu()


@pytest.mark.parametrize("place", HERE, indirect=True)
def test_a_stream_runs_in_order(place: Place) -> None:
    def program(card: AbstractCard) -> None:
        tensor = filled(card, 1.0)
        for _ in range(20):
            tensor = tensor * 2.0 - 1.0
            tensor += 1.0
        assert read(card, tensor).unique().tolist() == [2.0**20]

    on(place, program)


@pytest.mark.parametrize("place", HERE, indirect=True)
def test_an_event_orders_two_streams(place: Place) -> None:
    def program(card: AbstractCard) -> None:
        side = card.stream()
        source = filled(card, 3.0)
        ready = card.event()
        ready.record()
        with card.use(side):
            ready.wait()
            card.keep(source)
            made = source
            for _ in range(30):
                made = made + 1.0
            done = card.event()
            done.record()
        done.wait()
        card.keep(made)
        assert read(card, made * 2.0).unique().tolist() == [66.0]

    on(place, program)


@pytest.mark.parametrize("place", HERE, indirect=True)
def test_memory_of_a_side_stream_that_is_kept_is_not_handed_out_again(place: Place) -> None:
    """As a receive's buffer: made on a stream of its own, read by the compute stream, dropped at once."""

    def program(card: AbstractCard) -> None:
        side = card.stream()
        sums = []
        for number in range(8):
            with card.use(side):
                buffer = filled(card, float(number))
                arrived = card.event()
                arrived.record()
            arrived.wait()
            card.keep(buffer)
            work = buffer
            for _ in range(10):
                work = work + 0.0
            sums.append(work.sum())
            del buffer, work
        assert [read(card, total).item() for total in sums] == [float(number * SIZE * SIZE) for number in range(8)]

    on(place, program)


@pytest.mark.parametrize("place", HERE, indirect=True)
def test_the_host_runs_ahead_and_events_tell_when_the_card_is_done(place: Place) -> None:
    def program(card: AbstractCard) -> None:
        tensor = filled(card, 1e-4, LARGE if place.on_card else SIZE)
        start, end = card.event(timed=True), card.event(timed=True)
        start.record()
        for _ in range(20):
            tensor = tensor @ tensor
        end.record()
        ahead = not end.query()
        end.synchronize()
        assert ahead and end.query()
        if place.on_card:  # the model's clock does not run
            assert card.seconds(start, end) > 0

    on(place, program)


@pytest.mark.parametrize("place", HERE, indirect=True)
def test_the_peak_of_memory_is_that_of_the_live_tensors(place: Place) -> None:
    def program(card: AbstractCard) -> None:
        num_bytes = SIZE * SIZE * 8
        first = filled(card, 1.0)
        card.reset_peak()
        second = first + 1.0
        third = second + 1.0
        read(card, third)
        assert card.peak_memory_bytes() >= 3 * num_bytes
        del first, second, third

    on(place, program)
