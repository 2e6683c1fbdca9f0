"""The table of action kinds: what each kind does, what it occupies and waits for, and how it is written.

    s2.F0@d1                 forward pass of micro-batch 0 of stage 2 on device 1
    s2.B0@d1                 backward pass
    s2.SF0>s3.d4[0:4]@d1     send the outputs of samples 0..3 to stage 3 on device 4
    s3.RF0<s2.d1[0:4]@d4     receive them for micro-batch 0 of stage 3
    s3.SB0>s2.d1[0:4]@d4     send the gradients of those outputs back
    s2.RB0<s3.d4[0:4]@d1     receive them
    s2.R0@d1                 all-reduce of gradient group 0 (`gpp.program.program.reduce_groups`)
    s2.N0@d1                 sum of the squared gradients of all devices (clipping by the global norm)
    s2.U0@d1                 optimizer step of mini-batch 0

Nobody else reads or writes these letters: the row of a kind answers every question about it, and a new kind is a new row. The graph
of waits (`gpp.program.waits`) is derived from what a row occupies and needs. Mechanisms add rows of their own (`gpp.mechanism`), so
the table and the sets below grow when a package of a user's own is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from gpp import mechanism
from gpp.cost.stage import StageCost
from gpp.errors import InvalidConfig, MalformedProgram
from gpp.program.kind import Kind, Need, Resource, Role
from gpp.routing import BACKWARD, FORWARD, Direction


class _Table(dict[str, Kind]):
    """Kinds by their text; an unknown one is refused.

    Raises:
        MalformedProgram: names the kind and the table.
    """

    def __missing__(self, text: str) -> Kind:
        raise MalformedProgram(f"{text!r} is no kind of action; the kinds are {', '.join(self)}")


_CORE: Final = (
    Kind(text="F", meaning="forward", role=Role.COMPUTE, direction=FORWARD, holds=True),
    Kind(
        text="B",
        meaning="backward",
        role=Role.COMPUTE,
        needs=(Need("F"),),
        direction=BACKWARD,
        frees=True,
        returns=True,
        finishes=True,
    ),
    Kind(text="SF", meaning="send outputs", role=Role.SEND, direction=FORWARD),
    Kind(text="SB", meaning="send gradients", role=Role.SEND, direction=BACKWARD),
    Kind(text="RF", meaning="receive inputs", role=Role.RECEIVE, direction=FORWARD),
    Kind(text="RB", meaning="receive gradients", role=Role.RECEIVE, direction=BACKWARD),
    Kind(text="R", meaning="reduce gradients", role=Role.SUM),
    Kind(text="N", meaning="sum the norm", role=Role.SUM, everyone=True),
    Kind(text="U", meaning="update", role=Role.UPDATE, of_minibatch=True),
)

KINDS: Final = _Table()
COMPUTE: Final = set[str]()
SENDS: Final = set[str]()
RECEIVES: Final = set[str]()
SUMS: Final = set[str]()
UPDATES: Final = set[str]()
COPIES: Final = set[str]()
TRANSFERS: Final = set[str]()
BESIDE: Final = set[str]()
"""Kinds that do not occupy their device: it goes on meanwhile."""
DIRECTIONS: Final = list[Direction]()
"""Those of messages."""
SEND: Final = dict[Direction, str]()
RECEIVE: Final = dict[Direction, str]()
"""Direction -> the kind of either end of its messages."""
TIMED: Final = dict[str, Callable[[StageCost, bool], float]]()
"""Kind of a mechanism's pass -> its seconds."""
OWNERS: Final = dict[str, str]()
"""Kind -> the name of its mechanism; none of those of the core."""
TOGETHER: Final = dict[str, tuple[str, ...]]()
"""Kind of a pass that stands in the place of another, with others (`Kind.instead_of`) -> all of these, as they come."""

_SETS: Final = {
    Role.COMPUTE: COMPUTE,
    Role.SEND: SENDS,
    Role.RECEIVE: RECEIVES,
    Role.SUM: SUMS,
    Role.UPDATE: UPDATES,
    Role.COPY: COPIES,
}


def _add(kind: Kind) -> None:
    """Give the table another row, and the sets above what follows from it."""
    KINDS[kind.text] = kind
    _SETS[kind.role].add(kind.text)
    if kind.transfers:
        TRANSFERS.add(kind.text)
    if kind.occupies not in (Resource.DEVICE, Resource.MEMBERS):
        BESIDE.add(kind.text)
    if kind.role is Role.RECEIVE:
        DIRECTIONS.append(kind.direction)
        RECEIVE[kind.direction] = kind.text
    if kind.role is Role.SEND:
        SEND.setdefault(kind.direction, kind.text)
    if kind.seconds:
        TIMED[kind.text] = kind.seconds


