"""The table of operators: formulas against torch's counter and by hand, causal masks, flex attention, unknown operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import gpp
from gpp.capture.build import capture
from gpp.capture.flops import FORMULAS, Counted
from gpp.cost.counted import masked_warnings
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import Captured
from tests.support.cutting import assert_cuts_exactly
from tests.support.long import thinned
from tests.support.problems import cluster

S, D, HEADS = 6, 4, 2


def pairs(causal: bool) -> int:
    return S * (S + 1) // 2 if causal else S * S


def passes(call: Any, *tensors: Tensor) -> tuple[float, float]:
    """Our FLOPs of a call and of its backward; all of its operators are known."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with Counted() as forward:
        out = call(*leaves)
    with Counted() as backward:
        out.sum().backward()
    assert not forward.unknown | backward.unknown
    return forward.flops, backward.flops


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_pairs_that_meet_and_the_scores_twice_backwards(causal: bool) -> None:
    q, k, v = (torch.randn(3, HEADS, S, D) for _ in range(3))
    product = 2 * 3 * HEADS * pairs(causal) * D
    assert passes(lambda *given: F.scaled_dot_product_attention(*given, is_causal=causal), q, k, v) == (2 * product, 5 * product)
    if not causal:  # torch's formulas of the same kernel on a card
        assert flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape) == 2 * product
        assert flop_counter.sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape) == 5 * product


CALLS: dict[str, tuple[Any, list[tuple[int, ...]], int]] = {
    "mv": (torch.mv, [(3, 5), (5,)], 2 * 15),
    "dot": (torch.dot, [(7,), (7,)], 14),
    "addmv": (torch.addmv, [(3,), (3, 5), (5,)], 30),
    "addbmm": (torch.addbmm, [(3, 4), (2, 3, 5), (2, 5, 4)], 2 * 2 * 3 * 5 * 4),
    "bilinear": (torch.bilinear, [(2, 3), (2, 4), (5, 3, 4)], 3 * 2 * 5 * 3 * 4),
    "cdist": (lambda a, b: torch.cdist(a, b, p=1.0), [(3, 5), (4, 5)], 3 * 3 * 4 * 5),
    "rfft": (lambda x: torch.fft.rfft(x).abs(), [(3, 8)], 5 * 3 * 8 * 3),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3)), [(2, 3, 3)], 2 * 2 * 27 + 2 * 27 // 3),
    "det": (torch.linalg.det, [(2, 3, 3)], 2 * 2 * 27 // 3),
    "solve": (torch.linalg.solve, [(3, 3), (3, 2)], 2 * 27 // 3 + 2 * 3 * 6),
    "softmax": (lambda x: x.softmax(-1).cumsum(0), [(3, 4)], 0),
    "in place": (lambda c, a, b: (c * 1).addmm_(a, b), [(2, 4), (2, 3), (3, 4)], 2 * 2 * 3 * 4),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_formulas_by_hand(name: str) -> None:
    call, shapes, expected = CALLS[name]
    with Counted() as counted:
        call(*(torch.randn(shape) for shape in shapes))
    assert (counted.flops, counted.unknown) == (expected, {})


def test_torchs_own_formulas_are_used_and_not_replaced() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 7))
    with FlopCounterMode(display=False) as forward:
        out = net(torch.randn(2, 3, 5, 5)).sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    assert passes(net, torch.randn(2, 3, 5, 5))[0] == forward.get_total_flops()
    with Counted() as again:
        net(torch.randn(2, 3, 5, 5)).sum().backward()
    assert again.flops == forward.get_total_flops() + backward.get_total_flops()
    # One is replaced: with groups each gradient of a convolution takes what the forward takes, and torch's says more.
    assert {str(key) for key in FORMULAS} & {str(key) for key in flop_counter.flop_registry} == {"aten.convolution_backward"}
    forward_flops, backward_flops = passes(nn.Conv2d(6, 6, 3, groups=3), torch.randn(2, 6, 5, 5))
    assert forward_flops == 2 * 2 * 9 * 6 * 2 * 9 and backward_flops == 2 * forward_flops


