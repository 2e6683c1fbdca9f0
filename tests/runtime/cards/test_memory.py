"""Races and memory that is reused too early: found in every order of execution, and named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch

from gpp.runtime.cards.card import CardStream
from tests.support.cards.card import ModelCard, run
from tests.support.cards.faults import Deadlock, EarlyReuse, Fault, Mismatch, Misuse, Race
from tests.support.cards.machine import Machine, Rule

Order = dict[str, Any]
ORDERS = [("eager", 0), ("lazy", 0), ("random", 0), ("random", 1)]
RUNS: list[Order] = [{"rule": rule, "policy": policy, "seed": seed} for rule in get_args(Rule) for policy, seed in ORDERS]
in_every_order = pytest.mark.parametrize("order", RUNS, ids=lambda order: "-".join(map(str, order.values())))


def on_card(program: Callable[[ModelCard], Any], **order: Any) -> Any:
    return run(Machine(**order), [program])[0]


@contextmanager
def aside(card: ModelCard) -> Iterator[CardStream]:
    """On a stream of its own, behind all that the compute stream has been given."""
    made, side = card.event(), card.stream()
    made.record()
    with card.use(side):
        made.wait()
        yield side


@in_every_order
def test_a_missing_event_is_a_race(order: Order) -> None:
    kept: list[torch.Tensor] = []

    def program(event: bool) -> Callable[[ModelCard], list[float]]:
        def run_(card: ModelCard) -> list[float]:
            kept.append(x := torch.zeros(4, device=card.device))
            with aside(card):
                x += 1
                done = card.event()
                done.record()
            if event:
                done.wait()
            return (x * 2).tolist()

        return run_

    assert on_card(program(True), **order) == [2.0] * 4
    with pytest.raises(
        Race, match=r"add_\.Tensor \(number 2 on stream 1 of worker 0\) writes to the memory of zeros \(16 bytes\)"
    ) as found:
        on_card(program(False), **order)
    assert "compute stream of worker 0 does not wait for an event recorded on stream 1 of worker 0 after add_.Tensor" in str(
        found.value
    )


@in_every_order
@pytest.mark.parametrize("wait", ["event", "stream", "device", "number", None])
def test_what_the_host_has_waited_for_is_over(order: Order, wait: str | None) -> None:
    """Streams need no event where the host stood between their operations."""
    kept: list[torch.Tensor] = []

    def stand(card: ModelCard, queue: CardStream | None, x: torch.Tensor) -> None:
        event = card.event()
        event.record()
        if wait == "stream" and queue is not None:
            queue.synchronize()
        elif wait == "device":
            card.device_wait()
        elif wait == "number":
            x.sum().item()
        elif wait is not None:
            event.synchronize()

    def program(card: ModelCard) -> list[float]:
        side, x = card.stream(), torch.zeros(4, device=card.device)
        kept.append(x)
        stand(card, None, x)
        with card.use(side):
            x += 1
            stand(card, side, x)
        return (x + 1).tolist()

    if wait is None:
        with pytest.raises(Race, match="on stream 1"):
            on_card(program, **order)
    else:
        assert on_card(program, **order) == [2.0] * 4


@in_every_order
def test_reads_do_not_race(order: Order) -> None:
    def program(card: ModelCard) -> None:
        x = torch.ones(4, device=card.device)
        made, sides = card.event(), [card.stream(), card.stream()]
        made.record()
        for side in sides:
            with card.use(side):
                made.wait()
                x.sum()
        card.device_wait()

    on_card(program, **order)


@in_every_order
@pytest.mark.parametrize("how", ["keep", "event", "query", "synchronize", "stream", "nothing", "keep elsewhere"])
def test_memory_goes_back_when_its_last_use_is_ordered(order: Order, how: str) -> None:
    def program(card: ModelCard) -> None:
        x = torch.ones(4, device=card.device)
        with aside(card) as side:
            y = x + 1
            done = card.event()
            done.record()
            if how == "keep":
                card.keep(x)
        if how == "keep elsewhere":
            card.keep(x, card.stream())
        if how == "event":
            done.wait()
        if how == "synchronize":
            done.synchronize()
        if how == "stream":
            side.synchronize()
        if how == "query":
            while not done.query():
                pass
        del x
        torch.zeros(4, device=card.device)
        card.device_wait()
        del y

    if how in ("nothing", "keep elsewhere"):
        words = r"memory of ones \(16 bytes\).* compute stream.*add\.Tensor|add\.Tensor .* uses the memory of ones .* went back"
        with pytest.raises(EarlyReuse, match=words):
            on_card(program, **order)
    else:
        on_card(program, **order)


def test_early_reuse_names_both_streams_and_the_missing_keep() -> None:
    def program(card: ModelCard) -> None:
        x = torch.ones(4, device=card.device)
        with aside(card) as side:
            x + 1
        side.synchronize()
        with card.use(side):
            x * 2
        del x
        torch.empty(1, device=card.device)

    with pytest.raises(EarlyReuse) as found:
        on_card(program, policy="eager")
    assert str(found.value) == (
        "the memory of ones (16 bytes) went back to compute stream of worker 0 and is handed out again while mul.Tensor (number 3 "
        "on stream 1 of worker 0) may still use it: record an event after mul.Tensor and make compute stream of worker 0 wait for "
        "it before the last reference goes, or call keep(tensor, stream 1)"
    )


def test_autograds_references_count() -> None:
    """What a backward still needs is not free, and is free after it."""

    def program(card: ModelCard) -> tuple[int, int, int]:
        w = torch.ones(1000, device=card.device, requires_grad=True)
        card.reset_peak()
        empty = card.host.live_bytes
        y = (w.exp() * 2).sum()
        held = card.host.live_bytes
        y.backward()
        w.grad = None
        del y
        return empty, held, card.host.live_bytes

    empty, held, after = on_card(program)
    assert empty == after == 4000 and held == 8004  # the exponential, and the sum


def test_peak_memory_counts_live_tensors() -> None:
    def program(card: ModelCard) -> tuple[int, int]:
        x = torch.zeros(1000, device=card.device)
        y = x + 1
        del x
        first = card.peak_memory_bytes()
        card.reset_peak()
        z = y[:10] + 1
        del y, z
        return first, card.peak_memory_bytes()

    assert on_card(program) == (8000, 4040)


@in_every_order
@pytest.mark.parametrize("wait", [True, False])
def test_fresh_memory_is_that_of_its_stream(order: Order, wait: bool) -> None:
    """What another stream writes into it must wait for whoever had it before."""

    kept: list[torch.Tensor] = []

    def program(card: ModelCard) -> None:
        x = torch.zeros(4, device=card.device)
        kept.append(buffer := torch.empty(4, device=card.device))
        made, side = card.event(), card.stream()
        made.record()
        with card.use(side):
            if wait:
                made.wait()
            buffer.fill_(1)
        card.device_wait()
        del x

    if wait:
        on_card(program, **order)
    else:
        with pytest.raises(
            Race,
            match=r"fill_\.Scalar .* uses the memory of empty.* which compute stream .* may still use for what it held",
        ):
            on_card(program, **order)


@in_every_order
@pytest.mark.parametrize("wait", [True, False])
def test_pinned_memory_stays_until_its_upload_is_over(order: Order, wait: bool) -> None:
    def program(card: ModelCard) -> list[float]:
        host = card.pinned(torch.ones(3))
        x = card.upload(host)
        done = card.event()
        done.record()
        if wait:
            done.synchronize()
        host.fill_(7)
        y = card.upload(host)
        return (x + y).tolist()

    if wait:
        assert on_card(program, **order) == [8.0] * 3
    else:
        with pytest.raises(Race, match=r"worker 0 writes to the memory of pinned memory \(12 bytes\) while upload \(number 1 on"):
            on_card(program, **order)


@in_every_order
@pytest.mark.parametrize("wait", [True, False])
def test_pinned_memory_is_read_after_its_download_is_over(order: Order, wait: bool) -> None:
    def program(card: ModelCard) -> list[float]:
        host = card.pinned(torch.zeros(3))
        host.copy_(torch.ones(3, device=card.device), non_blocking=True)
        done = card.event()
        done.record()
        if wait:
            done.synchronize()
        return host.tolist()

    if wait:
        assert on_card(program, **order) == [1.0] * 3
    else:
        with pytest.raises(Race, match=r"worker 0 reads the memory of pinned memory \(12 bytes\) while copy to main memory"):
            on_card(program, **order)


def test_only_pinned_memory_is_uploaded_while_the_host_goes_on() -> None:
    def program(pinned: bool) -> Callable[[ModelCard], dict[str, int]]:
        def run_(card: ModelCard) -> dict[str, int]:
            x = torch.ones(3)
            card.upload(card.pinned(x) if pinned else x)
            return dict(card.host.waits)

        return run_

    assert on_card(program(True)) == {}
    assert on_card(program(False)) == {"upload of memory that is not pinned": 1}


# Messages: worker 0 sends to worker 1.


def pair(sender: Callable[[ModelCard, Any], Any], receiver: Callable[[ModelCard, Any], Any], **options: Any) -> list[Any]:
    def program(part: Callable[[ModelCard, Any], Any]) -> Callable[[ModelCard], Any]:
        return lambda card: part(card, card.communicator([0, 1], "pair"))

    return run(Machine(**options), [program(sender), program(receiver)])


@in_every_order
@pytest.mark.parametrize(("how", "fault"), [("wait", None), ("drop", EarlyReuse), ("write", Race), ("hold", None)])
def test_what_is_sent_lives_until_it_is_sent(order: Order, how: str, fault: type[Fault] | None) -> None:
    kept: list[torch.Tensor] = []

    def sender(card: ModelCard, group: Any) -> object:
        x = torch.arange(4.0, device=card.device)
        work = group.send(x, 1)
        if how == "write":
            x += 1
        if how == "wait":
            work.wait()
        if how == "hold":
            return x
        if how == "write":
            kept.append(x)
        del x
        return torch.zeros(4, device=card.device)

    def receiver(card: ModelCard, group: Any) -> list[float]:
        x = torch.empty(4, device=card.device)
        group.receive(x, 0).wait()
        return x.tolist()

    if fault is None:
        assert pair(sender, receiver, **order)[1] == [0.0, 1.0, 2.0, 3.0]
    else:
        with pytest.raises(fault, match="send 0 to worker 1"):
            pair(sender, receiver, **order)


@in_every_order
def test_a_receive_is_awaited_before_it_is_read(order: Order) -> None:
    kept: list[torch.Tensor] = []

    def sender(card: ModelCard, group: Any) -> None:
        x = torch.arange(4.0, device=card.device)
        group.send(x, 1).wait()

    def receiver(card: ModelCard, group: Any) -> list[float]:
        kept.append(x := torch.empty(4, device=card.device))
        group.receive(x, 0)
        return x.tolist()

    with pytest.raises(
        Race, match=r"receive 0 from worker 0 \(number 1 on communicator pair of worker 1\) writes to the memory of empty"
    ):
        pair(sender, receiver, **order)


@in_every_order
def test_a_message_waits_for_what_was_queued_on_the_current_stream(order: Order) -> None:
    """And for nothing on other streams."""

    def sender(aside: bool) -> Callable[[ModelCard, Any], None]:
        def run_(card: ModelCard, group: Any) -> None:
            side = card.stream()
            x = torch.zeros(4, device=card.device)
            side_may_go = card.event()
            side_may_go.record()
            with card.use(side):
                side_may_go.wait()
                x += 1
                work = None if aside else group.send(x, 1)
            (work or group.send(x, 1)).wait()
            side.synchronize()

        return run_

    def receiver(card: ModelCard, group: Any) -> list[float]:
        x = torch.empty(4, device=card.device)
        group.receive(x, 0).wait()
        return x.tolist()

    assert pair(sender(False), receiver, **order)[1] == [1.0] * 4
    with pytest.raises(Race, match="does not wait for an event recorded on stream 1"):
        pair(sender(True), receiver, **order)


def there_and_back(way: str) -> None:
    """Worker 1 makes x aside and exchanges a message from there, then one on its compute stream, and reads x there."""

    def zero(card: ModelCard) -> None:
        first, second = card.communicator([0, 1], "first"), card.communicator([0, 1], "second")
        assert first and second
        x = torch.zeros(1, device=card.device)
        (first.send(x, 1) if way == "down" else first.receive(x, 1)).wait()
        second.send(x, 1).wait()

    def one(card: ModelCard) -> list[float]:
        first, second = card.communicator([0, 1], "first"), card.communicator([0, 1], "second")
        assert first and second
        x, y = torch.zeros(2, device=card.device).chunk(2)
        with aside(card):
            x += 1
            work = first.receive(x, 0) if way == "down" else first.send(x, 0)
        second.receive(y, 0).wait()
        found = (x + 1).tolist()
        work.wait()
        return found

    run(Machine(), [zero, one])


def test_a_message_orders_what_comes_after_its_receive_and_not_after_its_send() -> None:
    there_and_back("up")
    with pytest.raises(Race, match=r"add_\.Tensor|receive 0 from worker 0"):
        there_and_back("down")


def test_messages_of_other_sizes_and_forms_are_refused() -> None:
    def sends(x: Callable[[torch.device], torch.Tensor]) -> Callable[[ModelCard, Any], None]:
        def run_(card: ModelCard, group: Any) -> None:
            tensor = x(card.device)
            (group.send(tensor, 1) if card.host.rank == 0 else group.receive(tensor, 0)).wait()

        return run_

    four = sends(lambda device: torch.zeros(4, device=device))
    pair(four, sends(lambda device: torch.zeros(2, 2, device=device)))
    with pytest.raises(
        Mismatch, match=r"4 values of torch.float32.* message 0 from 0 to 1 on communicator pair with 5|5 values of .* with 4"
    ):
        pair(four, sends(lambda device: torch.zeros(5, device=device)))
    with pytest.raises(Mismatch, match=r"torch\.float64"):
        pair(four, sends(lambda device: torch.zeros(4, device=device, dtype=torch.float64)))
    with pytest.raises(Misuse, match="not contiguous"):
        pair(sends(lambda device: torch.zeros(4, 2, device=device)[:, 0]), four)
    with pytest.raises(Misuse, match="does not lie on this card"):
        pair(sends(lambda device: torch.zeros(4)), four)


@in_every_order
def test_sums_add_in_the_order_of_workers(order: Order) -> None:
    values = [torch.full((3,), value) for value in (1.0, 1e8, -1e8)]

    def program(card: ModelCard) -> list[float] | None:
        group = card.communicator([2, 0, 1], "sum")
        assert group is not None
        x = card.upload(values[card.host.rank])
        group.sum(x).wait()
        return x.tolist()

    found = run(Machine(**order), [program] * 3)
    assert found == [((values[0] + values[1]) + values[2]).tolist()] * 3


@pytest.mark.parametrize("reader", [0, 1])
def test_a_sum_orders_what_follows_it_anywhere(reader: int) -> None:
    """One worker writes aside before a sum; the other's message after the sum says that it may be read."""

    def program(card: ModelCard) -> list[float] | None:
        both, back = card.communicator([0, 1], "both"), card.communicator([0, 1], "back")
        assert both and back
        x, y = torch.zeros(1, device=card.device), torch.zeros(1, device=card.device)
        ready, side = card.event(), card.stream()
        ready.record()
        if card.host.rank != reader:
            both.sum(y).wait()
            back.send(y, reader).wait()
            return None
        with card.use(side):
            ready.wait()
            x += 1
            work = both.sum(y)
        message = torch.zeros(1, device=card.device)
        back.receive(message, 1 - reader).wait()
        found = (x + message).tolist()
        work.wait()
        return found

    assert run(Machine(), [program] * 2)[reader] == [1.0]


