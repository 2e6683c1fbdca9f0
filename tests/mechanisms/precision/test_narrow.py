"""The bytes of a model under autocast are those that PyTorch takes, operator by operator; and its products' rate."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gpp import Analytical, Stash
from gpp.capture.build import capture
from gpp.cost.regime import Regime
from gpp.cost.stage import StageCost, stage_amounts
from gpp.graph.captured import Captured
from gpp.mechanisms.precision.asked import ASKED
from gpp.mechanisms.precision.narrow import narrowed
from gpp.stage import Stage
from tests.capture.test_memory_bill import measured
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.problems import random_problem


class Mixed(nn.Module):
    """A table that is read as it is and cast, a weight behind a view, a norm, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.table(ids)) @ self.second.t()).float().softmax(-1)
        return hidden @ self.table.weight.t()


def mixed() -> Captured:
    ids = torch.zeros(4, dtype=torch.long)
    return capture(Mixed(), {"ids": ids}, ids, lambda out, ids: nn.functional.cross_entropy(out, ids), name="mixed")


def test_types_follow_from_torchs_own_rules() -> None:
    whole = mixed()
    found = narrowed(whole, "bfloat16")
    assert [op.name for op in found.graph.ops] == [op.name for op in whole.graph.ops]
    types = {node.target.split(".")[1]: node.dtype for node in found.nodes if node.kind == "call"}
    assert (types["embedding"], types["linear"], types["softmax"]) == ("float32", "bfloat16", "float32")
    copies = {param.copy_of: param.num_bytes for param in found.graph.params if param.copy_of}
    assert copies == {"table.weight": 256, "first.weight": 128, "first.bias": 16, "second": 128}
    reads = {node.target.split(".")[1]: node.narrow for node in found.nodes if node.narrow}
    # The transposed weights are views of the copies. The embedding reads the table as it is.
    assert "embedding" not in reads and len(reads["linear"]) == 2 and "t" in reads
    assert narrowed(found, "bfloat16") == found


@pytest.mark.parametrize("passes", thinned(["bfloat16", "float16"]))
def test_what_a_stage_keeps_and_takes_is_what_the_allocator_says(passes) -> None:
    model = inprocess.model_named("gpt_small", "model.num_layers=2")
    captured, weights = inprocess.capture(model, "float32")
    problem = inprocess.problem_of(narrowed(captured, passes), 3, 16, max_ops=12)
    n = problem.graph.num_ops
    for low, high in pairwise((0, n // 3, 2 * n // 3, n)):
        stage = Stage(ops=tuple(range(low, high)), devices=(0,), microbatch_size=16, in_flight=16)
        bill = stage_amounts(problem, stage)
        kept, beyond = measured(narrowed(captured, passes), problem.graph, stage, weights, 16)
        assert bill.kept * 16 == pytest.approx(kept, rel=0.003, abs=200)
        assert 0.99 <= ((bill.kept + bill.once) * 16 + bill.fixed) / (kept + beyond) <= 1.5


def test_copies_are_billed_once_and_with_every_version() -> None:
    bills = []
    for captured in (mixed(), narrowed(mixed(), "bfloat16")):
        problem = inprocess.problem_of(captured, 2, 8, max_ops=12)
        stage = Stage(ops=tuple(range(problem.graph.num_ops)), devices=(0,), microbatch_size=4, in_flight=8)
        versions = replace(problem, microbatch_size=4, regime=Regime(weights=Stash(accumulation=1)))
        bills.append((StageCost.of(problem, stage), StageCost.of(replace(versions, minibatch_size=4), stage)))
    (wide, wide_versions), (narrow, narrow_versions) = bills
    assert narrow.static_bytes - wide.static_bytes == 528
    assert narrow_versions.version_bytes - wide_versions.version_bytes == 528


def test_products_run_at_the_rate_of_the_narrow_type() -> None:
    """16 times the FLOP/s: passes that products bound take a sixteenth; the graph stays as it is."""
    problem = replace(random_problem(3, max_ops=6, max_devices=2), cost=Analytical())
    device = replace(
        problem.cluster.devices[0],
        peak_flop_per_s={"float32": 1e9, "bfloat16": 16e9},
        memory_bandwidth_bytes_per_s=1e15,
        kernel_latency_s=0.0,
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=(device,) * problem.cluster.num_devices))
    posed = ASKED.posed(problem, {"autocast": "bfloat16"})
    before, after = problem.op_times(2, 0), posed.op_times(2, 0)
    assert before.forward_s.sum() > 0
    assert after.forward_s == pytest.approx(before.forward_s / 16) and after.backward_s == pytest.approx(before.backward_s / 16)
    assert posed.graph == problem.graph and posed.cost.product_type(posed.graph) == "bfloat16"
