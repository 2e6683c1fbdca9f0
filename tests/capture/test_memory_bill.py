"""The bill of a stage's activations and transients against PyTorch's own profiler, on the real stage with real tensors."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile

from gpp import capture_model
from gpp.capture.stage import StageModule, build_stage, initial_state
from gpp.cost.stage import stage_amounts
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.keeper import Keeper
from gpp.mechanisms.marks.nodes import NodeMarks
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.stage import Stage
from tests.support import inprocess
from tests.support.long import thinned

CASES = [
    ("digits", ()),
    ("clip_small", ("model.image_layers=2", "model.text_layers=1")),
    ("gpt_small", ("model.num_layers=2",)),
    ("candle_uno_small", ()),
]


def allocated(recorded: profile) -> list[int]:
    """Bytes taken since the profile began, after each event of the allocator."""
    results: Any = recorded.profiler and recorded.profiler.kineto_results
    return list(accumulate((e.nbytes() for e in results.events() if e.name() == "[memory]"), initial=0))


def listening() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def values_of(captured: Captured, module: StageModule, samples: int) -> dict[str, torch.Tensor]:
    """Inputs and messages of a pass; the classes of integer inputs are all 0."""
    out: dict[str, torch.Tensor] = {}
    for name in module.inputs:
        node = next(n for n in captured.nodes if n.kind == "input" and n.target == name)
        shape = [samples if extent == "b" else extent for extent in node.shape or ()]
        dtype = getattr(torch, node.dtype or "float64")
        out[name] = torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    for name in module.receives:
        spec = module.spec(name)
        shape = [*spec.shape[: spec.batch_dim], samples, *spec.shape[spec.batch_dim :]]
        out[name] = torch.rand(shape, dtype=spec.dtype).requires_grad_(spec.differentiable)
    return out


def measured(captured: Captured, graph: OpGraph, stage: Stage, weights: dict[str, Any], samples: int) -> tuple[int, int]:
    """Bytes of a micro-batch between its forward and its backward, and the most beyond them in either."""
    module = build_stage(captured, [node for op in stage.ops for node in graph.ops[op].nodes], device="cpu")
    module.load(weights)
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    values = values_of(captured, module, samples)
    received = sum(values[name].nbytes for name in module.receives)
    if captured.passes:
        module(samples, values)  # from here on the narrow copies of the weights are there
    with ExitStack() as watched, listening() as forward:
        keeper = keeper_of(captured, graph, stage, module) if marks_of(stage).recompute else None
        outputs = module(samples, values, *([watched.enter_context(keeper.forward(0, None))] if keeper else []))
        watched.close()
        roots = [get_gradient_edge(tensor) for tensor in outputs.values() if tensor.requires_grad]
        forms = [(tensor.shape, tensor.dtype) for tensor in outputs.values() if tensor.requires_grad]
        if keeper:
            # As in a worker: what has left is not held.
            outputs.clear()
    path = allocated(forward)
    kept = path[-1]
    seeds = [torch.ones(shape, dtype=dtype) for shape, dtype in forms]
    with listening() as backward:
        torch.autograd.backward(roots, seeds)
    sent = sum(seed.nbytes for seed in seeds if seed.dim())
    return kept + received, max(max(path) - kept, max(allocated(backward)) + sent)


def keeper_of(captured: Captured, graph: OpGraph, stage: Stage, module: StageModule) -> Keeper:
    marks = NodeMarks.of(captured, graph, stage, module.calls)
    generators = [torch.default_generator] if module.has_random else []
    return Keeper(module, marks, generators=generators, copies=None)


@pytest.mark.parametrize(("name", "settings"), thinned(CASES, len(CASES)), ids=[name for name, _ in CASES])
def test_the_bill_of_a_stage_is_what_the_allocator_says(name: str, settings: tuple[str, ...]) -> None:
    """With everything kept, and with operators discarded, as workers do it."""
    _, captured, weights = inprocess.captured_named(name, *settings)
    problem = inprocess.problem_of(captured, 3, 16, max_ops=12)
    n = problem.graph.num_ops
    for low, high in pairwise((0, n // 3, 2 * n // 3, n)):
        ops = tuple(range(low, high))
        cases = ((4, (), ()), (16, (), ()), (16, ops, ()), (16, ops, ops[::2]), (16, ops[: len(ops) // 2], ()))
        for samples, recompute, ends in cases:
            stage = Stage(ops=ops, devices=(0,), microbatch_size=samples, in_flight=samples)
            stage = marked(stage, recompute=recompute, boundaries=ends)
            bill = stage_amounts(problem, stage)
            kept, beyond = measured(captured, problem.graph, stage, weights, samples)
            # Scalars of the loss aside. What leaves a stage with marks and is kept by its readers alone is not there.
            sent = [t for t in problem.graph.tensors if t.producer in ops and not set(t.consumers) <= set(ops)]
            less = (
                sum(t.bytes_per_sample for t in sent if t.saved and t.producer not in {*recompute} - {*ends}) if recompute else 0.0
            )
            # Attention of torch 2.11 keeps up to 0.3 % more than its fake form says.
            assert -200 - 0.003 * kept <= bill.kept * samples - kept <= 200 + less * samples, (ops, samples, recompute, ends)
            stated, true = (bill.kept + bill.once) * samples + bill.fixed, kept + beyond
            # One micro-batch in flight and no weights, so transients weigh much; a weight's gradient may be counted too much. Of
            # an operator that is kept behind a run it is not known when in its backward it asks for the run.
            assert 0.93 * true <= stated <= (1.8 if recompute else 1.3) * true, (ops, samples, recompute, stated, true)


class Repeated(torch.nn.Module):
    """One layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.layer(x).relu()).relu())


@pytest.mark.parametrize("max_ops", [64, 1])
def test_gradients_of_a_weight_that_is_used_again_are_in_the_bill(max_ops: int) -> None:
    """Autograd holds two gradients and their sum beside the sum of the micro-batches; of operators, and of a group of them."""
    model, x, y = Repeated(), torch.rand(2, 128), torch.rand(2, 128)
    captured = capture_model(model, {"x": x}, y, torch.nn.functional.mse_loss)
    problem = inprocess.problem_of(captured, 1, 8, max_ops=max_ops)
    stage = Stage(ops=tuple(range(problem.graph.num_ops)), devices=(0,), microbatch_size=2, in_flight=2)
    bill, (_, beyond) = stage_amounts(problem, stage), measured(captured, problem.graph, stage, initial_state(model, captured), 2)
    assert 0.98 * beyond <= bill.once * 2 + bill.fixed <= 1.05 * beyond
