"""The judge of PipeBench: whether a plan is valid for a problem, and the seconds of its step. It needs nothing but Python.

    python benchmarks/pipebench/verify.py PROBLEM.json PLAN.json

prints the seconds, or why the plan is none and ends with 1. README.md beside it has the definition; rules are numbered as there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

ROOM = 1e-9
"""Share of a device's memory by which rounding may exceed it."""


class Invalid(Exception):
    """A plan that breaks a rule; the text begins with its number."""


def judge(problem: dict[str, Any], plan: Any) -> float:
    """Seconds of a step.

    Raises:
        Invalid: names the rule that the plan breaks, and where.
    """
    size, stages = _shape(problem, plan)
    owner = _owners(problem, stages)
    edges = _edges(problem, owner)
    depth = _depths(len(stages), edges)
    _check_memory(problem, size, stages, owner, depth)
    return _step(problem, size, stages, edges, depth)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape(problem: dict[str, Any], plan: Any) -> tuple[int, list[tuple[list[int], list[int]]]]:
    """The micro-batch, and operators and devices of each stage."""
    if not isinstance(plan, dict) or not isinstance(plan.get("stages"), list) or not plan["stages"]:
        raise Invalid("1: a plan is an object with microbatch and stages, of which there is one at least")
    if plan.get("problem", problem["name"]) != problem["name"]:
        raise Invalid(f"1: the plan is for {plan['problem']}, and the problem is {problem['name']}")
    given: dict[str, Any] = plan
    size: Any = given.get("microbatch")
    used = set[int]()
    if not _whole(size) or size < 1 or problem["minibatch"] % size:
        raise Invalid(f"2: microbatch={size!r} must be a divisor of {problem['minibatch']}")
    out: list[tuple[list[int], list[int]]] = []
    for s, stage in enumerate(plan["stages"]):
        if not isinstance(stage, dict):
            raise Invalid(f"1: stage {s} is an object with operators and devices")
        ops: Any = stage.get("operators")
        devices: Any = stage.get("devices")
        for name, values, count in (("operators", ops, len(problem["operators"])), ("devices", devices, problem["devices"])):
            if not isinstance(values, list) or not values or not all(_whole(v) and 0 <= v < count for v in values):
                raise Invalid(f"1: {name} of stage {s} are numbers from 0 to {count - 1}, one at least")
        for device in devices:
            if device in used:
                raise Invalid(f"4: device {device} is used twice, the second time by stage {s}")
            used.add(device)
        if len(devices) > problem["max_replicas"] or size % len(devices):
            rule = f"at most {problem['max_replicas']}, and a divisor of microbatch={size}"
            raise Invalid(f"4: stage {s} has {len(devices)} devices, and must have {rule}")
        out.append((ops, devices))
    return size, out


def _owners(problem: dict[str, Any], stages: list[tuple[list[int], list[int]]]) -> list[int]:
    """The stage of each operator."""
    owner = [-1] * len(problem["operators"])
    for s, (ops, _) in enumerate(stages):
        for op in ops:
            if owner[op] >= 0:
                raise Invalid(f"3: operator {op} is in stages {owner[op]} and {s}")
            owner[op] = s
    if -1 in owner:
        raise Invalid(f"3: operator {owner.index(-1)} is in no stage")
    return owner


def _edges(problem: dict[str, Any], owner: list[int]) -> dict[tuple[int, int], float]:
    """Pairs of stages that exchange tensors -> bytes a sample; a tensor goes to a stage once."""
    out: dict[tuple[int, int], float] = defaultdict(float)
    for tensor in problem["tensors"]:
        maker = owner[tensor["from"]]
        for reader in {owner[op] for op in tensor["to"]} - {maker}:
            if reader < maker:
                raise Invalid(f"5: stage {reader} reads what stage {maker} makes, and stands before it")
            out[maker, reader] += tensor["bytes"]
    return dict(out)


def _depths(count: int, edges: dict[tuple[int, int], float]) -> list[int]:
    """Stages on the longest way from each to an end, itself included."""
    out = [1] * count
    for a, b in sorted(edges, key=lambda edge: -edge[0]):
        out[a] = max(out[a], 1 + out[b])
    return out