@pytest.mark.parametrize("what", ["message", "sum"])
def test_the_host_waits_for_the_others_at_a_first_use_alone(what: str) -> None:
    def program(card: ModelCard) -> list[int]:
        group = card.communicator([0, 1], "pair")
        assert group is not None
        x, met = torch.zeros(1, device=card.device), [card.host.waits["meeting"]]
        for _ in range(2):
            (group.sum(x) if what == "sum" else group.receive(x, 0) if card.host.rank else group.send(x, 1)).wait()
            met.append(card.host.waits["meeting"])
        return met

    assert run(Machine(), [program] * 2) == [[1, 2, 2]] * 2


def test_a_worker_that_is_no_member_gets_no_communicator() -> None:
    assert run(Machine(), [lambda card: card.communicator([0, 2], "pair") is None] * 3) == [False, True, False]


def test_another_workers_memory_is_refused() -> None:
    box: list[torch.Tensor] = []

    def first(card: ModelCard) -> None:
        box.append(torch.ones(2, device=card.device))
        card.communicator([0, 1], "pair")

    def second(card: ModelCard) -> None:
        card.communicator([0, 1], "pair")
        box[0] + 1

    with pytest.raises(Misuse, match=r"worker 1 uses the memory of ones .* which lies on the card of worker 0"):
        run(Machine(), [first, second])