class Attends(nn.Module):
    """Attention of one layer with a mask of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(HEADS * D, 3 * HEADS * D)
        self.slope = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("held", torch.ones(S, S, dtype=torch.bool).tril())

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], S, 3, HEADS, D).permute(2, 0, 3, 1, 4)
        rows, columns = torch.arange(S)[:, None], torch.arange(S)
        if self.kind.startswith("flex"):
            causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu")
            block = None if self.kind == "flex free" else causal
            bias = (lambda score, b, h, i, j: score - self.slope[h] * (i - j)) if self.kind == "flex slope" else None
            return flex_attention(q, k, v, score_mod=bias, block_mask=block).transpose(1, 2).flatten(2)  # pyright: ignore
        masks = {
            "none": lambda: None,
            "tril": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
            "compared": lambda: (columns <= rows)[None, None].expand(x.shape[0], 1, S, S),
            "infinite": lambda: torch.full((S, S), -torch.inf).triu(1).to(x.dtype),
            "window": lambda: (columns <= rows) & (columns > rows - 3),
            "held": lambda: self.held,
            "padded": lambda: (columns <= rows) & keep[:, None, None, :],
            "counted": lambda: (columns <= rows) & (torch.arange(x.shape[0]).sum() < 5),
        }
        return F.scaled_dot_product_attention(q, k, v, masks[self.kind]()).transpose(1, 2).flatten(2)


def examples(batch: int) -> tuple[dict[str, Tensor], Tensor]:
    x, keep = torch.randn(batch, S, HEADS * D, dtype=torch.float64), (torch.arange(S) < S - 1).expand(batch, S).clone()
    return {"x": x, "keep": keep}, torch.zeros_like(x)


def attention_of(captured: Captured) -> tuple[Any, float, float]:
    """What the captured attention is told, and the FLOPs of a sample."""
    (node,) = [node for node in captured.nodes if "scaled_dot_product_attention" in node.target]
    (op,) = [op for op in captured.graph.ops if node.name in op.nodes]
    return node.args[3:6], op.forward_flops, op.backward_flops


TOLD = {"none": [], "tril": True, "compared": True, "infinite": True, "flex": True, "flex free": False}


@pytest.mark.parametrize("kind", thinned([*TOLD, "window", "held", "padded", "counted"]))
def test_masks_that_sizes_decide_become_what_attention_knows(kind: str) -> None:
    torch.manual_seed(0)
    model = Attends(kind).double()
    captured = capture(model, *examples(2), F.mse_loss, name=kind)
    told, forward, backward = attention_of(captured)
    if kind in TOLD:
        assert told == ([None, 0.0, TOLD[kind]] if kind != "none" else [])
    else:
        assert "ref" in told[0] and True not in told[1:]
    product = 2 * HEADS * pairs(TOLD.get(kind) is True) * D
    assert (forward, backward) == (2 * product, 5 * product)
    said = masked_warnings(captured, cluster(1), gpp.Analytical())
    assert len(said) == (kind not in TOLD) and all("has a mask that is not known to be causal" in words for words in said)
    assert not masked_warnings(captured, gpp.local(num_devices=1), gpp.Analytical())
    if not kind.startswith("flex"):
        assert_cuts_exactly(captured, model, examples, F.mse_loss, batches=(1, 3), seeds=(0,))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_computes_what_torchs_does() -> None:
    """Torch has no backward of it on a CPU, so that of a plain form of the same attention is compared."""
    model = Attends("flex slope").double()
    inputs, target = examples(3)
    captured = capture(model, inputs, target, F.mse_loss, name="flex")

    class Plain(Attends):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(x.shape[0], S, 3, HEADS, D).permute(2, 0, 3, 1, 4)
            apart = torch.arange(S)[:, None] - torch.arange(S)
            scores = q @ k.mT / D**0.5 - self.slope[:, None, None] * apart
            return (scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)

    plain = Plain("flex slope").double()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.allclose(model(**inputs), plain(**inputs), rtol=0, atol=1e-14)
    assert_cuts_exactly(captured, plain, examples, F.mse_loss, batches=(2,), seeds=(0,))


def test_a_function_of_flex_attention_that_indexes_in_steps_is_refused_with_the_line() -> None:
    class Steps(Attends):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(x.shape[0], S, 3, HEADS, D).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + self.held[i][j]).sum(1)  # pyright: ignore

    with pytest.raises(CaptureError, match=r"indexes 1 of the 2 dimensions of a tensor at .*test_flops.py:\d+.*table\[batch"):
        capture(Steps("flex").double(), *examples(2), lambda out, target: out.mean(), name="steps")


@pytest.mark.long
def test_a_mask_of_nn_transformer_alone() -> None:
    class Translates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.net(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(S, dtype=source.dtype))

    def make(batch: int) -> tuple[dict[str, Tensor], Tensor]:
        return {key: torch.randn(batch, S, 8).double() for key in ("source", "target")}, torch.zeros(batch, S, 8).double()

    model = Translates().double()
    captured = capture(model, *make(2), F.mse_loss, name="translates")
    told = [node.args[5] for node in captured.nodes if "scaled_dot_product" in node.target and len(node.args) > 5]
    assert captured.batch is None and told.count(True) == 1
    assert_cuts_exactly(captured, model, make, F.mse_loss, batches=(3,), seeds=(0,))


class Decomposes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.linalg.qr(self.inner(x))[0])


@pytest.mark.parametrize("width", [2, 20_000])
def test_an_operator_without_a_formula_is_named_and_refused_or_small(width: int) -> None:
    x, y = torch.randn(3, 4, 4), torch.zeros(3, 4, width)
    captured = capture(Decomposes(width), {"x": x}, y, F.mse_loss, name="qr")
    cores = gpp.local(num_devices=2)
    if width > 2:
        assert not captured.uncounted and any("aten.linalg_qr.default at" in words for words in captured.warnings)
        gpp.problem(captured, cores, minibatch_size=4)
        return
    assert [one.operator for one in captured.uncounted] == ["aten.linalg_qr.default"] and captured.uncounted[0].share > 0.01
    with pytest.raises(InvalidConfig, match=r"none are known of aten.linalg_qr.default at .*test_flops.py:\d+.*cost=profiled"):
        gpp.problem(captured, cores, minibatch_size=4, cost=gpp.Analytical())
