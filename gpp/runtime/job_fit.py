"""Whether the files of a job fit together: what a worker would otherwise find out in the middle of a step, or never.

Every file has been read by itself (`gpp.runtime.job.Job.load`), the plan is one for the graph, and the programs run to their ends.
Here a program does the plan's work, all of it, once; the captured nodes are there; and the settings speak of this plan.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpp.errors import InvalidConfig, InvalidFile, MalformedProgram
from gpp.graph.captured import LEAVES, Captured, Node
from gpp.graph.op_graph import OpGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.program.added import lowerings
from gpp.program.kinds import (
    BACKWARD,
    FORWARD,
    KINDS,
    NORM,
    PASS,
    REDUCE,
    SUMS,
    TOGETHER,
    UPDATE,
    UPDATES,
    Action,
)
from gpp.program.lower import communication
from gpp.program.program import Program, ReduceGroup, adding_stages, reduce_groups, summed_stages

AGAIN = "make the job again, by the command that wrote it"
"""What helps when a file of a job is wrong."""

MOST_ELEMENTS = 2**40
ENCODINGS = ("ref", "size", "float", "complex", "dtype", "device", "layout", "memory_format")


def check_nodes(captured: Captured, path: Path) -> None:
    """Refuse nodes that read what does not stand above them, or in an unknown encoding.

    Raises:
        InvalidFile: names the place in `path`, where the model stands.
    """
    known: dict[str, Node] = {}
    for i, node in enumerate(captured.nodes):
        where = f"nodes[{i}]"
        if node.name in known:
            raise InvalidFile(path, f"{where}.name", "is given twice", AGAIN, value=[node.name])
        for inner, name in _read(node, where, path):
            if name not in known:
                raise InvalidFile(path, inner, "must name a node above", AGAIN, value=[name])
        if node.kind in LEAVES and not _is_shape(node.shape):
            rule = "must be a list of sizes, which are integers of at least 0"
            raise InvalidFile(path, f"{where}.shape", rule, AGAIN, value=[node.shape])
        known[node.name] = node
    for result, name in captured.results.items():
        if name not in known:
            raise InvalidFile(path, f"results.{result}", "must name a node", AGAIN, value=[name])
    for name in captured.constants:
        if name not in known or known[name].kind != "constant":
            raise InvalidFile(path, f"constants.{name}", "must name a node that is a constant", AGAIN)


def _is_shape(shape: Any) -> bool:
    """Whether a shape is that of a tensor that can exist before any batch does."""
    sizes = shape or ()
    return all(isinstance(size, int) and size >= 0 for size in sizes) and math.prod(sizes) <= MOST_ELEMENTS


def _read(node: Node, where: str, path: Path) -> Iterator[tuple[str, str]]:
    """(place, name) of every node that a node reads, or must come after.

    Raises:
        InvalidFile: an argument has an unknown encoding.
    """
    yield from ((f"{where}.after", name) for name in node.after)
    todo: list[tuple[str, Any]] = [(f"{where}.args", node.args)]
    todo += [(f"{where}.kwargs.{key}", value) for key, value in node.kwargs.items()]
    while todo:
        place, value = todo.pop()
        if isinstance(value, list):
            todo += [(f"{place}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, Mapping):
            if len(value) != 1 or (kind := next(iter(value))) not in ENCODINGS:
                raise InvalidFile(path, place, f"must be one of {', '.join(ENCODINGS)}", AGAIN, value=[value])
            if kind == "ref":
                yield place, str(value[kind])


def check_ops(graph: OpGraph, captured: Captured, path: Path) -> None:
    """Refuse operators that are not made of the captured nodes. (A profile has none.)

    Raises:
        InvalidFile: names the place in `path`, where the graph stands.
    """
    nodes = captured.node_of
    for i, op in enumerate(graph.ops if nodes else ()):
        for name in op.nodes:
            if name not in nodes:
                raise InvalidFile(path, f"ops[{i}].nodes", "must name nodes of model.json", AGAIN, value=[name])


def check_work(program: Program, plan: Plan, graph: OpGraph, num_samples: int, path: Path) -> None:
    """Refuse a program that does not do the plan's work on so many samples, all of it and once.

    Raises:
        MalformedProgram: names the action, and the line of `path`.
    """
    if program.num_samples != num_samples:
        rule = f"is for {program.num_samples} samples, and by settings.json and plan.json there are {num_samples}"
        raise MalformedProgram(f"{path}: line 1: {rule}")
    if set(program.actions) != set(plan.devices):
        raise MalformedProgram(f"{path}: is for devices {sorted(program.actions)[:8]}, and plan.json for {list(plan.devices[:8])}")
    kinds = {(action.stage, action.kind) for own in program.actions.values() for action in own}
    apart = {s: TOGETHER[kind] for s, kind in kinds if kind in TOGETHER}
    expected = _work(plan, graph, num_samples, program.minibatches, trains=program.trains, apart=apart)
    for part in lowerings(plan):
        for device, actions in part.due(plan, graph, program).items():
            expected[device] += actions
        part.prove(plan, program)
    groups = reduce_groups(plan, graph) if program.trains else ()
    normed = any(action.kind == NORM for own in program.actions.values() for action in own)
    for number, device in enumerate(sorted(program.actions), start=2):
        own = program.actions[device]
        if normed:
            expected[device] += [Action(NORM, plan.stages_of_device[device][0], 0)] * program.minibatches
        if sorted(own) != sorted(expected[device]):
            found, due = Counter(own), Counter(expected[device])
            action = next((a for a in own if found[a] > due[a]), None) or next(iter(due - found))
            times = f"stands there {found[action]} times, and by plan.json and graph.json it must be {due[action]}"
            raise MalformedProgram(f"{path}: line {number}: {action.text(device)} {times}")
        adding = {g: adding_stages(plan, graph, group, device) for g, group in enumerate(groups) if device in group.devices}
        _check_updates(own, plan, device, adding, f"{path}: line {number}")


def _work(
    plan: Plan, graph: OpGraph, num_samples: int, minibatches: int, *, trains: bool, apart: Mapping[int, tuple[str, ...]]
) -> dict[int, list[Action]]:
    """Device -> the actions that its list must hold, in any order; sums of the norm are left out.

    Args:
        apart: stage -> the kinds that stand in place of its backwards.
    """
    out: dict[int, list[Action]] = {device: [] for device in plan.devices}
    groups: tuple[ReduceGroup, ...] = reduce_groups(plan, graph) if trains else ()
    for s, stage in enumerate(plan.stages):
        parts = apart.get(s, ()) if plan.has_weight_gradients(s, graph) else ()
        backward = next((value.backward for value in stage.mechanisms if value.backward), parts) or (PASS[BACKWARD],)
        kinds = [PASS[FORWARD], *(backward if trains and plan.runs_backward(s, graph) else ())]
        for m in range(-(-num_samples // stage.microbatch_size)):
            for device in stage.takers(m):
                out[device] += [Action(kind, s, m) for kind in kinds]
        for device in (*stage.devices, *stage.beside):
            out[device] += [Action(UPDATE, s, t) for t in range(minibatches if trains else 0)]
    for slots in communication(plan, graph, num_samples):
        for (device, task), actions in slots.items():
            if trains or task[1] == FORWARD:
                out[device] += actions
    of_stages = summed_stages(plan)
    for g, group in enumerate(groups):
        for device in group.devices:
            stage_of = of_stages[g] if of_stages else plan.stages_of_device[device][0]
            out[device] += [Action(REDUCE, stage_of, g)] * minibatches
    return out


def _check_updates(own: tuple[Action, ...], plan: Plan, device: int, adding: Mapping[int, tuple[int, ...]], where: str) -> None:
    """A mini-batch's gradients are summed and applied when all of them are there, and before the next ones come.

    Args:
        adding: gradient group -> the device's stages whose backwards add to it.
    """
    done: Counter[int] = Counter()
    whole = Counter(action.stage for action in own if KINDS[action.kind].finishes)
    first = plan.work_of_device[device][0]
    count = max(sum(action.kind in UPDATES and action.stage == first for action in own), 1)
    times: dict[Action, int] = defaultdict(int)
    for action in own:
        if KINDS[action.kind].finishes:
            done[action.stage] += 1
        elif action.kind in UPDATES or action.kind in SUMS:
            minibatch = action.microbatch if action.kind in UPDATES else times[action]
            times[action] += 1
            # Where devices run in periods each stage has updates of its own.
            together = (action.stage,) if plan.periodic else plan.stages_of_device[device]
            stages = adding.get(action.microbatch, ()) if action.kind == REDUCE else together
            if any(done[s] * count != whole[s] * (minibatch + 1) for s in stages):
                raise MalformedProgram(f"{where}: {action.text(device)} does not come right after its mini-batch's backwards")


def check_clipping(optimizer: AbstractOptimizer, plan: Plan, graph: OpGraph) -> None:
    """Refuse to clip a parameter by stage if several stages share it.

    Raises:
        InvalidConfig: names the parameter and the stages.
    """
    if optimizer.clip_norm is not None and optimizer.clip_scope == "stage" and (shared := plan.shared_weights(graph)):
        name, stages = shared[0]
        rule = f"{name} is shared by stages {' and '.join(map(str, stages))}, whose norms differ"
        raise InvalidConfig("optimizer.clip_scope", "stage", rule, "set optimizer.clip_scope=model")
