"""Modules on shards compute what the whole module computes: outputs and gradients, at every degree that they can run at."""

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.capture.build import capture
from gpp.capture.stage import build_stage, initial_state
from gpp.graph.captured import Captured
from gpp.graph.coarsen.coarsen import coarsen
from gpp.mechanisms.tensor_parallel.layout import Shard, reshaped, slices
from gpp.mechanisms.tensor_parallel.regions import Sharding, shard
from gpp.mechanisms.tensor_parallel.shards import Shards, _Conversions
from tests.support.inprocess import in_threads

B, L, D, H = 4, 6, 8, 4
DTYPE = torch.float64


@dataclass
class Meeting:
    """Where the members of a team put what they add up."""

    size: int
    terms: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)


@dataclass
class Member:
    member: int
    meeting: Meeting
    sums: int = 0

    def sum(self, tensor: Tensor) -> None:
        self.sums += 1
        self.meeting.terms[self.member] = tensor.clone()
        self.meeting.barrier.wait(20)
        total = torch.stack([self.meeting.terms[i] for i in range(self.meeting.size)]).sum(0)
        self.meeting.barrier.wait(20)
        tensor.copy_(total)


def heads(x: Tensor, count: int = H) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Perceptron(nn.Module):
    """Columns, an activation, rows; a norm and a residual around them."""

    splits: ClassVar = {"up.weight", "up.bias", "down.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """A gate and a value in one projection, half of each on every member."""

    splits: ClassVar = {"both.weight", "both.bias", "down.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(D, 16), nn.Linear(8, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Separate(nn.Module):
    """Three projections, of which the attention needs all alike."""

    splits: ClassVar = {f"{name}.weight" for name in ("q", "k", "v", "out")}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        return x + self.out(y.transpose(1, 2).flatten(2))


class Written(nn.Module):
    """Attention written out: a mask, a norm of each head's queries, a gain for each head, and a slope that the code makes whole."""

    splits: ClassVar = {"qkv.weight", "qkv.bias", "gain", "out.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D // H)
        self.slope, self.gain = nn.Parameter(torch.randn(H, 1, 1) * 0.1), nn.Parameter(torch.randn(H, 1, 1))
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(L, L).tril().log())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, L, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(self.norm(q), k.transpose(-2, -1)) * self.gain + self.slope * torch.arange(L) + self.mask
        y = torch.matmul(scores.softmax(-1), v)
        return x + self.out(y.permute(0, 2, 1, 3).reshape(-1, L, D))


class Grouped(nn.Module):
    """Fewer keys and values than queries."""

    splits: ClassVar = {f"{name}.weight" for name in ("q", "kv", "out")}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(D, n, bias=False) for n in (D, D, D))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (heads(part, 2) for part in self.kv(x).split(D // 2, dim=-1))
        y = F.scaled_dot_product_attention(heads(self.q(x)), k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Flat(nn.Module):
    """Products over samples and positions at once, as GPT-2 writes them."""

    splits: ClassVar = {"a", "a_bias", "b"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, 12)), nn.Parameter(torch.randn(12, D))
        self.a_bias, self.b_bias = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.a_bias, x.view(-1, D), self.a).view(-1, L, 12).tanh()
        return x + torch.addmm(self.b_bias, hidden.view(-1, 12), self.b).view(-1, L, D)


class Tokens(nn.Module):
    """A table of an odd number of rows, one of which stands for padding."""

    splits: ClassVar = {"table.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.out = nn.Embedding(11, D, padding_idx=9), nn.Embedding(L, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :, 0] * 3).long().remainder(11)
        return self.out(self.table(ids) + self.places(torch.arange(L)))


class Tied(nn.Module):
    """A table that is read as a matrix too: it stays whole."""

    splits: ClassVar = set[str]()

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.table((x[:, :, 0] * 3).long().remainder(40)), self.table.weight).mean(-1, keepdim=True) + x


class Normed(nn.Module):
    """A norm over what would be split: whole."""

    splits: ClassVar = set[str]()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 12), nn.LayerNorm(12), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Odd(nn.Module):
    """Three heads are for nobody's half: whole."""

    splits: ClassVar = set[str]()

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 36), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, 3) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


NETWORKS = (Perceptron, Gated, Separate, Written, Grouped, Flat, Tokens, Tied, Normed, Odd)
WHOLE_AT_FOUR = (Grouped,)


