from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.added import AbstractLowering, Rates
from gpp.program.channels import Channel
from gpp.program.kinds import UPDATES, Action
from gpp.program.program import Program


class Lowering(AbstractLowering):
    """Before the update of each stage its first device adds up; all others send what they have to the first stage."""

    def lower(self, plan: Plan, graph: OpGraph, program: Program) -> Program:
        return replace(program, actions={device: tuple(self._with(plan, device, own)) for device, own in program.actions.items()})

    def _with(self, plan: Plan, device: int, actions: Sequence[Action]) -> list[Action]:
        out = list[Action]()
        for action in actions:
            # With several stages on a device all of them are added up before the first update, the first stage last.
            if action.kind in UPDATES and not any(done.kind == "K" and done.microbatch == action.microbatch for done in out):
                for s in sorted(plan.stages_of_device[device], reverse=True):
                    if plan.stages[s].devices[0] == device:
                        out += self._of(plan, s, action.microbatch)
            out.append(action)
        return out

    def _of(self, plan: Plan, s: int, minibatch: int) -> list[Action]:
        to = plan.stages[0].devices[0]
        if s:
            return [Action("K", s, minibatch), Action("SK", s, minibatch, 0, to, 0, 1)]
        others = range(1, len(plan.stages))
        return [*(Action("RK", 0, minibatch, t, plan.stages[t].devices[0], 0, 1) for t in others), Action("K", 0, minibatch)]

    def due(self, plan: Plan, graph: OpGraph, program: Program) -> Mapping[int, Sequence[Action]]:
        out: dict[int, list[Action]] = {}
        updates = {a.microbatch for own in program.actions.values() for a in own if a.kind in UPDATES}
        for s, stage in enumerate(plan.stages):
            for minibatch in updates:
                out.setdefault(stage.devices[0], []).extend(self._of(plan, s, minibatch))
        return out

    def channels(self, plan: Plan) -> Sequence[Channel]:
        to, ends = plan.stages[0].devices[0], [stage.devices[0] for stage in plan.stages]
        return [("K", s, 0, ends[s], to) for s in range(1, len(ends)) if ends[s] != to]

    def rates(self, plan: Plan, graph: OpGraph) -> Rates:
        return {("K", s, 0): (0.0, 8.0) for s in range(1, len(plan.stages))}

    def prove(self, plan: Plan, program: Program) -> None:
        for device, own in program.actions.items():
            updated = set[int]()
            for action in own:
                updated |= {action.microbatch} if action.kind in UPDATES else set()
                if action.kind == "K" and action.microbatch in updated:
                    raise MalformedProgram(f"{action.text(device)} adds up gradients that an update has used")


LOWERING = Lowering()
