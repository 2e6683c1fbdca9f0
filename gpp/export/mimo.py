"""Branching plans for Megatron core's MIMO: a grid of ranks for each module, and the graph of the modules that feed each other.

    stages  s0 ► s1 ┐             modules  image: s0, s1 ┐
                    ├► s3 ► s4             sound: s2     ├► language: s3, s4
            s2 ─────┘                      (0.16: HyperCommGrid, MultiModulePipelineCommunicator)

A module is a chain of stages, equally wide, which nothing enters but at its first stage and nothing leaves but at its last.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from string import Template
from typing import Final

from gpp.errors import UnsupportedPlan
from gpp.export.base import Exported, Lost, ToExport, refuse_order, told, torchrun
from gpp.plan.chain import refuse_unequal_microbatches
from gpp.plan.plan import Plan
from gpp.report.draw.stage_graph import module_names
from gpp.schedules.one_f_one_b import OneFOneB

DIMS: Final = 3
"""Dimensions of the tensors between modules: their communicator sends shapes of three numbers."""

GRIDS: Final = Template('''"""$title

    torchrun --nproc-per-node $world YOUR_SCRIPT.py      which imports this file, and builds its part of the module of its rank
"""

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator

MODULES = $modules
"""Each module's first rank, degrees, what its stages hold, and the devices that were planned for its ranks."""
TOPOLOGY = $topology
"""The modules that each one feeds."""
DIMENSIONS = $dimensions
"""Of the tensors between modules: batch, sequence, hidden."""
MICROBATCH_SIZE, NUM_MICROBATCHES = $samples, $count


def grids(backend=None):
    """The grid of each module, with a group for each dimension; every rank has to call this."""
    found = {}
    for name, module in MODULES.items():
        shape = [module["tp"], 1, module["pp"], module["dp"]]
        found[name] = HyperCommGrid(shape, ["tp", "cp", "pp", "dp"], rank_offset=module["rank"], backend=backend)
        for dimension in ("tp", "cp", "pp", "dp"):
            found[name].create_pg(dimension)
    return found


def communicator(config, backend=None):
    """What hands tensors on between the stages of a module, and between modules; `config` is a ModelParallelConfig."""
    return MultiModulePipelineCommunicator(grids(backend), TOPOLOGY, config, DIMENSIONS)