def _check_memory(
    problem: dict[str, Any], size: int, stages: list[tuple[list[int], list[int]]], owner: list[int], depth: list[int]
) -> None:
    """Rule 6."""
    coming, going, kept = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    for tensor in problem["tensors"]:
        maker = owner[tensor["from"]]
        readers = {owner[op] for op in tensor["to"]} - {maker}
        for reader in readers:
            coming[reader] += tensor["bytes"]
        if readers:
            going[maker] += tensor["bytes"]
            kept[maker] += 0.0 if tensor["stored"] else tensor["bytes"]
    count = problem["minibatch"] // size
    for s, (ops, devices) in enumerate(stages):
        share = size / len(devices)
        fixed = sum(problem["operators"][op]["parameters"] for op in ops) * problem["weight_copies"]
        flight = sum(problem["operators"][op]["saved"] for op in ops) + coming[s] + kept[s]
        held = fixed + share * (flight * min(depth[s], count) + coming[s] + going[s])
        if held > problem["memory"] * (1 + ROOM):
            raise Invalid(f"6: stage {s} holds {held:.6g} bytes, and a device has {problem['memory']:.6g}")


def _order(ahead: int, count: int) -> list[tuple[str, int]]:
    """The passes of a stage: 1F1B with so many forwards ahead."""
    out, forward = [("F", m) for m in range(ahead)], ahead
    for backward in range(count):
        out.append(("B", backward))
        if forward < count:
            out.append(("F", forward))
            forward += 1
    return out


def _step(
    problem: dict[str, Any],
    size: int,
    stages: list[tuple[list[int], list[int]]],
    edges: dict[tuple[int, int], float],
    depth: list[int],
) -> float:
    """Rule 7: walks every stage's passes as soon as what they need is there."""
    count, latency, bandwidth = problem["minibatch"] // size, problem["latency"], problem["bandwidth"]
    seconds: list[dict[str, float]] = []
    for ops, devices in stages:
        share = size / len(devices)
        each = [problem["operators"][op] for op in ops]
        seconds.append({"F": share * sum(op["forward"] for op in each), "B": share * sum(op["backward"] for op in each)})
    order = [_order(min(depth[s], count), count) for s in range(len(stages))]
    needs: dict[str, list[list[int]]] = {"F": [[] for _ in stages], "B": [[] for _ in stages]}
    for a, b in edges:
        needs["F"][b].append(a)
        needs["B"][a].append(b)
    at, end = [0] * len(stages), 0.0
    free = [[0.0] * len(devices) for _, devices in stages]
    done: dict[tuple[str, int, int], list[float]] = {}
    channel: dict[tuple[str, int, int, int, int], float] = defaultdict(float)
    ready: dict[tuple[str, int, int], list[float]] = {}
    waiting = list(range(len(stages)))
    while waiting:
        s = waiting.pop()
        while at[s] < len(order[s]):
            kind, m = order[s][at[s]]
            sources = needs[kind][s]
            if any((kind, p, m) not in done for p in sources):
                break
            begins = list(free[s])
            for p in sources:
                for r, arrived in enumerate(ready.pop((kind, p, s * count + m))):
                    begins[r] = max(begins[r], arrived)
            free[s] = done[kind, s, m] = [begin + seconds[s][kind] for begin in begins]
            for t in needs["B" if kind == "F" else "F"][s]:
                amount = edges[(s, t) if kind == "F" else (t, s)]
                arrivals = [0.0] * len(stages[t][1])
                for i, j, samples in _parts(size, len(stages[s][1]), len(stages[t][1])):
                    begin = max(done[kind, s, m][i], channel[kind, s, t, i, j])
                    channel[kind, s, t, i, j] = over = begin + samples * amount / bandwidth
                    end, arrivals[j] = max(end, over), max(arrivals[j], over + latency)
                ready[kind, s, t * count + m] = arrivals
                waiting.append(t)
            at[s] += 1
    if any(position < len(row) for position, row in zip(at, order, strict=True)):
        raise Invalid("7: the passes wait for each other")  # no plan that keeps rule 5 does
    for s, (ops, devices) in enumerate(stages):
        r, params = len(devices), sum(problem["operators"][op]["parameters"] for op in ops)
        summed = 2 * (r - 1) * (latency + params / r / bandwidth) if r > 1 and params else 0.0
        end = max(end, max(free[s]) + summed)
    return end


def _parts(size: int, makers: int, readers: int) -> list[tuple[int, int, int]]:
    """Messages of a micro-batch: maker, reader and the samples that both have."""
    out = []
    for i in range(makers):
        for j in range(readers):
            lo, hi = max(i * size // makers, j * size // readers), min((i + 1) * size // makers, (j + 1) * size // readers)
            if lo < hi:
                out.append((i, j, hi - lo))
    return out


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 2:
        print(__doc__)
        return 2
    with open(words[0]) as first, open(words[1]) as second:
        problem, plan = json.load(first), json.load(second)
    try:
        print(f"{judge(problem, plan):.9g}")
    except Invalid as error:
        print(f"invalid: rule {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
