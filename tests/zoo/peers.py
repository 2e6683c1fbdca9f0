"""What other engines do with a network: `python -m tests.zoo.peers ENGINE CASES.json [RANK STORE]`, where the engine is installed.

It uses nothing of the project but the networks and their losses, and prints a line of JSON for each: `accepted` where what comes
out is what the network itself computes, `wrong` where it differs, else `refused` with the engine's own words.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp.models.losses import loss, loss_terms

SIZE, MICROBATCHES, RANKS, TOLERANCE = 8, 4, 3, 1e-9
Case = dict[str, Any]


def made(case: Case) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """The network in float64, inputs and target."""
    module, _, name = case["network"].rpartition(".")
    torch.manual_seed(0)
    network = getattr(import_module(module), name)(**case["arguments"]).double()
    if (table := network._modules.pop("rotary", None)) is not None:
        # A module that other modules call is refused by pipeline(), which has nothing to do with the stages.
        network.rotary = table.forward

    def drawn(shape: list[int], dtype: str, high: int | None) -> Tensor:
        if dtype == "float":
            return torch.randn(SIZE, *shape, dtype=torch.float64)
        found = torch.randint(high or 2, (SIZE, *shape))
        return found.bool() if dtype == "bool" else found

    inputs = {key: drawn(*spec) for key, spec in case["inputs"].items()}
    return network, inputs, drawn(*case["target"])


def value_of(case: Case, outputs: Any, target: Tensor) -> Tensor:
    return torch.stack(list(loss_terms(loss(case["loss"])(outputs, target)).values())).sum()


def flat(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for part in (outputs.values() if isinstance(outputs, dict) else outputs) for leaf in flat(part)]


def torch_pipelining(case: Case, rank: int) -> dict[str, Any]:
    """`pipeline()` with a split before two modules, three ranks, GPipe: losses and gradients beside a plain loop."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    network, inputs, target = made(case)
    other = copy.deepcopy(network)
    rows = [slice(lo, lo + SIZE // MICROBATCHES) for lo in range(0, SIZE, SIZE // MICROBATCHES)]
    expected, keys = list[float](), list[str]()
    for own in rows:
        outputs = other(**{key: given[own] for key, given in inputs.items()})
        keys, value = list(outputs) if isinstance(outputs, dict) else [], value_of(case, outputs, target[own])
        (value / MICROBATCHES).backward()
        expected.append(value.item())
    first = tuple(value[rows[0]] for value in inputs.values())
    pipe = pipeline(network, mb_args=first, split_spec=dict.fromkeys(case["split"], SplitPoint.BEGINNING))
    if pipe.num_stages != RANKS:
        return {"verdict": "refused", "words": f"pipeline() made {pipe.num_stages} stages, not {RANKS}"}
    dist.barrier()  # the other rank may wait for one that has failed at the network before
    group = dist.new_group([*range(RANKS)], timeout=datetime.timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    stage = pipe.build_stage(rank, torch.device("cpu"), group)

    def measure(outputs: Any, wanted: Tensor) -> Tensor:
        if keys and len(outputs) != len(keys):
            raise ValueError(f"the last stage returns {len(outputs)} of {len(keys)} outputs")
        named = dict(zip(keys, outputs, strict=True)) if keys else outputs  # what comes out of a stage has no names
        return value_of(case, named, wanted)

    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=measure)
    losses: list[Tensor] = []
    last = rank == RANKS - 1
    schedule.step(*(inputs.values() if rank == 0 else ()), **({"target": target, "losses": losses} if last else {}))
    gradients = dict(other.named_parameters())
    far = [abs(a.item() - b) for a, b in zip(losses, expected, strict=True)] if last else []
    worst = ""
    for name, parameter in stage.submod.named_parameters():
        wanted = gradients[name].grad if name in gradients else None
        if wanted is None or parameter.grad is None:
            if (wanted is None) != (parameter.grad is None):
                worst = f"{name} has {'no' if parameter.grad is None else 'a'} gradient"
            continue
        if (apart := (parameter.grad - wanted).abs().max().item()) > TOLERANCE:
            worst = f"the gradient of {name} differs by {apart:.1e}, of at most {wanted.abs().max().item():.1e}"
    if far and max(far) > TOLERANCE:
        worst = f"losses differ by {max(far):.1e}"
    return {"verdict": "wrong", "words": worst} if worst else {"verdict": "accepted", "words": ""}


def layers_of(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a network in the order in which it has them, lists of modules taken apart."""
    for name, module in network.named_children():
        if isinstance(module, nn.ModuleList):
            yield from ((f"{name}.{i}", one) for i, one in enumerate(module))
        else:
            yield name, module


class Passing(nn.Module):
    """In the place of a module that a stage lacks: what comes in goes on, as the models of torchtitan have it."""

    def forward(self, x: Any, *rest: Any) -> Any:
        return x


def compared(case: Case, run: Callable[[nn.Module, dict[str, Tensor]], tuple[Any, list[nn.Module]]]) -> dict[str, Any]:
    """What comes out of an engine's modules beside the network's own outputs, and gradients outside of its numbered layers."""
    network, inputs, _ = made(case)
    other = copy.deepcopy(network)
    outputs, parts = run(network, inputs)
    expected, found = flat(other(**inputs)), flat(outputs)
    if [t.shape for t in found] != [t.shape for t in expected]:
        return {"verdict": "wrong", "words": f"outputs of shapes {[list(t.shape) for t in found]}"}
    apart = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    if apart > TOLERANCE:
        return {"verdict": "wrong", "words": f"outputs differ by {apart:.1e}"}
    for tensors in (found, expected):
        torch.stack([tensor.square().mean() for tensor in tensors if tensor.requires_grad]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in other.named_parameters(remove_duplicate=False)}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if not any(word.isdigit() for word in name.split(".")) and (wanted := gradients[name]) is not None:
                far = wanted.abs().max().item() if parameter.grad is None else (parameter.grad - wanted).abs().max().item()
                if far > TOLERANCE:
                    return {
                        "verdict": "wrong",
                        "words": f"the gradient of {name} differs by {far:.1e}, of {wanted.abs().max():.1e}",
                    }
    return {"verdict": "accepted", "words": ""}


def deepspeed(case: Case, rank: int) -> dict[str, Any]:
    """A `PipelineModule` of the network's modules in their order, run by its own forward as one stage.

    Layers that take a table of positions get it; a layer gets nothing else but what the one before it returns.
    """
    import deepspeed as engine
    from deepspeed.pipe import PipelineModule

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    if engine.comm.cdb is None:
        engine.comm.init_distributed("fake", dist_init_required=False)

    def run(network: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, list[nn.Module]]:
        tables = (network.rotary,) if hasattr(network, "rotary") else ()

        def layer(name: str, module: nn.Module) -> Callable[[Any], Any]:
            takes = tables if "." in name and len(signature(module.forward).parameters) > 1 else ()
            return lambda x: module(x, *tables) if takes else module(x)

        module = PipelineModule([layer(*named) for named in layers_of(network)], num_stages=1)
        given = tuple(inputs.values())
        return module(given[0] if len(given) == 1 else given), [network]

    return compared(case, run)


def torchtitan(case: Case, rank: int) -> dict[str, Any]:
    """The three parts that its splitter makes of the network's modules; each gets what the one before makes as its first input.

    Modules that a part lacks pass on what comes in, which torchtitan asks of a model's forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.pipeline_parallel import _pipeline_module_split  # pyright: ignore[reportMissingImports]

    def run(network: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, list[nn.Module]]:
        names = [name for name, _ in layers_of(network)]
        (one, two), mesh = map(names.index, case["split"]), init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        parts = [names[:one], names[one:two], names[two:]]
        _, stages = _pipeline_module_split(network, mesh, "Interleaved1F1B", torch.device("cpu"), parts)
        for stage in stages:
            for name in [name for name, child in stage._modules.items() if child is None]:
                setattr(stage, name, Passing())
        first, handed, made = next(iter(inputs)), inputs, None
        for stage in stages:
            made = stage(**handed)
            handed = {**inputs, first: made}
        return made, stages

    return compared(case, run)


ENGINES: dict[str, Callable[[Case, int], dict[str, Any]]] = {
    "torch": torch_pipelining,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
}


def main(engine: str, cases: Path, rank: int = 0, store: str = "") -> None:
    torch.set_num_threads(1)
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for name, case in json.loads(cases.read_text()).items():
        try:
            found = ENGINES[engine](case, rank)
        except Exception as error:  # the engine's words are what is asked for
            inner = error.__cause__ or error
            found = {"verdict": "refused", "words": f"{type(inner).__name__}: {str(inner).strip() or type(error).__name__}"}
        print("FOUND " + json.dumps({"model": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *([int(sys.argv[3]), sys.argv[4]] if len(sys.argv) > 3 else []))
