"""What happens where two mechanisms meet: both are put on the first stage of one small plan, which is then checked, lowered,
predicted and made a job, as a run does it.

    python -m tests.mechanisms.pairs        writes the table of pairs into gpp/mechanisms/README.md

`PUTS` says how each mechanism is put on a plan; a new folder of `gpp/mechanisms/` needs a row.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from gpp import Checkpoints, Distributed, Even, Flush, NoFlush, OneFOneB, Plan, Stash, Strategy, ZeroBubbleH1, mechanism
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import InvalidConfig, InvalidPlan, UnsupportedPlan
from gpp.mechanisms.helpers.stage import Helpers, delays
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.quantised_edges.settings import QuantisedEdges
from gpp.mechanisms.round_robin.sharing import SHARING
from gpp.mechanisms.serving.course import Requests
from gpp.mechanisms.serving.mode import MODE
from gpp.mechanisms.serving.model import served
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.models.base import describe
from gpp.optimizers import SGD, AbstractOptimizer
from gpp.plan.build import make_plan
from gpp.runtime.job import Job, assemble
from gpp.runtime.job_asked import asked, asked_model, with_asked
from gpp.runtime.mode import RunSettings
from gpp.schedules.base import AbstractSchedule
from gpp.stage import Stage
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.split import halves

PAGE = Path(__file__).resolve().parents[2] / "gpp" / "mechanisms" / "README.md"
HEADING: Final = "## Mechanisms that meet"
MINIBATCH, MICROBATCH, STEPS = 16, 4, 2
ALLOWED: Final = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """How a mechanism is put on a plan, with what it cannot do without.

    Args:
        stage: gives the first of two stages the mechanism's value.
        plan: the same, for what takes more than the stage to say.
        width: times as many devices the first stage has.
        schedule: the order of the passes; of two mechanisms that need one, the later in `PUTS` has its way.
        weights: the weight policy; else the plain one, or stashed weights where the pipeline does not drain.
        optimizer: the same optimizer, as the mechanism is asked for by it.
        settings: by which the mechanism is asked for.
        serves: whether requests are served, and nothing is trained.
    """

    stage: Callable[[Stage], Stage] = lambda stage: stage
    plan: Callable[[Plan, Problem], Plan] = lambda plan, problem: plan
    width: int = 1
    schedule: AbstractSchedule | None = None
    weights: AbstractWeights | None = None
    optimizer: AbstractOptimizer | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    serves: bool = False


def _helped(plan: Plan, problem: Problem) -> Plan:
    """Another device makes the gradients of the first stage's weights, and stages have as much in flight as that delays."""
    first, *others = plan.stages
    stages = (first.having(Helpers(weight_device=problem.cluster.num_devices - 1)), *others)
    late = delays(stages, plan.edges)
    return replace(plan, stages=tuple(replace(s, in_flight=(d + 1) * MICROBATCH) for s, d in zip(stages, late, strict=True)))


TRAINED_BY: Final = SGD(lr=0.1, momentum=0.9)

PUTS: Final[dict[str, Put]] = {
    "tensor_parallel": Put(stage=lambda stage: stage.having(TensorParallel(degree=2)), width=2),
    "round_robin": Put(plan=SHARING.chosen, width=2),
    "marks": Put(stage=lambda stage: marked(stage, recompute=stage.ops[:1])),
    "quantised_edges": Put(plan=QuantisedEdges(bits=8).chosen, serves=True),
    "weight_versions": Put(schedule=NoFlush(), weights=Stash(accumulation=1)),
    "helpers": Put(plan=_helped, schedule=NoFlush()),
    # No cast touches the float64 of the test's trainings, so that they equal one device to the last digits, with the loss scale.
    "precision": Put(settings={"autocast": "float16"}),
    "shared_state": Put(optimizer=replace(TRAINED_BY, shard="replicas"), width=2),
    "split_backward": Put(schedule=ZeroBubbleH1()),
    "serving": Put(serves=True),
}
"""In this order they are put on a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What came of putting mechanisms on a plan.

    Args:
        said: `ALLOWED`, or the message of the refusal.
        job: of a training that is allowed.
    """

    said: str
    job: Job | None = None


