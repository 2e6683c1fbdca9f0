"""What the platform says of a published row: its model captured, its layout laid out by hand, the program simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.app.experiment import Experiment
from gpp.cluster import Cluster
from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.graph.captured import Captured
from gpp.mechanisms.split_backward.schedules.zero_bubble_auto import ZeroBubbleAuto
from gpp.mechanisms.tensor_parallel.variants import TensorParallelVariants
from gpp.plan.plan import Plan
from gpp.planners.chains.single import Single
from gpp.program.kinds import BACKWARD, PASS
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from gpp.strategy import Strategy
from sweeps.truth.layouts import (
    Torchgpipe,
    kept_plan,
    laid_out,
    with_float_loss,
    with_recomputed_shards,
    with_scores,
    with_split_head,
    with_whole_products,
)
from sweeps.truth.rows import MEMORY, STEP, Row

ROOT = Path(__file__).resolve().parents[2]

MIXED_STATE = 7.0
"""Bytes of optimizer state for each byte of a 16-bit weight: Megatron keeps 18 bytes a parameter, two of them the weight's and
two counted as its gradient's here (its main gradient has four): float32 weight, two moments and the rest of the gradient."""

MIXED_TRAFFIC = 15.0
"""Bytes that Adam moves for each byte of a 16-bit weight: reads gradient, float32 weight and two moments, writes four of them."""

SGD_TRAFFIC = 3.0


@dataclass(frozen=True, slots=True)
class Constants:
    """What of its data sheet a card reaches, as a training program uses it.

    Args:
        compute: share of the peak in matrix products and convolutions.
        memory: share of the memory's bandwidth.
        kernel_s: least seconds of a kernel.
        sums: share of a link's bandwidth in an all-reduce.
    """

    compute: float
    memory: float
    kernel_s: float
    sums: float = 1.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step, and the bytes of the fullest device."""

    step_s: float
    peak_bytes: float

    def of(self, row: Row) -> float:
        """The value of the row's metric."""
        if row.metric == MEMORY:
            return self.peak_bytes / 1e9
        if row.metric == STEP:
            return 1e3 * self.step_s
        rate = row.minibatch / self.step_s
        if row.metric == "samples/s":
            return rate
        if row.metric == "samples/s a GPU":
            return rate / row.devices
        return rate * flops(row) / row.devices / 1e12


def flops(row: Row) -> float:
    """FLOPs of a sample by equation 3 of Narayanan et al., recomputation included: 96 s l h^2 (1 + s / 6h + V / 16lh)."""
    layers, h, s, v = (int(row.words[f"model.{name}"]) for name in ("num_layers", "hidden", "sequence", "vocabulary"))
    return 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


