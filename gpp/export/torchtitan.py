"""torchtitan 0.3: a module with the configuration, the list of modules of each stage, and the plan's own order of passes as a CSV.

Releases up to 0.2 read TOML; the same settings are written so, too.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any, ClassVar, final

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export.actions import passes, table, word
from gpp.export.base import AbstractExporter, Exported, Lost, ToExport, torchrun
from gpp.export.degrees import ModuleChain, losses
from gpp.export.layout import GivenLayout, LayoutPart
from gpp.export.modules import Modules
from gpp.plan.chain import PlanChain
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import settings

OPENING, NORM, HEAD, LAYERS = "tok_embeddings", "norm", "lm_head", "layers"
"""The modules of its models."""

ORDERS = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zero_bubble_v",
    "DualPipeV": "dualpipe_v",
}
"""Its names of orders of passes, and ours. A file with an order (`pipeline_parallel_schedule_csv`) counts more than its name."""

FSDP = Lost(what="the optimizer's state that replicas share: FSDP shares weights and gradients, too, which it gathers once a step")
"""With a pipeline, its default keeps gathered weights until the step is over (`fsdp_reshard_after_forward`)."""

REGISTRY = "torchtitan.models.{}.config_registry"
"""Where a model of it has its configurations."""

COMMAND = "PYTHONPATH=.:$PYTHONPATH {} -m torchtitan.train --module planned --config planned"

CONFIG = '''"""{title}

    {command}
