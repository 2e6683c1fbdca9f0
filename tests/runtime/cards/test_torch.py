"""torch on a card of the model: every value is that of a run without cards, bit for bit, in every order of execution."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cards.card import ModelCard, run
from tests.support.cards.faults import Misuse, Race
from tests.support.cards.machine import Machine, Policy
from tests.support.long import thinned

CPU = torch.device("cpu")


def on_card(program: Callable[[ModelCard], Any], policy: Policy = "random", seed: int = 0) -> Any:
    return run(Machine(policy=policy, seed=seed), [program])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.layer(self.embedding(x), src_mask=mask).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 12, 2, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(12, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.layer(x)[0])[0][:, -1])


class InPlace(nn.Module):
    """Views, writes into them, masks, sorts and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).clone()
        y[:, 2:4] *= 2
        y.t()[5].add_(y[:, 6])
        y.view(-1, 2, 4).transpose(1, 2)[:, 1].mul_(0.5)
        y = torch.where(y > 0, y, 0.1 * y)
        order = y.detach().argsort(1, descending=True)
        y = y.gather(1, order).masked_fill(order == 3, 0.0)
        y = torch.cat([y[:, ::2], y.flip(1)[:, :4]], 1).contiguous()
        self.seen += y.detach().mean(0)
        first, second = y.chunk(2, 1)
        return first.clone().relu_() + second.unbind(1)[0].unsqueeze(1).expand(-1, 4)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 4))


