"""The rules of streams, events and communicators, on operations that compute nothing."""

from collections.abc import Callable, Generator
from typing import get_args

import pytest

from tests.support.cards.faults import Deadlock, Mismatch, Misuse
from tests.support.cards.hosts import AbstractHost, Wait
from tests.support.cards.machine import Machine, Policy, Rule
from tests.support.cards.meetings import Group

Program = Generator[Wait | None, None, object]
ORDERS: list[tuple[Policy, int]] = [("eager", 0), ("lazy", 0), ("random", 0), ("random", 1)]
RUNS = [(rule, *order) for rule in get_args(Rule) for order in ORDERS]


def each(*programs: Callable[[AbstractHost], Program], rule: Rule, policy: Policy = "random", seed: int = 0) -> Machine:
    machine = Machine(rule=rule, policy=policy, seed=seed)
    for program in programs:
        machine.generator(program)
    machine.run()
    return machine


def met(host: AbstractHost, ranks: list[int], name: str, first: bool = True) -> Generator[Wait | None, None, Group]:
    """A communicator over whose connections a first message has gone."""
    group, wait = host.machine.gather(host, ranks, name)  # pyright: ignore[reportAttributeAccessIssue]
    yield wait
    for low in ranks if first and host.rank in ranks else []:
        for high in ranks:
            if low < high and host.rank in (low, high):
                yield group.connect(host, low + high - host.rank)
                op = group.send(host, high) if host.rank == low else group.receive(host, low)
                yield host.until([op], "first message")
    return group


def exchange(order: dict[int, str], *, groups: int = 1) -> Callable[[AbstractHost], Program]:
    """Worker 0 and 1 send each other a message, in the order given (s, r) for each, with a communicator a direction or one."""

    def program(host: AbstractHost) -> Program:
        down = yield from met(host, [0, 1], "down")
        up = (yield from met(host, [0, 1], "up")) if groups == 2 else down
        mine, theirs = (down, up) if host.rank == 0 else (up, down)
        queue = host.queue("compute")
        for what in order[host.rank]:
            if what == "s":
                mine.send(host, 1 - host.rank, 4, after=queue)
            else:
                host.order(queue, theirs.receive(host, 1 - host.rank, 4, after=queue))

    return program


@pytest.mark.parametrize(("rule", "policy", "seed"), RUNS)
def test_two_that_send_first_on_one_communicator_deadlock(rule: Rule, policy: Policy, seed: int) -> None:
    with pytest.raises(Deadlock, match=r"stands at send \d to worker 1 \(") as found:
        program = exchange({0: "sr", 1: "sr"})
        each(program, program, rule=rule, policy=policy, seed=seed)
    assert "stands at send 0 to worker 0 (" in str(found.value)
    program = exchange({0: "sr", 1: "rs"})
    each(program, program, rule=rule, policy=policy, seed=seed)


@pytest.mark.parametrize(("rule", "policy", "seed"), RUNS)
def test_a_communicator_a_direction_helps_where_streams_are_independent(rule: Rule, policy: Policy, seed: int) -> None:
    """On the strictest card the first send still stands in front of the receive."""
    program = exchange({0: "sr", 1: "sr"}, groups=2)
    if rule == "streams":
        each(program, program, rule=rule, policy=policy, seed=seed)
    else:
        with pytest.raises(Deadlock, match=r"send . to worker 1"):
            each(program, program, rule=rule, policy=policy, seed=seed)


def test_a_receive_that_is_posted_early_stands_in_front_on_the_strictest_card() -> None:
    def program(host: AbstractHost) -> Program:
        down = yield from met(host, [0, 1], "down")
        up = yield from met(host, [0, 1], "up")
        queue = host.queue("compute")
        if host.rank == 0:
            back = up.receive(host, 1, after=queue)
            host.launch(queue, "F0")
            down.send(host, 1, after=queue)
            host.order(queue, back)
            host.launch(queue, "B0")
        else:
            host.order(queue, down.receive(host, 0, after=queue))
            host.launch(queue, "B0")
            up.send(host, 0, after=queue)

    each(program, program, rule="streams")
    with pytest.raises(Deadlock, match=r"stands at receive 0 from worker 1 \(.* is not at the head\)|not been queued"):
        each(program, program, rule="one_queue")


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_device_wait_behind_an_early_receive_deadlocks(policy: Policy) -> None:
    def program(wait: bool) -> Callable[[AbstractHost], Program]:
        def run(host: AbstractHost) -> Program:
            down = yield from met(host, [0, 1], "down")
            up = yield from met(host, [0, 1], "up")
            queue = host.queue("compute")
            if host.rank == 0:
                up.receive(host, 1, after=queue)
                host.launch(queue, "F0")
                yield host.everything() if wait else host.until([queue.point()], "wait for a stream")
                down.send(host, 1, after=queue)
            else:
                host.order(queue, down.receive(host, 0, after=queue))
                up.send(host, 0, after=queue)

        return run

    assert not each(program(False), program(False), rule="streams", policy=policy).findings
    with pytest.raises(Deadlock, match=r"worker 0 waits for device-wide wait at test_rules.py:\d+"):
        each(program(True), program(True), rule="streams", policy=policy)


def test_a_device_wait_while_communicators_work_is_a_finding() -> None:
    def program(host: AbstractHost) -> Program:
        group = yield from met(host, [0, 1], "both")
        if host.rank == 0:
            group.send(host, 1)
        else:
            group.receive(host, 0)
        yield host.everything()
        yield host.everything()

    findings = each(program, program, rule="streams", policy="lazy").findings
    assert len(findings) == 2 and all("device-wide wait of worker" in one and "1 operations" in one for one in findings)


