"""What engines of chains of modules are told alike: degrees, sizes, the order of the passes, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpp.errors import UnsupportedPlan
from gpp.export.base import Lost, ToExport, refuse_order, refuse_skips, refuse_unequal, told
from gpp.export.modules import Modules
from gpp.plan.chain import device_order
from gpp.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChain:
    """A plan as a chain of whole modules, each stage on equally many devices.

    Args:
        parts: the modules of each stage.
        ranks: devices in the direction of the pipeline.
        per_rank: stages of each.
        replicas: of a stage.
        split: devices of a replica.
        samples: of a micro-batch on each replica.
        settings: of mechanisms, by the engine's own names.
        ran: the plan as the engine runs it.
    """

    modules: Modules
    parts: tuple[tuple[str, ...], ...]
    ranks: int
    per_rank: int
    replicas: int
    split: int
    samples: int
    count: int
    settings: Mapping[str, Any]
    lost: tuple[str, ...]
    ran: ToExport

    @classmethod
    def of(cls, e: ToExport, engine: str, *, folds: tuple[str, ...] = ("loop",)) -> ModuleChain:
        """The chain of a plan.

        Args:
            folds: how an engine places several stages on a rank: `loop`, round and round; `v`, there and back.

        Raises:
            UnsupportedPlan: it is none; names the edge or the stage.
        """
        plan, graph = e.plan, e.problem.graph
        refuse_unequal(plan, engine)
        refuse_skips(plan, e.task, engine)
        refuse_order(e, engine)
        said, modules = told(engine, plan), Modules.of(e.captured)
        parts = modules.of_stages(plan, graph, engine)
        empty = next((s for s, part in enumerate(parts) if not part), None)
        if empty is not None:
            raise UnsupportedPlan(f"stage {empty} has no module of its own, and export={engine} names modules")
        first, order = plan.stages[0], device_order(plan)
        ranks, split = len(order), first.devices_per_replica
        replicas = len(first.devices) // split
        found = [order.index(stage.devices[0]) for stage in plan.stages]
        ways = {"loop": [s % ranks for s in range(len(found))], "v": [min(s, 2 * ranks - 1 - s) for s in range(len(found))]}
        if found not in [ways[fold] for fold in folds]:
            wrong = next(s for s, rank in enumerate(found) if rank != ways[folds[0]][s])
            raise UnsupportedPlan(
                f"stage {wrong} is on rank {found[wrong]}, and export={engine} puts it on rank {ways[folds[0]][wrong]}: stages "
                "go round and round the ranks. Fix: strategy/schedule=interleaved_1f1b"
            )
        if len(found) % ranks:
            raise UnsupportedPlan(f"{len(found)} stages do not go evenly onto {ranks} ranks")
        return cls(
            modules=modules,
            parts=tuple(parts),
            ranks=ranks,
            per_rank=len(found) // ranks,
            replicas=replicas,
            split=split,
            samples=first.microbatch_size // replicas,
            count=plan.minibatch_size // first.microbatch_size,
            settings=said.settings,
            lost=said.lost,
            ran=e.having(said.plan or plan),
        )

    @property
    def world(self) -> int:
        """All devices."""
        return self.ranks * self.replicas * self.split


def losses(e: ToExport, chain: ModuleChain) -> tuple[Lost, ...]:
    """What the engine cannot be told of mechanisms; the first entry has the seconds that all of it costs."""
    if not chain.lost:
        return ()
    more = chain.ran.step_s() - e.step_s()
    return tuple(Lost(what=what, seconds=more if i == 0 else None) for i, what in enumerate(chain.lost))


def by_schedule(e: ToExport, chain: ModuleChain, own: Strategy, engine: str) -> tuple[ToExport, tuple[Lost, ...]]:
    """The plan under the order of passes that an engine has, and what that costs where it is another."""
    if own.schedule == e.strategy.schedule:
        return chain.ran, ()
    ran = chain.ran.having(chain.ran.plan, strategy=own)
    what = f"the order of passes ({e.strategy.schedule.name}): {engine} runs {own.schedule.name}"
    return ran, (Lost(what=what, seconds=ran.step_s() - chain.ran.step_s()),)