def measure(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@cache
def captured_of(kind: Any) -> tuple[nn.Module, Captured, Tensor, Tensor]:
    """A network, what was captured of it, its inputs and targets; made once for all tests."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    torch.manual_seed(0)
    try:
        module = kind()
        x, y = torch.randn(B, L, D), torch.randn(B, L, D)
        return module, capture(module, {"x": x}, y, measure, name="m"), x, y
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", NETWORKS)
def test_shards_compute_what_the_whole_computes(kind: Any, degree: int) -> None:
    module, captured, x, y = captured_of(kind)
    sharding = shard(captured, degree)
    params = {name for name in sharding.layouts if captured.node_of[name].kind == "param"}
    assert params == (set() if degree == 4 and kind in WHOLE_AT_FOUR else kind.splits)
    module.zero_grad()
    loss = measure(module(x), y)
    loss.backward()
    state, nodes = initial_state(module, captured), [node for op in captured.graph.ops for node in op.nodes]
    meeting = Meeting(degree)

    def member(number: int) -> tuple[float, float]:
        shards = Shards(sharding=sharding, captured=captured, number=number, add_up=Member(number, meeting).sum)
        stage = build_stage(captured, nodes, device="cpu", shards=shards)
        stage.load({name: shards.share(name, value) for name, value in state.items()})
        found = stage(B, {"x": x, "target:target": y})["loss"]
        found.backward()
        with torch.no_grad():
            evaluated = stage.eval_module()(B, {"x": x, "target:target": y})["loss"]
        for name, param in stage.named_parameters():
            theirs = module.get_parameter(name).grad
            assert theirs is not None and param.grad is not None
            torch.testing.assert_close(
                param.grad, shards.share(name, theirs), rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert torch.equal(shards.whole(name, param.detach()), state[name])
        return found.item(), evaluated.item()

    for pair in in_threads([lambda i=i: member(i) for i in range(degree)]):
        assert pair == pytest.approx((loss.item(), loss.item()), abs=1e-13)


@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind.splits])
def test_variants_declare_what_a_member_holds_and_survive_coarsening(kind: Any) -> None:
    module, captured, _, _ = captured_of(kind)
    sharding = shard(captured, 2)
    shards = Shards(sharding=sharding, captured=captured, number=0, add_up=Member(0, Meeting(2)).sum)
    held = sum(shards.share(name, param).nbytes for name, param in module.named_parameters())
    for graph in (captured.graph, coarsen(captured.graph, 3), coarsen(captured.graph, 1)):
        ways = [next(v for v in op.variants if v.degree == 2) for op in graph.ops]
        declared = sum(
            way.params * sum(graph.param_of[name].num_bytes for name in op.params) for op, way in zip(graph.ops, ways, strict=True)
        )
        assert declared == pytest.approx(held, rel=0.04)  # shares of a table differ by a row
        # What is summed inside and what is put together at a cut do not depend on how operators are grouped.
        assert sum(way.forward_sums.count for way in ways) == sum(applied.summed for applied in sharding.applied.values())
    assert ways[0].send == ways[0].receive == ()


def test_models_without_regions_declare_nothing() -> None:
    assert all(not op.variants for op in captured_of(Normed)[1].graph.ops)


@pytest.mark.parametrize("kind", [Perceptron, Separate, Written])
def test_declared_sums_are_those_that_are_made(kind: Any) -> None:
    module, captured, x, y = captured_of(kind)
    sharding, meeting, state = shard(captured, 2), Meeting(2), initial_state(module, captured)
    nodes = [node for op in captured.graph.ops for node in op.nodes]

    def member(number: int) -> tuple[int, int]:
        team = Member(number, meeting)
        shards = Shards(sharding=sharding, captured=captured, number=number, add_up=team.sum)
        stage = build_stage(captured, nodes, device="cpu", shards=shards)
        stage.load({name: shards.share(name, value) for name, value in state.items()})
        loss = stage(B, {"x": x, "target:target": y})["loss"]
        forward, team.sums = team.sums, 0
        loss.backward()
        return forward, team.sums

    (way,) = [v for v in coarsen(captured.graph, 1).ops[0].variants if v.degree == 2]
    for forward, backward in in_threads([lambda i=i: member(i) for i in range(2)]):
        assert forward == way.forward_sums.count and backward >= way.backward_sums.count


def test_a_split_is_followed_through_reshapes() -> None:
    assert reshaped(Shard(2), (7, 5, 12), (7, 5, 4, 3), 2) == Shard(2)
    assert reshaped(Shard(2, 3), (7, 5, 36), (7, 5, 3, 4, 3), 2) == Shard(3)
    assert reshaped(Shard(3), (7, 5, 3, 4, 3), (7, 5, 36), 4) == Shard(2, 3)
    assert reshaped(Shard(1), (7, 12), (7, 3, 4), 2) is None  # three parts of four are nobody's half
    assert list(slices(12, Shard(0, 2), 2, 1)) == [(3, 6), (9, 12)]


def test_members_draw_their_own_numbers_on_shards_and_common_ones_after() -> None:
    sharding, meeting = Sharding(degree=2), Meeting(2)
    drawn, after = [], []
    for number in range(2):
        torch.manual_seed(5)
        captured = captured_of(Normed)[1]
        shards = Shards(sharding=sharding, captured=captured, number=number, add_up=Member(number, meeting).sum)
        torch.manual_seed(5)
        draw = _Conversions(shards).drawing(torch.nn.functional.dropout)
        drawn.append(draw(torch.ones(64), 0.5))
        after.append(torch.rand(8))
    assert not torch.equal(*drawn) and torch.equal(*after)
