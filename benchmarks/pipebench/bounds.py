"""Times that no plan of a problem beats, by a mixed-integer program for each micro-batch size (HiGHS, through scipy).

x[o, k, r] = 1 where operator o is in the k-th stage, which has r devices; stages stand in the order of the plan.

    minimise T
    every operator is once somewhere; a stage has one r; the stages' r add up to the devices at most
    an operator stands in no earlier stage than what it reads
    parameters and one micro-batch's saved bytes fit the memory of each stage
    T >= passes of a stage + its sum of gradients
    T >= passes of a stage with an operator of the heaviest path + both passes of what the path has before it, for one micro-batch

All of it holds for every valid plan (README.md, rules 2 to 7), so the program's own lower bound does, however early it stops. Sizes
are tried from the smallest bound on, and only while the smallest bound of all may rise by it.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_array

DIGITS = 1e-6
"""Share by which a bound is lowered for the solver's tolerance of feasibility."""
INFEASIBLE = 2
"""HiGHS's status of a program without a solution."""


class Proof(NamedTuple):
    """What is proved for one micro-batch size.

    Args:
        bound_s: no plan with it is faster; infinity where there is none.
        how: `work` (the simple arguments), `program` (its dual bound), `solved` (the program's optimum) or `infeasible`.
        program: SHA-256 of the program, which `program_of` makes again; empty without one.
    """

    microbatch: int
    bound_s: float
    how: str
    program: str


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def heaviest_path(problem: dict[str, Any]) -> list[int]:
    """The operators of the path that takes longest."""
    work = [op["forward"] + op["backward"] for op in problem["operators"]]
    before: list[list[int]] = [[] for _ in work]
    for tensor in problem["tensors"]:
        for op in tensor["to"]:
            before[op].append(tensor["from"])
    length, last = list[float](), list[int]()
    for op, own in enumerate(work):  # operators are numbered in a topological order
        best = max(before[op], key=lambda p: length[p], default=-1)
        last.append(best)
        length.append(own + (length[best] if best >= 0 else 0.0))
    at, out = max(range(len(work)), key=lambda op: length[op]), list[int]()
    while at >= 0:
        out.append(at)
        at = last[at]
    return out[::-1]


def simple_s(problem: dict[str, Any], size: int) -> float:
    """The work over all devices; the heaviest path for one micro-batch, and the longest operator for all, on most replicas."""
    work = [op["forward"] + op["backward"] for op in problem["operators"]]
    most = max(r for r in divisors(size) if r <= problem["max_replicas"])
    path = sum(work[op] for op in heaviest_path(problem)) * size / most
    return max(problem["minibatch"] * sum(work) / problem["devices"], problem["minibatch"] * max(work) / most, path)


class Program(NamedTuple):
    """A mixed-integer program: minimise the last variable."""

    matrix: coo_array
    low: np.ndarray
    high: np.ndarray
    whole: np.ndarray
    most: np.ndarray

    @property
    def digest(self) -> str:
        """SHA-256 of its numbers."""
        out = hashlib.sha256()
        for array in (self.matrix.row, self.matrix.col, self.matrix.data, self.low, self.high, self.whole, self.most):
            out.update(np.ascontiguousarray(array, dtype=float).tobytes())
        return out.hexdigest()


