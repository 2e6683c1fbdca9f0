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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp.models.losses import loss, loss_terms

SIZE, MICROBATCHES, TOLERANCE = 8, 4, 1e-9
Case = dict[str, Any]


def made(case: Case) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """The network in float64, inputs and target."""
    module, _, name = case["network"].rpartition(".")
    torch.manual_seed(0)
    network = getattr(import_module(module), name)(**case["arguments"]).double()

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
    """`pipeline()` with a split before one module, two ranks, GPipe: losses and gradients beside a plain loop."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    network, inputs, target = made(case)
    other = copy.deepcopy(network)
    rows = [slice(lo, lo + SIZE // MICROBATCHES) for lo in range(0, SIZE, SIZE // MICROBATCHES)]
    expected = []
    for own in rows:
        value = value_of(case, other(**{key: given[own] for key, given in inputs.items()}), target[own])
        (value / MICROBATCHES).backward()
        expected.append(value.item())
    first = {key: value[rows[0]] for key, value in inputs.items()}
    pipe = pipeline(network, mb_args=(), mb_kwargs=first, split_spec={case["split"]: SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        return {"verdict": "refused", "words": f"pipeline() made {pipe.num_stages} stages, not 2"}
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
    stage = pipe.build_stage(rank, torch.device("cpu"), group)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda outputs, wanted: value_of(case, outputs, wanted))
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(**inputs)
    else:
        schedule.step(target=target, losses=losses)
    gradients = dict(other.named_parameters())
    far = [abs(a.item() - b) for a, b in zip(losses, expected, strict=True)] if rank else []
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


def compared(case: Case, run: Callable[[nn.Module, dict[str, Tensor]], Any]) -> dict[str, Any]:
    """What comes out of an engine's modules beside the network's own outputs."""
    network, inputs, _ = made(case)
    expected = flat(copy.deepcopy(network)(**inputs))
    found = flat(run(network, inputs))
    if [t.shape for t in found] != [t.shape for t in expected]:
        return {"verdict": "wrong", "words": f"outputs of shapes {[list(t.shape) for t in found]}"}
    apart = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return (
        {"verdict": "accepted", "words": ""}
        if apart <= TOLERANCE
        else {"verdict": "wrong", "words": f"outputs differ by {apart:.1e}"}
    )


def deepspeed(case: Case, rank: int) -> dict[str, Any]:
    """A `PipelineModule` of the network's modules in their order, run by its own forward as one stage."""
    import deepspeed as engine
    from deepspeed.pipe import PipelineModule

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    if engine.comm.cdb is None:
        engine.comm.init_distributed("fake", dist_init_required=False)

    def run(network: nn.Module, inputs: dict[str, Tensor]) -> Any:
        module = PipelineModule([layer for _, layer in layers_of(network)], num_stages=1)
        given = tuple(inputs.values())
        return module(given[0] if len(given) == 1 else given)

    return compared(case, run)


def torchtitan(case: Case, rank: int) -> dict[str, Any]:
    """The parts that its splitter makes of the network's modules, one called with what the other returns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.pipeline_parallel import _pipeline_module_split  # pyright: ignore[reportMissingImports]

    def run(network: nn.Module, inputs: dict[str, Tensor]) -> Any:
        names = [name for name, _ in layers_of(network)]
        at = next(i for i, name in enumerate(names) if case["split"] == name)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        _, (first, second) = _pipeline_module_split(network, mesh, "Interleaved1F1B", torch.device("cpu"), [names[:at], names[at:]])
        made = first(**inputs)
        return second(*made) if isinstance(made, tuple) else second(made)

    return compared(case, run)


ENGINES: dict[str, Callable[[Case, int], dict[str, Any]]] = {
    "torch": torch_pipelining,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
}


def main(engine: str, cases: Path, rank: int = 0, store: str = "") -> None:
    torch.set_num_threads(1)
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
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