@cache
def _experiment(settings: tuple[str, ...], cluster: str, devices: int) -> Experiment:
    words = [
        f"hydra.searchpath=[file://{ROOT / 'sweeps'}]",
        "strategies=[]",
        "name=truth",
        "logger=none",
        *settings,
        f"cluster={cluster}",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        nodes = -(-devices // 8)
        return instantiate(compose("config", overrides=[*words, f"cluster.num_nodes={nodes}"]), _convert_="all")


def cluster_of(name: str) -> Cluster:
    """One node of a cluster as it is configured."""
    return _experiment(("model=mlp",), name, 8).cluster


@cache
def _captured(settings: tuple[str, ...], degree: int) -> Captured:
    """The model at its finest: an operator for each kernel or few, with variants for the tensor-parallel degree."""
    captured = _experiment(settings, "dgx_a100", 8).captured()
    return TensorParallelVariants(degrees=(degree,)).declared(captured) if degree > 1 else captured


@cache
def problem_of(row: Row, constants: Constants) -> Problem:
    """The row's hardware, model and mini-batch."""
    captured = _captured(row.settings, row.tensor)
    one = _experiment(row.settings, row.cluster, row.devices)
    sheet = one.cluster.devices[0]
    device = replace(
        sheet,
        efficiency=constants.compute,
        memory_bandwidth_bytes_per_s=sheet.memory_bandwidth_bytes_per_s * constants.memory,
        kernel_latency_s=constants.kernel_s,
    )
    mixed = "dtype=bfloat16" in row.settings
    return Problem(
        graph=with_whole_products(row, captured.graph) if row.attention == "scores" else captured.graph,
        cluster=replace(
            one.cluster,
            devices=(device,) * row.devices,
            nodes=one.cluster.nodes[: row.devices],
            collective_efficiency=constants.sums,
        ),
        cost=Analytical(update_traffic=MIXED_TRAFFIC if mixed else SGD_TRAFFIC),
        minibatch_size=row.minibatch,
        optimizer_state_factor=MIXED_STATE if mixed else 0.0,
    )


def strategy_of(row: Row) -> Strategy:
    """The row's schedule, by the settings that stand for it."""
    ours = {"gpipe": Torchgpipe(), "1f1b": OneFOneB(), "zb_1p": ZeroBubbleAuto(cap=1.0), "zb_2p": ZeroBubbleAuto(cap=2.0)}
    schedule = ours[row.schedule] if row.schedule in ours else Interleaved1F1B(k=row.per_device)
    return Strategy(name="published", planner=Single(), schedule=schedule)


def predict(row: Row, constants: Constants) -> Predicted:
    """The prediction of a row."""
    return _predicted(row.run, constants)


def _posed(row: Row, constants: Constants) -> tuple[Problem, Plan]:
    """The row's problem, and its plan."""
    problem = problem_of(row, constants)
    device = problem.cluster.devices[0]
    if row.attention == "scores":
        problem = replace(problem, graph=with_scores(row, problem.graph, device))
    if row.loss == "float32":
        problem = replace(problem, graph=with_float_loss(row, problem.graph, device))
    if row.tensor > 1:
        problem = replace(problem, graph=with_split_head(row, problem.graph))
    if row.tensor > 1 and row.recompute != "none":
        problem = replace(problem, graph=with_recomputed_shards(problem.graph, problem, row.microbatch, row.tensor))
    return problem, laid_out(row, problem)


@cache
def _predicted(row: Row, constants: Constants) -> Predicted:
    (problem, plan), strategy = _posed(row, constants), strategy_of(row)
    if row.schedule != "gpipe":
        metrics = strategy.predict(plan, problem, record=False).metrics
        return Predicted(metrics.iteration_s, max(metrics.peak_memory_bytes.values()))
    return as_torchgpipe(strategy, plan, problem, keeps_last=row.recompute == "except_last")


def stage_range(row: Row, constants: Constants) -> tuple[Predicted, Predicted]:
    """A row whose devices have several stages: with one, which is plain 1F1B, and with so many that none is ever idle.

    Then the work of the busiest device is the step: more stages only divide what fills and drains the pipeline.
    """
    plain = replace(row.run, schedule="1f1b", balance=())
    problem, plan = _posed(plain, constants)
    bills = plan.bills(strategy_of(plain).posed(problem))
    work_s = max(row.count * (bill.forward_s + bill.backward_s) + bill.update_s for bill in bills)
    slow = predict(plain, constants)
    return slow, replace(slow, step_s=work_s)


def as_torchgpipe(strategy: Strategy, plan: Plan, problem: Problem, *, keeps_last: bool) -> Predicted:
    """A plan that recomputes, as torchgpipe runs it.

    It recomputes while a stage waits for the gradients: the backward of a micro-batch begins max(device free + recomputation,
    gradients there). That is what the simulator says of gradients that arrive earlier by the time of the recomputation.

    Args:
        keeps_last: `checkpoint='except_last'`: the last micro-batch, whose backward is the first, keeps its activations. Its stage
            waits for the gradients in any case, so that their early arrival is taken back by a longer pass.
    """
    posed = strategy.posed(problem)
    program = strategy.lower(plan, problem)
    costs, waits = Costs.of(program, plan, posed), program.waits
    again, kept = plan.bills(posed), kept_plan(plan).bills(posed)
    more = [bill.backward_s - plain.backward_s for bill, plain in zip(again, kept, strict=True)]
    waiting = set()
    for i, (direction, _, receiver, _, _) in enumerate(waits.channels):
        if direction == BACKWARD:
            costs.late[i] -= more[receiver]
            waiting.add(receiver)
    last = -(-plan.minibatch_size // plan.stages[0].microbatch_size) - 1
    labels = waits.label_of
    for device, actions in program.actions.items():
        for node, action in enumerate(actions, start=waits.first[device]):
            if keeps_last and action.kind == PASS[BACKWARD] and action.microbatch == last and action.stage not in waiting:
                costs.seconds[labels[node]] = kept[action.stage].pass_s(last=True)[1]
    _, step_s = LongestPath.of(waits, costs.seconds, costs.late).period()
    held = dict.fromkeys(range(len(plan.stages)), plan.minibatch_size)
    return Predicted(step_s, max(plan.device_memory(posed, held).values()))


def errors(rows: tuple[Row, ...], constants: Constants) -> list[float]:
    """Predicted / published - 1 of each row."""
    return [predict(row, constants).of(row) / row.value - 1 for row in rows]
