"""The page to explore: what it holds is what strategies plan and predict, and no setting of its controls leads nowhere."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gpp.analysis.explore import Explored, Grid, GridPoint, explore
from gpp.cluster import Cluster
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.report.explore.page import explore_report
from gpp.report.run.record import Asked, Planned, RunRecord, Surveyed
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from tests.support import graphs
from tests.support.page_check import parse

SCHEDULES = {"1f1b": OneFOneB(), "zero_bubble_h1": ZeroBubbleH1()}
STRATEGIES = tuple(
    Strategy(name=name, planner=planner, schedule=OneFOneB())
    for name, planner in (("sequential", Sequential()), ("graphpipe", GraphPipe()))
)
MEMORY = 1e4
"""Bytes of a device: more than any plan takes."""


def posed(num_devices: int, microbatch_size: int | None = None, memory_bytes: float = MEMORY) -> Problem:
    graph = graphs.in_halves(graphs.with_weights(graphs.two_towers(2)))
    return graphs.problem(graph, num_devices, 8, memory_bytes=memory_bytes, microbatch_size=microbatch_size)


def first(count: int) -> Cluster:
    return graphs.cluster(count, MEMORY)


@pytest.fixture(scope="module")
def found() -> Explored:
    grid = Grid(devices=(1, 3, 16), microbatches=(1, 4, 3), memory=(0.0, 0.5, 1.0), schedules=SCHEDULES)
    return explore(grid, STRATEGIES, posed(4), first)


@pytest.fixture(scope="module")
def page(found: Explored) -> str:
    graph = posed(4).graph
    run = RunRecord(
        asked=Asked(model="towers", cluster="test", command="run"), planned=Planned(graph=graph), survey=Surveyed(explored=found)
    )
    return explore_report(run, found)


@pytest.fixture(scope="module")
def data(page: str) -> Any:
    """What a browser reads."""
    packed = re.search(r'<script type="text/plain" id="explored">([^<]*)</script>', page)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed.group(1)), -15))


def states(data: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every reachable setting of the controls, by the words of the page's address, with its entry: as explore.js counts."""
    axes = [control["values"] for control in data["controls"]]
    for positions in product(*(range(len(values)) for values in axes)):
        number = 0
        for position, values in zip(positions, axes, strict=True):
            number = number * len(values) + position
        yield tuple(v[p] for v, p in zip(axes, positions, strict=True)), data["entries"][data["points"][number]]


def test_every_setting_of_the_controls_has_a_plan_with_its_drawings_or_a_reason(page: str, data: Any) -> None:
    assert all(len(set(control["values"])) == len(control["values"]) for control in data["controls"])
    every = list(states(data))
    assert len(every) == len(data["points"]) == 2 * 2 * 3 * 2 * 2
    assert {entry["status"] for _, entry in every} == {"ok", "infeasible"}
    for _, entry in every:
        if entry["status"] == "ok":
            assert data["plans"][entry["plan"]]["drawing"].startswith("<svg")
            assert len(data["timelines"][entry["timeline"]]["panels"]) == 1
        else:
            assert "needs" in entry["reason"] and "Smallest change that fits" in entry["reason"]
    assert len(data["plans"]) < len({str(entry) for _, entry in every if entry["status"] == "ok"})  # equal plans stand once
    names = set(parse(page).tags)
    assert {"input", "output", "fieldset"} <= names
    assert every[0][0][:2] == ("1", "2")
    begin = [control["values"][p] for control, p in zip(data["controls"], data["start"], strict=True)]
    fastest = min((e["step_s"] for words, e in every if words[0] == "3" and words[2] == begin[2] and e["status"] == "ok"))
    assert dict(every)[tuple(begin)]["step_s"] == fastest and begin[0] == "3"


def test_what_is_stored_is_what_strategies_plan_and_predict(found: Explored, data: Any) -> None:
    """Sampled points are planned again, each by itself on a problem made here. A plan that was taken over from more memory may be
    better than what a search within less finds, never worse; with all the memory both are equal."""
    of_memory = dict(zip(data["controls"][2]["values"], found.limits, strict=True))
    kinds = set[str]()
    for words, entry in list(states(data))[::5]:
        limit = of_memory[words[2]]
        planner = next(s for s in STRATEGIES if s.name == words[3])
        strategy = replace(planner, schedule=SCHEDULES[words[4]])
        problem = posed(int(words[0]), int(words[1]), MEMORY if limit == max(found.limits) else limit)
        try:
            plan = strategy.plan(problem)
        except Infeasible as error:
            assert (entry["status"], entry["reason"]) == ("infeasible", str(error))
            kinds.add("infeasible")
            continue
        metrics = strategy.predict(plan, problem).metrics
        if limit == max(found.limits):
            assert entry["step_s"] == metrics.iteration_s and entry["bubble"] == metrics.bubble_fraction
            assert entry["peak_bytes"] == max(metrics.peak_memory_bytes.values())
            kinds.add("free")
        else:
            assert entry["step_s"] <= metrics.iteration_s * (1 + 1e-12)
            assert entry["peak_bytes"] <= limit
            kinds.add("within")
    assert kinds == {"infeasible", "free", "within"}


def test_the_timeline_that_is_drawn_has_the_bubble_that_is_said(data: Any) -> None:
    for _, entry in list(states(data))[::3]:
        if entry["status"] != "ok":
            continue
        line = data["timelines"][entry["timeline"]]
        (panel,) = line["panels"]
        numbers = list(_numbers(zlib.decompress(base64.b64decode(panel["packed"]), -15)))
        busy, at = 0.0, 0
        for _ in line["rows"]:
            count = numbers[at]
            lengths, codes = (numbers[at + 1 + count * n : at + 1 + count * (n + 1)] for n in (1, 2))
            at += 1 + 4 * count
            for length, code in zip(lengths, codes, strict=True):
                kind = line["kinds"][panel["table"][code][1]]["text"]
                busy += length * line["tick_s"] if kind in ("F", "B", "I", "W") else 0.0
        assert at == len(numbers)
        assert 1 - busy / (len(line["rows"]) * entry["step_s"]) == pytest.approx(entry["bubble"], abs=1e-4)


def _numbers(stream: bytes) -> Iterator[int]:
    """LEB128: seven bits a byte, the lowest first."""
    value = shift = 0
    for byte in stream:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0


def test_a_grid_without_anything_for_this_problem_is_refused() -> None:
    grid = Grid(devices=(16,), schedules=SCHEDULES)
    with pytest.raises(InvalidConfig, match=r"explore\.devices.*set explore\.devices=\[4\]"):
        explore(grid, STRATEGIES, posed(4), first)
    with pytest.raises(InvalidConfig, match=r"explore\.microbatches"):
        explore(replace(grid, devices=(1,), microbatches=(3,)), STRATEGIES, posed(4), first)
    assert GridPoint._fields == ("devices", "microbatch_size", "memory", "strategy", "schedule")
