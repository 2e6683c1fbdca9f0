"""The bill of a stage's activations and transients against PyTorch's own profiler, on the real stage with real tensors."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpp.capture.stage import StageModule, build_stage
from gpp.graph.captured import Captured
from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.graph.sums import Sums
from tests.support import inprocess

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


def measured(captured: Captured, graph: OpGraph, ops: tuple[int, ...], weights: dict[str, Any], samples: int) -> tuple[int, int]:
    """Bytes of a micro-batch between its forward and its backward, and the most beyond them in either."""
    module = build_stage(captured, [node for op in ops for node in graph.ops[op].nodes], device="cpu")
    module.load(weights)
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    values = values_of(captured, module, samples)
    received = sum(values[name].nbytes for name in module.receives)
    with listening() as forward:
        outputs = module(samples, values)
    path = allocated(forward)
    kept = path[-1]
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    seeds = [torch.ones_like(root) for root in roots]
    with listening() as backward:
        torch.autograd.backward(roots, seeds)
    sent = sum(seed.nbytes for seed in seeds if seed.dim())
    return kept + received, max(max(path) - kept, max(allocated(backward)) + sent)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[name for name, _ in CASES])
def test_the_bill_of_a_stage_is_what_the_allocator_says(name: str, settings: tuple[str, ...]) -> None:
    _, captured, weights = inprocess.captured_named(name, *settings)
    graph = coarsen(captured.graph, 12)
    sums, n = Sums(graph), graph.num_ops
    for low, high in pairwise((0, n // 3, 2 * n // 3, n)):
        ops = tuple(range(low, high))
        bill = sums.of(mask_of(ops))
        for samples in (4, 16):
            kept, beyond = measured(captured, graph, ops, weights, samples)
            # Scalars of the loss aside.
            assert (bill.saved + bill.kept) * samples == pytest.approx(kept, abs=200), (ops, samples)
            stated, true = (bill.saved + bill.kept + bill.transient) * samples + bill.fixed, kept + beyond
            # One micro-batch in flight and no weights, so transients weigh much; a weight's gradient may be counted too much.
            assert 0.93 * true <= stated <= 1.3 * true, (ops, samples, stated, true)
