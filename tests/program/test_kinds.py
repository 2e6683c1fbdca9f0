"""The table of action kinds: text both ways, and nobody takes an unknown kind for a known one."""

import pytest

from gpp.errors import MalformedProgram
from gpp.program.kinds import BACKWARD, COMPUTE, COPIES, FORWARD, KINDS, PASS, RECEIVE, SEND, TRANSFERS, Action, Resource, Role
from gpp.program.program import Program, check_program
from gpp.runtime.transport.form import MAIN_MEMORY
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.seat import Seat
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.simulate.simulator import simulate
from tests.schedules.test_schedules import plan_of
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.graphs import chain, problem
from tests.support.host import hosted
from tests.support.programs import lower


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.text)
def test_text_is_reversible(kind) -> None:
    action = Action(kind.text, 3, 14, 5, 9, 2, 6) if kind.transfers else Action(kind.text, 3, 14)
    program = Program(num_samples=8, actions={7: (action,), 8: ()})
    assert Program.from_text(program.to_text()) == program


@pytest.mark.parametrize(
    "word",
    ["s0.F0>s1.d1[0:1]@d0", "s0.SF0@d0", "s0.SF0<s1.d1[0:1]@d0", "s0.RF0>s1.d1[0:1]@d0", "s0.Q0@d0", "s0.F0@d0x"],
)
def test_words_that_are_no_actions_are_refused(word: str) -> None:
    with pytest.raises(MalformedProgram, match="not an action"):
        Program.from_text(f"samples 1 minibatches 1\n{word}\n")


@pytest.mark.parametrize("text", ["samples 1", "samples one minibatches 1\ns0.F0@d0", "samples 1 minibatches 1\ns0.F0@d0 s0.B0@d1"])
def test_texts_that_are_no_programs_are_refused(text: str) -> None:
    with pytest.raises(MalformedProgram):
        Program.from_text(text)


def test_every_row_answers() -> None:
    assert {kind.text for kind in KINDS.values()} == set(KINDS)
    for direction in (FORWARD, BACKWARD):
        assert KINDS[SEND[direction]].role is Role.SEND and KINDS[RECEIVE[direction]].role is Role.RECEIVE
        assert KINDS[PASS[direction]].role is Role.COMPUTE
    for kind in KINDS.values():
        assert (kind.text in COMPUTE) == kind.computes and (kind.text in TRANSFERS) == kind.transfers
        assert not (kind.holds or kind.frees or kind.returns or kind.finishes) or kind.computes
        assert kind.direction is not None or not kind.transfers
        assert (kind.text in COPIES) == (kind.occupies in (Resource.COPY_OUT, Resource.COPY_IN))
        assert all(need.kind in KINDS and need.kind != kind.text for need in kind.needs)


WRONG = {
    "a copy out is missing": ("drop", "O1", r"s0\.F2@d0 needs s0\.O1@d0 \(copy to the host\) before it"),
    "a fetch is missing": ("drop", "P1", r"s0\.B1@d0 needs s0\.P1@d0 \(fetch from the host\) before it"),
    "a fetch before its copy out": ("first", "P1", r"s0\.P1@d0 needs s0\.O1@d0"),
    "a copy out before its forward": ("first", "O1", r"s0\.O1@d0 needs s0\.F1@d0 \(forward\) before it"),
    "a third one comes": ("early", "P3", r"s0\.F5@d0 comes before a backward of stage 0 has made room"),
    "a copy out twice": ("twice", "O1", r"blocked: s0\.O1@d0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_programs_that_copy_wrongly_are_refused(name: str) -> None:
    change, word, message = WRONG[name]
    program, _, _ = hosted(4, 8, 0.5)
    own = list(program.actions[0])
    at = next(i for i, a in enumerate(own) if f"{a.kind}{a.microbatch}" == word)
    action = own[at] if change == "twice" else own.pop(at)
    if change == "first":
        own.insert(0, action)
    if change == "early":
        own.insert(next(i for i, a in enumerate(own) if (a.kind, a.microbatch) == ("P", 2)) + 1, action)
    if change == "twice":
        own.insert(at, action)
    check_program(program)
    with pytest.raises(MalformedProgram, match=message):
        check_program(Program(num_samples=8, actions={**program.actions, 0: tuple(own)}))


def test_a_copy_that_nobody_uses_is_refused() -> None:
    program, _, _ = hosted(4, 8, 0.5)
    own = [a for a in program.actions[0] if (a.kind, a.microbatch) not in (("B", 7), ("RB", 7))]
    others = {d: tuple(a for a in own if (a.kind, a.microbatch) != ("SB", 7) or d != 1) for d, own in program.actions.items()}
    with pytest.raises(MalformedProgram, match=r"s0\.B7@d0 \(backward\) is missing: a stage that copies"):
        check_program(Program(num_samples=8, actions={**others, 0: tuple(own)}))


def with_kind(kind: str) -> tuple[Program, object, object]:
    """A program in which an update is of another kind."""
    prob = problem(chain(2), 2, 4)
    plan = plan_of(prob, 2, 1)
    program = lower(plan, prob.graph, OneFOneB())
    actions = {
        d: tuple(a._replace(kind=kind) if KINDS[a.kind].role is Role.UPDATE else a for a in own)
        for d, own in program.actions.items()
    }
    return Program(num_samples=4, actions=actions), plan, prob


def test_an_unknown_kind_is_refused_everywhere() -> None:
    program, plan, prob = with_kind("Q")
    for call in (
        lambda: program.to_text(),
        lambda: check_program(program),
        lambda: simulate(program, plan, prob),  # type: ignore[arg-type]
        lambda: Interpreter(
            program.actions[0][-1:], {}, {}, Seat(device_id=0, device=MAIN_MEMORY, transport=FakeTransport(FakeNetwork((), 2), 0))
        ).run(),  # emulated devices run the same interpreter
    ):
        with pytest.raises(MalformedProgram, match="'Q' is no kind of action"):
            call()
