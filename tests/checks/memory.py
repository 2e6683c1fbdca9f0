"""Compare `gpp.mechanisms.marks.fit` with an exhaustive search over the ways of each operator, on random stages with little memory.

    python -m tests.checks.memory --count 300 [--seed 0] [--ops 7]

Chains and graphs, devices of two speeds with and without a link to their host, replicas, frozen tensors, parameters, micro-batches
in flight from 1 to 5. The search is `tests.oracle.markings`, which shares no helper with the bill. Exit code 1 if a stage is found
to fit that does not, or not to fit that does, or in more seconds than the least; and if the bill of a marking is another one.

    python -m tests.checks.memory --strategies 50

does the same for whole plans: `graphpipe` with the memory policy `auto` against all cuts and all ways on graphs of up to six
operators and up to three devices, at a given micro-batch size (`tests.oracle.memory_plans`). Exit code 1 if fewer than 90 % are as
fast as the best plan, if one is more than 5 % slower, overflows, or is not found though one fits.

    python -m tests.checks.memory --planners dawnpiper --count 300

compares the chains of `strategy=dawnpiper` with all cuts and all ways (`tests.oracle.memory_chains`): graphs of up to six operators
cut in their own order, up to four devices, equal or not, draining or with stashed weights. Exit code 1 if the slowest stage of an
exact search is not the least there is, if a plan overflows, is missed or is found though none fits, and if the binary search is
equal in fewer than 95 % or more than 3 % above.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from gpp import Analytical, Auto, Cluster, DawnPiper, Device, GraphPipe, Link, OneFOneB, Stash, Strategy, uniform
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.cost.stage import stage_bytes
from gpp.errors import Infeasible
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.mechanisms.marks.choices import Choices, Marking
from gpp.mechanisms.marks.fit import fit
from gpp.stage import Stage
from tests.oracle.markings import AGAIN, END, HOST, KEEP, Marked, Markings
from tests.oracle.memory_chains import MarkedChains
from tests.oracle.memory_plans import MarkedPlans

Search = Literal["exact", "binary"]

SEARCHES: tuple[Search, ...] = ("exact", "binary")

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
    """A stage, what it may do, and all that it can: the least bytes, and what is best within a limit."""

    problem: Problem
    stage: Stage
    held: int
    ways: tuple[str, ...]
    least: float
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
    able = (KEEP, *([AGAIN, END] if "recompute" in ways else []), *([HOST] if "offload" in ways and linked and held > 2 else []))
    markings = Markings(problem, ops, devices, held, b)
    every, plain = list(markings.all(able)), markings.judged((KEEP,) * len(ops))
    assert plain is not None
    _check_bills(problem, stage, held, rng.sample(every, min(3, len(every))))
    least = min(one.peak for one in every)
    limit = least + (plain.peak - least) * rng.uniform(-0.05, 1.0)
    fitting = [one for one in every if one.peak <= limit]
    return Case(problem, stage, held, ways, least, limit, min(fitting, key=lambda one: one.seconds, default=None), plain)


def _check_bills(problem: Problem, stage: Stage, held: int, some: list[Marked]) -> None:
    """The bill says what the search says."""
    for one in some:
        named = [[op for op, way in zip(stage.ops, one.ways, strict=True) if way in of] for of in ((AGAIN, END), (HOST,), (END,))]
        billed = stage_bytes(problem, Marking(*map(tuple, named)).on(stage)).peak(held)
        assert abs(billed - one.peak) <= NEAR * one.peak, f"{one.ways}: the bill says {billed}, the search {one.peak}"


def verdict(case: Case) -> str:
    """`equal`, `equal: nothing fits`, or what is wrong."""
    choices = Choices(case.problem, case.stage, case.held, case.ways, None)
    if choices.in_runs and choices.least_peak > case.least * (1 + NEAR):
        return "refuses what fits"
    found = fit(case.problem, case.stage, case.held, case.limit, ways=case.ways)
    if found is None or case.best is None:
        return (
            "equal: nothing fits"
            if found is None and case.best is None
            else "missed"
            if found is None
            else "fits, though nothing does"
        )
    way = {op: of for of, ops in zip((AGAIN, HOST, END), found.marking, strict=True) for op in ops}
    ways = tuple(way.get(op, KEEP) for op in case.stage.ops)
    samples = case.stage.samples
    true = Markings(case.problem, case.stage.ops, case.stage.devices, case.held, samples).judged(ways)
    if true is None or true.peak > case.limit * (1 + 2 * NEAR):
        return "overflows"
    if abs(true.seconds - case.plain.seconds - found.added_s) > NEAR * true.seconds:
        return "says other seconds"
    return "equal" if true.seconds <= case.best.seconds * (1 + NEAR) else "worse"


def random_problem(rng: random.Random) -> Problem:
    """A small graph on a few devices with too little memory for everything."""
    n, num_devices = rng.randint(3, 6), rng.randint(2, 3)
    graph = random_graph(rng, n, chain=rng.random() < 0.3)
    problem = Problem(
        graph=graph,
        cluster=replace(random_cluster(rng, num_devices), processors=None),
        cost=Analytical(),
        minibatch_size=12,
        microbatch_size=rng.choice([2, 3, 4]),
        optimizer_state_factor=rng.choice([0.0, 1.0]),
    )
    alike = rng.random() < 0.5
    whole = Stage(ops=tuple(range(n)), devices=(0,), microbatch_size=problem.microbatch_size or 1, in_flight=12)
    memory = stage_bytes(problem, whole).peak(1) * rng.uniform(0.3, 1.0)
    first = problem.cluster.devices[0]
    devices = tuple(replace(first if alike else device, memory_bytes=memory) for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def compare_strategies(count: int, seed: int) -> int:
    """Print how `graphpipe` with `auto` compares with every plan; returns the exit code."""
    strategy = Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB(), memory=Auto())
    counts, worst = Counter[str](), 1.0
    for number in range(count):
        problem = random_problem(random.Random(f"{seed}-plans-{number}"))
        best_s = MarkedPlans(problem, strategy, ("recompute", "offload")).best_s()
        try:
            plan = strategy.plan(problem)
        except Infeasible:
            counts["missed" if best_s is not None else "nothing fits"] += 1
            continue
        peaks = plan.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(plan.stages)})
        if any(need > problem.cluster.devices[d].memory_bytes * (1 + NEAR) for d, need in peaks.items()):
            counts["overflows"] += 1
        ratio = strategy.predict(plan, problem, record=False).metrics.iteration_s / (best_s or math.inf)
        worst = max(worst, ratio)
        counts["equal" if abs(ratio - 1) <= NEAR else "better" if ratio < 1 else "within 5 %" if ratio <= 1.05 else "worse"] += 1
        if ratio > 1 + NEAR:
            print(f"  plan {number}: {ratio:.4f} of the best plan's seconds", flush=True)
    print(f"{count} problems: {dict(sorted(counts.items()))}; at most {worst:.4f} of the best plan's seconds")
    judged = count - counts["nothing fits"]
    good = counts["equal"] + counts["better"] >= 0.9 * judged
    return int(not good or any(counts[name] for name in ("missed", "overflows", "worse")))


def random_chain_problem(rng: random.Random) -> Problem:
    """As `random_problem`, with all devices needed more often, and enough micro-batches for every position to differ."""
    problem = random_problem(rng)
    cluster = replace(random_cluster(rng, rng.randint(2, 4)), processors=None)
    memory, first, alike = problem.memory_limit_bytes * rng.uniform(0.8, 2.5), cluster.devices[0], rng.random() < 0.7
    devices = tuple(replace(first if alike else device, memory_bytes=memory) for device in cluster.devices)
    b = problem.microbatch_size or 1
    return replace(problem, cluster=replace(cluster, devices=devices), minibatch_size=b * rng.choice([2, 6, 6]))


def judged_chains(problem: Problem, ways: tuple[str, ...], *, stashes: bool) -> dict[Search, tuple[str, float]]:
    """What both searches say of one problem: a verdict, and the ratio to the least seconds of the slowest stage."""
    if stashes:
        # An update after every micro-batch, so that each in flight has a version of its own.
        problem = replace(problem, minibatch_size=problem.microbatch_size or 1, regime=Regime(weights=Stash()))
    least = MarkedChains(problem, ways, stashes=stashes).best_s()
    name: Literal["auto", "recompute", "offload"] = (
        "auto" if len(ways) == 2 else "recompute" if ways == ("recompute",) else "offload"
    )
    out: dict[Search, tuple[str, float]] = {}
    for search in SEARCHES:
        planner = DawnPiper(search=search, ways=name)
        found = planner.best_chain(problem, tuple(range(problem.graph.num_ops)), problem.microbatch_size or 1)
        if found is None or least is None:
            out[search] = ("nothing fits" if found is None and least is None else "missed" if found is None else "overflows"), 1.0
            continue
        needs = found.plan.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(found.plan.stages)})
        ratio = found.seconds / least
        over = any(need > problem.cluster.devices[d].memory_bytes * (1 + NEAR) for d, need in needs.items())
        said = "overflows" if over else "equal" if abs(ratio - 1) <= NEAR else "better" if ratio < 1 else "worse"
        out[search] = said, ratio
    return out


def compare_chains(count: int, seed: int) -> int:
    """Print how DawnPiper's chains compare with all of them; returns the exit code."""
    counts, worst = {search: Counter[str]() for search in SEARCHES}, dict.fromkeys(SEARCHES, 1.0)
    for number in range(count):
        rng = random.Random(f"{seed}-chains-{number}")
        ways, stashes = rng.choice([("recompute",), ("offload",), ("recompute", "offload")]), rng.random() < 0.4
        for search, (said, ratio) in judged_chains(random_chain_problem(rng), ways, stashes=stashes).items():
            counts[search][said] += 1
            worst[search] = max(worst[search], ratio)
            if said not in ("equal", "nothing fits"):
                print(f"  chain {number}, {search}: {said}, {ratio:.4f} of the least seconds", flush=True)
    for search in SEARCHES:
        found = counts[search]
        print(f"{search:7} {count} problems: {dict(sorted(found.items()))}; at most {worst[search]:.4f} of the least seconds")
    exact, binary = counts["exact"], counts["binary"]
    wrong = any(one[bad] for one in (exact, binary) for bad in ("missed", "overflows", "better")) or exact["worse"]
    judged = count - binary["nothing fits"]
    return int(bool(wrong) or binary["equal"] < 0.95 * judged or worst["binary"] > 1.03)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", type=int, default=7, help="operators at most; the search tries up to four ways for each")
    parser.add_argument("--strategies", type=int, metavar="COUNT", help="compare whole plans instead, for so many problems")
    parser.add_argument("--planners", choices=["dawnpiper"], help="compare the chains of a planner instead")
    asked = parser.parse_args(arguments)
    if asked.planners:
        return compare_chains(asked.count, asked.seed)
    if asked.strategies:
        return compare_strategies(asked.strategies, asked.seed)
    print("form   stages  equal  of them none fits  worse  wrong  marked  on the host  parted  CPU s of fit")
    bad = 0
    for chain in (True, False):
        counts, seconds, marked, moved, parted = Counter[str](), 0.0, 0, 0, 0
        for number in range(asked.count):
            rng = random.Random(f"{asked.seed}-{chain}-{number}")
            case = random_case(rng, asked.ops, chain=chain)
            start = time.process_time()
            found = fit(case.problem, case.stage, case.held, case.limit, ways=case.ways)
            seconds += time.process_time() - start
            said = verdict(case)
            counts[said] += 1
            marked += bool(found and any(found.marking))
            moved += bool(found and found.marking.offload)
            parted += bool(found and found.marking.boundaries)
            if not said.startswith("equal"):
                print(f"  {'chain' if chain else 'graph'} {number}: {said}: {found}, best {case.best}, limit {case.limit:.6g}")
        none, equal = counts["equal: nothing fits"], counts["equal"] + counts["equal: nothing fits"]
        worse, wrong = counts["worse"], asked.count - equal - counts["worse"]
        bad += worse + wrong
        name = "chain" if chain else "graph"
        print(f"{name} {asked.count:7} {equal:6} {none:18} {worse:6} {wrong:6} {marked:7} {moved:12} {parted:7} {seconds:13.1f}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
