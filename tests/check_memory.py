"""Compare `gpp.memory.fit` with an exhaustive search over three ways for each operator, on random stages with little memory.

    python -m tests.check_memory --count 300 [--seed 0] [--ops 7]

Chains and graphs, devices of two speeds with and without a link to their host, replicas, frozen tensors, parameters, micro-batches
in flight from 1 to 5. The search is `tests.oracle.markings`, which shares no helper with the bill. Exit code 1 if a stage is found
to fit that does not, or not to fit that does, or in more seconds than the least; and if the bill of a marking is another one.

`--strategies` is the place for whole plans: `graphpipe` with the memory policy `auto` against all cuts and all ways.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

from gpp.cluster import Cluster, Device, Link, uniform
from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.cost.stage import stage_bytes
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.memory.fit import fit
from gpp.plan.stage import Stage
from tests.oracle.markings import AGAIN, HOST, KEEP, Marked, Markings

NEAR = 1e-9
"""Share by which two sums of the same numbers may differ."""


def random_cluster(rng: random.Random, num_devices: int) -> Cluster:
    """Devices of two speeds and their hosts."""
    device = Device(
        kind="cuda",
        memory_bytes=1e9,
        peak_flop_per_s={"float32": 1.0},
        memory_bandwidth_bytes_per_s=1e9,
        host_bandwidth_bytes_per_s=rng.choice([None, 1.0, 3.0, 10.0, 50.0]),
        host_latency_s=rng.choice([0.0, 0.5]),
        host_memory_bytes=rng.choice([None, None, 200.0]),
        host_sharers=rng.choice([1, 2]),
    )
    whole = uniform(
        name="random",
        num_nodes=1,
        devices_per_node=num_devices,
        device=device,
        intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9),
    )
    return replace(whole, devices=tuple(replace(device, speed_factor=rng.choice([0.5, 1.0])) for _ in range(num_devices)))


def random_graph(rng: random.Random, n: int, *, chain: bool) -> OpGraph:
    """Operators that keep what others read and more, or nothing; some tensors are kept by nobody, some have no gradient."""
    tensors = []
    for i in range(n - 1):
        readers = [i + 1] if chain else sorted(rng.sample(range(i + 1, n), min(n - 1 - i, rng.choice([1, 1, 2, 3]))))
        tensors.append(
            Tensor(
                name=f"t{i}",
                producer=i,
                consumers=tuple(readers),
                bytes_per_sample=float(rng.randint(1, 9)),
                saved=rng.random() < 0.6,
                differentiable=rng.random() < 0.9,
            )
        )
    with_fixed = rng.random() < 0.5
    ops = tuple(
        Op(
            name=f"op{i}",
            forward_flops=rng.uniform(1, 5),
            backward_flops=rng.uniform(1, 9),
            saved_bytes=rng.choice([0.0, 0.0, 3.0, 8.0, 20.0])
            + sum(t.bytes_per_sample for t in tensors if t.producer == i and t.saved),
            transient_bytes=float(rng.randint(0, 25)),
            fixed_bytes=float(rng.choice([0, 5, 30])) * with_fixed,
            params=tuple(sorted({f"w{rng.randrange(3)}" for _ in range(rng.randint(0, 2))})),
        )
        for i in range(n)
    )
    params = tuple(
        Param(name=name, num_bytes=rng.randint(1, 20), trainable=rng.random() < 0.8)
        for name in sorted({name for op in ops for name in op.params})
    )
    return OpGraph(name="random", ops=ops, tensors=tuple(tensors), params=params)


@dataclass(frozen=True, slots=True)
class Case:
    """A stage, what it may do, and all that it can."""

    problem: Problem
    stage: Stage
    held: int
    ways: tuple[str, ...]
    limit: float
    best: Marked | None
    plain: Marked


def random_case(rng: random.Random, most_ops: int, *, chain: bool) -> Case:
    """A stage with a limit between what it needs at least and what it needs with everything kept."""
    n = rng.randint(2, most_ops)
    low = 0 if rng.random() < 0.6 else rng.randint(0, n - 2)
    ops = tuple(range(low, n if rng.random() < 0.6 else rng.randint(low + 1, n)))
    held, b, num_devices = rng.randint(1, 5), rng.choice([1, 2, 3]), rng.choice([1, 2])
    problem = Problem(
        graph=random_graph(rng, n, chain=chain),
        cluster=random_cluster(rng, 2),
        cost=Analytical(),
        minibatch_size=b * num_devices * held,
        optimizer_state_factor=rng.choice([0.0, 1.0]),
    )
    devices = tuple(range(num_devices))
    stage = Stage(ops=ops, devices=devices, microbatch_size=b * num_devices, in_flight=b * num_devices * held)
    ways = rng.choice([("recompute",), ("offload",), ("recompute", "offload")])
    linked = all(problem.cluster.devices[d].host_bandwidth_bytes_per_s is not None for d in devices)
    able = (KEEP, *([AGAIN] if "recompute" in ways else []), *([HOST] if "offload" in ways and linked and held > 2 else []))
    markings = Markings(problem, ops, devices, held, b)
    every, plain = list(markings.all(able)), markings.judged((KEEP,) * len(ops))
    assert plain is not None
    _check_bills(problem, stage, held, rng.sample(every, min(3, len(every))))
    least = min(one.peak for one in every)
    limit = least + (plain.peak - least) * rng.uniform(-0.05, 1.0)
    fitting = [one for one in every if one.peak <= limit]
    return Case(problem, stage, held, ways, limit, min(fitting, key=lambda one: one.seconds, default=None), plain)


def _check_bills(problem: Problem, stage: Stage, held: int, some: list[Marked]) -> None:
    """The bill says what the search says."""
    for one in some:
        named = [tuple(op for op, way in zip(stage.ops, one.ways, strict=True) if way == asked) for asked in (AGAIN, HOST)]
        billed = stage_bytes(problem, replace(stage, recompute=named[0], offload=named[1])).peak(held)
        assert abs(billed - one.peak) <= NEAR * one.peak, f"{one.ways}: the bill says {billed}, the search {one.peak}"


def verdict(case: Case) -> str:
    """`equal`, `equal: nothing fits`, or what is wrong."""
    found = fit(case.problem, case.stage, case.held, case.limit, ways=case.ways)
    if found is None or case.best is None:
        return (
            "equal: nothing fits"
            if found is None and case.best is None
            else "missed"
            if found is None
            else "fits, though nothing does"
        )
    way = {**dict.fromkeys(found.recompute, AGAIN), **dict.fromkeys(found.offload, HOST)}
    ways = tuple(way.get(op, KEEP) for op in case.stage.ops)
    samples = case.stage.samples
    true = Markings(case.problem, case.stage.ops, case.stage.devices, case.held, samples).judged(ways)
    if true is None or true.peak > case.limit * (1 + 2 * NEAR):
        return "overflows"
    if abs(true.seconds - case.plain.seconds - found.added_s) > NEAR * true.seconds:
        return "says other seconds"
    return "equal" if true.seconds <= case.best.seconds * (1 + NEAR) else "worse"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", type=int, default=7, help="operators at most; the search tries three ways for each")
    asked = parser.parse_args(arguments)
    print("form   stages  equal  of them none fits  worse  wrong  marked  on the host  CPU s of fit")
    bad = 0
    for chain in (True, False):
        counts, seconds, marked, moved = Counter[str](), 0.0, 0, 0
        for number in range(asked.count):
            rng = random.Random(f"{asked.seed}-{chain}-{number}")
            case = random_case(rng, asked.ops, chain=chain)
            start = time.process_time()
            found = fit(case.problem, case.stage, case.held, case.limit, ways=case.ways)
            seconds += time.process_time() - start
            said = verdict(case)
            counts[said] += 1
            marked += bool(found and (found.recompute or found.offload))
            moved += bool(found and found.offload)
            if not said.startswith("equal"):
                print(f"  {'chain' if chain else 'graph'} {number}: {said}: {found}, best {case.best}, limit {case.limit:.6g}")
        none, equal = counts["equal: nothing fits"], counts["equal"] + counts["equal: nothing fits"]
        worse, wrong = counts["worse"], asked.count - equal - counts["worse"]
        bad += worse + wrong
        name = "chain" if chain else "graph"
        print(f"{name} {asked.count:7} {equal:6} {none:18} {worse:6} {wrong:6} {marked:7} {moved:12} {seconds:13.1f}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
