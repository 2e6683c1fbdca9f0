"""Engines of others read what was written for them: `python peers.py ENGINE FOLDER ...` in an environment that has the engine.

It knows nothing of this project. For each folder it prints one line of JSON, or ends with the engine's own error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def torchtitan(folder: Path) -> dict[str, Any]:
    """Its parser loads the configuration, its splitter makes the stages of every rank, its builder the schedule."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config.manager import ConfigManager  # pyright: ignore[reportMissingImports]
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _pipeline_module_split  # pyright: ignore[reportMissingImports]

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules.pop("planned", None)
    config: Any = ConfigManager().parse_args(["--module", "planned", "--config", "planned"])
    sys.path.remove(str(folder))
    parallel = config.parallelism
    with torch.device("meta"):
        model = config.model_spec.model.build()
    whole = {name for name, _ in model.named_parameters()}
    ranks, found, count, held = parallel.pipeline_parallel_degree, {}, 0, list[str]()
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        style, names = parallel.pipeline_parallel_schedule, parallel.module_fqns_per_model_part
        stages, parts = _pipeline_module_split(model, mesh, style, torch.device("meta"), names)
        local = config.training.local_batch_size
        schedule: Any = _build_pipeline_schedule(parallelism=parallel, local_batch_size=local, stages=stages, loss_fn=lambda *g: g)
        for stage, part in zip(stages, parts, strict=True):
            found[stage.stage_index] = rank
            held += [name for name, _ in part.named_parameters()]
            assert schedule.stage_index_to_group_rank[stage.stage_index] == rank, "the CSV and the splitter place stages elsewhere"
        count = schedule._n_microbatches
        dist.destroy_process_group()
    # Its splitter numbers the layers of a stage anew: kinds of parameters and their number tell whether all are there.
    assert len(held) == len(whole), (len(held), len(whole))
    checkpointing = type(config.activation_checkpoint).__qualname__.split(".")[0]
    degrees = [parallel.data_parallel_replicate_degree, parallel.tensor_parallel_degree]
    return {"stage_rank": found, "microbatches": count, "parameters": len(held), "degrees": degrees, "ac": checkpointing}


def megatron(folder: Path) -> dict[str, Any]:
    """Its parser reads the layout, and its check accepts it."""
    from megatron.core.transformer.enums import LayerType  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # pyright: ignore[reportMissingImports]

    flags = dict(line.split(" ", 1) for line in (folder / "arguments.txt").read_text().splitlines() if " " in line)
    text = flags["--pipeline-model-parallel-layout"].strip('"')
    layout = PipelineParallelLayerLayout(text, int(flags["--pipeline-model-parallel-size"]))
    layout.validate_layer_layout(num_layers=int(flags["--num-layers"]), mtp_num_layers=0)
    layers = [[stage.count(LayerType.decoder) for stage in rank] for rank in layout.layout]
    return {"layout": text, "layers": layers, "repr": layout.pretty_repr()}


