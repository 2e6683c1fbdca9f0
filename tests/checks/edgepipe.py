"""The planner edgepipe against every plan there is, on random small chains and graphs and unequal devices.

    python -m tests.checks.edgepipe --count 300

Prints for chains and graphs how many were equal and how many have no plan, and for graphs by how much the search for large graphs
(which is not exact) misses. Ends with 1 if an exact search misses, finds a plan where there is none, or none where there is one.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from gpp import EdgePipe, Plan
from gpp.cluster import Cluster, Device, Link, PairLink
from gpp.cost.models.by_type import TimesByType
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import Infeasible
from gpp.graph.op_graph import Input, Op, OpGraph, Param, Tensor, bits
from gpp.mechanisms.serving.course import Requests
from gpp.mechanisms.serving.edgepipe.forward import Assigned, ForwardProblem, Kinds
from gpp.mechanisms.serving.edgepipe.typed_stages import TypedStages
from gpp.planners.common.stage_costs import StageCosts
from tests.oracle.edge import Served
from tests.support.options import options

Shape = Literal["chain", "graph"]
NEAR = 1e-9


def random_served(shape: Shape, seed: int) -> tuple[Problem, Served]:
    """A random problem, for the planner and for the oracle."""
    rng = random.Random(f"{shape} {seed}")
    num_ops, samples = rng.randint(2, 7), rng.choice((1, 2, 8))
    graph = _graph(rng, shape, num_ops)
    kinds = [f"type{i}" for i in range(rng.randint(1, 3))]
    seconds = {kind: {op.name: rng.lognormvariate(0.0, 0.7) for op in graph.ops} for kind in kinds}
    cluster = _cluster(rng, kinds, graph, samples)
    buffers = rng.choice((0, 1, 2))
    problem = Problem(
        graph=graph,
        cluster=cluster,
        cost=TimesByType(batch=samples, seconds=seconds, source="this test"),
        minibatch_size=4 * samples,
        microbatch_size=samples,
        max_replicas=1,
        regime=Regime(course=Requests(buffers=buffers)),
    )
    took = [[seconds[device.name or ""][op.name] / device.speed_factor for device in cluster.devices] for op in graph.ops]
    return problem, Served(graph=graph, cluster=cluster, seconds=took, samples=samples, buffers=buffers)


def _graph(rng: random.Random, shape: Shape, num_ops: int) -> OpGraph:
    readers: list[tuple[int, ...]] = [(i + 1,) for i in range(num_ops - 1)]
    if shape == "graph":
        readers = [
            tuple(sorted(rng.sample(range(i + 1, num_ops), rng.randint(0, min(2, num_ops - 1 - i))))) for i in range(num_ops - 1)
        ]
    params = [Param(name=f"w{i}", num_bytes=int(rng.lognormvariate(6, 1)), trainable=False) for i in range(num_ops)]
    shared = rng.random() < 0.3
    ops = [
        Op(
            name=f"op{i}",
            params=tuple({f"w{i}", "w0"} if shared and i == num_ops - 1 else {f"w{i}"}),
            inputs=("x",) if i == 0 else (),
            transient_bytes=rng.lognormvariate(3, 1),
        )
        for i in range(num_ops)
    ]
    tensors = [
        Tensor(
            name=f"t{i}.{copy}",
            producer=i,
            consumers=to if copy == 0 else to[:1],
            bytes_per_sample=rng.lognormvariate(5, 1.5),
            saved=False,
            differentiable=False,
        )
        for i, to in enumerate(readers)
        if to
        for copy in range(1 + (rng.random() < 0.2))
    ]
    given = Input(name="x", bytes_per_sample=rng.lognormvariate(4, 1))
    return OpGraph(name="random", ops=tuple(ops), tensors=tuple(tensors), params=tuple(params), inputs=(given,))


def _cluster(rng: random.Random, kinds: list[str], graph: OpGraph, samples: int) -> Cluster:
    weights = sum(param.num_bytes for param in graph.params) + samples * sum(t.bytes_per_sample for t in graph.tensors)
    rate = samples * 200.0
    types = {
        kind: Device(
            kind="cpu",
            name=kind,
            memory_bytes=weights * rng.choice((0.4, 0.7, 1.0, 2.0, 20.0)),
            bandwidth_bytes_per_s=rng.choice((None, rate * rng.lognormvariate(0, 1))),
            speed_factor=rng.choice((1.0, 0.5)),
            peak_flop_per_s={"float32": 1.0},
            memory_bandwidth_bytes_per_s=1.0,
        )
        for kind in kinds
    }
    devices = tuple(types[rng.choice(kinds)] for _ in range(rng.randint(2, 4)))
    used = sorted({device.name or "" for device in devices})
    links = []
    if len(used) > 1 and rng.random() < 0.3:
        links.append(
            PairLink(between=(used[0], used[1]), link=Link(latency_s=0.0, bandwidth_bytes_per_s=rate * rng.lognormvariate(0, 1)))
        )
    if rng.random() < 0.2:
        links.append(PairLink(between=(0, 1), link=Link(latency_s=0.5, bandwidth_bytes_per_s=rate)))
    return Cluster(
        name="random",
        devices=devices,
        nodes=tuple(rng.randint(0, 1) for _ in devices),
        intra_node=Link(latency_s=rng.choice((0.0, 0.1)), bandwidth_bytes_per_s=4 * rate),
        inter_node=Link(latency_s=rng.choice((0.0, 0.3)), bandwidth_bytes_per_s=rate),
        links=tuple(links),
    )


@dataclass(frozen=True, slots=True)
class Found:
    """One problem: the least bottleneck, and those that the planner finds; infinite where there is none.

    Args:
        exact_s: of the planner as it is.
        alone_s: of the search over downsets without a known plan and a bound to begin with.
        searched_s: of the search for large graphs.
    """

    best_s: float
    exact_s: float
    alone_s: float
    searched_s: float

    @property
    def wrong(self) -> bool:
        """Whether the exact search is not exact, or the other one is better than everything."""
        same = (x == self.best_s or math.isclose(x, self.best_s, rel_tol=NEAR) for x in (self.exact_s, self.alone_s))
        return not all(same) or self.searched_s < self.best_s * (1 - NEAR)


def compare(shape: Shape, seed: int, *, searched: bool = True) -> Found:
    """Both searches and the oracle on one problem.

    Args:
        searched: whether to try the search for large graphs too.
    """
    problem, served = random_served(shape, seed)

    def predict(plan: Plan) -> Any:
        return SimpleNamespace(metrics=SimpleNamespace(iteration_s=served.bottleneck_s(_device_of(plan))))

    def seconds(planner: EdgePipe) -> float:
        try:
            plan = planner.plan(problem, predict)
        except Infeasible:
            return math.inf
        plan.validate(problem)
        return served.bottleneck_s(_device_of(plan))

    exact = EdgePipe()
    forward = ForwardProblem(problem, StageCosts(problem, replication=False), served.samples)
    search = TypedStages(forward, Kinds.of(problem.cluster), most_downsets=1000, most_states=10**6)
    alone = search.fastest(None, 0.0)
    return Found(
        best_s=served.best_s(),
        exact_s=seconds(exact),
        alone_s=math.inf if alone is None else served.bottleneck_s(_by_op(alone)),
        searched_s=seconds(replace(exact, most_downsets=1)) if searched else math.inf,
    )


def _by_op(stages: Assigned) -> tuple[int, ...]:
    return tuple(device for _, device in sorted((op, device) for mask, device in stages for op in bits(mask)))


def _device_of(plan: Plan) -> tuple[int, ...]:
    by_op = {op: stage.devices[0] for stage in plan.stages for op in stage.ops}
    return tuple(by_op[op] for op in sorted(by_op))


def check(shape: Shape, seeds: Iterable[int], *, searched: bool = True) -> tuple[list[int], str]:
    """Seeds that are wrong, and a summary."""
    found = {seed: compare(shape, seed, searched=searched) for seed in seeds}
    gaps = sorted(f.searched_s / f.best_s for f in found.values() if math.isfinite(f.best_s) and math.isfinite(f.searched_s))
    none = sum(math.isinf(f.best_s) for f in found.values())
    missed = sum(math.isinf(f.searched_s) and math.isfinite(f.best_s) for f in found.values()) if searched else 0
    wrong = [seed for seed, f in found.items() if f.wrong]
    words = f"{shape}: {len(found)} problems, {none} without a plan; exact search wrong on {len(wrong)}"
    if searched and gaps:
        equal = sum(gap < 1 + NEAR for gap in gaps)
        words += (
            f"; search for large graphs equal on {equal} of {len(gaps)}, {gaps[-1]:.3f} times the best at worst, {missed} not found"
        )
    return wrong, words


def main() -> int:
    count, failed = options(__doc__, count=300).count, False
    for shape in ("chain", "graph"):
        wrong, words = check(shape, range(count))
        print(words, f"(seeds {wrong[:10]})" if wrong else "")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
