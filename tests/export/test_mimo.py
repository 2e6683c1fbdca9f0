"""A plan with branches for Megatron core's MIMO: grids of ranks, and the graph of its modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from gpp import Even, OneFOneB, Strategy
from gpp.errors import UnsupportedPlan
from gpp.export import mimo
from gpp.export.base import ToExport
from gpp.export.megatron import Megatron
from gpp.graph.captured import Captured
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from tests.support.inprocess import captured_named, problem_of

STAGES = (
    ("image.embed", "image.encoder.layers.0"),
    ("image",),
    ("text",),
    ("cat", "multimodal.layers.0"),
    ("",),
)
"""What two towers and the model over them have in each stage: the first that an operator's module begins with."""


@cache
def flava() -> Captured:
    return captured_named("flava_small", "model.text_layers=1", "model.image_layers=2")[1]


def branching(
    stages: Sequence[Sequence[str]] = STAGES, devices: Sequence[Sequence[int]] = ((0,), (1,), (2,), (3,), (4,))
) -> ToExport:
    """FLAVA's image tower in two stages, its text tower in one, and the model over both in two."""
    captured = flava()
    problem = replace(problem_of(captured, 1 + max(map(max, devices)), 32, microbatch_size=4), graph=captured.graph)
    masks = [0] * len(stages)
    for i, op in enumerate(captured.graph.ops):
        path = captured.node_of[op.nodes[0]].module or op.name
        s = next(s for s, names in enumerate(stages) if any(path == n or path.startswith(f"{n}.") or not n for n in names))
        masks[s] |= mask_of([i])
    parts = [(mask, len(own)) for mask, own in zip(masks, devices, strict=True)]
    plan = make_plan(problem, "test", parts, 4, ordered=True, placement=[tuple(own) for own in devices])
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    return ToExport(model="flava_small", captured=captured, problem=problem, strategy=strategy, plan=plan)


def read(e: ToExport) -> dict[str, Any]:
    """What its file says; Megatron's own classes are left out (`test_peers.py` has them)."""
    source = Megatron().exported(e).files["planned_mimo.py"]
    scope: dict[str, Any] = {}
    exec(source[source.index("MODULES") : source.index("def grids")], scope)
    return scope


def test_each_branch_is_a_module_with_a_grid_of_its_own() -> None:
    e = branching()
    assert e.plan.edges == ((0, 1), (1, 3), (2, 3), (3, 4))
    found = read(e)
    assert found["TOPOLOGY"] == {"image": ["multimodal"], "text": ["multimodal"], "multimodal": []}
    modules = found["MODULES"]
    assert [(one["rank"], one["tp"], one["pp"], one["dp"]) for one in modules.values()] == [
        (0, 1, 2, 1),
        (2, 1, 1, 1),
        (3, 1, 2, 1),
    ]
    assert (found["NUM_MICROBATCHES"], found["MICROBATCH_SIZE"], found["DIMENSIONS"]) == (8, 4, {"b": 0, "s": 1, "h": 2})


def test_more_micro_batches_wait_on_the_short_branch_and_that_is_predicted() -> None:
    """MIMO counts from the end of the longest way to a stage: the text tower is a stage ahead of where its own way has it."""
    e = branching()
    ran = Megatron().exported(e).ran
    assert [stage.in_flight // 4 for stage in e.plan.stages] == [4, 3, 3, 2, 1]
    assert [stage.in_flight // 4 for stage in ran.plan.stages] == [4, 3, 4, 2, 1]
    own, theirs = (one.strategy.predict(one.plan, one.problem).metrics for one in (e, ran))
    assert theirs.peak_memory_bytes[2] > own.peak_memory_bytes[2]


def test_replicas_are_a_dimension_of_a_grid() -> None:
    found = read(branching(devices=((0,), (1,), (2, 3), (4, 5), (6, 7))))
    assert [(one["rank"], one["pp"], one["dp"]) for one in found["MODULES"].values()] == [(0, 2, 1), (2, 1, 2), (4, 2, 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": ((0, 1), (2, 3), (4,), (5, 6, 7), (8, 9, 10))}, "edge 1->3 joins 2 replicas and 3"),
        ({"devices": ((0,), (1,), (0,), (2,), (3,))}, "device 0 has stages 0, 2"),
        (
            {"stages": (("image.embed",), ("image",), ("text.embed", "text.encoder.layers.0.attention_norm"), ("text",), ("",))},
            r"edge 2->3 has 2 tensors",
        ),
    ],
)
def test_what_mimo_does_not_take_is_refused_by_stage(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedPlan, match=words):
        Megatron().exported(branching(**change))


def test_a_chain_has_no_branches() -> None:
    e = branching()
    assert mimo.branches(e.plan) and not mimo.branches(replace(e.plan, edges=((0, 1), (1, 2), (2, 3), (3, 4))))
