"""Replicas that take whole micro-batches in turn, trained without drains: what a plain loop gives.

With drains they are among the cases of `tests/runtime/test_equality.py`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpp import SGD, DoubleBuffer, Even, Link, NoFlush, PipeOptim, Stash, Strategy, uniform
from gpp.cost.regime import Regime
from gpp.data.sampler import minibatch
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.plan.build import make_plan
from gpp.runtime.job import Job
from gpp.serialization import to_json
from gpp.simulate.simulator import steady_period
from gpp.timeline import Timeline
from gpp.weights.base import AbstractWeights
from tests.mechanisms.round_robin.test_sharing import random_plan
from tests.runtime import test_emulate
from tests.support import inprocess
from tests.support.cli import run
from tests.support.graphs import DEVICE
from tests.support.long import thinned
from tests.support.staged import DATA, captured, parts_of, problem_of

OPTIMIZER = SGD(lr=0.2, momentum=0.9)
STEPS = 7


def endless_job(policy: AbstractWeights, counts: list[int], count: int, steps: int = STEPS) -> Job:
    """Three stages of `Chain` whose replicas take turns, `count` micro-batches a mini-batch of 12 samples."""
    model, found, _ = captured("Chain")
    problem = replace(problem_of(found, NoFlush(), sum(counts)), regime=Regime(weights=policy), minibatch_size=12)
    parts, b = list(zip(parts_of(found.graph), counts, strict=True)), 12 // count
    plan = make_plan(problem, "test", parts, b, ordered=True, sharing=IN_TURN)
    strategy = Strategy(name="test", planner=Even(), schedule=NoFlush(), weights=policy)
    strategy.check(plan, problem)
    return inprocess.job_under(strategy, found, problem, plan, model=model, data=DATA, optimizer=OPTIMIZER, steps=steps)


class Reference:
    """Three stages tanh(x W^T + b) in one process, with all versions of their weights kept.

    Backward passes are written out, because PipeOptim's gradient of a stage's inputs goes through other weights than its forward.

    Args:
        ahead: forwards of a replica of each stage that are ahead of a backward.
        degrees: replicas of each stage that take micro-batches in turn.
    """

    def __init__(
        self, weights: dict[str, Tensor], policy: AbstractWeights, ahead: list[int], degrees: list[int], count: int
    ) -> None:
        self.policy, self.ahead, self.degrees, self.count = policy, ahead, degrees, count
        self.names = [[f"s{s}.0.weight", f"s{s}.0.bias"] for s in range(3)]
        self.versions = [[[weights[n].clone() for n in names]] for names in self.names]  # [stage][version]
        self.momenta: list[list[list[Tensor] | None]] = [[None] for _ in self.names]

    def forward_weights(self, s: int, j: int) -> list[Tensor]:
        """Of micro-batch j: a replica has made an update for every count / R micro-batches of its own that have come back."""
        own, between = j // self.degrees[s], self.count // self.degrees[s]
        latest = max(0, (own - self.ahead[s]) // between)
        batch = j // self.count
        if isinstance(self.policy, DoubleBuffer):
            return self.versions[s][max(0, batch - 1)]
        base, moved = self.versions[s][latest], self.momenta[s][latest]
        if self.policy.backward != "current" or moved is None:
            return base
        return [w - (batch - latest) * OPTIMIZER.lr * v for w, v in zip(base, moved, strict=True)]

    def step(self, batch: int, x: Tensor, y: Tensor) -> float:
        total, size = 0.0, len(x) // self.count
        grads = [[torch.zeros_like(w) for w in versions[0]] for versions in self.versions]
        for j in range(batch * self.count, (batch + 1) * self.count):
            at = (j % self.count) * size
            h, inputs, used = x[at : at + size], [], []
            for s in range(3):
                used.append(self.forward_weights(s, j))
                inputs.append(h)
                h = torch.tanh(h @ used[s][0].T + used[s][1])
            inputs.append(h)
            total += float(((h - y[at : at + size]) ** 2).mean()) / self.count
            grad = 2 * (h - y[at : at + size]) / h.numel() / self.count
            for s in reversed(range(3)):
                grad = grad * (1 - inputs[s + 1] ** 2)
                grads[s][0] += grad.T @ inputs[s]
                grads[s][1] += grad.sum(0)
                grad = grad @ (self.versions[s][batch] if self.policy.backward == "current" else used[s])[0]
        for s in range(3):
            before = self.momenta[s][-1]
            momentum = [g if before is None else OPTIMIZER.momentum * before[i] + g for i, g in enumerate(grads[s])]
            self.momenta[s].append(momentum)
            self.versions[s].append([w - OPTIMIZER.lr * v for w, v in zip(self.versions[s][-1], momentum, strict=True)])
        return total


CHAINS = [([2, 1, 1], 2), ([2, 1, 1], 4), ([1, 2, 1], 2), ([1, 3, 2], 6)]


STASHED, AHEAD = Stash(accumulation=2), PipeOptim(accumulation=2)


@pytest.mark.parametrize(
    ("policy", "counts", "count"),
    [
        *((each, *chain) for each, chain in zip([STASHED, AHEAD] * 2, CHAINS, strict=True)),
        *(pytest.param(each, *chain, marks=pytest.mark.long) for each, chain in zip([AHEAD, STASHED] * 2, CHAINS, strict=True)),
        (DoubleBuffer(), [2, 1, 1], 4),
    ],
)
def test_without_drains_replicas_in_turn_equal_a_plain_loop(
    policy: AbstractWeights, counts: list[int], count: int, tmp_path: Path
) -> None:
    model, _, weights = captured("Chain")
    job = endless_job(policy, counts, count)
    assert [stage.stride for stage in job.plan.stages] == counts
    losses, _, workers = inprocess.run(job, tmp_path, weights)
    ahead = [job.plan.position(s).warmup for s in range(3)]
    if counts == [2, 1, 1]:
        assert ahead == [1, 1, 0]  # floor((4 - 1 - devices of the stages before) / replicas)
    plain = Reference(weights, policy, ahead, counts, count)
    samples = DATA.load("train", model, seed=0, dtype="float64")
    for step, loss in enumerate(losses):
        values = samples.fetch(minibatch(step, 12, len(samples), 0))
        assert loss == pytest.approx(plain.step(step, values["x"], values["target:y"]), abs=1e-12)
    for worker in workers:
        for s, module in worker.modules.items():
            params = dict(module.named_parameters())
            for name, expected in zip(plain.names[s], plain.versions[s][-1], strict=True):
                torch.testing.assert_close(params[name].detach(), expected, rtol=0, atol=1e-12)
        for s, held in worker.weights.items():
            assert held.staleness == policy.staleness(job.plan.position(s))
            assert held.copies <= policy.copies(job.plan.position(s))


def emulated_job(seed: int) -> tuple[Job, Timeline]:
    """A random plan on links that take time, and its prediction."""
    problem, plan, schedule = random_plan(seed)
    link = Link(latency_s=0.1, bandwidth_bytes_per_s=8)
    devices = problem.cluster.num_devices
    cluster = uniform(name="test", num_nodes=1, devices_per_node=devices, device=DEVICE, memory_bytes=1e15, intra_node=link)
    weights = None if schedule.drains else Stash(accumulation=None)
    return test_emulate.job_of(replace(problem, cluster=cluster), plan, schedule, weights)


@pytest.mark.parametrize("seed", thinned(range(12)))
def test_the_virtual_clock_is_the_simulators_time(seed: int, tmp_path: Path) -> None:
    job, predicted = emulated_job(seed)
    job.save(tmp_path)
    workers = test_emulate.workers_of(Job.load(tmp_path))
    if not job.streams:
        _, period = test_emulate.rehearse(workers)
    else:
        done, _ = test_emulate.step(workers, 0.0)
        first = {s: stage.devices[0] for s, stage in enumerate(job.plan.stages)}
        of_device = {worker.device_id: record["virtual_updates"] for worker, record in zip(workers, done, strict=True)}
        period = steady_period({s: of_device[device][s] for s, device in first.items()}, job.plan)[1]
    assert period == pytest.approx(predicted.metrics.iteration_s, rel=1e-9)
    peaks = {w.device_id: w.held.peak_bytes({s: job.costs[s].memory for s in w.runners}) for w in workers}
    assert peaks == pytest.approx(predicted.metrics.peak_memory_bytes, abs=1)


def test_the_emulated_plans_take_turns() -> None:
    jobs = [emulated_job(seed)[0] for seed in range(30)]
    kinds = {(stage.stride > 1, job.streams) for job in jobs for stage in job.plan.stages}
    assert kinds == {(turns, streams) for turns in (False, True) for streams in (False, True)}


COMMON = [
    *("model=digits_deep", "data=digits", "graph.max_ops=2", "minibatch_size=48", "microbatch_size=12"),
    *("cluster=local_4", "cost=analytical", "logger=none", "explain_s=0"),
]
ENDLESS = ["strategy=pipedream", "strategy.weights.accumulation=4", "optimizer=sgd", "dtype=float64", "evaluate_every=0"]


@pytest.mark.dist
def test_processes_take_turns_and_resume_with_micro_batches_in_flight(tmp_path: Path) -> None:
    _, found, _ = inprocess.captured_named("digits_deep")
    problem = replace(inprocess.problem_of(found, 4, 48, max_ops=2), regime=Regime(weights=Stash(accumulation=4)))
    masks, b = [1, problem.graph.all_mask & ~1], 12
    plan = make_plan(problem, "test", [(mask, 2) for mask in masks], b, ordered=True, sharing=IN_TURN)
    plan = replace(plan, stages=(replace(plan.stages[0], in_flight=4 * b), replace(plan.stages[1], in_flight=2 * b)))
    (tmp_path / "plan.json").write_text(to_json(plan))
    words = [*COMMON, *ENDLESS, f"plan={tmp_path / 'plan.json'}", "steps=6"]
    whole = run(tmp_path / "whole", *words, "checkpoint.every=3", "checkpoint.keep=3")
    assert whole.code == 0, whole.out
    assert "d0-1 in turn" in whole.out
    assert whole.result["measured"]["max_in_flight_samples"] == {"0": 4 * b, "1": 2 * b}
    assert whole.result["measured"]["weight_versions"] == {"0": 2, "1": 1}
    again = run(tmp_path / "again", *words, f"resume={tmp_path / 'whole' / 'checkpoints' / 'step_3'}")
    assert again.code == 0, again.out
    assert len(again.result["loss"]) == 3
    assert again.result["loss"] == whole.result["loss"][3:]
