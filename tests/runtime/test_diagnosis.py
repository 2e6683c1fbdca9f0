"""Whoever keeps a run from going on is found, on random programs and at any place."""

import random
from dataclasses import dataclass, field

import pytest

from gpp.plan.build import make_plan
from gpp.program.kinds import COMPUTE, RECEIVES, SENDS, Action
from gpp.program.program import Program, channel_of
from gpp.runtime.hang_detection.diagnosis import Programs, Sight, diagnose
from gpp.runtime.hang_detection.status import FINISHING, STARTING, TRAINING, RankState
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support.graphs import chain, graph, problem
from tests.support.long import thinned
from tests.support.programs import lower

PASSES = 2


def key_of(action: Action, device: int) -> tuple[object, int]:
    """A message: its channel and its first sample."""
    return channel_of(action, device), action.lo


@dataclass
class Walk:
    """Devices that run a program as far as they come; one stays where it is, or one message never arrives."""

    program: Program
    frozen: tuple[int, int, int] | None = None
    """Device, pass, index."""
    lost: tuple[object, int] | None = None
    """Message, pass."""
    at: dict[int, tuple[int, int]] = field(default_factory=dict)
    waits: dict[int, bool] = field(default_factory=dict)
    sent: set[tuple[object, int]] = field(default_factory=set)
    posted: set[tuple[object, int]] = field(default_factory=set)
    reached: set[tuple[object, int, int]] = field(default_factory=set)

    def run(self) -> dict[int, RankState]:
        self.at = dict.fromkeys(self.program.actions, (1, 0))
        moved = True
        while moved:
            moved = sum(self._advance(device) for device in self.program.actions) > 0
        return {rank: self._state(device) for rank, device in enumerate(sorted(self.at))}

    def _advance(self, device: int) -> bool:
        step, index = self.at[device]
        actions = self.program.actions[device]
        if step > PASSES or self.frozen == (device, step, index):
            return False
        if index == len(actions):
            sends = {key_of(a, device) for a in actions if a.kind in SENDS}
            self.waits[device] = any((key, step) not in self.posted for key in sends)
            if self.waits[device]:
                return False
            self.at[device] = (step + 1, 0)
            return True
        action = actions[index]
        waits = False
        if action.kind in RECEIVES:
            self.posted.add((key_of(action, device), step))
        elif action.kind in SENDS:
            if self.lost != (key_of(action, device), step):
                self.sent.add((key_of(action, device), step))
        elif action.kind in COMPUTE:
            needs = [
                key_of(a, device)
                for a in actions
                if a.kind == f"R{action.kind}" and (a.stage, a.microbatch) == (action.stage, action.microbatch)
            ]
            waits = any((key, step) not in self.sent for key in needs)
        elif action.kind in "RN":
            what = (action.kind, action.microbatch)
            self.reached.add((what, step, device))
            members = [d for d, theirs in self.program.actions.items() if any((a.kind, a.microbatch) == what for a in theirs)]
            waits = any((what, step, member) not in self.reached for member in members)
        self.waits[device] = waits
        if not waits:
            self.at[device] = (step, index + 1)
        return not waits

    def _state(self, device: int) -> RankState:
        step, index = self.at[device]
        if step > PASSES:
            return RankState(phase=FINISHING, runs=PASSES, index=len(self.program.actions[device]), waiting=True)
        frozen = self.frozen is not None and self.frozen[0] == device
        return RankState(phase=TRAINING, runs=step, step=step - 1, index=index, waiting=self.waits[device] and not frozen)


def random_program(seed: int) -> tuple[Program, random.Random]:
    rng = random.Random(seed)
    n = rng.randint(2, 6)
    edges = [(a, b) for b in range(1, n) for a in rng.sample(range(b), k=min(b, rng.randint(1, 2)))]
    prob = problem(graph(n, edges), 3 * n, 16)
    parts = [(1 << op, rng.choice([1, 1, 2])) for op in range(n)]
    plan = make_plan(prob, "test", parts, [rng.choice([2, 4, 8]) for _ in range(n)])
    return lower(plan, prob.graph, OneFOneB(), global_norm=rng.random() < 0.5), rng


