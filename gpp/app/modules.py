"""A user's model as the one module that capture and workers know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpp.errors import InvalidConfig


def plain_module(model: Any, warn: Callable[[str], None]) -> Any:
    """The module inside wrappers whose work the pipeline does itself.

    Args:
        warn: is told of a wrapper whose work nobody does.

    Raises:
        InvalidConfig: it is no module, or a script; its parameters are not there yet, or two of them are one memory.
    """
    from torch import jit, nn
    from torch.nn.parameter import is_lazy

    if not isinstance(model, nn.Module):
        raise InvalidConfig("model", type(model).__name__, "must be a torch.nn.Module", "put the functions into one")
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        warn("torch.compile of the model is left out; engine=Distributed(compile='inductor') compiles its stages")
        return plain_module(inner, warn)
    if type(model) in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        return plain_module(model.module, warn)
    if isinstance(model, jit.ScriptModule):
        raise InvalidConfig("model", type(model).__name__, "is a script, which cannot be captured", "pass the module itself")
    memory: dict[tuple[int, int], str] = {}
    for name, param in model.named_parameters():
        if is_lazy(param):
            rule = f"has no shape yet: its {type(param).__name__} waits for a first batch"
            raise InvalidConfig(f"model.{name}", "lazy", rule, "call the model once on the examples before")
        if param.requires_grad and param.numel() and not param.is_meta:
            other = memory.setdefault((param.data_ptr(), param.numel()), name)
            if other != name:
                rule = f"is the same memory as {other}, and workers would have one of each"
                raise InvalidConfig(f"model.{name}", "shared", rule, "tie them: let both modules hold the same nn.Parameter")
    return model