for _kind in _CORE:
    _add(_kind)


PASS: Final = {kind.direction: kind.text for kind in _CORE if kind.computes}
"""Direction -> the whole pass that runs in it."""
REDUCE, NORM = (kind.text for kind in _CORE if kind.role is Role.SUM)
(UPDATE,) = UPDATES


def _add_found() -> None:
    """Give the table the rows of mechanisms.

    Raises:
        InvalidConfig: two mechanisms have a kind of one name.
    """
    new = list[Kind]()
    for name, kinds in mechanism.found("kinds", "KINDS", tuple).items():
        for kind in kinds:
            if kind.text in KINDS and OWNERS.get(kind.text) != name:
                rule = f"has a kind {kind.text}, and so has the table or another mechanism"
                raise InvalidConfig("strategy.mechanisms", name, rule, "give the kind another name")
            if kind.text not in KINDS:
                _add(kind)
                new.append(kind)
                OWNERS[kind.text] = name
                own = tuple(other.text for other in kinds if other.instead_of == kind.instead_of) if kind.instead_of else ()
                TOGETHER.update(dict.fromkeys(own, own))
    for kind in new:  # when all are there: what is needed by a kind is by what takes its messages in its place, too
        for waiting, previous in kind.needed_by:
            for row in [row for row in KINDS.values() if waiting in (row.text, row.direction and row.instead_of)]:
                KINDS[row.text] = replace(row, needs=(*row.needs, Need(kind.text, previous)))


_add_found()
mechanism.watch(_add_found)

NUMBER: Final = "([0-9]{1,18})"
"""A number of a program's text: no sign, no digits of other alphabets, and no more of them than a step could count to."""

_PEER = rf"([<>])s{NUMBER}\.d{NUMBER}\[{NUMBER}:{NUMBER}\]"
_ACTION = re.compile(rf"s{NUMBER}\.([A-Z]{{1,8}}){NUMBER}(?:{_PEER})?@d{NUMBER}")
_ARROW = {Role.SEND: ">", Role.RECEIVE: "<"}


def written(kind: str, stage: int, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int, *, device: int) -> str:
    """An action of `device` as text; `read` is the inverse.

    Raises:
        MalformedProgram: an unknown kind.
    """
    row = KINDS[kind]
    peer = f"{_ARROW[row.role]}s{peer_stage}.d{peer_device}[{lo}:{hi}]" if row.transfers else ""
    return f"s{stage}.{kind}{microbatch}{peer}@d{device}"


def read(word: str) -> tuple[int, tuple[str, int, int, int, int, int, int]]:
    """The device of a written action, and its kind, stage, micro-batch, peer stage, peer device and samples.

    Raises:
        MalformedProgram: `word` is none; names it.

    >>> read("s0.SF2>s1.d3[8:12]@d1")
    (1, ('SF', 0, 2, 1, 3, 8, 12))
    """
    match = _ACTION.fullmatch(word)
    if not match or match[2] not in KINDS:
        raise MalformedProgram(f"{word[:80]!r} is not an action")
    stage, kind, microbatch, arrow, peer_stage, peer_device, lo, hi, device = match.groups()
    if arrow != _ARROW.get(KINDS[kind].role):
        raise MalformedProgram(f"{word!r} is not an action: messages name their peer, sends behind '>' and receives behind '<'")
    peer = (int(peer_stage), int(peer_device), int(lo), int(hi)) if arrow else (-1, -1, 0, 0)
    return int(device), (kind, int(stage), int(microbatch), peer[0], peer[1], peer[2], peer[3])


def pass_seconds(bill: StageCost, *, last: bool = False) -> dict[str, float]:
    """Kind -> seconds of a pass of one micro-batch, or of the last one, which may be smaller.

    The kinds of mechanisms take what their rows say, or their bills.
    """
    forward_s, backward_s = bill.pass_s(last=last)
    found = {kind: seconds(bill, last) for kind, seconds in TIMED.items()}
    return {PASS[FORWARD]: forward_s, PASS[BACKWARD]: backward_s, **found, **dict(bill.own_s)}


class Action(NamedTuple):
    """One thing that a device does, and its kind (`gpp.program.kinds.KINDS`).

    `microbatch` is the stage's own; of a reduction, the gradient group; of an update, the mini-batch.

    >>> Action("SF", stage=0, microbatch=2, peer_stage=1, peer_device=3, lo=8, hi=12).text(device=1)
    's0.SF2>s1.d3[8:12]@d1'
    """

    kind: str
    stage: int
    microbatch: int
    peer_stage: int = -1
    peer_device: int = -1
    lo: int = 0
    hi: int = 0

    def text(self, device: int) -> str:
        return written(*self, device=device)
