"""torch.distributed.pipelining: the plan's own order of passes as a CSV, and a script that builds its stages and trains.

Branches are carried along the chain of stages, since torch's runtime lets neighbours alone exchange tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import ClassVar, Literal, final

from gpp.errors import UnsupportedPlan, counted
from gpp.export.actions import passes, table, with_messages, word
from gpp.export.base import AbstractExporter, Exported, Lost, ToExport, refuse_order, refuse_unequal, torchrun
from gpp.graph.captured import is_loss
from gpp.plan.chain import PlanChain, as_chain, reaches, refuse_replicas
from gpp.report.draw import text
from gpp.runtime.engine import refuse_policies, refuse_split_operators
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import settings

CLIPPING = Lost(what="clipping of gradients by their norm (optimizer.clip_norm): the script has none")

TEMPLATE = Path(__file__).with_name("template") / "torch_train.txt"


@final
@settings("export")
class Torch(AbstractExporter):
    """Stages cut from the captured model, one PipelineStage each, under `_PipelineScheduleRuntime`.

    Args:
        messages: `torch` lets torch's runtime add sends and receives to the passes; `plan` gives it ours.
        weights: whether the folder holds the initial weights; without them the script needs them put there.
    """

    name: ClassVar[str] = "torch"
    engine: ClassVar[str] = "torch.distributed.pipelining"
    schedules: ClassVar[tuple[AbstractSchedule, ...]] = (OneFOneB(),)
    nearest: bool = False
    messages: Literal["torch", "plan"] = "torch"
    weights: bool = True

    def exported(self, e: ToExport) -> Exported:
        plan = e.plan
        refuse_policies(plan)
        refuse_split_operators(plan, self.engine)
        refuse_replicas(plan, f"export={self.name}")
        refuse_unequal(plan, self.name)
        refuse_order(e, self.name)
        if not e.captured.nodes:
            raise UnsupportedPlan(f"model={e.captured.name} is a profile, without code to run. Fix: a model that is captured")
        ran = e.having(*as_chain(plan, e.problem))
        chain = PlanChain.of(plan, e.problem.graph)
        for s, names in enumerate(chain.carried):
            if not names:
                raise UnsupportedPlan(f"no tensor crosses from stage {s} to stage {s + 1}, or past them: torch's runtime needs one")
        rows = passes(ran.strategy.lower(ran.plan, ran.problem), chain)
        predicted = ran.strategy.predict(ran.plan, ran.problem)
        size, graph = plan.stages[0].microbatch_size, e.problem.graph
        nodes = [graph.nodes_of(stage.ops) for stage in plan.stages]
        tied = {name: sorted({chain.rank_of[s] for s in stages}) for name, stages in plan.shared_weights(graph)}
        layout = {
            "ranks": chain.stages,
            "nodes": nodes,
            "carried": chain.carried,
            "tied": {name: ranks for name, ranks in tied.items() if len(ranks) > 1},
            "losses": [name for name in e.captured.results if is_loss(name)],
            "microbatch_size": size,
            "microbatches": plan.minibatch_size // size,
        }
        script = Template(TEMPLATE.read_text()).substitute(
            model=e.model,
            stages=len(plan.stages),
            ranks=len(chain.devices),
            count=plan.minibatch_size // size,
            csv="schedule.csv" if self.messages == "torch" else "schedule_messages.csv",
            form="compute_only" if self.messages == "torch" else "compute_comms",
        )
        return Exported(
            files={
                "train.py": script,
                "schedule.csv": table([[word(task) for task in row] for row in rows]),
                "schedule_messages.csv": table(with_messages(rows, chain, predicted)),
                "layout.json": json.dumps(layout, indent=1) + "\n",
            },
            command=f"{torchrun(e.problem.cluster, plan)} train.py",
            ran=ran,
            lost=(*_carrying(e, ran), *([CLIPPING] if e.clips else [])),
            job=True,
        )


def _carrying(e: ToExport, ran: ToExport) -> tuple[Lost, ...]:
    """What tensors that pass stages cost."""
    far = {name: ends for name, ends in reaches(e.plan, e.problem.graph).items() if ends[1] > ends[0] + 1}
    if not far:
        return ()
    size = {tensor.name: tensor.bytes_per_sample for tensor in e.problem.graph.tensors}
    moved = sum(size[name] * (last - first - 1) for name, (first, last) in far.items()) * e.plan.minibatch_size
    name, (first, last) = max(far.items(), key=lambda item: size[item[0]] * (item[1][1] - item[1][0]))
    what = (
        f"edges that pass stages: {counted(len(far), 'tensor')}, as {name} from stage {first} to stage {last}, through the stages "
        f"between, {text.num_bytes(moved)} more a step each way, and branches wait for each other"
    )
    return (Lost(what=what, seconds=ran.step_s() - e.step_s()),)
