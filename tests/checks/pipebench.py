"""PipeBench's verifier against mutated plans: the platform's own validation and simulator judge beside it.

    python -m tests.checks.pipebench --count 1000

Each plan is a random one of a random problem of PipeBench with up to three mutations, most of which break a rule; memory is set
near what the plan takes, so that it decides, too. Verifier and platform share no code. Prints how often each rule decided, and
ends with 1 where one of both accepts a plan that the other refuses, or where their seconds differ.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from typing import Any

from benchmarks.pipebench.__main__ import problems
from benchmarks.pipebench.planners import posed
from benchmarks.pipebench.verify import Invalid, judge
from gpp import Even, OneFOneB, Plan, Strategy
from gpp.cost.problem import check_batch
from gpp.errors import GppError, InvalidConfig, InvalidPlan
from gpp.plan.in_flight import in_flight_samples
from gpp.serialization import from_json
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from tests.support.options import options

SAME = 1e-9
"""Relative difference of seconds, by the order in which they are added."""


def drawn(rng: random.Random, problem: dict[str, Any]) -> dict[str, Any]:
    """A valid plan but for its memory: operators in their order, cut anywhere, on any devices."""
    count, devices = len(problem["operators"]), list(range(problem["devices"]))
    size = rng.choice([b for b in range(1, problem["minibatch"] + 1) if problem["minibatch"] % b == 0])
    cuts = sorted(rng.sample(range(1, count), rng.randint(0, min(count, len(devices)) - 1)))
    rng.shuffle(devices)
    stages, left = [], len(cuts)
    for lo, hi in zip([0, *cuts], [*cuts, count], strict=True):
        most = min(len(devices) - left, problem["max_replicas"])
        replicas = rng.choice([r for r in range(1, most + 1) if size % r == 0])
        stages.append({"operators": list(range(lo, hi)), "devices": sorted(devices.pop() for _ in range(replicas))})
        left -= 1
    return {"problem": problem["name"], "microbatch": size, "stages": stages}


def mutated(rng: random.Random, problem: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with one thing changed, for better or worse."""
    plan = json.loads(json.dumps(plan))
    stages = plan["stages"]
    one, other = rng.choice(stages), rng.choice(stages)
    ops, devices = one.get("operators") or [0], one.get("devices") or [0]
    kind = rng.randrange(12)
    if kind == 0 and other.get("operators") is not None:
        other["operators"].append(ops.pop(rng.randrange(len(ops))))
    elif kind == 1:
        ops.pop(rng.randrange(len(ops)))
    elif kind == 2:
        ops.append(rng.randrange(-1, len(problem["operators"]) + 1))
    elif kind == 3:
        rng.shuffle(stages)
    elif kind == 4:
        plan["microbatch"] = rng.choice([0, -1, 1, 2, 3, 5, problem["minibatch"], 2 * problem["minibatch"]])
    elif kind == 5:
        devices.append(rng.randrange(-1, problem["devices"] + 1))
    elif kind == 6:
        devices.pop(rng.randrange(len(devices)))
    elif kind == 7 and one is not other:
        one["operators"] = ops + (other.get("operators") or [])
        stages.remove(other)
    elif kind == 8 and len(ops) > 1:
        at = rng.randrange(1, len(ops))
        stages.insert(stages.index(one) + 1, {"operators": ops[at:], "devices": [rng.randrange(problem["devices"])]})
        one["operators"] = ops[:at]
    elif kind == 9:
        wrong: list[Any] = ["0", 0.5, None, True, [0]]
        rng.choice([ops, devices])[0] = rng.choice(wrong)
    elif kind == 10:
        one.pop(rng.choice(["operators", "devices"]), None)
    elif other.get("operators"):
        a, b = rng.randrange(len(ops)), rng.randrange(len(other["operators"]))
        ops[a], other["operators"][b] = other["operators"][b], ops[a]
    return plan