def convolution() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8, momentum=None), nn.Dropout2d(0.2), nn.GELU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def numbers(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(6, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (linear, numbers(8)),
    "convolution": (convolution, numbers(3, 8, 8)),
    "attention": (Attention, lambda: torch.randint(0, 20, (6, 5))),
    "recurrent": (Recurrent, numbers(5, 8)),
    "in place": (InPlace, numbers(8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}


def train(model: str, optimizer: str, device: torch.device, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Three steps of two micro-batches; the losses, and all that the model holds at the end."""
    make, inputs = MODELS[model]
    torch.manual_seed(0)
    module, x, y = make().to(device), inputs().to(device), torch.randint(0, 4, (6,)).to(device)
    steps = OPTIMIZERS[optimizer](module.parameters())
    losses = []
    for _ in range(3):
        for part in (slice(0, 3), slice(3, 6)):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = F.cross_entropy(module(x[part]), y[part])
            (loss / 2).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        steps.step()
        steps.zero_grad(set_to_none=optimizer != "sgd")
    return [one.detach().cpu() for one in (*losses, *module.state_dict().values(), torch.rand(3))]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        np.testing.assert_array_equal(one.float().numpy(), other.float().numpy())


@pytest.mark.parametrize(("optimizer", "model"), thinned(product(OPTIMIZERS, MODELS), 4))
def test_a_training_gives_the_same_bits(model: str, optimizer: str) -> None:
    wanted = train(model, optimizer, CPU)
    policies = get_args(Policy)
    turn = (list(MODELS).index(model) + list(OPTIMIZERS).index(optimizer)) % len(policies)
    assert_same(on_card(lambda card: train(model, optimizer, card.device), policies[turn]), wanted)


@pytest.mark.parametrize("model", ["linear", "convolution", "attention"])
def test_a_training_under_autocast_gives_the_same_bits(model: str) -> None:
    wanted = train(model, "sgd", CPU, torch.bfloat16)
    assert_same(on_card(lambda card: train(model, "sgd", card.device, torch.bfloat16)), wanted)


def test_workers_draw_their_own_random_numbers() -> None:
    """As in processes of their own, whoever goes first."""
    wanted = [train("linear", "sgd", CPU) for _ in range(2)]
    state = torch.get_rng_state()
    for seed in range(3):
        found = run(Machine(seed=seed), [lambda card: train("linear", "sgd", card.device)] * 2)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_host_does_not_wait_in_a_step() -> None:
    def program(card: ModelCard) -> dict[str, int]:
        module = linear().to(card.device)
        optimizer = torch.optim.AdamW(module.parameters(), 0.1, fused=True)
        x = card.upload(card.pinned(torch.randn(4, 8)))
        card.host.waits.clear()
        for _ in range(3):
            module(x).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return dict(card.host.waits)

    assert on_card(program, "lazy") == {}


@pytest.mark.parametrize(
    ("wait", "count"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x[0]), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu"), 1),
        (lambda x: x.to(device="cpu", dtype=torch.float64), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.unique(), 1),
        (lambda x: torch.equal(x, x + 1), 1),
        (lambda x: x.cpu().numpy(), 1),
        (lambda x: torch.zeros(4).copy_(x), 1),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1),
        (lambda x: x.to(x.device), 0),
        (lambda x: x.to(torch.float64), 0),
        (lambda x: x.double(), 0),
        (lambda x: x + torch.tensor(1.0), 0),
        (lambda x: x.new_zeros(3), 0),
        (lambda x: x.detach().clone(), 0),
    ],
)
def test_what_the_host_waits_for(wait: Callable[[torch.Tensor], object], count: int) -> None:
    def program(card: ModelCard) -> object:
        x = card.upload(card.pinned(torch.arange(4.0))) - 1
        card.host.waits.clear()
        found = wait(x)
        assert sum(card.host.waits.values()) == count
        return found.cpu() if isinstance(found, torch.Tensor) else found

    wanted = wait(torch.arange(4.0) - 1)
    found = on_card(program, "lazy")
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    else:
        assert np.array_equal(found, wanted)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("way", ["to", "copy_", "to another type"])
def test_what_the_host_waits_for_in_an_upload(way: str, pinned: bool, free: bool) -> None:
    def program(card: ModelCard) -> torch.Tensor:
        x, target = torch.arange(4.0), torch.empty(4, device=card.device)
        x = card.pinned(x) if pinned else x
        card.host.waits.clear()
        if way == "copy_":
            target.copy_(x, non_blocking=free)
        else:
            dtype = torch.float32 if way == "to" else torch.bfloat16
            target = x.to(card.device, dtype, non_blocking=free)
        assert target.device == card.device and sum(card.host.waits.values()) == (not (pinned and free))
        return target.float().cpu()

    assert torch.equal(on_card(program, "lazy"), torch.arange(4.0))


def test_scaled_gradients_give_the_same_bits() -> None:
    def program(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(5)
        module = linear().to(device)
        module(torch.ones(2, 8, device=device)).mul(1e5).sum().backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found, scale = torch.zeros((), device=device), torch.full((), 1e-5, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)  # pyright: ignore[reportPrivateImportUsage]
        growth = torch.zeros((), dtype=torch.int32, device=device)
        torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1)  # pyright: ignore[reportPrivateImportUsage]
        return [one.cpu() for one in (*grads, found, scale, growth)]

    assert_same(on_card(lambda card: program(card.device), "lazy"), program(CPU))


def test_a_tensor_says_where_it_lies() -> None:
    def program(card: ModelCard) -> None:
        x = torch.zeros(3, device=card.device)
        assert x.device == card.device != CPU == torch.zeros(3).device == x.cpu().device
        for one in (x + 1, x[1:], torch.zeros_like(x), torch.ones(2, device=x.device), torch.tensor(3, device=x.device)):
            assert one.device == card.device
        assert torch.ones(2).to(x).device == card.device and x.to(torch.ones(2)).device == CPU
        assert nn.Linear(2, 2, device=card.device).weight.device == card.device
        assert card.pinned(torch.ones(2)).is_pinned() and not x.is_pinned() and card.pinned(torch.ones(2)).device == CPU

    on_card(program)


def test_main_memory_and_a_card_do_not_mix() -> None:
    def program(card: ModelCard) -> None:
        x = torch.zeros(3, device=card.device)
        with pytest.raises(Misuse, match=r"add\.Tensor on worker 0: tensors of shape \(3,\) lie in main memory, others on a card"):
            x + torch.ones(3)
        with pytest.raises(Misuse, match=r"copy it to main memory first"):
            x.numpy()
        with pytest.raises(Misuse, match="only main memory can be pinned"):
            card.pinned(x)

    on_card(program)


def test_a_kernel_takes_numbers_of_main_memory_as_they_are_at_its_launch() -> None:
    def program(card: ModelCard) -> list[float]:
        number = torch.tensor(2.0)
        x = torch.ones(2, device=card.device) * number
        number.fill_(5)
        return x.tolist()

    assert on_card(program, "lazy") == [2.0, 2.0]


@pytest.mark.parametrize("change", ["batch norm", "foreach", "out", "in place"])
def test_what_kernels_write_to_is_known(change: str) -> None:
    """Also where the schema of the operator does not say it, or where it is one of a list."""
    kept = []

    def program(card: ModelCard) -> object:
        norm = nn.BatchNorm1d(3).to(card.device)
        kept.append(norm)
        x, y = torch.ones(2, 3, device=card.device), norm.running_mean
        assert y is not None
        made, side = card.event(), card.stream()
        made.record()
        with card.use(side), torch.no_grad():
            made.wait()
            if change == "batch norm":
                norm(x)
            elif change == "foreach":
                torch._foreach_add_([x, y], 1.0)  # pyright: ignore[reportPrivateImportUsage]
            elif change == "out":
                torch.add(x[0], 1, out=y)
            else:
                y[1:].view(-1).mul_(2)
        kept.append(x)
        return y + 1

    with pytest.raises(Race, match="does not wait for an event recorded on stream 1"):
        on_card(program)


def test_errors_of_torch_come_where_the_call_is() -> None:
    def program(card: ModelCard) -> None:
        x = torch.zeros(3, 4, device=card.device)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            x @ x

    on_card(program)


def test_fresh_memory_holds_no_numbers() -> None:
    assert on_card(lambda card: torch.empty(5, device=card.device).isnan().all().item())


def test_a_module_is_copied_on_the_card() -> None:
    def program(card: ModelCard) -> bool:
        module = linear().to(card.device)
        twin = copy.deepcopy(module)
        mine, copied = next(module.parameters()), next(twin.parameters())
        with torch.no_grad():
            mine += 1
        assert isinstance(copied, nn.Parameter) and copied.device == card.device
        return torch.equal(copied + 1, mine)

    assert on_card(program, "lazy")


def test_hooks_see_the_card() -> None:
    def program(card: ModelCard) -> tuple[list[str], list[float]]:
        seen: list[str] = []
        values: list[float] = []
        x = torch.ones(3, device=card.device, requires_grad=True)
        x.register_hook(lambda grad: seen.append(str(grad.device)))
        x.register_post_accumulate_grad_hook(lambda x: values.extend(x.grad.cpu().tolist()))  # pyright: ignore[reportOptionalMemberAccess]
        (x * x).sum().backward()
        torch.autograd.backward([(x * 3).sum()])
        return seen, values

    assert on_card(program, "lazy") == (["cpu:0"] * 2, [2.0] * 3 + [5.0] * 3)


def test_gradients_flow_into_views_of_one_buffer() -> None:
    """As in `gpp.runtime.worker.gradients`, which sums the buffer over devices."""

    def program(device: torch.device) -> torch.Tensor:
        torch.manual_seed(3)
        module = nn.Linear(4, 3).to(device)
        flat = torch.zeros(15, device=device)
        module.weight.grad, module.bias.grad = flat[:12].view(3, 4), flat[12:]
        for _ in range(2):
            module(torch.ones(2, 4, device=device)).square().sum().backward()
        return flat.cpu()

    assert torch.equal(on_card(lambda card: program(card.device), "lazy"), program(CPU))
