"""Megatron core 0.16: the layout of the pipeline as its string, degrees, sizes and flags.

Ettt|tttt|tttt|tttL      E what stands before the layers, t a layer, L what follows them and the loss; | ends a stage

A plan with branches is written as grids of ranks (`gpp.export.mimo`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar, Final, final

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export import mimo
from gpp.export.base import AbstractExporter, Exported, Lost, ToExport, torchrun
from gpp.export.degrees import ModuleChain, by_schedule, losses
from gpp.export.layout import CLOSING, LAYER, OPENING, GivenLayout, LayoutPart
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import settings

KINDS: Final = {"E": (OPENING,), "t": (LAYER,), "L": (CLOSING,), "m": ()}
"""What the letters of a layout mean; a layer that predicts several tokens (m) is none of the planned model."""
_FORM = re.compile(r"[EtmL|,()*0-9\s]*")


@final
@settings("export")
class Megatron(AbstractExporter):
    """Chains of whole layers under 1F1B, interleaved where ranks have several stages; branches under 1F1B."""

    name: ClassVar[str] = "megatron"
    engine: ClassVar[str] = "Megatron core"
    whole: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    schedules: ClassVar[tuple[AbstractSchedule, ...]] = (OneFOneB(), Interleaved1F1B(k=2))
    nearest: bool = False

    def exported(self, e: ToExport) -> Exported:
        if mimo.branches(e.plan):
            return mimo.exported(e, self.name)
        chain = ModuleChain.of(e, self.name)
        written = layout_text(chain)
        schedule = OneFOneB() if chain.per_rank == 1 else Interleaved1F1B(k=chain.per_rank)
        if chain.per_rank > 1 and chain.count % chain.ranks:
            raise UnsupportedPlan(
                f"its interleaved schedule runs rounds of {chain.ranks} micro-batches, and there are {chain.count}. Fix: a "
                f"microbatch_size of which a mini-batch has a multiple of {chain.ranks}"
            )
        ran, other = by_schedule(e, chain, replace(e.strategy, schedule=schedule), self.engine)
        shares = e.problem.updates is not None
        flags = {
            "--pipeline-model-parallel-size": chain.ranks,
            "--pipeline-model-parallel-layout": f'"{written}"',
            "--tensor-model-parallel-size": chain.split,
            "--num-layers": len(chain.modules.layers),
            "--micro-batch-size": chain.samples,
            "--global-batch-size": e.plan.minibatch_size,
            **chain.settings,
        }
        text = "\n".join(f"{name} {value}" for name, value in flags.items()) + ("\n--use-distributed-optimizer" if shares else "")
        script = "#!/bin/bash\n# MEGATRON: a checkout of Megatron-LM; FIRST_NODE: the first of several nodes.\n"
        script += "# Further arguments of the model and its data follow.\n"
        words = text.replace("\n", " \\\n    ")
        script += f'{torchrun(e.problem.cluster, e.plan)} "$MEGATRON/pretrain_gpt.py" \\\n    {words} "$@"\n'
        return Exported(
            files={"layout.txt": f"{written}\n", "arguments.txt": f"{text}\n", "run.sh": script},
            command="MEGATRON=... bash run.sh (further arguments of the model)",
            ran=ran,
            lost=(*losses(e, chain), *other, *_whole_ends(chain)),
            notes=("--hidden-size, --seq-length and the rest of the model's sizes must be those of the model that was planned.",),
        )

    def layout(self, text: str) -> GivenLayout | None:
        if not text or not _FORM.fullmatch(text) or "t" not in text:
            return None
        plain = text.replace(",", "").replace(" ", "")
        for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
            plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
        if wrong := next((letter for letter in plain if letter not in "EtmL|"), None):
            rule = f"has {wrong!r}, which is no letter of a layout: E, t, m and L"
            raise InvalidConfig("plan", text, rule, 'write it as "Ettt|tttt|tttL"')
        parts = [LayoutPart(kinds=tuple(kind for letter in part for kind in KINDS[letter])) for part in plain.split("|")]
        return GivenLayout(source=self.name, text=text, parts=tuple(parts))


def layout_text(chain: ModuleChain) -> str:
    """The layout string of a chain.

    Raises:
        UnsupportedPlan: what stands before the layers, or follows them, is in several stages.
    """
    modules, out = chain.modules, []
    if not modules.layers:
        raise UnsupportedPlan("the model has no list of layers, and export=megatron lays out one. Fix: export=torch")
    for s, part in enumerate(chain.parts):
        letters = []
        for what, letter in ((modules.opening, "E"), (modules.closing, "L")):
            inside = [name for name in what if name in part]
            if inside and len(inside) < len(what):
                missing = next(name for name in what if name not in part)
                raise UnsupportedPlan(
                    f"stage {s} has {inside[0]} and not {missing}: export=megatron keeps them together ({letter})"
                )
            letters.append(letter if inside else "")
        count = sum(name in modules.layers for name in part)
        out.append(letters[0] + "t" * count + letters[1])
    if not out[0].startswith("E"):
        out[0] = f"E{out[0]}"
    if not out[-1].endswith("L"):
        out[-1] += "L"
    return "|".join(out)


def _whole_ends(chain: ModuleChain) -> tuple[Lost, ...]:
    """What Megatron has beside the layers and the model has not."""
    ends = {"embedding": chain.modules.opening, "output layer": chain.modules.closing}
    return tuple(Lost(what=f"the model has no {what} of its own, and Megatron's has") for what, own in ends.items() if not own)