def by_platform(problem: dict[str, Any], plan: dict[str, Any]) -> float:
    """The seconds of the step from its first pass to its last action, by the platform.

    Raises:
        GppError: it refuses the plan.
    """
    asked = posed(problem)
    strategy = Strategy(name="judge", planner=Even(), schedule=OneFOneB())
    size, stages = plan["microbatch"], plan["stages"]
    check_batch(asked.minibatch_size, size)
    owner = {op: s for s, stage in enumerate(stages) for op in stage.get("operators") or () if isinstance(op, int)}
    pairs = {(owner.get(t.producer, -1), owner.get(op, -1)) for t in asked.graph.tensors for op in t.consumers}
    edges = sorted((a, b) for a, b in pairs if a != b and min(a, b) >= 0)
    forward = all(a < b for a, b in edges)
    held = in_flight_samples([(size, 1, 1)] * len(stages), edges if forward else [], asked.minibatch_size, strategy.schedule.holds)
    rows = [
        {
            **{name: sorted(v, key=str) if len({type(x) for x in v}) > 1 else sorted(v) for name, v in renamed(stage).items()},
            "microbatch_size": size,
            "in_flight": in_flight,
        }
        for stage, in_flight in zip(stages, held, strict=True)
    ]
    text = {
        "planner": "judge",
        "stages": rows,
        "edges": edges,
        "minibatch_size": asked.minibatch_size,
        "graph_fingerprint": asked.graph.fingerprint,
    }
    read = from_json(Plan, json.dumps(text))
    strategy.check(read, asked)
    # What PipeBench has as further rules, in the platform's words.
    if read.shares_devices:
        raise InvalidPlan("a device has two stages")
    for s, stage in enumerate(read.stages):
        if len(stage.devices) > problem["max_replicas"] or size % len(stage.devices):
            raise InvalidConfig("devices", len(stage.devices), f"of stage {s} divide {size}, and are few enough", "use fewer")
    program, under = strategy.lower(read, asked), strategy.posed(asked)
    costs = Costs.of(program, read, under)
    return max(LongestPath.of(program.waits, costs.seconds, costs.late).times().free_s)


def renamed(stage: dict[str, Any]) -> dict[str, list[Any]]:
    """A stage's lists by the platform's names; those that it lacks are left out."""
    names = {"operators": "ops", "devices": "devices"}
    return {names[name]: values for name, values in stage.items()}


def near(rng: random.Random, problem: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The problem on devices with room for about what the plan takes, where it is one."""
    small = {**problem, "memory": 1}
    try:
        judge(small, plan)
    except Invalid as error:
        if found := re.match(r"6: stage \d+ holds (\S+) bytes", str(error)):
            return {**problem, "memory": max(1, round(float(found[1]) * rng.choice([0.5, 0.99, 1.01, 2.0, 20.0])))}
    return problem


def compared(number: int, every: list[dict[str, Any]]) -> tuple[str, str | None]:
    """What decided for one mutated plan: a rule's number, or `valid`; and in what verifier and platform differ, if in anything."""
    rng = random.Random(f"pipebench {number}")
    problem = rng.choice(every)
    plan = drawn(rng, problem)
    for _ in range(rng.randint(0, 3)):
        plan = mutated(rng, problem, plan)
        if not plan["stages"] or not all(stage.get("operators") and stage.get("devices") for stage in plan["stages"]):
            break
    problem = near(rng, problem, plan)
    try:
        ours, why = judge(problem, plan), "valid"
    except Invalid as error:
        ours, why = None, str(error)
    try:
        theirs, said = by_platform(problem, plan), "valid"
    except GppError as error:
        theirs, said = None, str(error)
    if (ours is None) != (theirs is None):
        return why[:1] if ours is None else why, f"{number}: {problem['name']}: verifier: {why}; platform: {said}"
    if ours is not None and theirs is not None and abs(ours - theirs) > SAME * theirs:
        return why, f"{number}: {problem['name']}: verifier {ours!r} s, platform {theirs!r} s"
    return "valid" if ours is not None else f"rule {why[0]}", None


def main(words: list[str] | None = None) -> int:
    """The command line."""
    given = options(__doc__, words, count=1000, first=0)
    every, decided, wrong = problems(), Counter[str](), list[str]()
    for number in range(given.first, given.first + given.count):
        why, differs = compared(number, every)
        decided[why] += 1
        if differs:
            wrong.append(differs)
            print(differs, flush=True)
    print(f"{given.count} plans, {len(wrong)} judged otherwise; " + ", ".join(f"{why}: {n}" for why, n in sorted(decided.items())))
    return int(bool(wrong) or len(decided) < 2)


if __name__ == "__main__":
    sys.exit(main())