''')


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoModule:
    """A chain of stages.

    Args:
        rank: the first of its ranks, which are as many as its stages have devices.
        feeds: the modules that read its output.
    """

    name: str
    stages: tuple[int, ...]
    rank: int
    split: int
    replicas: int
    feeds: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return len(self.stages) * self.split * self.replicas


def branches(plan: Plan) -> bool:
    """Whether a stage feeds several others, or is fed by several."""
    return any(count > 1 for end in (0, 1) for count in Counter(edge[end] for edge in plan.edges).values())


def modules_of(plan: Plan, e: ToExport) -> tuple[MimoModule, ...]:
    """The modules of a plan, in the order of their first stages."""
    chains: list[list[int]] = []
    for s, stage in enumerate(plan.stages):
        before = [chain for chain in chains if plan.predecessors[s] == (chain[-1],) and plan.successors[chain[-1]] == (s,)]
        width = len(stage.devices), stage.devices_per_replica
        if before and (len(plan.stages[before[0][-1]].devices), plan.stages[before[0][-1]].devices_per_replica) == width:
            before[0].append(s)
        else:
            chains.append([s])
    names, of_stage = list[str](), {s: i for i, chain in enumerate(chains) for s in chain}
    for i, chain in enumerate(chains):
        nodes = e.problem.graph.nodes_of(op for s in chain for op in plan.stages[s].ops)
        paths = [e.captured.node_of[node].module for node in nodes]
        own = max(Counter(path.partition(".")[0] for path in paths if path).items(), key=lambda found: found[1], default=("", 0))[0]
        names.append(own if own.isidentifier() and own not in names else f"module_{i}")
    out, rank = list[MimoModule](), 0
    for name, chain in zip(names, chains, strict=True):
        stage = plan.stages[chain[0]]
        feeds = tuple(names[of_stage[t]] for t in plan.successors[chain[-1]])
        split, replicas = stage.devices_per_replica, len(stage.devices) // stage.devices_per_replica
        out.append(MimoModule(name=name, stages=tuple(chain), rank=rank, split=split, replicas=replicas, feeds=feeds))
        rank += out[-1].ranks
    return tuple(out)


def exported(e: ToExport, engine: str) -> Exported:
    """The file of the grids.

    Raises:
        UnsupportedPlan: MIMO's classes do not take the plan; names the stage or the edge.
    """
    plan = e.plan
    refuse_unequal_microbatches(plan, f"export={engine}")
    refuse_order(e, engine)
    shared = next((d for d, stages in sorted(plan.stages_of_device.items()) if len(stages) > 1), None)
    if shared is not None:
        raise UnsupportedPlan(
            f"device {shared} has stages {', '.join(map(str, plan.stages_of_device[shared]))}: export={engine} gives a rank one "
            "stage of a branching plan. Fix: strategy/schedule=1f1b"
        )
    said, modules, batch_dim = told(engine, plan), modules_of(plan, e), _batch_dim(plan, e, engine)
    _refuse_widths(modules, engine)
    own = replace(e.strategy, schedule=OneFOneB())
    ran = e.having(_ahead(said.plan or plan), strategy=own)
    more = ran.step_s() - e.step_s()
    count, size = plan.minibatch_size // plan.stages[0].microbatch_size, plan.stages[0].microbatch_size
    told_of = {
        each.name: {
            "rank": each.rank,
            "tp": each.split,
            "pp": len(each.stages),
            "dp": each.replicas,
            "stages": [list(module_names(plan, e.problem.graph, s)) for s in each.stages],
            "devices": [list(plan.stages[s].devices) for s in each.stages],
        }
        for each in modules
    }
    world, (s, h) = sum(each.ranks for each in modules), [d for d in range(DIMS) if d != batch_dim]
    further = [s for s, (a, b) in enumerate(zip(plan.stages, ran.plan.stages, strict=True)) if a.in_flight != b.in_flight]
    what = "samples in flight, as on the longest way to the loss, on stages " + ", ".join(map(str, further))
    lost = [Lost(what=what, seconds=more if more > 0 else None)] if further else []
    return Exported(
        files={
            "planned_mimo.py": GRIDS.substitute(
                title=f"{e.model} as planned by {plan.planner}: {len(plan.stages)} stages of {len(modules)} modules, for MIMO.",
                world=world,
                modules="\n".join(
                    ["{", *(f"    {json.dumps(name)}: {json.dumps(value)}," for name, value in told_of.items()), "}"]
                ),
                topology=json.dumps({each.name: list(each.feeds) for each in modules}),
                dimensions={"b": batch_dim, "s": s, "h": h},
                samples=size,
                count=count,
            )
        },
        command=f"{torchrun(e.problem.cluster, e.plan)} YOUR_SCRIPT.py (which imports planned_mimo)",
        ran=ran,
        lost=(*lost, *(Lost(what=what) for what in said.lost)),
        notes=(
            "Megatron core 0.16 has the grids and the communicator, and no order of passes for them: its schedules ask a "
            "communicator for the group of one pipeline, which that of several modules has not.",
            *(f"{name} {value}" for name, value in said.settings.items()),
        ),
    )


def _batch_dim(plan: Plan, e: ToExport, engine: str) -> int:
    """The dimension of the samples in all tensors that leave a stage.

    Raises:
        UnsupportedPlan: a stage hands on several tensors, or one of other than three dimensions; names the edge.
    """
    dims, sent = dict[int, str](), dict[int, str]()
    for (s, t), tensors in sorted(plan.edge_tensors(e.problem.graph).items()):
        names = [tensor.name for tensor in tensors]
        if len(names) != 1 or sent.setdefault(s, names[0]) != names[0]:
            many = f"{len(names)} tensors ({', '.join(names[:3])})" if len(names) != 1 else f"{names[0]}, and others {sent[s]}"
            raise UnsupportedPlan(f"edge {s}->{t} has {many}: export={engine} hands one tensor on from a stage. Fix: export=torch")
        node = e.captured.node_of[names[0]]
        if node.shape is None or len(node.shape) != DIMS or node.batch_dim is None:
            raise UnsupportedPlan(
                f"edge {s}->{t} has {names[0]} of shape {node.shape}: export={engine} hands on tensors of {DIMS} dimensions. "
                "Fix: export=torch"
            )
        dims.setdefault(node.batch_dim, f"edge {s}->{t}")
    if len(dims) > 1:
        raise UnsupportedPlan(
            f"samples are in dimensions {dims} of what stages hand on: export={engine} has one. Fix: export=torch"
        )
    return next(iter(dims), 0)


def _refuse_widths(modules: tuple[MimoModule, ...], engine: str) -> None:
    """Refuse modules that feed each other with numbers of replicas of which neither divides the other.

    Raises:
        UnsupportedPlan: names the stages.
    """
    named = {each.name: each for each in modules}
    for each in modules:
        for other in map(named.__getitem__, each.feeds):
            if each.replicas % other.replicas and other.replicas % each.replicas:
                raise UnsupportedPlan(
                    f"edge {each.stages[-1]}->{other.stages[0]} joins {each.replicas} replicas and {other.replicas}: "
                    f"export={engine} needs one to be a multiple of the other. Fix: strategy.planner.replication=false"
                )


def _ahead(plan: Plan) -> Plan:
    """The plan with as many micro-batches in flight as MIMO has them: the stages of the longest way, less those before a stage on
    the longest way to it."""
    place = list[int]()
    for s in range(len(plan.stages)):
        place.append(1 + max((place[r] for r in plan.predecessors[s]), default=0))
    total = max(place)
    stages = tuple(
        replace(stage, in_flight=min(plan.minibatch_size, (total - place[s] + 1) * stage.microbatch_size))
        for s, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)