@pytest.mark.parametrize("seed", thinned(range(40), 3))
def test_the_rank_that_stays_behind_is_named(seed: int) -> None:
    program, rng = random_program(seed)
    device = rng.choice(sorted(program.actions))
    index = rng.randrange(len(program.actions[device]))
    # A frozen rank that is waited for nowhere shows at the end of the run at the latest.
    states = Walk(program, frozen=(device, rng.randint(1, PASSES), index)).run()
    programs = Programs(sorted(program.actions), program)
    found = diagnose(programs, {rank: Sight(state=state, quiet_s=5.0) for rank, state in states.items()})
    assert found.rank == programs.devices.index(device), found.reason
    assert program.actions[device][index].text(device) in found.why
    assert len(found.lines) == len(states)
    assert all("waits for" in line for rank, line in enumerate(found.lines) if rank != found.rank)


@pytest.mark.parametrize("seed", thinned(range(40), 3))
def test_a_lost_message_is_named_with_its_sender(seed: int) -> None:
    program, rng = random_program(seed)
    device, action = rng.choice([(d, a) for d, actions in program.actions.items() for a in actions if a.kind in SENDS])
    states = Walk(program, lost=(key_of(action, device), rng.randint(1, PASSES))).run()
    programs = Programs(sorted(program.actions), program)
    found = diagnose(programs, {rank: Sight(state=state, quiet_s=5.0) for rank, state in states.items()})
    assert f"{action.text(device)} of rank {programs.devices.index(device)}" in found.why, found.reason
    assert f"of rank {found.rank}" in found.why
    assert f"has not arrived at rank {programs.devices.index(action.peer_device)}" in found.why


def chain_of_three() -> Programs:
    prob = problem(chain(3), 3, 4)
    plan = make_plan(prob, "test", [(1 << op, 1) for op in range(3)], 2)
    program = lower(plan, prob.graph, OneFOneB())
    return Programs(sorted(program.actions), program)


def test_what_is_said_of_every_rank() -> None:
    programs = chain_of_three()
    at = {text: i for i, text in enumerate(a.text(1) for a in programs.actions(1, RankState(phase=TRAINING)))}
    waiting = RankState(phase=TRAINING, runs=7, step=6, index=0, waiting=True, host="a", pid=11)
    first = next(i for i, a in enumerate(programs.actions(2, RankState(phase=TRAINING))) if a.kind == "F")
    states = {
        0: RankState(phase=TRAINING, runs=7, step=6, index=len(programs.actions(0, RankState(phase=TRAINING))) - 2, waiting=True),
        1: RankState(phase=TRAINING, runs=7, step=6, index=at["s1.F0@d1"]),
        2: RankState(**{**{name: getattr(waiting, name) for name in waiting.__slots__}, "index": first}),
    }
    found = diagnose(programs, {r: Sight(state=s, quiet_s=5.04) for r, s in states.items()})
    assert (found.rank, found.out) == (1, ())
    assert found.why.startswith("does not go on, in s1.F0@d1 of step 6")
    assert found.lines[2] == "  rank 2 (a, process 11) in s2.F0@d2 of step 6: waits for s1.SF0>s2.d2[0:2]@d1 of rank 1, for 5.0 s"


def test_who_cannot_run_is_the_cause_before_who_waits() -> None:
    programs = chain_of_three()
    state = RankState(phase=TRAINING, runs=1, index=0)
    sights = {rank: Sight(state=state, out="stopped by a signal" if rank else None, quiet_s=9.0) for rank in range(3)}
    found = diagnose(programs, sights)
    assert found.rank == 1
    assert found.out == (1, 2)
    assert found.why.startswith("stopped by a signal, like rank 2")


def test_a_rank_that_never_came_and_one_that_loads() -> None:
    programs = chain_of_three()
    sights = {
        0: Sight(state=RankState(phase=STARTING), out="loading and connecting for longer than engine.startup_timeout_s"),
        1: Sight(state=None, out="importing for longer than engine.startup_timeout_s"),
        2: Sight(state=RankState(phase=STARTING)),
    }
    found = diagnose(programs, sights)
    assert found.rank == 0
    assert "not started yet" in found.lines[1]
    assert "loading and connecting" in found.lines[2]