def test_the_other_members_work_stands_behind_a_sum() -> None:
    """A communicator runs one operation at a time, sums and messages in one order."""

    def program(sum_first: bool) -> Callable[[AbstractHost], Program]:
        def run(host: AbstractHost) -> Program:
            group = yield from met(host, [0, 1, 2], "all")
            yield group.connect(host)
            yield host.until([group.sum(host)], "first sum")
            if host.rank == 2 and not sum_first:
                group.sum(host)
            if host.rank == 0:
                group.send(host, 2)
            if host.rank == 2:
                group.receive(host, 0)
            if host.rank != 2 or sum_first:
                group.sum(host)

        return run

    each(program(True), program(True), program(True), rule="streams")
    with pytest.raises(Deadlock, match="stands at sum 1"):
        each(program(False), program(False), program(False), rule="streams")


def test_streams_wait_for_events_and_hosts_do_not() -> None:
    ran: list[str] = []

    def program(host: AbstractHost) -> Program:
        one, two = host.queue("one"), host.queue("two")
        for name in "ab":
            host.launch(one, name, run=lambda name=name: ran.append(name))
        host.order(two, one.point())
        host.launch(two, "c", run=lambda: ran.append("c"))
        host.launch(one, "d", run=lambda: ran.append("d"))
        ran.append("host")
        yield host.until([two.point()], "wait for a stream")
        assert "c" in ran

    orders = set()
    for seed in range(20):
        ran.clear()
        each(program, rule="streams", seed=seed)
        assert ran[0] == "host" and ran.index("a") < ran.index("b") < ran.index("c")
        orders.add(tuple(ran))
        ran.clear()
        each(program, rule="one_queue", seed=seed)
        assert ran == ["host", "a", "b", "c", "d"]
    assert len(orders) == 2  # d before or after c


def test_a_first_message_is_a_meeting_of_hosts() -> None:
    def program(warm: bool) -> Callable[[AbstractHost], Program]:
        def run(host: AbstractHost) -> Program:
            down = yield from met(host, [0, 1], "down", warm)
            up = yield from met(host, [0, 1], "up", warm)
            first, second = (down, up) if host.rank == 0 else (up, down)
            # The hosts issue the ends of the two messages in different orders.
            yield first.connect(host, 1 - host.rank)
            first.send(host, 1 - host.rank)
            yield second.connect(host, 1 - host.rank)
            second.receive(host, 1 - host.rank)

        return run

    machine = each(program(True), program(True), rule="streams")
    assert machine.connections == 2 and machine.communicators == 2
    with pytest.raises(Deadlock, match="worker 0 waits for the first message between 0 and 1 on communicator down"):
        each(program(False), program(False), rule="streams")


def test_a_first_sum_is_a_meeting_of_hosts() -> None:
    def program(host: AbstractHost) -> Program:
        one = yield from met(host, [0, 1], "one", False)
        two = yield from met(host, [0, 1], "two", False)
        for group in (one, two) if host.rank else (two, one):
            yield group.connect(host)
            group.sum(host)

    with pytest.raises(Deadlock, match="worker 1 waits for the first sum on communicator one"):
        each(program, program, rule="streams")


def test_communicators_are_made_in_one_order() -> None:
    def program(names: str) -> Callable[[AbstractHost], Program]:
        def run(host: AbstractHost) -> Program:
            for name in names:
                yield from met(host, [0, 1], name, False)

        return run

    assert each(program("ab"), program("ab"), rule="streams").communicators == 2
    with pytest.raises(
        Mismatch, match=r"worker . makes communicator . .* worker . makes . .*: they must be made in one order"
    ) as found:
        each(program("ab"), program("ba"), rule="streams")
    assert "worker 0" in str(found.value) and "worker 1" in str(found.value)
    with pytest.raises(Deadlock, match=r"worker 0 waits for all workers, to make communicator b \(number 1\)"):
        each(program("ab"), program("a"), rule="streams")


def test_the_host_waits_for_all_workers_to_make_a_communicator() -> None:
    """Those that are no members take part as well."""
    came: list[int] = []

    def program(host: AbstractHost) -> Program:
        came.append(host.rank)
        yield from met(host, [0, 1], "pair", False)
        assert len(came) == 3

    each(program, program, program, rule="streams")


def test_sizes_must_match() -> None:
    def program(host: AbstractHost) -> Program:
        group = yield from met(host, [0, 1], "pair")
        if host.rank == 0:
            group.send(host, 1, 12)
        else:
            group.receive(host, 0, 13)

    with pytest.raises(Mismatch, match=r"message 1 from 0 to 1 on communicator pair with 1[23]"):
        each(program, program, rule="streams")


def test_a_peer_is_a_member() -> None:
    def program(host: AbstractHost) -> Program:
        group = yield from met(host, [0, 1], "pair", False)
        if host.rank == 0:
            yield group.connect(host, 2)

    with pytest.raises(Misuse, match=r"with 2 on pair, whose members are \(0, 1\)"):
        each(program, program, program, rule="streams")


def test_work_that_is_left_over_is_a_deadlock() -> None:
    def program(host: AbstractHost) -> Program:
        group = yield from met(host, [0, 1], "pair")
        if host.rank == 0:
            group.send(host, 1)

    with pytest.raises(Deadlock, match=r"send 1 to worker 1 \(its partner has not been queued\)"):
        each(program, program, rule="streams")


def test_hosts_count_what_they_wait_for() -> None:
    def program(host: AbstractHost) -> Program:
        queue = host.queue("compute")
        host.launch(queue, "kernel")
        for _ in range(3):
            yield host.until([queue.point()], "wait for a stream")

    machine = each(program, rule="streams")
    assert machine.hosts[0].waits == {"wait for a stream": 3} and machine.executed == machine.hosts[0].launched == 1
