"""What `hypothesis` draws: pieces of micro-batches, shapes of stage graphs, plans with their programs, and changes of programs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from gpp import GPipe, OneFOneB, Plan
from gpp.cost.regime import Regime
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.plan.build import make_plan
from gpp.program.kinds import Action
from gpp.program.program import Program, ReduceGroup, reduce_groups
from gpp.routing import Piece, pieces
from gpp.schedules.base import AbstractSchedule
from tests.support.graphs import graph, problem, with_weights
from tests.support.programs import lower

MOST = 10_000


class Side(NamedTuple):
    """One stage's pieces of `total` samples and what they were made from."""

    devices: tuple[int, ...]
    size: int
    total: int
    stride: int
    pieces: list[Piece]


@st.composite
def sides(draw: st.DrawFn, total: int | None = None, first_device: int = 0) -> Side:
    """A stage of one to six replicas, with micro-batches that need not divide the samples, and that some of them may share out."""
    devices = tuple(draw(st.permutations(range(first_device, first_device + draw(st.integers(1, 6))))))
    size, stride = draw(st.integers(1, 16)), draw(st.sampled_from([n for n in range(1, 7) if len(devices) % n == 0]))
    samples = draw(st.integers(1, 60)) if total is None else total
    return Side(devices, size, samples, stride, pieces(devices, size, samples, stride))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Side, Side]:
    """A producer and a consumer of the same samples, on devices of their own."""
    total = draw(st.integers(1, 60))
    return draw(sides(total)), draw(sides(total, 10))


@st.composite
def edges_of(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """Edges of a DAG on 0..count-1, each from a lower number to a higher one; at most two into each."""
    return [(a, b) for b in range(1, count) for a in sorted(draw(st.sets(st.integers(0, b - 1), max_size=2)))]


class Shapes(NamedTuple):
    """(micro-batch size, k, turns) of stages in a topological order, and the edges between them."""

    stages: list[tuple[int, int, int]]
    edges: list[tuple[int, int]]


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    stage = st.tuples(st.integers(1, 16), st.integers(1, 3), st.integers(1, 4))
    stages = draw(st.lists(stage, min_size=1, max_size=7))
    return Shapes(stages, draw(edges_of(len(stages))))


class Lowered(NamedTuple):
    """A plan, its schedule and its program."""

    plan: Plan
    schedule: AbstractSchedule
    program: Program
    groups: tuple[ReduceGroup, ...]


@st.composite
def lowered(draw: st.DrawFn, most_stages: int = 6) -> Lowered:
    """A stage for every operator of a small DAG; replicas that split or take turns, unequal micro-batches, shared devices."""
    count, schedule = draw(st.integers(1, most_stages)), draw(st.sampled_from([OneFOneB(), GPipe()]))
    batch = draw(st.sampled_from([6, 8, 12, 15]))
    net = graph(count, draw(edges_of(count)))
    net = with_weights(net) if draw(st.booleans()) else net
    norm = draw(st.booleans())
    sizes = [draw(st.integers(1, batch)) for _ in range(count)]
    replicas = [draw(st.integers(1, min(3, size))) for size in sizes]
    turns = [draw(st.booleans()) and batch % size == 0 and batch // size % r == 0 for size, r in zip(sizes, replicas, strict=True)]
    posed = problem(net, 3 * count, batch, regime=Regime(holds=schedule.holds), global_norm=norm)
    placement = None
    if count > 1 and not any(turns) and draw(st.booleans()):
        # Fewer devices than replicas in all, so that stages share some.
        devices = range(max(*replicas, count - 1))
        placement = [tuple(sorted(draw(st.permutations(devices))[:r])) for r in replicas]
    plan = make_plan(
        posed,
        "generated",
        [(1 << op, r) for op, r in enumerate(replicas)],
        sizes,
        k=[draw(st.integers(1, 2)) for _ in range(count)],
        chain=draw(st.booleans()),
        ordered=True,
        placement=placement,
        sharing=[IN_TURN if turn else None for turn in turns],
    )
    return Lowered(plan, schedule, lower(plan, net, schedule, global_norm=norm), reduce_groups(plan, net))


def actions() -> st.SearchStrategy[Action]:
    """Any action at all, with a peer where its kind has one."""
    number = st.integers(0, MOST)
    alone = st.tuples(st.sampled_from(["F", "B", "R", "N", "U", "O", "P"]), number, number)
    between = st.tuples(st.sampled_from(["SF", "SB", "RF", "RB"]), *[number] * 6)
    return st.one_of(alone, between).map(lambda numbers: Action(*numbers))


def programs() -> st.SearchStrategy[Program]:
    """Any program at all: most of them cannot run."""
    lists = st.dictionaries(st.integers(0, 99), st.lists(actions(), max_size=6).map(tuple), min_size=1, max_size=4)
    return st.builds(Program, num_samples=st.integers(1, MOST), actions=lists, minibatches=st.integers(1, 9))


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Lowered, Program]:
    """A program and the same with one action gone, doubled, moved to another place or changed in one number."""
    found = draw(lowered(4))
    program = found.program
    device = draw(st.sampled_from(sorted(d for d, own in program.actions.items() if own)))
    own = list(program.actions[device])
    at, to = (draw(st.integers(0, len(own) - 1)) for _ in range(2))
    change = draw(st.sampled_from(["drop", "double", "move", "renumber"]))
    if change == "drop":
        del own[at]
    elif change == "double":
        own.insert(to, own[at])
    elif change == "move":
        own.insert(to, own.pop(at))
    else:
        field = draw(st.sampled_from(["stage", "microbatch", "lo", "peer_device"] if own[at].peer_stage >= 0 else ["microbatch"]))
        own[at] = own[at]._replace(**{field: getattr(own[at], field) + 1})
    return found, replace(program, actions={**program.actions, device: tuple(own)})
