"""Compiled files and the same files as plain Python: random questions to both, by turns."""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from gpp import Even, GPipe, OneFOneB, Plan, Strategy, compiled
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.graph.op_graph import mask_of
from gpp.graph.sums import OpSums
from gpp.plan.build import make_plan
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.search.climb import Climber
from gpp.planners.search.line import best_chain
from gpp.planners.search.nodes import NodeRoom
from gpp.planners.search.timers import Timers
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from tests.support.problems import random_problem

OVERHEADS = Overheads(
    forward_s=1e-4,
    backward_s=2e-4,
    message_s=3e-5,
    send_s_per_byte=1e-9,
    receive_s_per_byte=2e-9,
    send_s_per_tensor=1e-5,
    step_s=1e-3,
)

PLACES, DEVICES = 5, 6
"""Of a random line, and devices for it."""

PASSES = 1_500
"""Of a walk: plain Python takes some seconds for it."""


def strategy_of(schedule: OneFOneB | GPipe) -> Strategy:
    return Strategy(name="test", planner=Even(), schedule=schedule)


@cache
def plain() -> dict[str, ModuleType]:
    """The files that are compiled, as plain Python that knows only plain Python, by the names of the modules."""
    found = dict[str, ModuleType]()
    for name in compiled.names():
        path = compiled.GPP.parent.joinpath(*name.split(".")).with_suffix(".py")
        spec = spec_from_file_location(f"plain.{name}", path)
        assert spec is not None and spec.loader is not None
        module = found[name] = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    for module in found.values():
        _exchange(module, found)
    return found


def _exchange(module: ModuleType, by: dict[str, ModuleType]) -> dict[str, object]:
    """Put others in the place of the classes and functions that a module has from some modules; returns those that it had."""
    old = dict[str, object]()
    for name, value in list(vars(module).items()):
        home = by.get(getattr(value, "__module__", None) or "")
        if home is not None and home is not module and hasattr(home, name):
            old[name] = value
            setattr(module, name, getattr(home, name))
    return old


@contextmanager
def plainly() -> Iterator[None]:
    """Meanwhile no module uses compiled code."""
    twins = plain()
    own = [module for name, module in list(sys.modules.items()) if name.startswith(("gpp.", "tests.")) and name not in twins]
    old = [(module, _exchange(module, twins)) for module in own]
    try:
        yield
    finally:
        for module, values in old:
            for name, value in values.items():
                setattr(module, name, value)


def plans(prob: Problem, seed: int, count: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...], bool]]:
    """Micro-batch size, stage of each operator, devices of each stage as bits, and whether it is a chain: at random, some without
    an order."""
    rng, out = random.Random(seed), []
    devices, ops = prob.cluster.num_devices, prob.graph.num_ops
    for _ in range(count):
        b = rng.choice(prob.microbatch_sizes())
        most = rng.randint(1, min(ops, 2 * devices))
        drawn = [rng.randrange(most) for _ in range(ops)]
        chain = rng.random() < 0.3
        drawn = sorted(drawn) if chain or rng.random() < 0.8 else drawn
        names = sorted(set(drawn))
        counts = [count for count in range(1, devices + 1) if b % count == 0]
        sets = [mask_of(rng.sample(range(devices), rng.choice(counts))) for _ in names]
        out.append((b, tuple(names.index(name) for name in drawn), tuple(sets), chain))
    return out


def candidate(assessor: Assessor, b: int, stage_of: tuple[int, ...], devices: tuple[int, ...], chain: bool) -> Candidate | None:
    masks = [mask_of(op for op, own in enumerate(stage_of) if own == s) for s in range(len(devices))]
    placement = [tuple(d for d in range(62) if own >> d & 1) for own in devices]
    found = assessor.assess(
        [(mask, len(own)) for mask, own in zip(masks, placement, strict=True)], b, chain=chain, placement=placement
    )
    return found if isinstance(found, Candidate) else None


def tight(prob: Problem, b: int, share: float) -> Problem:
    """The problem on devices with so much of the memory that all operators on one of them need."""
    assessor = Assessor(StageCosts(prob.with_endless_memory))
    need = assessor.needs(prob.graph.all_mask, 1, b, 1, 1)[0]
    devices = tuple(replace(device, memory_bytes=share * need) for device in prob.cluster.devices)
    return replace(prob, cluster=replace(prob.cluster, devices=devices))


@dataclass(slots=True)
class Compared:
    """What both have taken for the same questions."""

    count: int = 0
    compiled_s: float = 0.0
    plain_s: float = 0.0


@dataclass(slots=True)
class Question:
    """A random problem, of which every second has little memory, and its strategy."""

    seed: int
    problem: Problem
    strategy: Strategy
    assessor: Assessor

    @classmethod
    def of(cls, seed: int) -> Question:
        strategy = strategy_of(GPipe() if seed % 5 == 0 else OneFOneB())
        prob = random_problem(seed, max_ops=9, max_devices=4).with_endless_memory
        if seed % 3 == 1:
            tensors = tuple(replace(tensor, differentiable=tensor.producer % 2 == 1) for tensor in prob.graph.tensors)
            prob = replace(prob, graph=replace(prob.graph, tensors=tensors))
        prob = replace(prob, overheads=OVERHEADS if seed % 4 > 1 else Overheads(), global_norm=seed % 2 == 0)
        return cls(seed, prob, strategy, Assessor(StageCosts(strategy.posed(prob))))

    def plans(self, count: int) -> Iterator[tuple[Plan, Candidate, bool]]:
        """Random plans, and whether each is a chain."""
        posed = self.assessor.problem
        for b, stage_of, devices, chain in plans(posed, self.seed, count):
            found = candidate(self.assessor, b, stage_of, devices, chain)
            if found is not None:
                made = make_plan(posed, "test", found.parts, b, chain=chain, ordered=True, placement=found.placement)
                yield made, found, chain