def test_events() -> None:
    def program(card: ModelCard) -> tuple[bool, bool, float]:
        start, end = card.event(timed=True), card.event(timed=True)
        start.record()
        for _ in range(5):
            torch.zeros(2, device=card.device)
        end.record()
        before = end.query()
        end.synchronize()
        with pytest.raises(Misuse, match="records an event twice"):
            end.record()
        with pytest.raises(Misuse, match="not recorded"):
            card.event().wait()
        with pytest.raises(Misuse, match="not timed"):
            plain = card.event()
            plain.record()
            card.seconds(start, plain)
        return before, end.query(), card.seconds(start, end)

    before, after, time_s = on_card(program, policy="lazy")
    assert not before and after and time_s == pytest.approx(5e-6)


def test_a_host_that_asks_for_ever_is_a_deadlock() -> None:
    def program(card: ModelCard) -> None:
        group = card.communicator([0, 1], "pair")
        assert group is not None
        x = torch.ones(2, device=card.device)
        work = group.send(x, 1 - card.host.rank)
        while not work.is_completed():
            pass

    with pytest.raises(Deadlock, match=r"worker 1 waits for send 0 to worker 0 \(.*\), for which it asks again and again"):
        run(Machine(), [program] * 2)


def test_a_failure_of_one_worker_ends_all() -> None:
    ended: list[int] = []

    def program(card: ModelCard) -> None:
        group = card.communicator([0, 1], "pair")
        assert group is not None
        x = torch.ones(2, device=card.device)
        try:
            if card.host.rank:
                raise ValueError("mine")
            group.receive(x, 1).wait()
            x.tolist()
        finally:
            ended.append(card.host.rank)

    with pytest.raises(ValueError, match="mine"):
        run(Machine(), [program] * 2)
    assert sorted(ended) == [0, 1]


def test_a_kernel_that_fails_ends_all() -> None:
    def program(card: ModelCard) -> None:
        index = card.upload(torch.tensor([0, 9]))
        torch.zeros(3, device=card.device)[index].tolist()

    with pytest.raises(IndexError):
        run(Machine(), [program] * 2)
