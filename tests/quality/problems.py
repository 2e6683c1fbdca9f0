"""What the ledger asks: 150 problems, and the words of the planners that plan them.

`problems.txt` has a problem a line, `NAME: WORDS`. Costs are the analytical model's, and memory is the cluster's, so that a problem
is the same on every machine. Forty are models on shipped clusters, some of them of `-cd sweeps`. The others are random graphs:
series-parallel with skips, the same with one source and one sink (two_terminal), graphs that are mostly not series-parallel (dag),
towers and chains, on one to three nodes, on unequal devices, and with so little memory that it decides.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

PLANNERS: Final = {
    "graphpipe": "strategy=graphpipe",
    "sequential": "strategy=sequential",
    "pipedream_flush": "strategy=pipedream_flush",
    "piper": "strategy=piper",
    "even": "strategy=even",
    "dawnpiper": "strategy=dawnpiper",
    "vpipe": "strategy=vpipe",
    "data_parallel": "strategy=data_parallel engine=simulate",
    "single": "strategy=single engine=simulate",
    "same_microbatch": "strategy=graphpipe strategy/planner=same_microbatch",
    "pipedream": "strategy=pipedream",
    "pipedream_2bw": "strategy=pipedream_2bw",
    "layerpipe": "strategy=layerpipe",
}
"""The planners that train, by the words that choose them."""

ON_DEMAND: Final = {
    "graphpipe_apart": "strategy=graphpipe strategy.planner.colocate=never",
    "zero_bubble": "strategy=zero_bubble",
    "optimal": "strategy=optimal strategy.planner.limit=2",
}
"""Further ones, where `--planner` names them: variants of the first, and one whose search takes as long as it may."""


class Question(NamedTuple):
    """A problem of the ledger: its name, and the words of the command line without a strategy."""

    name: str
    words: str


def questions(only: str = "") -> list[Question]:
    """The problems in whose name the pattern is found."""
    lines = Path(__file__).with_name("problems.txt").read_text().splitlines()
    every = [Question(*line.split(": ", 1)) for line in lines]
    return [question for question in every if re.search(only, question.name)]
