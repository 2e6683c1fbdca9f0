"""Programs of plans with helpers: the order of every device, and where sums and updates stand.

A device goes from period to period (`gpp.mechanisms.helpers.stage.ticks`). In a period it has its forwards, by stage, then its
backwards, from the last stage to the first, then the gradients of weights, its own and those that it makes for others; last come,
by stage, the sums and updates of the mini-batches that end in the period. A helper has an update, too: there it lets go of the sum.

Everything that an action waits for stands in an earlier period, or in this one before it: whatever the order of the devices within
a period, nobody waits in a circle. `gpp.program.waits` proves it of every program that is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpp.errors import InvalidConfig, InvalidPlan
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.helpers.bill import gradient_bytes, late_bytes
from gpp.mechanisms.helpers.kinds import HELPED_INPUTS, HELPED_WEIGHTS, HELPING, HELPING_INPUTS, SEND_PART
from gpp.mechanisms.helpers.stage import Ticks, helpers_of, parts_of_inputs, ticks
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.plan.plan import Plan
from gpp.program.added import WHOLE, AbstractLowering, ActionShare, AddedMessage, Rates, Return
from gpp.program.channels import Channel
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PASS, RECEIVE, REDUCE, SEND, UPDATE, Action
from gpp.program.program import Program, Task, summed_stages
from gpp.weights.base import AbstractWeights

FORWARDS, BACKWARDS, WEIGHTS = range(3)
"""Parts of a period."""


class _Place(NamedTuple):
    """Where a task stands in its device's order, and the task."""

    period: int
    part: int
    turn: int
    task: Task


