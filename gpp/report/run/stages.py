"""The stages of a run's plan: the facts of each as text and numbers, the same for the page and the terminal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, COMPUTE, COPIES, FORWARD, KINDS
from gpp.report.draw import text
from gpp.report.draw.stage_graph import device_words, module_names, operator_words
from gpp.report.run.record import RunRecord
from gpp.stage import Stage
from gpp.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """One stage's line in the table.

    Args:
        modules: short paths of its modules.
        forward_s, backward_s: predicted seconds of one micro-batch; None where there is no prediction.
        memory_bytes: predicted peak on its fullest device.
        limit_bytes: memory of its smallest device.
        operators: the operators that do not run just once on each device's own samples.
    """

    number: int
    stage: Stage
    modules: tuple[str, ...]
    forward_s: float | None
    backward_s: float | None
    memory_bytes: float | None
    limit_bytes: float | None
    next_stages: tuple[int, ...]
    operators: str

    def cells(self) -> dict[str, str]:
        """Every column's text by its name."""
        return {
            "stage": f"s{self.number}",
            "modules": ", ".join(self.modules),
            "devices": device_words(self.stage),
            "micro-batch": str(self.stage.microbatch_size),
            "in flight": str(self.stage.in_flight),
            "forward": text.seconds(self.forward_s),
            "backward": text.seconds(self.backward_s),
            "peak memory": text.num_bytes(self.memory_bytes),
            "of limit": text.percent(text.quotient(self.memory_bytes, self.limit_bytes)),
            "next stages": text.ranges(self.next_stages, "s") or "–",
            "operators": self.operators,
        }


def stage_lines(run: RunRecord) -> list[StageLine]:
    """A line for every stage; none without a plan and its graph."""
    plan, passes = run.plan, pass_seconds(run.predicted)
    if plan is None or run.graph is None:
        return []
    out = []
    for s, stage in enumerate(plan.stages):
        used, limit = _memory(run, plan, s)
        backward_s = passes.get((s, BACKWARD))
        if backward_s is not None and run.predicted is not None and stage.beside:
            # It is a mean over the devices that make parts of the gradients of the stage's inputs.
            backward_s *= len({e.device for e in run.predicted.events if e.stage == s and KINDS[e.kind].returns})
        out.append(
            StageLine(
                number=s,
                stage=stage,
                modules=module_names(plan, run.graph, s),
                forward_s=passes.get((s, FORWARD)),
                backward_s=backward_s,
                memory_bytes=used,
                limit_bytes=limit,
                next_stages=plan.successors[s],
                operators=_operators(stage, s, run.predicted),
            )
        )
    return out


def _operators(stage: Stage, s: int, predicted: Timeline | None) -> str:
    """What is special about a stage's operators, and the seconds of a micro-batch's forwards that run again, and of a copy."""
    words = operator_words(stage)
    if predicted is not None and predicted.memory:
        again_s = predicted.memory[s].again_s
        took_s = max((e.end_s - e.start_s for e in predicted.events if e.kind in COPIES and e.stage == s), default=0.0)
        words = words.replace("recomputed", f"recomputed ({text.seconds(again_s)})")
        words = words.replace("on host", f"on host ({text.seconds(took_s)})")
    return words


def pass_seconds(timeline: Timeline | None) -> dict[tuple[int, str], float]:
    """Mean seconds of one forward and one whole backward of a micro-batch, by stage and direction; a backward may be in parts."""
    total: dict[tuple[int, str], float] = defaultdict(float)
    count: dict[tuple[int, str], int] = defaultdict(int)
    for event in timeline.events if timeline else ():
        if event.kind in COMPUTE:
            row = KINDS[event.kind]
            key = (event.stage, FORWARD if row.direction == FORWARD else BACKWARD)
            total[key] += event.end_s - event.start_s
            count[key] += row.holds or row.returns
    return {key: total[key] / count[key] for key in total if count[key]}


def _memory(run: RunRecord, plan: Plan, stage: int) -> tuple[float | None, float | None]:
    """Peak bytes on the fullest device of a stage, and the limit of its smallest device."""
    devices, timeline = plan.stages[stage].devices, run.predicted
    peaks = [timeline.metrics.peak_memory_bytes[d] for d in devices if d in timeline.metrics.peak_memory_bytes] if timeline else []
    limits = [run.cluster.devices[d].memory_bytes for d in devices if d < run.cluster.num_devices] if run.cluster else []
    return max(peaks, default=None), min(limits, default=None)
