"""ViT, DeiT and BERT in quarter-blocks: PyTorch's own layer, and the operators that planners see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpp.errors import InvalidConfig
from gpp.graph.coarsen.whole import whole_modules
from gpp.graph.op_graph import Op, OpGraph, Tensor
from gpp.models.networks.quarter_blocks import EPS, QuarterBlock
from gpp.plan.loss_stage import coarsen_for
from tests.support.inprocess import captured_named


@pytest.mark.parametrize("before", [True, False])
def test_a_block_is_pytorchs_layer(before):
    torch.manual_seed(0)
    own = QuarterBlock(8, 2, before=before)
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", EPS, batch_first=True, norm_first=before)
    norms = (own.attend.norm, own.widen.norm) if before else (own.project.norm, own.narrow.norm)
    weights = {f"self_attn.out_proj.{k}": v for k, v in own.project.linear.state_dict().items()}
    for kind in ("weight", "bias"):
        parts = [getattr(part, kind) for part in (own.attend.query, own.attend.key, own.attend.value)]
        weights[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    for theirs_name, module in (
        ("linear1", own.widen.linear),
        ("linear2", own.narrow.linear),
        ("norm1", norms[0]),
        ("norm2", norms[1]),
    ):
        weights |= {f"{theirs_name}.{k}": v for k, v in module.state_dict().items()}
    theirs.load_state_dict(weights)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(own(x), theirs(x))


def test_planners_see_quarters():
    model, captured, _ = captured_named("vit_small", "model.num_layers=2")
    graph = coarsen_for(captured, 64, "microbatch", model.whole)
    quarters = [f"blocks.{i}.{part}" for i in range(2) for part in ("attend", "project", "widen", "narrow")]
    assert [op.name for op in graph.ops] == ["embed", *quarters, "head"]
    assert sum(op.forward_flops for op in graph.ops) == sum(op.forward_flops for op in captured.graph.ops)
    # Behind `project` and `narrow` one activation is handed on, behind `attend` two of them, behind `widen` five.
    crossing = [sum(t.bytes_per_sample for t in graph.tensors if t.producer <= i < t.consumers[-1]) for i in range(1, 9)]
    assert [size / min(crossing) for size in crossing] == [2, 1, 5, 1] * 2


def test_modules_that_cannot_be_one_operator_are_refused():
    def graph(names: list[str], edges: list[tuple[int, int]]) -> OpGraph:
        tensors = (Tensor(name=f"t{i}", producer=a, consumers=(b,), bytes_per_sample=1.0) for i, (a, b) in enumerate(edges))
        return OpGraph(name="g", ops=tuple(Op(name=name) for name in names), tensors=tuple(tensors))

    around = graph(["a.x", "b.x", "a.y"], [(0, 1), (1, 2)])
    assert [op.name for op in whole_modules(around, ["b"]).ops] == ["a.x", "b", "a.y"]
    with pytest.raises(InvalidConfig, match=r"model\.whole=a: has operators before and behind"):
        whole_modules(around, ["a"])
    with pytest.raises(InvalidConfig, match=r"model\.whole=nowhere: no module of g"):
        whole_modules(around, ["b", "nowhere"])
    crossed = graph(["a.x", "b.y", "b.x", "a.y"], [(0, 2), (1, 3)])
    with pytest.raises(InvalidConfig, match="would wait for each other"):
        whole_modules(crossed, ["a", "b"])
