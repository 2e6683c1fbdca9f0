"""A pipeline of three workers on the model, and what the model says to each way of getting it wrong.

The path is a small one of its own, so that each rule can be broken alone; `test_path.py` has the project's.
"""

from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tests.support.cards.card import ModelCard, run
from tests.support.cards.faults import Deadlock, EarlyReuse, Fault, Mismatch, Race
from tests.support.cards.machine import Machine, Policy, Rule
from tests.support.long import thinned

WORKERS, MICROBATCHES, STEPS = 3, 4, 2
WIDTH, SAMPLES = 6, 2
ORDERS: list[tuple[Policy, int]] = [("eager", 0), ("lazy", 0), ("random", 0), ("random", 1)]
RUNS = [(rule, *order) for rule in get_args(Rule) for order in ORDERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How the workers go about it: the defaults are right, each other value breaks one rule.

    Args:
        ahead: passes by which a receive is posted before the one that needs it.
        device_wait: after each pass.
        waits: compute waits for receives.
        holds: what is sent is held until it is sent.
        keeps: inputs that were uploaded on a stream of their own are kept for the compute stream.
        event: compute waits for the upload.
        sorted_names: all workers make the communicators in one order.
        warm: a first message over each connection before the first step.
        first_sum: and a first sum.
    """

    ahead: int = 0
    device_wait: bool = False
    waits: bool = True
    holds: bool = True
    keeps: bool = True
    event: bool = True
    sorted_names: bool = True
    warm: bool = True
    first_sum: bool = True


def stage(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def sample(step: int, microbatch: int) -> torch.Tensor:
    return torch.sin(torch.arange(float(SAMPLES * WIDTH)) + 10 * step + microbatch).view(SAMPLES, WIDTH)


class Worker:
    """One stage on a card."""

    def __init__(self, card: ModelCard, path: Path) -> None:
        self.card, self.path, self.rank = card, path, card.host.rank
        self.module = stage(self.rank).to(card.device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.5, momentum=0.9, foreach=True)
        names = ["down", "up", "sum"]
        groups: dict[str, Any] = {}
        for name in names if path.sorted_names or self.rank != 1 else reversed(names):
            groups[name] = card.communicator(range(WORKERS), name)
        self.groups = groups
        self.copies = card.stream()
        self.posted: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        self.pending: list[tuple[Any, torch.Tensor | None]] = []
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        if path.warm:
            for low in range(WORKERS - 1):
                self._warm("down", low, low + 1)
                self._warm("up", low + 1, low)
        if path.first_sum:
            x = torch.zeros(1, device=card.device)
            groups["sum"].sum(x).wait()
        ready = card.event()
        ready.record()
        ready.synchronize()
        card.host.waits.clear()

    def _warm(self, name: str, source: int, target: int) -> None:
        x = torch.zeros(1, device=self.card.device)
        if self.rank == source:
            self.groups[name].send(x, target).wait()
        elif self.rank == target:
            self.groups[name].receive(x, source).wait()

    def post(self, direction: str, microbatch: int) -> None:
        peer = self.rank - 1 if direction == "F" else self.rank + 1
        if 0 <= peer < WORKERS and (direction, microbatch) not in self.posted:
            x = torch.empty(SAMPLES, WIDTH, device=self.card.device)
            self.posted[direction, microbatch] = x, self.groups["down" if direction == "F" else "up"].receive(x, peer)

    def arrived(self, direction: str, microbatch: int) -> torch.Tensor:
        x, work = self.posted.pop((direction, microbatch))
        if self.path.waits:
            work.wait()
        return x

    def send(self, tensor: torch.Tensor, name: str, peer: int) -> None:
        message = tensor.detach().clone()
        work = self.groups[name].send(message, peer)
        self.pending.append((work, message if self.path.holds else None))

    def inputs(self, step: int, microbatch: int) -> torch.Tensor:
        ready = self.card.event()
        with self.card.use(self.copies):
            x = self.card.upload(self.card.pinned(sample(step, microbatch)))
            ready.record()
        if self.path.event:
            ready.wait()
        if self.path.keeps:
            self.card.keep(x)
        return x

    def forward(self, step: int, microbatch: int) -> None:
        x = self.arrived("F", microbatch).requires_grad_() if self.rank else self.inputs(step, microbatch)
        y = self.module(x)
        if self.rank < WORKERS - 1:
            self.send(y, "down", self.rank + 1)
        else:
            y = y.square().mean() / MICROBATCHES
            self.losses.append(y.detach())
        self.made[microbatch] = x, y

    def backward(self, step: int, microbatch: int) -> None:
        x, y = self.made.pop(microbatch)
        y.backward(self.arrived("B", microbatch) if self.rank < WORKERS - 1 else None)
        if self.rank:
            assert x.grad is not None
            self.send(x.grad, "up", self.rank - 1)

    def step(self, step: int) -> None:
        passes = [("F", m) for m in range(MICROBATCHES)] + [("B", m) for m in range(MICROBATCHES)]
        for i, (direction, microbatch) in enumerate(passes):
            for posted in passes[i : i + 1 + self.path.ahead]:
                self.post(*posted)
            (self.forward if direction == "F" else self.backward)(step, microbatch)
            if self.path.device_wait:
                self.card.device_wait()
        squares = [p.grad.square().sum() for p in self.module.parameters() if p.grad is not None]
        total = torch.stack(squares).sum()
        self.groups["sum"].sum(total).wait()
        for p in self.module.parameters():
            assert p.grad is not None
            p.grad.mul_(torch.clamp(0.1 / total.sqrt(), max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        while self.pending:
            work, message = self.pending[0]
            work.wait()
            self.pending.pop(0)
            del message


def train(path: Path, rule: Rule = "streams", policy: Policy = "random", seed: int = 0) -> tuple[list[Any], Machine]:
    def program(card: ModelCard) -> Any:
        worker = Worker(card, path)
        for step in range(STEPS):
            worker.step(step)
        waits = dict(card.host.waits)
        return waits, [loss.item() for loss in worker.losses], [p.detach().cpu() for p in worker.module.parameters()]

    machine = Machine(rule=rule, policy=policy, seed=seed)
    return run(machine, [program] * WORKERS), machine


def single() -> tuple[list[float], list[list[torch.Tensor]]]:
    modules = [stage(rank) for rank in range(WORKERS)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in modules]
    losses = []
    for step in range(STEPS):
        for m in range(MICROBATCHES):
            loss = nn.Sequential(*modules)(sample(step, m)).square().mean() / MICROBATCHES
            losses.append(loss.item())
            loss.backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in modules]
        total = sum((torch.stack([g.square().sum() for g in one]).sum() for one in grads), torch.zeros(()))
        for optimizer, one in zip(optimizers, grads, strict=True):
            for g in one:
                g.mul_(torch.clamp(0.1 / total.sqrt(), max=1.0))
            optimizer.step()
            optimizer.zero_grad()
    return losses, [[p.detach() for p in m.parameters()] for m in modules]


@pytest.mark.parametrize(("rule", "policy", "seed"), RUNS)
def test_the_path_gives_the_single_devices_bits_without_a_wait_of_the_host(rule: Rule, policy: Policy, seed: int) -> None:
    found, machine = train(Path(), rule, policy, seed)
    losses, params = single()
    assert found[-1][1] == losses
    for (waits, _, mine), theirs in zip(found, params, strict=True):
        assert waits == {} and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not machine.findings and machine.communicators == 3 and machine.connections == 4


TODAY = Path(ahead=2, device_wait=True, warm=False, first_sum=False)
"""As the runtime did it on cards before: receives posted ahead, a device-wide wait after each pass, lazy connections."""

WRONG: list[tuple[str, Path, type[Fault], str]] = [
    ("today", TODAY, Deadlock, "worker 0 waits for"),
    ("device wait behind a posted receive", Path(ahead=2, device_wait=True), Deadlock, "waits for device-wide wait"),
    ("missing event after a receive", Path(waits=False), Race, "receive . from worker .*no event orders the two"),
    ("missing event after an upload", Path(event=False), Race, "upload .*no event orders the two"),
    ("buffer freed early", Path(holds=False), EarlyReuse, "send . to worker"),
    ("lost keep", Path(keeps=False), EarlyReuse, r"memory of upload .*(compute stream of worker 0|stream 1 of worker 0)"),
    ("communicators in another order", Path(sorted_names=False), Mismatch, "must be made in one order"),
]


@pytest.mark.parametrize(("rule", "policy", "seed"), thinned(RUNS, 3))
@pytest.mark.parametrize(("path", "fault", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_each_mutation_is_found(path: Path, fault: type[Fault], words: str, rule: Rule, policy: Policy, seed: int) -> None:
    with pytest.raises(fault, match=words):
        train(path, rule, policy, seed)


@pytest.mark.parametrize("policy", get_args(Policy))
def test_what_is_posted_ahead_stands_in_front_on_the_strictest_card_alone(policy: Policy) -> None:
    found, _ = train(Path(ahead=2), "streams", policy)
    assert found[-1][1] == single()[0]
    with pytest.raises(Deadlock, match="stands at receive"):
        train(Path(ahead=2), "one_queue", policy)


def test_a_device_wait_is_a_finding_where_it_does_no_harm() -> None:
    found, machine = train(Path(device_wait=True), policy="lazy")
    assert found[-1][1] == single()[0]
    assert any("device-wide wait of worker" in one for one in machine.findings)


@pytest.mark.parametrize("path", [Path(warm=False), Path(first_sum=False)], ids=["message", "sum"])
def test_a_first_use_in_the_loop_is_a_wait_of_the_host(path: Path) -> None:
    found, _ = train(path)
    assert all(waits.get("meeting") for waits, _, _ in found)
