"""Networks whose layers read more than the layer before: the parts that have a closed form, and the losses beside the main one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpp.models.networks.experts import BALANCE, SMALL, Experts, experts_loss
from sweeps.networks.block_residuals import DepthAttention
from sweeps.networks.cross_batch import Queue
from sweeps.networks.hyper_connections import HyperConnection
from sweeps.networks.multi_token import WEIGHT, all_tokens_loss
from sweeps.networks.zamba import state_space


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_the_state_space_sum_is_that_of_a_walk_over_the_positions(chunk):
    torch.manual_seed(0)
    x, logs = torch.randn(2, 12, 3, 4, dtype=torch.float64), -torch.rand(2, 12, 3, dtype=torch.float64)
    write, read = torch.randn(2, 2, 12, 5, dtype=torch.float64)
    state, expected = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for i in range(12):
        state = state * logs[:, i].exp()[..., None, None] + x[:, i, :, :, None] * write[:, i, None, None]
        expected.append((state * read[:, i, None, None]).sum(-1))
    torch.testing.assert_close(state_space(x, logs, write, read, chunk), torch.stack(expected, dim=1))


def test_a_mixture_of_experts_with_room_for_all_is_the_weighted_sum_of_those_chosen():
    torch.manual_seed(0)
    experts, x = Experts(6, 5, 3, 2, capacity=1.5).double(), torch.randn(4, 7, 6, dtype=torch.float64)
    made, balance, small = experts(x)
    shares = experts.router(x).softmax(-1)
    weight, chosen = shares.topk(2, dim=-1)
    each = torch.stack([(F.silu(x @ g) * (x @ u)) @ d for g, u, d in zip(experts.gate, experts.up, experts.down, strict=True)], 2)
    picked = each.gather(2, chosen[..., None].expand(-1, -1, -1, 6))
    torch.testing.assert_close(made, (picked * weight[..., None]).sum(2))
    load = F.one_hot(chosen, 3).double().mean((1, 2))
    torch.testing.assert_close(balance, 3 * (load * shares.mean(1)).sum(-1))
    torch.testing.assert_close(small, experts.router(x).logsumexp(-1).square().mean(-1))


def test_tokens_beyond_an_experts_places_pass_it_by_and_get_no_gradient():
    torch.manual_seed(0)
    experts, x = Experts(4, 5, 2, 1, capacity=0.5), torch.randn(1, 8, 4, requires_grad=True)
    with torch.no_grad():
        experts.router.weight.zero_()  # all shares are equal, so that the first expert, with two places, is chosen by all
    made, _, _ = experts(x)
    made.square().sum().backward()
    assert (made[0].abs().sum(-1) > 0).tolist() == [True, True, *[False] * 6]
    assert x.grad is not None and (x.grad[0].abs().sum(-1) > 0).tolist() == [True, True, *[False] * 6]


def test_streams_are_mixed_by_a_doubly_stochastic_matrix():
    """A function that makes nothing leaves the mean over the streams alone, since its columns sum to one."""

    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    torch.manual_seed(0)
    connection, x = HyperConnection(4, 3, 20, Nothing()).double(), torch.randn(2, 5, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(connection(x).mean(2), x.mean(2))
    same = x[:, :, :1].expand(-1, -1, 3, -1)
    torch.testing.assert_close(connection(same), same.clone())


def test_a_layer_reads_blocks_by_its_query():
    attention, blocks = DepthAttention(4), [torch.randn(2, 3, 4) for _ in range(3)]
    with torch.no_grad():
        attention.query.weight.zero_()
        torch.testing.assert_close(attention(blocks), torch.stack(blocks).mean(0))
        attention.query.weight[0, 0] = 1000.0
        first = torch.stack([attention.norm(block)[..., 0] for block in blocks]).argmax(0)
        expected = torch.stack(blocks).gather(0, first[None, ..., None].expand(1, -1, -1, 4))[0]
        torch.testing.assert_close(attention(blocks), expected)


def test_a_queue_has_the_last_embeddings_and_grows_in_training_alone():
    queue, new = Queue(4, 2), torch.randn(3, 2, requires_grad=True)
    first = queue.kept.clone()
    assert torch.equal(queue(new), first) and torch.equal(queue.kept, torch.cat([first[3:], new.detach()]))
    before = queue.eval()(new)
    assert torch.equal(before, queue.kept) and not before.requires_grad


def test_the_terms_of_several_losses_are_weighted_as_published():
    tokens, logits = torch.randint(0, 7, (2, 6)), tuple(torch.randn(2, 4, 7) for _ in range(3))
    terms = all_tokens_loss(logits, tokens)
    assert list(terms) == ["next", "ahead_1", "ahead_2"]
    torch.testing.assert_close(terms["ahead_2"], WEIGHT / 2 * F.cross_entropy(logits[2].flatten(0, 1), tokens[:, 2:].flatten()))
    outputs = {"logits": logits[0], "balance.0": torch.ones(2), "small.0": torch.full((2,), 4.0)}
    own = experts_loss(outputs, tokens[:, :4])
    assert (own["balance.0"].item(), own["small.0"].item()) == pytest.approx((BALANCE, 4 * SMALL))
