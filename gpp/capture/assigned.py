"""Buffers that a module assigns instead of changing them in place, which torch.export would lose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_place(whole: nn.Module) -> Iterator[set[str]]:
    """Let a module that assigns another tensor to one of its buffers write it there: torch.export loses what is assigned.

    It is written when the module's forward ends, so that what the forward computes from either tensor is not touched. Yields the
    full names of such buffers, filled while the model is traced.
    """
    paths = {module: path for path, module in whole.named_modules()}
    before: dict[nn.Module, dict[str, Tensor | None]] = {}
    assigned: set[str] = set()

    def note(module: nn.Module, args: Any) -> None:
        before[module] = dict(module._buffers)

    def write(module: nn.Module, args: Any, output: Any) -> None:
        for name, old in before.pop(module, {}).items():
            new, path = module._buffers.get(name), paths.get(module)
            if path is None or old is None or new is None or new is old or (old.shape, old.dtype) != (new.shape, new.dtype):
                continue
            old.copy_(new.detach())
            module._buffers[name] = old
            assigned.add(f"{path}.{name}")

    handles = nn.modules.module.register_module_forward_pre_hook(note), nn.modules.module.register_module_forward_hook(write)
    try:
        yield assigned
    finally:
        for handle in handles:
            handle.remove()


def read_copies(program: torch.export.ExportedProgram, assigned: set[str]) -> None:
    """Let what reads an assigned buffer before it is written read a copy, which a backward then finds as it was."""
    graph, copy = program.graph_module.graph, torch.ops.aten.copy_.default
    order = {node: number for number, node in enumerate(graph.nodes)}
    leaves = zip([node for node in graph.nodes if node.op == "placeholder"], program.graph_signature.input_specs, strict=True)
    for leaf in [leaf for leaf, spec in leaves if spec.target in assigned]:
        written = min((order[user] for user in leaf.users if user.target is copy and user.args[0] is leaf), default=0)
        if readers := sorted((user for user in leaf.users if order[user] < written), key=order.__getitem__):
            with graph.inserting_before(readers[0]):
                kept = graph.call_function(torch.ops.aten.clone.default, (leaf,))
            kept.meta = {**readers[0].meta, "val": leaf.meta["val"]}
            for reader in readers:
                reader.replace_input_with(leaf, kept)