def compare(seed: int, count: int, walks: int = 1) -> dict[str, Compared]:
    """Asks compiled and plain code the same of a random problem.

    `sums`: what random sets of operators add up to; `ways`: candidates and their slow parts, on devices of their own and on given
    ones; `chain`: the best one of random stages; `nodes`: devices of random stages;
    `program`: the longest path of a lowered program, all its times;
    `prediction`: that of the strategy, by rounds where it can;
    `step`: the timed step of a plan; `walk`: a walk of the search, half of them with little memory, and what it draws.

    Args:
        count: random plans of which those that are valid are asked for.

    Raises:
        AssertionError: they differ.
    """
    one, out = (
        Question.of(seed),
        {part: Compared() for part in ("sums", "ways", "chain", "nodes", "program", "prediction", "step", "walk")},
    )
    every = list(one.plans(count))
    programs = [one.strategy.lower(plan, one.problem) for plan, _, _ in every]
    costs = [Costs.of(made, plan, one.assessor.problem) for made, (plan, _, _) in zip(programs, every, strict=True)]
    for plan, _, _ in every:
        one.strategy.predict(plan, one.problem, record=False)  # so that neither side finds bills and tables first

    def asked(part: str) -> list[Callable[[], object]]:
        """What is asked, ready to be timed."""
        if part == "sums":
            sums, rng = OpSums(one.problem.graph), random.Random(seed)
            masks = [rng.randrange(1, one.problem.graph.all_mask + 1) for _ in range(count)]
            return [lambda mask=mask: sums.of(mask) for mask in masks]
        if part == "ways":
            assessor = Assessor(StageCosts(one.assessor.problem))
            return [lambda found=found, chain=chain: _judged(assessor, found, chain) for _, found, chain in every]
        if part == "chain":
            return [
                lambda rows=rows: best_chain(*rows, last=PLACES, num_devices=DEVICES)
                for rows in map(random_rows, range(seed, seed + count))
            ]
        if part == "nodes":
            rng = random.Random(seed)
            nodes = tuple(tuple(range(4 * node, 4 * node + rng.randint(1, 4))) for node in range(4))
            every_counts = [[rng.randint(1, 6) for _ in range(rng.randint(1, 3))] for _ in range(count)]
            room, free = NodeRoom(nodes), sum(map(len, nodes))
            return [lambda counts=counts: room.deal(counts) for counts in every_counts if sum(counts) <= free]
        if part == "program":
            paths = [(made.waits, own.seconds, own.late) for made, own in zip(programs, costs, strict=True)]
            return [lambda given=given: LongestPath.of(*given).period() for given in paths]
        if part == "prediction":
            return [lambda plan=plan: one.strategy.predict(plan, one.problem, record=False).metrics for plan, _, _ in every]
        if part == "step":
            timers = Timers(one.assessor.posed, 2 * one.problem.cluster.num_devices, plain=True)
            for _, found, _ in every:
                timers.of(found.microbatch_size)
            return [
                lambda found=found, chain=chain: timers.step_s(found.parts, found.placement, found.microbatch_size, chain)
                for _, found, chain in every
            ]
        return [_walker(one, number) for number in range(walks)]

    for part, compared in out.items():
        first, compared.compiled_s = _timed(asked(part))
        with plainly():
            second, compared.plain_s = _timed(asked(part))
        compared.count = len(first)
        assert first == second, f"random problem {seed}: {part} differs"
    return out


def _judged(assessor: Assessor, found: Candidate, chain: bool) -> object:
    b, parts = found.microbatch_size, found.parts
    alone = assessor.assess(parts, b, chain=chain)
    slow = assessor.slow_parts(parts, b, 0.9, chain=chain) if isinstance(alone, Candidate) else None
    below_s = found.bound_s * (1 + found.depth % 2 * 1e-9)
    return alone, slow, assessor.assess(parts, b, chain=chain, placement=found.placement, below_s=below_s)


def random_rows(seed: int) -> tuple[array[int] | array[float], ...]:
    """Stages that may be on a line of so many places, as `best_chain` takes them, some as good as others."""
    rng = random.Random(seed)
    rows = [(i, j, r) for i in range(PLACES) for r in (1, 2, 3) for j in range(i + 1, PLACES + 1) if rng.random() < 0.7]
    begin, end, replicas = (array("q", values) for values in zip(*rows, strict=True))
    busy_s, through_s = (array("d", [(j - i) / r + rng.randint(0, 3) for i, j, r in rows]) for _ in range(2))
    return begin, end, replicas, busy_s, through_s, array("q", [rng.randint(1, PLACES) for _ in rows])


def _timed(asked: list[Callable[[], object]]) -> tuple[list[object], float]:
    """The answers, and the processor's seconds."""
    start = time.process_time()
    answers = [question() for question in asked]
    return answers, time.process_time() - start


def _walker(one: Question, number: int) -> Callable[[], object]:
    """The plans of a walk, and the state in which it leaves its arrays."""
    posed = one.assessor.problem
    b = max(posed.microbatch_sizes())
    posed = tight(posed, b, 0.8) if (one.seed + number) % 2 else posed
    facts, room, timer = Timers(Assessor(StageCosts(posed)).posed, 8, plain=False).of(b)
    walker = Climber(facts, room, timer)
    start = (0,) * posed.graph.num_ops, (1,)

    def walked() -> object:
        ways = ((0.0, False), (0.1, False), (0.1, True))
        found = [walker.walk(start, number, threshold, PASSES, apart) for threshold, apart in ways]
        return found, facts.work[0], list(room.stage_of), list(room.devices)

    return walked
