"""Backwards in two halves: the same numbers, and no more held between them than the bill says."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from gpp import Flush, Split1F1B, ZeroBubbleH1, ZeroBubbleH2
from gpp.capture.build import capture
from gpp.capture.stage import StageModule, build_stage, initial_state
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.graph.captured import Captured
from gpp.mechanisms.precision.narrow import narrowed
from gpp.mechanisms.split_backward.job import JOB
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.operators import late_of
from gpp.mechanisms.split_backward.operators import split as split_module
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.runtime.worker.allocator import MemoryEvents
from gpp.schedules.base import AbstractSchedule
from tests.checks.split_backward import differences
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.markings import keep, model_of, random_case, train
from tests.support.weight_uses import UsingStages

USES = ("transposed", "einsum", "bilinear", "convolution", "attention", "scaled", "copied inside an operator", "weight norm")
"""Ways to read weights that are split in different ways."""


def whole_and_split(captured: Captured, dtype: torch.dtype, state: dict[str, torch.Tensor]) -> tuple[StageModule, StageModule]:
    """All of a model as one stage, and again with its backward in halves."""
    nodes = [node for op in captured.graph.ops for node in op.nodes]
    both = [build_stage(captured, nodes, device="cpu", dtype_of_floats=dtype) for _ in range(2)]
    for module in both:
        module.load(state)
    split_module(both[1])
    return both[0], both[1]


@pytest.mark.parametrize(
    ("name", "late", "dtype", "marked"),
    [("Tied", 3, "float32", False), ("Dropping", 7, "float64", True), ("NormedBatch", 1, "float64", False)],
)
def test_trainings_are_equal_bit_for_bit(name: str, late: int, dtype: str, marked: bool) -> None:
    """Random cuts, replicas, recomputation; `python -m tests.checks.split_backward` looks for more."""
    assert differences(name, random.Random(name), late=late, dtype=dtype, marked=marked, minibatch=16) == []


@pytest.mark.parametrize("use", thinned(USES))
def test_every_way_to_read_weights(use: str) -> None:
    """Three micro-batches whose weights' gradients all come at the end; whatever is computed from weights alone included."""
    torch.manual_seed(0)
    model = UsingStages(use).double()
    captured = capture(model, (torch.randn(3, 6).double(),), torch.randn(3, 6).double(), torch.nn.functional.mse_loss, name="use")
    whole, split = whole_and_split(captured, torch.float64, initial_state(model, captured))
    kept = []
    for _ in range(3):
        rows = {captured.inputs[0]: torch.randn(4, 6).double(), captured.inputs[1]: torch.randn(4, 6).double()}
        whole(4, rows)["loss"].backward()
        split(4, rows)["loss"].backward()
        kept.append(late_of(split).take())
    for gradients in kept:
        gradients.deliver()
    for (name, mine), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad), name


class Apart(torch.nn.Module):
    """A linear layer whose rows lie apart in memory: torch adds its bias behind the product, where it else adds it within."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.stack([x, x.sin(), x.cos()]).transpose(0, 1)).sum(1)


def test_a_linear_layer_of_rows_that_lie_apart_rounds_as_torchs() -> None:
    torch.manual_seed(0)
    model, shapes = Apart().double(), ((4, 64), (4, 24))
    x, y = (torch.randn(*shape).double() for shape in shapes)
    captured = capture(model, (x,), y, torch.nn.functional.mse_loss, name="apart")
    whole, split = whole_and_split(captured, torch.float64, initial_state(model, captured))
    losses = [module(4, dict(zip(captured.inputs, (x, y), strict=True)))["loss"] for module in (whole, split)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    late_of(split).take().deliver()
    assert all(torch.equal(*(p.grad for p in pair)) for pair in zip(whole.parameters(), split.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "passes"),
    thinned([(name, passes) for passes in (None, "bfloat16") for name in ("ThreeOutputs", "gpt_small", "dlrm_small")], 3),
)
def test_the_bill_of_what_is_late(name: str, passes: Literal["bfloat16"] | None) -> None:
    """By the allocator: what is left of a micro-batch after the first half, within 3 %; and nothing of it after the second.

    Three operators read one tensor, or the gradients of several are slices of one.
    """
    model, captured, state = model_of(name, "float32")
    captured = narrowed(captured, passes) if passes else captured
    _, split = whole_and_split(captured, torch.float32, state)
    rows = inprocess.data_of(model).load("train", model, seed=0, dtype="float32").fetch(torch.arange(8))
    for param in split.parameters():
        param.grad = torch.zeros_like(param)
    split(8, rows)  # from here on narrow copies of the weights are there
    events = MemoryEvents(lambda allowed: None)
    events.begin([])
    split(8, rows)["loss"].backward()
    kept = late_of(split).take()
    events.drain()
    assert events.held_bytes == pytest.approx(8 * sum(op.late_bytes for op in captured.graph.ops), rel=0.03)
    kept.deliver()
    events.end()
    assert events.held_bytes == 0


def test_halves_of_narrow_forwards_train_what_whole_backwards_train(tmp_path: Path) -> None:
    """Operators whose casts are differentiated with them."""
    case = random_case("Fork", Flush(), random.Random(5), minibatch=16, dtype="float32")
    strategy = replace(case.strategy, schedule=ZeroBubbleH1())
    problem = replace(case.problem, regime=strategy.posed(case.problem).regime)
    split = replace(case, strategy=strategy, problem=problem).job(keep, dtype="float32", autocast="bfloat16")
    whole = case.job(keep, dtype="float32", autocast="bfloat16")
    found = train(whole, case.weights, tmp_path / "a")
    assert found.differences(train(split, case.weights, tmp_path / "b")) == []


@pytest.mark.parametrize("schedule", [Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2()])
def test_schedules_train_what_whole_backwards_train(schedule: AbstractSchedule, tmp_path: Path) -> None:
    """Real workers of a random plan, in threads."""
    case = random_case("Fork", Flush(), random.Random(5), minibatch=16)
    strategy = replace(case.strategy, schedule=schedule)
    problem = replace(case.problem, regime=strategy.posed(case.problem).regime)
    split = replace(case, strategy=strategy, problem=problem).job(keep)
    assert {action.kind for own in split.program.actions.values() for action in own} >= set(HALVES)
    assert train(case.job(keep), case.weights, tmp_path / "a").differences(train(split, case.weights, tmp_path / "b")) == []
    with pytest.raises(InvalidConfig, match=r"engine\.compile.*makes all of its gradients in one go"):
        JOB.refuse(replace(split, settings=replace(split.settings, compile="inductor")))
    stages = tuple(stage.having(TensorParallel(degree=2)) for stage in split.plan.stages)
    with pytest.raises(UnsupportedPlan, match="split over 2 devices"):
        JOB.refuse(replace(split, plan=replace(split.plan, stages=stages)))


def test_what_stays_whole_is_told() -> None:
    """With its reason, and every other use of its parameters with it."""
    _, captured, _ = model_of("NormedBatch")
    nodes = [node for op in captured.graph.ops for node in op.nodes]
    module = build_stage(captured, nodes, device="meta")
    found = split_module(module)
    assert {captured.node_of[name].target for name in found.split} == {"aten.linear.default"}
    assert {captured.node_of[name].target for name in found.whole} == {"aten.batch_norm.default"}
    first = min(found.split)
    asked = split_module(module, whole=frozenset([first]))
    assert "as measured" in asked.whole[first] and first not in asked.split