class _Rows:
    """Rows of a program under way."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        row = len(self.low)
        self.entries += [(row, column, value) for column, value in terms.items() if value]
        self.low.append(low)
        self.high.append(high)


def program_of(problem: dict[str, Any], size: int) -> Program:
    """The program of the module's docstring, in seconds over `simple_s`, so that its numbers are near one."""
    ops, devices, count = problem["operators"], problem["devices"], problem["minibatch"] // size
    unit = simple_s(problem, size) or 1.0
    ways = [r for r in divisors(size) if r <= min(devices, problem["max_replicas"])]
    slots = min(devices, len(ops))
    number = {(o, k, r): i for i, (o, k, r) in enumerate((o, k, r) for o in range(len(ops)) for k in range(slots) for r in ways)}
    chosen = {(k, r): len(number) + i for i, (k, r) in enumerate((k, r) for k in range(slots) for r in ways)}
    on_path = {k: len(number) + len(chosen) + k for k in range(slots)}
    last = len(number) + len(chosen) + slots
    rows, inf, path = _Rows(), np.inf, heaviest_path(problem)
    passes = {(o, r): size / r * (op["forward"] + op["backward"]) / unit for o, op in enumerate(ops) for r in ways}
    for o in range(len(ops)):
        rows.add({number[o, k, r]: 1.0 for k in range(slots) for r in ways}, 1.0, 1.0)
    rows.add({column: float(r) for (_, r), column in chosen.items()}, 0.0, devices)
    for k in range(slots):
        rows.add({chosen[k, r]: 1.0 for r in ways}, 0.0, 1.0)
        if k:  # empty ones stand last
            rows.add({chosen[k - 1, r]: 1.0 for r in ways} | {chosen[k, r]: -1.0 for r in ways}, 0.0, inf)
        for r in ways:
            for o in range(len(ops)):
                rows.add({chosen[k, r]: 1.0, number[o, k, r]: -1.0}, 0.0, inf)
            held = {number[o, k, r]: _held(problem, o, size / r) / problem["memory"] for o in range(len(ops))}
            rows.add(held | {chosen[k, r]: -1.0}, -inf, 0.0)
        own = {number[o, k, r]: count * passes[o, r] for o in range(len(ops)) for r in ways}
        summed = {
            number[o, k, r]: 2 * (r - 1) * op["parameters"] / r / problem["bandwidth"] / unit
            for o, op in enumerate(ops)
            for r in ways
        }
        rows.add({last: 1.0} | {column: -own[column] - summed[column] for column in own}, 0.0, inf)
        before = {number[o, j, r]: -passes[o, r] for o in path for j in range(k) for r in ways}
        big = 1.0 + count * sum(max(passes[o, r] for r in ways) for o in range(len(ops)))
        rows.add({last: 1.0, on_path[k]: -big} | {column: -seconds for column, seconds in own.items()} | before, -big, inf)
        for o in path:
            rows.add({on_path[k]: 1.0} | {number[o, k, r]: -1.0 for r in ways}, 0.0, inf)
    for a, b in sorted({(t["from"], op) for t in problem["tensors"] for op in t["to"]}):
        for k in range(slots - 1):
            early = {number[a, j, r]: 1.0 for j in range(k + 1) for r in ways}
            rows.add(early | {number[b, j, r]: -1.0 for j in range(k + 1) for r in ways}, 0.0, inf)
    row, column, data = zip(*rows.entries, strict=True)
    most = np.ones(last + 1)
    most[last] = np.inf
    whole = np.ones(last + 1)
    whole[last] = 0
    matrix = coo_array((data, (row, column)), shape=(len(rows.low), last + 1))
    return Program(matrix, np.array(rows.low), np.array(rows.high), whole, most)


def _held(problem: dict[str, Any], o: int, samples: float) -> float:
    op = problem["operators"][o]
    return problem["weight_copies"] * op["parameters"] + samples * op["saved"]


def proved(problem: dict[str, Any], size: int, limit_s: float) -> Proof:
    """What a program proves for a micro-batch size in so many seconds."""
    unit, program = simple_s(problem, size), program_of(problem, size)
    found = _answer(program, limit_s, presolve=True)
    if found.status == INFEASIBLE:
        # HiGHS 1.12's presolve calls programs infeasible that are not (pipedream_inception_v3_4 at micro-batch 4).
        found = _answer(program, limit_s, presolve=False)
    if found.status == INFEASIBLE:
        return Proof(size, float("inf"), "infeasible", program.digest)
    dual = found.mip_dual_bound
    if dual is None or not np.isfinite(dual) or dual * (1 - DIGITS) <= 1.0:
        return Proof(size, unit, "work", program.digest)
    return Proof(size, dual * (1 - DIGITS) * unit, "solved" if found.status == 0 else "program", program.digest)


def _answer(program: Program, limit_s: float, *, presolve: bool) -> Any:
    from scipy.optimize import Bounds, LinearConstraint, milp

    cost = np.zeros(len(program.most))
    cost[-1] = 1.0
    limits: Any = np.zeros(len(cost)), program.most
    sides: Any = program.low, program.high
    return milp(
        cost,
        integrality=program.whole,
        bounds=Bounds(*limits),
        constraints=LinearConstraint(program.matrix.tocsr(), *sides),
        options={"time_limit": limit_s, "presolve": presolve},
    )


def bound_of(problem: dict[str, Any], limit_s: float) -> list[Proof]:
    """What is proved for each micro-batch size; the least of them is the problem's bound."""
    out = {size: Proof(size, simple_s(problem, size), "work", "") for size in divisors(problem["minibatch"])}
    while not (least := min(out.values(), key=lambda proof: (proof.bound_s, proof.microbatch))).program:
        out[least.microbatch] = proved(problem, least.microbatch, limit_s)
    return [out[size] for size in sorted(out)]
