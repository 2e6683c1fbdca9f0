"""Examples in docstrings are true, and run in one small world."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import gpp
from gpp import Even, OneFOneB, Strategy
from gpp.cluster import flat
from gpp.cost.holding import Holding
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.random_graphs import equal_chain, equal_towers
from gpp.plan.build import make_plan
from gpp.program.program import Task

ROOMS = (
    "gpp.routing",
    "gpp.stage",
    "gpp.cost",
    "gpp.graph",
    "gpp.plan",
    "gpp.planners",
    "gpp.program",
    "gpp.schedules",
    "gpp.simulate",
)

LEAST = 25
"""Examples that a newcomer finds in these rooms at least."""


def world() -> dict[str, object]:
    """What examples may name: a chain of two operators, each 1 s forwards and 2 s backwards, on two devices."""
    cluster = flat(num_devices=2, bandwidth_bytes_per_s=1e9, memory_bytes=1e12)
    graph, cost = equal_chain(2), Constant(flop_s=1e-9)
    problem = Problem(graph=graph, cluster=cluster, cost=cost, minibatch_size=4, microbatch_size=1)
    strategy = Strategy(name="mine", planner=Even(), schedule=OneFOneB())
    plan = make_plan(problem, "mine", [(0b01, 1), (0b10, 1)], 1)
    values = {"graph": graph, "problem": problem, "strategy": strategy, "plan": plan, "program": strategy.lower(plan, problem)}
    named = (flat, Constant, Holding, Task, equal_chain, equal_towers, make_plan, replace)
    return {**values, "predict": partial(strategy.predict, problem=problem), **{each.__name__: each for each in named}}


def modules() -> Iterator[ModuleType]:
    """All modules of the rooms."""
    for found in pkgutil.walk_packages(gpp.__path__, "gpp."):
        if any(found.name == room or found.name.startswith(f"{room}.") for room in ROOMS):
            yield importlib.import_module(found.name)


def test_examples_are_true():
    """Every example says what it says, and there are enough of them."""
    found = [doctest.testmod(module, extraglobs=world()) for module in modules()]
    assert not sum(each.failed for each in found), "the lines above show what was expected"
    assert sum(each.attempted for each in found) >= LEAST