class Lowering(AbstractLowering):
    """Devices that run side by side, and the messages to and from helpers."""

    def check_stream(self, plan: Plan, graph: OpGraph, weights: AbstractWeights) -> None:
        if tied := plan.shared_weights(graph):
            name, stages = tied[0]
            raise InvalidPlan(
                f"{name} is shared by stages {' and '.join(map(str, stages))}, whose updates a plan with helpers makes in "
                "different periods. Fix: a plan without helpers (strategy=pipedream), or do not tie it"
            )
        for s, stage in enumerate(plan.stages):
            if stage.adding and not plan.has_weight_gradients(s, graph):
                raise InvalidPlan(
                    f"stage {s}: weight_device={stage.adding[0]} has nothing to make, since the stage trains no weights. "
                    "Fix: leave it out"
                )
        if not weights.same:
            rule = "has backwards use the latest weights, and in a plan with helpers these come a period before their own update"
            raise InvalidConfig("strategy.weights", weights.name, rule, "set strategy/weights=stash")
        if isinstance(weights, AbstractVersionPolicy) and weights.correction and weights.correction.damping:
            rule = "damps gradients by the weights of their forwards, and helpers, who make some of them, have no weights"
            fix = "use another correction, or a strategy without helpers"
            raise InvalidConfig("strategy.weights.correction", weights.correction.name, rule, fix)

    def orders(self, plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[Task]]:
        return {device: [place.task for place in own] for device, own in _places(plan, graph, num_samples).items()}

    def span(self, plan: Plan) -> int:
        """A device may have passes that are as far apart as the first forward and the last gradient."""
        return max(tick.weight for tick in ticks(plan.stages, plan.edges)) + 1

    def endings(
        self, plan: Plan, graph: OpGraph, num_samples: int, minibatches: int
    ) -> Mapping[int, Mapping[Task, Sequence[Action]]]:
        places, group_of = _places(plan, graph, num_samples), {s: g for g, s in enumerate(summed_stages(plan))}
        latest = {device: {place.period: place.task for place in own} for device, own in places.items()}
        out: dict[int, dict[Task, list[Action]]] = {device: defaultdict(list) for device in places}
        for s, (stage, tick) in enumerate(zip(plan.stages, ticks(plan.stages, plan.edges), strict=True)):
            count = -(-plan.minibatch_size // stage.microbatch_size)
            for t in range(minibatches):
                for device in (*stage.devices, *stage.beside):
                    adds = device in (*stage.devices, *stage.adding)
                    ends = _ends(plan, s, tick, graph) if adds else tick.inputs + 1
                    sums = [Action(REDUCE, s, group_of[s])] if s in group_of and adds else []
                    out[device][latest[device][ends + (t + 1) * count - 1]] += [*sums, Action(UPDATE, s, t)]
        return out

    def messages(self, plan: Plan, num_samples: int) -> list[AddedMessage]:
        """What helpers are sent."""
        out = list[AddedMessage]()
        for s, stage in enumerate(plan.stages):
            own, value = stage.devices[0], helpers_of(stage)
            sent = [(HELPING, device) for device in value.adding]
            for way, helper in [*sent, *((HELPING_INPUTS, device) for device, _ in value.input_share)]:
                for _, microbatch, lo, hi in stage.pieces(num_samples):
                    send = Action(SEND[way], s, microbatch, s, helper, lo, hi)
                    receive = Action(RECEIVE[way], s, microbatch, s, own, lo, hi)
                    out.append(AddedMessage(BACKWARD, own, send, helper, receive))
        return out

    def returns(self, plan: Plan) -> dict[int, list[Return]]:
        out = dict[int, list[Return]]()
        for s, stage in enumerate(plan.stages):
            if shares := helpers_of(stage).input_share:
                own = [Return(stage.devices[0], SEND[BACKWARD], BACKWARD)] if helpers_of(stage).own_input_share else []
                out[s] = [*own, *(Return(device, SEND_PART, HELPING_INPUTS) for device, _ in shares)]
        return out

    def part(self, plan: Plan, device: int, action: Action) -> ActionShare:
        stage, way = plan.stages[action.stage], KINDS[action.kind].direction
        if action.kind == WEIGHT_GRADIENTS:
            return ActionShare(of_samples=float(not stage.adding))
        if action.kind == SEND[HELPING_INPUTS]:
            return ActionShare(fixed=dict(helpers_of(stage).input_share)[action.peer_device])
        if way == HELPING_INPUTS or (way == BACKWARD and action.kind != PASS[BACKWARD]):
            share = dict(parts_of_inputs(stage)).get(device, 0.0)
            return ActionShare(share, share)
        return WHOLE

    def channels(self, plan: Plan) -> list[Channel]:
        out = list[Channel]()
        for s, stage in enumerate(plan.stages):
            own, value = stage.devices[0], helpers_of(stage)
            out += [(HELPING, s, s, own, device) for device in value.adding]
            for helper, _ in value.input_share:
                out.append((HELPING_INPUTS, s, s, own, helper))
                before = [(p, plan.stages[p].devices[0]) for p in plan.predecessors[s]]
                out += [(BACKWARD, s, p, helper, device) for p, device in before if device != helper]
        return out

    def rates(self, plan: Plan, graph: OpGraph) -> Rates:
        out = {}
        for s, stage in enumerate(plan.stages):
            trained = sum(graph.param_of[name].num_bytes for name in {name for op in stage.ops for name in graph.trained_by[op]})
            out[HELPING, s, s] = (late_bytes(stage, graph), 0.0)
            out[HELPING_INPUTS, s, s] = (gradient_bytes(stage, graph)[1], trained)
        return out

    def due(self, plan: Plan, graph: OpGraph, program: Program) -> dict[int, list[Action]]:
        """A helper's passes. An evaluation has none."""
        out: dict[int, list[Action]] = defaultdict(list)
        for s, stage in enumerate(plan.stages if program.trains else ()):
            for m in range(-(-program.num_samples // stage.microbatch_size)):
                for device in stage.adding:
                    out[device].append(Action(HELPED_WEIGHTS, s, m))
                for device, _ in helpers_of(stage).input_share:
                    out[device].append(Action(HELPED_INPUTS, s, m))
        return out


def _ends(plan: Plan, s: int, tick: Ticks, graph: OpGraph) -> int:
    """The period in which a stage is done with micro-batch 0."""
    return tick.weight if plan.runs_backward(s, graph) else tick.forward


def _places(plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[_Place]]:
    """The passes of every device, in order."""
    out: dict[int, list[_Place]] = {device: [] for device in plan.work_of_device}
    for s, (stage, tick) in enumerate(zip(plan.stages, ticks(plan.stages, plan.edges), strict=True)):
        own, value = stage.devices[0], helpers_of(stage)
        passes = [(own, tick.forward, FORWARDS, s, PASS[FORWARD])]
        if stage.beside:
            passes.append((own, tick.inputs, BACKWARDS, -s, INPUT_GRADIENTS))
            passes.append((own, tick.weight, WEIGHTS, -s, WEIGHT_GRADIENTS))
            passes += [(device, tick.inputs + 1, BACKWARDS, -s, HELPED_INPUTS) for device, _ in value.input_share]
            passes += [(device, tick.weight, WEIGHTS, -s, HELPED_WEIGHTS) for device in value.adding]
        elif plan.runs_backward(s, graph):
            passes.append((own, tick.inputs, BACKWARDS, -s, PASS[BACKWARD]))
        for m in range(-(-num_samples // stage.microbatch_size)):
            for device, first, part, turn, kind in passes:
                out[device].append(_Place(first + m, part, turn, Task(s, kind, m)))
    return {device: sorted(own) for device, own in out.items()}


LOWERING = Lowering()
