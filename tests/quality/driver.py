"""Plans problems in the words of the command line, one after the other in one process.

    python -P tests/quality/driver.py      # the working directory and PYTHONPATH say whose planners

Reads one JSON object a line, `{"problem": [...], "planner": [...]}`, and answers each with one (`planned`). The file stands alone:
it also serves checkouts that do not have it, and of a checkout it knows the configuration, `Experiment`, `Strategy` and the bound.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_bounds: dict[tuple[str, ...], Any] = {}
"""The bound of the problem that was asked for last, by its words: all planners have the same."""


SWEEPS = "hydra.searchpath=[file://sweeps]"
"""The models of published tables are options, too: `-cd sweeps` of the command line."""


def experiment(words: list[str]) -> Any:
    """The experiment of a command line."""
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    import gpp.app.multirun  # noqa: F401  # the functions that YAML files call

    with initialize_config_dir(os.path.join(os.getcwd(), "conf"), version_base="1.3"):
        return instantiate(compose("config", overrides=[SWEEPS, "name=quality", "strategies=[]", *words]), _convert_="all")


def planned(problem_words: list[str], planner_words: list[str]) -> dict[str, Any]:
    """What a planner makes of a problem.

    `status` is ok, infeasible, refused (the problem is not for this planner) or failed; `cpu_s` are the processor's seconds of
    planning, without composing, capture and the bound; `simulated` are the plans that the planner had predicted; `step_s` is the
    exact prediction of the plan, `bound_s` what no plan of its kind can beat (null where no bound is known).
    """
    from gpp.errors import GppError, Infeasible

    one = experiment([*problem_words, *planner_words])
    captured = one.captured()
    problem = one.problem(captured, one.op_graph(captured))
    out: dict[str, Any] = {"ops": problem.graph.num_ops, "devices": problem.cluster.num_devices}
    gc.collect()
    with _counted(type(one.strategy)) as calls:
        start = time.process_time()
        try:
            plan = one.strategy.plan(problem)
            out["status"] = "ok"
        except Infeasible as error:
            plan, out["status"], out["reason"] = None, "infeasible", str(error)
        except GppError as error:
            plan, out["status"], out["reason"] = None, "refused", str(error)
        out["cpu_s"] = time.process_time() - start
    out["simulated"] = len(calls)
    if plan is not None:
        out["step_s"] = one.strategy.predict(plan, problem).metrics.iteration_s
        out["bound_s"] = _bound_s(tuple(problem_words), one.strategy, problem, plan)
        out["stages"], out["shared"] = len(plan.stages), plan.shares_devices
    return out


@contextmanager
def _counted(strategy: type) -> Iterator[list[None]]:
    """An entry for every prediction that a planner asks for meanwhile."""
    calls, predict = list[None](), strategy.predict  # type: ignore[attr-defined]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return predict(*args, **kwargs)

    strategy.predict = counting  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        strategy.predict = predict  # type: ignore[attr-defined]


def _bound_s(words: tuple[str, ...], strategy: Any, problem: Any, plan: Any) -> float | None:
    """Seconds that no plan of the plan's kind can beat; None where the schedule or the plan has no bound."""
    from gpp.errors import Infeasible
    from gpp.planners.bounds.lower_bound import lower_bound

    if getattr(strategy.schedule, "unbounded", True):  # commits before 27 November have no such word
        return None
    spares = bool(strategy.memory.ways) or strategy.planner.marks
    key = (*words, str(spares))
    if key not in _bounds:
        if len(_bounds) > 1:
            _bounds.clear()
        try:
            _bounds[key] = lower_bound(problem, spares=spares)
        except Infeasible:
            _bounds[key] = None
    bound = _bounds[key] and _bounds[key].of(plan)
    return bound and bound.iteration_s


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a checkout prints is no answer.
    sys.path.insert(0, os.getcwd())
    for line in sys.stdin:
        task = json.loads(line)
        try:
            found = planned(task["problem"], task["planner"])
        except Exception as error:  # A crash is a result too, and the next problem goes on.
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
