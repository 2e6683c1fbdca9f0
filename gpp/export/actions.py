"""The lists of actions that torch's pipeline runtime reads, from a plan's own program.

0F0,0F1,0B0,0F2,...          compute_only: passes of each rank, a row a rank
0F0,0SEND_F0,0F1,...         compute_comms: with messages between ranks, and the sum of gradients at the end of each stage
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Final

from gpp.errors import UnsupportedPlan
from gpp.plan.chain import PlanChain
from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, KINDS
from gpp.program.program import Program, Task
from gpp.timeline import Timeline

TORCH_KINDS: Final = ("F", "B", "I", "W")
"""Our kinds of passes that torch has, by the same letters."""

_BETWEEN: Final = re.compile(r"\d+(SEND_[FB]\d+|RECV_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
"""Actions between passes, as torch writes them."""

Rows = Sequence[Sequence[Task]]
"""The passes of each rank."""


def passes(program: Program, chain: PlanChain) -> list[list[Task]]:
    """The passes of each rank, in the order of its program.

    Raises:
        UnsupportedPlan: a stage has a pass that torch has no word for, or no backward; names the stage.
    """
    rows = []
    for device in chain.devices:
        rows.append([Task(a.stage, a.kind, a.microbatch) for a in program.actions[device] if a.kind in COMPUTE])
    finished = {task.stage for row in rows for task in row if KINDS[task.kind].finishes}
    for task in (task for row in rows for task in row):
        if task.kind not in TORCH_KINDS:
            raise UnsupportedPlan(
                f"stage {task.stage} has {KINDS[task.kind].meaning} ({task.kind}), which torch's runtime has no action for. "
                "Fix: plan without it"
            )
        if task.stage not in finished:
            raise UnsupportedPlan(
                f"stage {task.stage} trains nothing and runs no backward, and torch's runtime wants one of every stage. "
                "Fix: unfreeze a parameter of it"
            )
    return rows


def with_messages(rows: Rows, chain: PlanChain, predicted: Timeline) -> list[list[str]]:
    """The words of each rank with sends and receives, each where one run of the whole program has it.

    A receive stands behind what its rank has begun when the sender's pass is over. So all messages between two ranks have one
    order at both ends, as transports without tags need it, and nothing waits for itself.

    Args:
        predicted: with events, by whose times the ranks are walked.
    """
    start = {(e.stage, e.kind, e.microbatch): e.start_s for e in predicted.events if e.kind in COMPUTE}
    place, last = chain.rank_of, chain.num_stages - 1
    out: list[list[str]] = [[] for _ in rows]
    at, done = [0] * len(rows), set[tuple[int, str, int]]()
    left = [sum(KINDS[task.kind].finishes for row in rows for task in row if task.stage == s) for s in range(last + 1)]

    def ready(task: Task) -> bool:
        if KINDS[task.kind].direction == FORWARD:
            return task.stage == 0 or (task.stage - 1, FORWARD, task.microbatch) in done
        returns = KINDS[task.kind].returns
        return not returns or task.stage == last or (task.stage + 1, BACKWARD, task.microbatch) in done

    while any(i < len(row) for i, row in zip(at, rows, strict=True)):
        heads = [(rank, row[i]) for rank, (i, row) in enumerate(zip(at, rows, strict=True)) if i < len(row)]
        rank, task = min(
            (head for head in heads if ready(head[1])),
            key=lambda head: (start[head[1].stage, head[1].kind, head[1].microbatch], head[0]),
        )
        at[rank] += 1
        out[rank].append(word(task))
        row, s = KINDS[task.kind], task.stage
        for way, peer, letter in ((FORWARD, s + 1, "F"), (BACKWARD, s - 1, "B")):
            sends = row.holds if way == FORWARD else row.returns
            if sends:
                done.add((s, way, task.microbatch))
            if sends and 0 <= peer <= last and place[peer] != rank:
                out[rank].append(f"{s}SEND_{letter}{task.microbatch}")
                out[place[peer]].append(f"{peer}RECV_{letter}{task.microbatch}")
        left[s] -= row.finishes
        if row.finishes and not left[s]:
            out[rank].append(f"{s}REDUCE_GRAD")
    return out


def word(task: Task) -> str:
    """A pass as torch writes it."""
    return f"{task.stage}{task.kind}{task.microbatch}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def listed(text: str) -> list[list[str]]:
    """The words of each rank of a CSV of either form, without messages, sums, and what else is none of a pass."""
    rows = [[word.strip() for word in row] for row in csv.reader(io.StringIO(text))]
    return [[word for word in row if word and not _BETWEEN.fullmatch(word)] for row in rows if row]
