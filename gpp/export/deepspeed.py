"""DeepSpeed's pipeline engine: its configuration, and a PipelineModule whose parts are the plan's own.

Its methods of partitioning know equal numbers of layers or of parameters; the boundaries of the planned parts go in by a subclass.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Final, final

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export.base import AbstractExporter, Exported, ToExport
from gpp.export.degrees import ModuleChain, by_schedule, losses
from gpp.export.layout import GivenLayout, LayoutPart
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import settings

MODULE: Final = '''"""A PipelineModule cut as planned: PlannedModule(layers=[...]) with a layer for each of LAYERS, in order."""

from deepspeed.pipe import PipelineModule

LAYERS = {layers}
PARTS = {parts}
"""Boundaries: stage s has layers PARTS[s] to PARTS[s + 1], the last one left out."""


class PlannedModule(PipelineModule):
    def __init__(self, layers, **settings):
        if len(layers) != len(LAYERS):
            raise ValueError(f"{{len(layers)}} layers were given, and {{len(LAYERS)}} were planned: {{LAYERS}}")
        super().__init__(layers, num_stages=len(PARTS) - 1, partition_method="uniform", **settings)

    def _partition_layers(self, method="uniform"):
        self.parts = PARTS
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


@final
@settings("export")
class DeepSpeed(AbstractExporter):
    """Chains of whole modules, a stage a rank, under its 1F1B."""

    name: ClassVar[str] = "deepspeed"
    engine: ClassVar[str] = "DeepSpeed"
    whole: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    schedules: ClassVar[tuple[AbstractSchedule, ...]] = (OneFOneB(),)
    nearest: bool = False

    def exported(self, e: ToExport) -> Exported:
        chain = ModuleChain.of(e, self.name)
        if chain.per_rank > 1:
            raise UnsupportedPlan(
                f"stages 0 and {chain.ranks} are on one device; DeepSpeed runs one stage a device. Fix: strategy/schedule=1f1b"
            )
        ran, other = by_schedule(e, chain, replace(e.strategy, schedule=OneFOneB()), self.engine)
        layers = [name for part in chain.parts for name in part]
        parts = [0, *accumulate(len(part) for part in chain.parts)]
        config: dict[str, Any] = {
            "train_batch_size": e.plan.minibatch_size,
            "train_micro_batch_size_per_gpu": chain.samples,
            "gradient_accumulation_steps": chain.count,
            # Stage 1 deals the optimizer's state out to the replicas.
            "zero_optimization": {"stage": 1 if e.problem.updates is not None and chain.replicas > 1 else 0},
            **chain.settings,
        }
        return Exported(
            files={
                "ds_config.json": json.dumps(config, indent=2) + "\n",
                "parts.json": json.dumps({"parts": parts, "layers": layers}, indent=1) + "\n",
                "planned.py": MODULE.format(layers=json.dumps(layers, indent=4), parts=parts),
            },
            command=f"deepspeed --num_gpus {chain.world} YOUR_SCRIPT.py --deepspeed --deepspeed_config ds_config.json",
            ran=ran,
            lost=(*losses(e, chain), *other),
            notes=("YOUR_SCRIPT.py makes planned.PlannedModule of its layers, and hands it to deepspeed.initialize.",),
        )

    def layout(self, text: str) -> GivenLayout | None:
        if '"parts"' not in text:
            return None
        try:
            found = json.loads(text)
            parts, layers = [int(place) for place in found["parts"]], [str(name) for name in found["layers"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(
                "plan", "parts.json", f"has no parts and layers: {error}", "give both, as export=deepspeed does"
            ) from None
        if parts[:1] != [0] or parts[-1:] != [len(layers)] or parts != sorted(set(parts)):
            raise InvalidConfig("plan", "parts.json", f"must have parts ascending from 0 to {len(layers)}", "correct them")
        cut = [LayoutPart(names=tuple(layers[lo:hi])) for lo, hi in pairwise(parts)]
        return GivenLayout(source=self.name, text="parts.json", parts=tuple(cut))
