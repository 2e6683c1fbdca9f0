"""vLLM and SGLang: layers of each stage of a pipeline that answers requests, as a variable of the environment."""

from __future__ import annotations

import re
from typing import ClassVar, final

from gpp.errors import UnsupportedPlan
from gpp.export.base import AbstractExporter, Exported, ToExport, refuse_skips, refuse_unequal, told
from gpp.export.layout import CLOSING, LAYER, OPENING, GivenLayout, LayoutPart
from gpp.export.modules import Modules
from gpp.settings import settings

_FORM = re.compile(r"\d{1,4}(,\d{1,4})*")


class AbstractLayerCounts(AbstractExporter):
    """Chains of whole layers for inference: the embedding is with the first of them, the head with the last."""

    mode: ClassVar[str] = "inference"
    whole: ClassVar[bool] = True
    variable: ClassVar[str]
    """The variable of the environment that has the layers of each stage."""
    start: ClassVar[str]
    """What starts the engine with a MODEL; the number of stages follows."""

    def exported(self, e: ToExport) -> Exported:
        plan = e.plan
        refuse_unequal(plan, self.name)
        refuse_skips(plan, e.task, self.name)
        modules, said = Modules.of(e.captured), told(self.name, plan)
        parts = modules.of_stages(plan, e.problem.graph, self.name)
        counts = [sum(name in modules.layers for name in part) for part in parts]
        last = len(parts) - 1
        for s, (part, count) in enumerate(zip(parts, counts, strict=True)):
            if not count:
                raise UnsupportedPlan(f"stage {s} has no layer, and export={self.name} gives every stage some")
            for what, place in ((modules.opening, 0), (modules.closing, last)):
                if wrong := next((name for name in part if name in what and s != place), None):
                    raise UnsupportedPlan(
                        f"stage {s} has {wrong}, which {self.engine} keeps in stage {place}: "
                        f"edge {min(s, place)}->{min(s, place) + 1} lies outside the layers"
                    )
        devices = [stage.devices for stage in plan.stages]
        if len({device for own in devices for device in own}) < len(devices):
            raise UnsupportedPlan(f"stages share a device, and {self.engine} gives each its own")
        if len(devices[0]) > 1:
            raise UnsupportedPlan(
                f"stage 0 has {len(devices[0])} devices: replicas of a stage are engines of their own in {self.engine}. "
                "Fix: strategy.planner.replication=false"
            )
        variable = f"{self.variable}={','.join(map(str, counts))}"
        command = f"{variable} {self.start} {len(parts)}"
        script = "#!/bin/bash\n" + command.replace("MODEL", '"$1"') + ' "${@:2}"\n'
        return Exported(
            files={"environment": f"{variable}\n", "run.sh": script},
            command=command,
            ran=e.having(said.plan or plan),
            notes=(f"{self.engine} batches requests as they come; the prediction is of requests of the size that was planned.",),
        )

    def layout(self, text: str) -> GivenLayout | None:
        if not _FORM.fullmatch(text.strip()) or "," not in text:
            return None
        counts = [int(word) for word in text.strip().split(",")]
        last = len(counts) - 1
        parts = [
            LayoutPart(kinds=((OPENING,) * (s == 0) + (LAYER,) * count + (CLOSING,) * (s == last)))
            for s, count in enumerate(counts)
        ]
        return GivenLayout(source=self.name, text=text, parts=tuple(parts))


@final
@settings("export")
class Vllm(AbstractLayerCounts):
    """vLLM's server."""

    name: ClassVar[str] = "vllm"
    engine: ClassVar[str] = "vLLM"
    variable: ClassVar[str] = "VLLM_PP_LAYER_PARTITION"
    start: ClassVar[str] = "vllm serve MODEL --pipeline-parallel-size"
    nearest: bool = False


@final
@settings("export")
class SgLang(AbstractLayerCounts):
    """SGLang's server."""

    name: ClassVar[str] = "sglang"
    engine: ClassVar[str] = "SGLang"
    variable: ClassVar[str] = "SGLANG_PP_LAYER_PARTITION"
    start: ClassVar[str] = "python -m sglang.launch_server --model-path MODEL --pp-size"
    nearest: bool = False


EXPORTER = Vllm()
"""Reads the layouts of both, which have one form."""