"""

from torchtitan.distributed.activation_checkpoint import FullAC
from {source} import {config} as base

STAGES = [
{stages}
]


def planned():
    """The configuration of {config}, in parallel as planned."""
    config = base()
    if len(config.model_spec.model.layers) != {layers}:
        raise ValueError(f"{config} has {{len(config.model_spec.model.layers)}} layers, and {layers} were planned")
    config.training.local_batch_size = {local}
    config.training.global_batch_size = {whole}
    config.training.disable_cuda_graphs = True  # its parser refuses them beside a pipeline
{parallelism}
    config.parallelism.module_fqns_per_model_part = STAGES
    config.activation_checkpoint = {checkpointing}
    return config
'''


@final
@settings("export")
class TorchTitan(AbstractExporter):
    """Chains of whole modules, under the plan's own order of passes.

    Args:
        module, config: the model of torchtitan, and the configuration of it that is planned; or the dotted path of a function of
            your own that returns one.
        names: our modules by the names that torchtitan has for them, where these do not follow from their places.
    """

    name: ClassVar[str] = "torchtitan"
    engine: ClassVar[str] = "torchtitan"
    whole: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    schedules: ClassVar[tuple[AbstractSchedule, ...]] = (OneFOneB(), Interleaved1F1B(k=2))
    nearest: bool = False
    module: str = "llama3"
    config: str = "llama3_8b"
    names: Mapping[str, str] | None = None

    def exported(self, e: ToExport) -> Exported:
        chain = ModuleChain.of(e, self.name, folds=("loop", "v"))
        stages = [[self._names(chain.modules)[name] for name in part] for part in chain.parts]
        rows = passes(e.strategy.lower(e.plan, e.problem), PlanChain.of(e.plan, e.problem.graph))
        vee = chain.per_rank == 2 and [s.devices for s in e.plan.stages[: chain.ranks]] == [
            s.devices for s in reversed(e.plan.stages[chain.ranks :])
        ]
        shards = e.problem.updates is not None and chain.replicas > 1
        told = {name.rpartition(".")[2]: value for name, value in chain.settings.items() if name.startswith("parallelism.")}
        parallelism: dict[str, Any] = {
            "pipeline_parallel_degree": chain.ranks,
            # Its splitter places stages by this name, and the CSV takes the place of its order.
            "pipeline_parallel_schedule": "ZBVZeroBubble" if vee and chain.ranks > 1 else "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": "schedule.csv",
            "pipeline_parallel_microbatch_size": chain.samples,
            "data_parallel_replicate_degree": 1 if shards else chain.replicas,
            "data_parallel_shard_degree": chain.replicas if shards else 1,
            **told,
        }
        full = chain.settings.get("activation_checkpoint") == "full"
        # Without a pipeline it knows no micro-batches: it sums gradients over rounds of the local batch.
        local, whole = chain.samples * (chain.count if chain.ranks > 1 else 1), e.plan.minibatch_size
        command = COMMAND.format(torchrun(e.problem.cluster, e.plan))
        source, _, config = (self.config if "." in self.config else f"{REGISTRY.format(self.module)}.{self.config}").rpartition(".")
        module = CONFIG.format(
            title=f"{e.model} as planned by {e.plan.planner}: {len(stages)} stages on {chain.world} devices.",
            command=command,
            source=source,
            config=config,
            stages="\n".join(f"    {json.dumps(names)}," for names in stages),
            layers=len(chain.modules.layers),
            local=local,
            whole=whole,
            parallelism="\n".join(f"    config.parallelism.{name} = {value!r}" for name, value in parallelism.items()),
            checkpointing="FullAC.Config()" if full else "None",
        )
        return Exported(
            files={
                "planned.py": module,
                "torchtitan.toml": _toml(stages, parallelism, local, whole, full),
                "schedule.csv": table([[word(task) for task in row] for row in rows]),
            },
            command=command,
            ran=chain.ran,
            lost=(*losses(e, chain), *([FSDP] if shards else [])),
            notes=(
                f"Layers, widths, sequence and optimizer are those of {self.config}: they must be the model's that was planned "
                f"({e.model}, {len(chain.modules.layers)} layers).",
            ),
        )

    def _names(self, modules: Modules) -> dict[str, str]:
        """Our modules with torchtitan's names.

        Raises:
            UnsupportedPlan: one has none.
        """
        out = self._placed(modules)
        if lacking := next((name for name in modules.names if name not in out), None):
            raise UnsupportedPlan(
                f"module {lacking} has no place in a model of torchtitan, which has {OPENING}, {LAYERS}.*, {NORM} and {HEAD}. "
                f"Fix: export.names={{{lacking}: NAME}}"
            )
        return out

    def _placed(self, modules: Modules) -> dict[str, str]:
        """Those of our modules that have a place in its models, with torchtitan's names."""
        out = {name: f"{LAYERS}.{i}" for i, name in enumerate(modules.layers)}
        out |= dict(zip(modules.opening[:1], [OPENING], strict=False))
        out |= dict.fromkeys(modules.closing[:-1][:1], NORM) | dict.fromkeys(modules.closing[-1:], HEAD)
        return out | dict(self.names or {})

    def layout(self, text: str) -> GivenLayout | None:
        if "module_fqns_per_model_part" not in text:
            return None
        try:
            found = tomllib.loads(text)["parallelism"]
            stages = [tuple(map(str, names)) for names in found["module_fqns_per_model_part"]]
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            rule = f"is no configuration of torchtitan in TOML: {error}"
            raise InvalidConfig(
                "plan", "torchtitan.toml", rule, "give parallelism.module_fqns_per_model_part, a list of lists"
            ) from None
        for name, degree in found.items():
            if name.endswith("_degree") and not name.startswith(("pipeline_", "data_")) and degree > 1:
                rule = f"has {name} = {degree}, and a layout has stages and replicas alone"
                raise InvalidConfig("plan", "torchtitan.toml", rule, "set it to 1 there, or plan with export=torchtitan")
        order = found.get("pipeline_parallel_schedule", "")
        copies = [found.get(f"data_parallel_{kind}_degree", usual) for kind, usual in (("replicate", 1), ("shard", -1))]
        return GivenLayout(
            source=self.name,
            text="torchtitan.toml",
            parts=tuple(LayoutPart(names=stage) for stage in stages),
            degree=found.get("pipeline_parallel_degree"),
            fold="v" if order in ("ZBVZeroBubble", "DualPipeV") else "loop",
            order=(order, ORDERS.get(order, "")),
            csv=str(found.get("pipeline_parallel_schedule_csv", "")),
            replicas=None if -1 in copies else copies[0] * copies[1],
            microbatch_size=found.get("pipeline_parallel_microbatch_size"),
            called=self._placed,
        )


def _toml(stages: list[list[str]], parallelism: Mapping[str, Any], local: int, whole: int, full: bool) -> str:
    lines = ["[training]", f"local_batch_size = {local}", f"global_batch_size = {whole}", "", "[parallelism]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in parallelism.items()]
    lines += ["module_fqns_per_model_part = [", *(f"  {json.dumps(names)}," for names in stages), "]"]
    return "\n".join([*lines, "", "[activation_checkpoint]", f'mode = "{"full" if full else "none"}"', ""])
