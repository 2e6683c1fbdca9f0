"""Mixtures of experts: products of rows with the matrix of their group, and the models of Transformers that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import gpp
from gpp.capture.build import capture
from gpp.capture.flops import Counted
from gpp.errors import CaptureError, InvalidConfig
from tests.support.cutting import assert_cuts_exactly
from tests.support.long import thinned

ENDS = [3, 3, 7]
"""The second group has no row, and the last two of nine rows have no group."""


def looped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The products, one group after the other, by operators that torch counts."""
    spans = zip([0, *ends.tolist()], ends.tolist(), matrices, strict=False)
    return torch.cat([rows[a:b] @ matrix for a, b, matrix in spans] + [rows[int(ends[-1]) :] @ torch.zeros_like(matrices[0])])


@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients_are_those_of_a_loop(transposed: bool) -> None:
    rows, seed = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    matrices = torch.randn(3, *((5, 4) if transposed else (4, 5)), dtype=torch.float64)
    found = []
    for product in (torch.ops.gpp.grouped_mm, looped):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, matrices)]
        out = product(leaves[0], leaves[1].mT if transposed else leaves[1], torch.tensor(ENDS, dtype=torch.int32))
        found.append((out.detach(), *torch.autograd.grad(out, leaves, seed)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("operator", [torch.ops.gpp.grouped_mm, torch.ops.aten._grouped_mm])
def test_every_row_counts_once(operator: Any) -> None:
    """2 S k n in the forward, and as much for each of both gradients: what a loop over the groups counts."""
    rows, matrices = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((16, 8), (2, 8, 24)))
    ends = torch.tensor([6, 16], dtype=torch.int32)
    totals = []
    for product in (operator, looped):
        for leaves in ([rows, matrices], [rows], [matrices]):
            with Counted() as forward:
                out = product(rows, matrices, ends)
            with Counted() as backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out).clone())
            totals.append((forward.flops, backward.flops))
    each = 2 * 16 * 8 * 24
    assert totals == [(each, 2 * each), (each, each), (each, each)] * 2


def experts(kind: str, implementation: str) -> nn.Module:
    """One layer of Mixtral, or of Qwen2-MoE, small and with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    shared = {**sizes, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 16, "use_cache": False}
    torch.manual_seed(0)
    if kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shared, num_local_experts=4))
    else:
        own = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
        model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**shared, **own))
    model.set_experts_implementation(implementation)
    return model.double()


def tokens(batch: int) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(0, 32, (batch, 8))
    return {"input_ids": ids}, ids


def next_token(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", thinned(["mixtral", "qwen2_moe"]))
def test_experts_of_transformers(kind: str) -> None:
    """Captured for any batch size; losses and gradients are those of the model, FLOPs those of every chosen expert.

    The model itself runs its experts in a loop, as torch's product of groups has no float64.
    """
    model: Any = experts(kind, "grouped_mm")
    captured = capture(model, *tokens(2), next_token, name=kind)
    assert captured.batch is None and all("could not be compared" in words for words in captured.warnings)
    targets = [node.target for node in captured.nodes]
    assert targets.count("gpp.grouped_mm.default") == 2
    model.set_experts_implementation("eager")
    assert_cuts_exactly(captured, model, tokens, next_token, batches=(1, 3), seeds=(1,))
    # Of 8 tokens: the router; two of four experts; Qwen2's shared expert with its gate.
    each = 16 * 4 + 2 * (16 * 48 + 24 * 16) if kind == "mixtral" else 16 * 4 + 2 * (16 * 16 + 8 * 16) + 3 * 16 * 16 + 16
    own = [op for op in captured.graph.ops if ".mlp." in op.name]
    assert sum(op.forward_flops for op in own) == sum(op.weight_flops for op in own) == 2 * 8 * each
    assert sum(op.backward_flops for op in own) == 2 * 2 * 8 * each


def test_experts_in_a_loop_are_refused_with_the_setting_that_helps() -> None:
    with pytest.raises(CaptureError, match=r"depends on a tensor's value.*set_experts_implementation\('grouped_mm'\)"):
        capture(experts("mixtral", "eager"), *tokens(2), next_token, name="mixtral")


LIBRARY = torch.library.Library("gpp_tests", "DEF")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * 3.0, "CompositeExplicitAutograd")
torch.library.register_fake("gpp_tests::scaled", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd("gpp_tests::scaled", lambda ctx, gradient: gradient * 5.0, lib=LIBRARY)


class Scaled(nn.Module):
    """An operator of one's own with a backward that is registered, and is not that of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.gpp_tests.scaled(self.linear(x))


def test_an_operator_with_a_registered_backward_keeps_it_and_is_named_as_not_counted() -> None:
    model = Scaled()

    def make(batch: int) -> tuple[tuple[Tensor], Tensor]:
        return (torch.randn(batch, 4, dtype=torch.float64),), torch.zeros(batch, 3, dtype=torch.float64)

    captured = capture(model, *make(2), F.mse_loss, name="scaled")
    assert_cuts_exactly(captured, model, make, F.mse_loss, batches=(3,), seeds=(0,))
    assert [one.operator for one in captured.uncounted] == ["gpp_tests.scaled.default"] and not captured.warnings
    with pytest.raises(InvalidConfig, match=r"none are known of gpp_tests.scaled.default at .*register_flop_formula"):
        gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=4)
    register_flop_formula(torch.ops.gpp_tests.scaled)(lambda shape, **_: 7 * shape[0] * shape[1])
    try:
        again = capture(model, *make(2), F.mse_loss, name="scaled")
    finally:
        del flop_registry[torch.ops.gpp_tests.scaled]
    assert not again.uncounted and sum(op.forward_flops for op in again.graph.ops) == 2 * 4 * 3 + 7 * 3
    gpp.problem(again, gpp.local(num_devices=2), minibatch_size=4)