def meet(*names: str) -> Met:
    """What a run says of the mechanisms of these names on one plan."""
    puts = [put for name, put in PUTS.items() if name in names]
    serves, width, settings = any(put.serves for put in puts), 1, dict[str, Any]()
    schedule: AbstractSchedule = OneFOneB()
    weights, optimizer = None, TRAINED_BY
    for put in puts:
        schedule, width, settings = put.schedule or schedule, width * put.width, settings | put.settings
        weights, optimizer = put.weights or weights, put.optimizer or optimizer
    weights = weights or (Flush() if schedule.drains else Stash(accumulation=1))
    model, captured, _ = inprocess.captured_named("mlp")
    captured = asked_model(served(captured) if serves else captured, optimizer, settings)
    engine = Distributed(**settings)
    problem = inprocess.problem_of(captured, 5, MINIBATCH, max_ops=60)
    problem = with_asked(replace(problem, optimizer=optimizer), optimizer, settings)
    first, last = halves(problem.graph, problem.graph.num_ops // 2)
    try:
        strategy = Strategy(name="pair", planner=Even(), schedule=schedule, weights=weights)
        if serves:
            MODE.check(
                cast(
                    RunSettings,
                    SimpleNamespace(
                        mode="inference", engine=engine, checkpoint=Checkpoints(), resume=None, loss_scope="microbatch"
                    ),
                )
            )
            strategy, problem = MODE.adapted(strategy), replace(problem, regime=Regime(course=Requests(buffers=2)))
        else:
            problem = strategy.posed(problem)
        plan = make_plan(problem, "pair", [(first, width), (last, 1)], MICROBATCH, ordered=True)
        for put in puts:
            plan = put.plan(replace(plan, stages=(put.stage(plan.stages[0]), *plan.stages[1:])), problem)
        strategy.check(plan, problem)
        program = strategy.lower(plan, problem)
        strategy.predict(plan, problem)
        engine.check(plan)
        if serves:
            assert problem.regime.course is not None
            there = (
                plan.mechanisms
                | program.mechanisms
                | {problem.regime.course.mechanism}
                | asked(describe(optimizer), settings).keys()
            )
            assert there >= {*names}, f"of {names} the plan and its program have {sorted(there)} only"
            return Met(said=ALLOWED)
        given = training() | {"optimizer": optimizer}
        job = assemble(captured, problem, plan, strategy, model=model, train_samples=64, **given, **settings)
        assert job.mechanisms >= {*names}, f"of {names} the job has {sorted(job.mechanisms)} only"
        engine.refuse(job)
        return Met(said=ALLOWED, job=job)
    except (InvalidConfig, InvalidPlan, UnsupportedPlan) as error:
        return Met(said=str(error))


def training() -> dict[str, Any]:
    """What is trained, on whatever plan."""
    data = inprocess.data_of(inprocess.captured_named("mlp")[0])
    return {"data": data, "optimizer": TRAINED_BY, "steps": STEPS, "dtype": "float64", "seed": 0}


SHIPPED: Final = [package.rpartition(".")[2] for package in mechanism.packages() if package.startswith(mechanism.SHIPPED)]
PAIRS: Final = list(combinations(SHIPPED, 2))


def section() -> str:
    """The table of all pairs, in Markdown, with the refusals under it: those that differ in values alone stand there once."""
    cells = {pair: meet(*pair).said for pair in PAIRS}
    rules: dict[str, str] = {}
    for pair, said in cells.items():
        if said != ALLOWED:
            rule = said.partition(" Fix: ")[0].rstrip(".")
            key = re.sub(r"\w+=\[.*\]|\d+", "VALUE", rule)
            rules.setdefault(key, rule)
            cells[pair] = str([*rules].index(key) + 1)
    columns = SHIPPED[1:]
    rows = ["||" + "|".join(columns) + "|", "|---" * len(SHIPPED) + "|"]
    rows += [f"|{a}|{'|'.join(cells.get((a, b), '') for b in columns)}|" for a in SHIPPED[:-1]]
    listed = [
        textwrap.fill(f"{n}. {rule}", 120, subsequent_indent=" " * len(f"{n}. ")) for n, rule in enumerate(rules.values(), start=1)
    ]
    return "\n".join([*rows, "", *listed])


def written(page: str, table: str) -> str:
    """The page with the table in place of what its last section has, from the first row to the last refusal."""
    head, _, rest = page.partition(f"{HEADING}\n")
    words, _, _ = rest.partition("||")
    return f"{head}{HEADING}\n{words}{table}\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), section()))
