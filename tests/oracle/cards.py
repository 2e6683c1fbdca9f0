"""Programs on the model of cards (`tests.support.cards`): each action becomes the calls that the host of a card would make.

It shares nothing with the static proof (`gpp.program.cards`) but the list of communicators.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence

from gpp.program.communicators import Communicator
from gpp.program.program import Program
from tests.support.cards.faults import Deadlock, Mismatch
from tests.support.cards.hosts import AbstractHost, Wait
from tests.support.cards.machine import Machine, Policy
from tests.support.cards.meetings import Group
from tests.support.cards.operations import Op

Steps = Generator[Wait | None, None, object]


def outcome(
    programs: Sequence[Program],
    made: Sequence[Communicator],
    *,
    one_queue: bool = False,
    receives_wait: bool = False,
    pending: int | None = None,
    policy: Policy = "random",
    seed: int = 0,
) -> str:
    """How the programs end on the model, one after the other: `runs`, `deadlock`, or `mismatch` of a message.

    Args:
        made: the communicators. Where several devices share the passes of a replica, each runs one stage.
        one_queue: the strictest rule, one operation at a time on a card.
        receives_wait: receives behind the passes before them, as torch has it.
        pending: sends under way before the host waits for the oldest.
    """
    machine = Machine(rule="one_queue" if one_queue else "streams", policy=policy, seed=seed)
    devices = sorted({device for program in programs for device in program.actions})
    groups: dict[object, Group] = {}
    for device in devices:

        def main(host: AbstractHost, device: int = device) -> Steps:
            yield from _make(host, machine, devices, groups, made)
            card = _Host(host, device, devices, groups, receives_wait=receives_wait, pending=pending)
            card.team = next((one.devices for one in made if one.replica and device in one.devices), None)
            for program in programs:
                yield from card.run(program)

        machine.generator(main)
    try:
        machine.run()
    except Deadlock:
        return "deadlock"
    except Mismatch:
        return "mismatch"
    return "runs"


def _make(
    host: AbstractHost,
    machine: Machine,
    devices: Sequence[int],
    groups: dict[object, Group],
    made: Sequence[Communicator],
) -> Steps:
    for number, one in enumerate(made):
        group, wait = machine.gather(host, [devices.index(device) for device in one.devices], f"communicator {number}")
        carries = [*one.pairs, *(("sum", group) for group in one.groups), *([one.devices] if one.replica else [])]
        groups.update(dict.fromkeys(carries, group))
        yield wait


class _Host:
    def __init__(
        self,
        host: AbstractHost,
        device: int,
        devices: Sequence[int],
        groups: dict[object, Group],
        *,
        receives_wait: bool,
        pending: int | None,
    ) -> None:
        self.host, self.device, self.devices, self.groups = host, device, devices, groups
        self.receives_wait, self.pending = receives_wait, pending
        self.compute, self.copies = host.queue("compute"), {"O": host.queue("copy out"), "P": host.queue("copy in")}
        self.team: tuple[int, ...] | None = None

    def run(self, program: Program) -> Steps:
        host, compute = self.host, self.compute
        posted: dict[tuple, list[Op]] = defaultdict(list)
        sent: deque[Op] = deque()
        summed: list[Op] = []
        copied: dict[tuple, Op] = {}
        for a in program.actions[self.device]:
            behind = compute if self.receives_wait or a.kind not in ("RF", "RB") else None
            if a.kind in ("F", "B"):
                for op in posted.pop((a.kind, a.stage, a.microbatch), ()):
                    host.order(compute, op)
                # A forward waits for its stage's last copy out, a backward for its own copy back.
                for what in [("O", a.stage)] if a.kind == "F" else [("P", a.stage, a.microbatch)]:
                    if what in copied:
                        host.order(compute, copied[what])
                latest = host.launch(compute, a.text(self.device))
                if self.team:
                    host.order(compute, self.groups[self.team].sum(host, (a.kind, a.stage, a.microbatch), after=compute))
            elif a.kind == "U":
                for op in summed:
                    host.order(compute, op)
                summed = []
                host.launch(compute, a.text(self.device))
            elif a.kind in ("R", "N"):
                if a.kind == "N":
                    for op in summed:
                        host.order(compute, op)
                    summed = []
                group = -1 if a.kind == "N" else a.microbatch
                summed.append(self.groups["sum", group].sum(host, (a.kind, group), after=behind))
            elif a.kind in ("O", "P"):
                queue = self.copies[a.kind]
                for op in [latest, *(copied[what] for what in [("O", a.stage, a.microbatch)] if a.kind == "P")]:
                    host.order(queue, op)
                op = host.launch(queue, a.text(self.device))
                copied[a.kind, a.stage] = copied[a.kind, a.stage, a.microbatch] = op
            elif a.peer_device == self.device:
                continue
            elif a.kind in ("RF", "RB"):
                about = a.kind[1], a.peer_stage, a.stage, a.peer_device, self.device
                group = self.groups[about[3:]]
                op = group.receive(host, self.devices.index(a.peer_device), (about, a.lo, a.hi), after=behind)
                posted[a.kind[1], a.stage, a.microbatch].append(op)
            else:
                about = a.kind[1], a.stage, a.peer_stage, self.device, a.peer_device
                while self.pending is not None and len(sent) > self.pending:
                    yield host.until([sent.popleft()], "send")
                group = self.groups[about[3:]]
                op = group.send(host, self.devices.index(a.peer_device), (about, a.lo, a.hi), after=behind)
                sent.append(op)
        yield host.everything("end of the step")
