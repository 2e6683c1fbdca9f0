"""Generated programs: what `lower` makes runs, what `check_program` accepts runs, and what is written is read back."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpp.errors import MalformedProgram
from gpp.program.program import Program, check_program
from gpp.simulate.simulator import max_in_flight
from tests.oracle.executor import runs
from tests.support.generated import Lowered, lowered, mutated, programs


def members_of(found: Lowered) -> dict[int, set[int]]:
    """The devices of every gradient group, and of the group of all."""
    return {g: set(group.devices) for g, group in enumerate(found.groups)} | {-1: set(found.program.actions)}


@given(lowered())
def test_what_is_lowered_runs(found: Lowered):
    assert runs(found.program, members_of(found))
    check_program(found.program, found.groups)


@given(lowered())
def test_every_replica_does_its_share_of_every_micro_batch_once(found: Lowered):
    total = found.program.num_samples
    for s, stage in enumerate(found.plan.stages):
        # A replica that has no sample of a micro-batch walks through it like the others.
        count, n = -(-total // stage.microbatch_size), len(stage.devices)
        wanted = Counter((d, m) for m in range(count) for d in ([stage.devices[m % n]] if stage.stride > 1 else stage.devices))
        for kind in "FB":
            done = Counter(
                (d, a.microbatch) for d, own in found.program.actions.items() for a in own if (a.kind, a.stage) == (kind, s)
            )
            assert done == wanted


@given(lowered())
def test_messages_leave_after_they_are_made_and_are_posted_before_they_are_needed(found: Lowered):
    for own in found.program.actions.values():
        at: dict[tuple[str, int, int], int] = {}
        for i, action in enumerate(own):
            at.setdefault((action.kind, action.stage, action.microbatch), i)
        for i, action in enumerate(own):
            if action.kind in ("SF", "SB"):
                assert at[action.kind[1], action.stage, action.microbatch] < i, action
            if action.kind in ("RF", "RB"):
                assert i < at[action.kind[1], action.stage, action.microbatch], action
            if action.kind == "B":
                assert at["F", action.stage, action.microbatch] < i


@given(lowered())
def test_every_sample_crosses_every_edge_once_each_way(found: Lowered):
    everything = list(range(found.program.num_samples))
    for s, t in found.plan.edges:
        for kind, stage, peer in (("SF", s, t), ("RF", t, s), ("SB", t, s), ("RB", s, t)):
            moved = [
                a for own in found.program.actions.values() for a in own if (a.kind, a.stage, a.peer_stage) == (kind, stage, peer)
            ]
            carried = any(
                (s, t) == (a.stage, a.peer_stage) for own in found.program.actions.values() for a in own if a.kind == "SF"
            )
            assert not carried or sorted(i for a in moved for i in range(a.lo, a.hi)) == everything


@given(lowered())
def test_no_stage_holds_more_than_its_plan_says(found: Lowered):
    held = max_in_flight(found.program, found.plan)
    if not found.plan.shares_devices:
        assert all(held[s] <= stage.in_flight for s, stage in enumerate(found.plan.stages))


@given(mutated())
def test_a_changed_program_is_accepted_if_and_only_if_it_runs(found: tuple[Lowered, Program]):
    before, after = found
    try:
        check_program(after, before.groups)
        accepted = True
    except MalformedProgram:
        accepted = False
    assert accepted == runs(after, members_of(before))


@given(st.one_of(programs(), lowered().map(lambda found: found.program)))
def test_what_is_written_is_read_back(program: Program):
    assert Program.from_text(program.to_text()) == program


@given(st.text("sFBRNUd0123456789.@<>[:] -+x", min_size=1, max_size=24))
def test_a_word_is_an_action_or_refused(word: str):
    if any(character.isspace() for character in word):
        word = word.replace(" ", "_")
    try:
        program = Program.from_text(f"samples 1 minibatches 1\n{word}\n")
    except MalformedProgram as error:
        assert repr(word) in str(error)
    else:
        assert Program.from_text(program.to_text()) == program