def mimo(folder: Path) -> list[dict[str, Any]]:
    """Its grids and its communicator take the module graph, and hand a tensor from the first modules to the last; a row a rank."""
    import tempfile

    import torch
    import torch.distributed as dist
    from megatron.core.model_parallel_config import ModelParallelConfig  # pyright: ignore[reportMissingImports]

    sys.path.insert(0, str(folder))
    import planned_mimo as planned  # pyright: ignore[reportMissingImports]

    given, config = dist.new_subgroups_by_enumeration, ModelParallelConfig(pipeline_dtype=torch.float32)
    world = sum(one["tp"] * one["pp"] * one["dp"] for one in planned.MODULES.values())

    def of_rank(rank: int, out: Path) -> None:
        """Megatron core 0.16.1 names NCCL and the current card where it makes groups between modules, and receives: gloo and
        the processor take their places, and all else is its own."""
        dist.new_subgroups_by_enumeration = lambda ranks, backend=None, **more: given(ranks, backend="gloo", **more)  # pyright: ignore
        torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.synchronize = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        os.environ["WORLD_SIZE"] = str(world)
        dist.init_process_group("gloo", init_method=f"file://{out.parent}/store", rank=rank, world_size=world)
        made = planned.communicator(config, backend="gloo")
        ((name, info),) = made.rank_module_map.items()
        shape = (planned.MICROBATCH_SIZE, 2, 3)
        arrived = made.recv_forward(tensor_shape=shape)
        value = sum(arrived.values(), torch.zeros(())) + 10.0**rank
        made.send_forward({name: value.expand(shape).contiguous()})
        dist.barrier()
        row = {"module": name, "pp": [info.pp_rank, info.pp_size], "warmup": made.num_warmup_microbatches}
        ends = [made.is_pp_first_stage, made.is_pp_last_stage]
        out.write_text(json.dumps({**row, "ends": ends, "from": sorted(arrived), "value": float(value.max())}))

    with tempfile.TemporaryDirectory() as where:
        outs = [Path(where) / f"rank_{rank}" for rank in range(world)]
        children = []
        for rank, out in enumerate(outs):
            if not (child := os.fork()):
                of_rank(rank, out)
                os._exit(0)
            children.append(child)
        assert not any(os.waitpid(child, 0)[1] for child in children), "a rank has failed; its own words are above"
        return [json.loads(out.read_text()) for out in outs]


def deepspeed(folder: Path) -> dict[str, Any]:
    """Its PipelineModule builds the layers of every rank, and its configuration reads the file."""
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import LayerSpec
    from deepspeed.runtime.config import DeepSpeedConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parts = json.loads((folder / "parts.json").read_text())
    sys.path.insert(0, str(folder))
    sys.modules.pop("planned", None)
    import planned  # pyright: ignore[reportMissingImports]

    sys.path.remove(str(folder))
    ranks, built = len(parts["parts"]) - 1, list[int]()
    import deepspeed as engine

    # Its shared-memory all-reduce would be compiled for minutes, for no use.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    for rank in range(ranks):
        os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        engine.comm.init_distributed("fake", dist_init_required=False)
        module = planned.PlannedModule([LayerSpec(torch.nn.Linear, 2, 2) for _ in parts["layers"]], loss_fn=torch.nn.MSELoss())
        built.append(len(module.forward_funcs))
        engine.comm.cdb = None
        dist.destroy_process_group()
    config = json.loads((folder / "ds_config.json").read_text())
    read = DeepSpeedConfig(config, mpu=None)
    return {"layers": built, "parts": parts["parts"], "batch": [read.train_batch_size, read.gradient_accumulation_steps]}


def layers_by(name: str, file: str, folder: Path) -> dict[str, Any]:
    """What a server's own `get_pp_indices` makes of its variable; it is taken out of its file, which imports what needs cards."""
    import ast
    import logging
    from importlib.util import find_spec
    from types import SimpleNamespace

    variable, _, text = (folder / "environment").read_text().strip().partition("=")
    os.environ[variable] = text
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_pp_indices"]
    scope: dict[str, Any] = {"os": os, "Tuple": tuple, "logger": logging, "envs": SimpleNamespace(**os.environ)}
    exec(compile(ast.Module([*own], []), file, "exec"), scope)
    count = len(text.split(","))
    ends = [scope["get_pp_indices"](sum(map(int, text.split(","))), rank, count) for rank in range(count)]
    return {"variable": variable, "layers": [end - begin for begin, end in ends], "ends": ends}


def vllm(folder: Path) -> dict[str, Any]:
    """Its own function cuts the layers."""
    return layers_by("vllm", "distributed/utils.py", folder)


def sglang(folder: Path) -> dict[str, Any]:
    """Its own function cuts the layers."""
    return layers_by("sglang", "srt/distributed/utils.py", folder)


ENGINES = {"vllm": vllm, "sglang": sglang, "torchtitan": torchtitan, "megatron": megatron, "mimo": mimo, "deepspeed": deepspeed}

if __name__ == "__main__":
    for one in sys.argv[2:]:
        print("READ " + json.dumps(ENGINES[sys.argv[1]](Path(one).resolve())), flush=True)
