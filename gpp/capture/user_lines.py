"""The user's line behind what torch says: where tracing failed, why, and what to write there."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.exc import UserError, UserErrorType

_LIBRARY = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(__file__).parents[1] / "app"), "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
OUTSIDE = (
    "take what follows from values out of forward, and hand its result in: a tensor, batch first, or numbers of Python, as in "
    "grid=(4, 8), which are constants and may decide"
)
REGISTER = (
    "register it in a module of its own, when that is imported, and name the module where it is not found: "
    "model.imports=[its.module] on the command line, gpp.Run(imports=['its.module']) in Python"
)
REWRITE = "rewrite that line without it, or describe the model by hand-written blocks (model=blocks)"


def reason(error: Exception, constants: Sequence[str]) -> str:
    """Why the batch could not be symbolic: the line that made a constant of it or failed, or torch's own finding.

    Args:
        constants: lines that made constants of sizes.
    """
    if isinstance(error, UserError) and error.error_type == UserErrorType.CONSTRAINT_VIOLATION:
        if constants:
            return f"{constants[0]}: this makes a constant of it"
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- ")]
        return re.split(r"(?<=\.) If you're", lines[0])[0] if lines else str(error).splitlines()[0]
    return f"{where(traceback.extract_tb(error.__traceback__))}: {str(error).splitlines()[0]}"


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor this room's."""
    standard = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    return not filename.startswith(_LIBRARY) and not standard


def where(frames: traceback.StackSummary) -> str:
    """`file:line: source` of the innermost frame of the user's code."""
    for frame in reversed(frames):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown place"


def where_of(stack_trace: str | None) -> str | None:
    """`file:line: source` of the innermost user frame in a node's stack trace from torch; None without one."""
    found = re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")
    for filename, line in reversed(found):
        if is_users(filename):
            return f"{filename}:{line}: {linecache.getline(filename, int(line)).strip()}"
    return None


def looks_at_values(error: BaseException) -> bool:
    """Whether the code of a model needed a number that is in a tensor."""
    return "data-dependent" in next((line for line in str(error).splitlines() if line.strip()), "")


def explained(error: BaseException, whole: nn.Module) -> str:
    """The message of a capture that failed: the line, what torch found there, and the fix.

    Args:
        whole: what was traced.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    what, fix = f"{type(error).__name__}: {first}", REWRITE
    if "fake tensor in the exported program" in first:
        what = "a tensor comes out of what a trace cannot follow, as torch.autograd.grad or code that is not torch's"
    if looks_at_values(error):
        what = f"control flow or a size depends on a tensor's value ({first.split(' (unhinted')[0]})"
        fix = _captured_otherwise(whole, frames) or f"{OUTSIDE}; or {fix}"
    if any(frame.filename.endswith("nn/modules/batchnorm.py") for frame in frames):
        fix = "give the batch norm a momentum, as momentum=0.1: without one it counts batches in Python"
    if unknown := re.fullmatch(r"'_OpNamespace' '(.+)' object has no attribute '(.+)'", first):
        what, fix = f"No module that was imported registers the operator {unknown[1]}::{unknown[2]}", REGISTER
    return f"the model cannot be captured at {where(frames).rstrip(':')}. {what}. Fix: {fix}"


def _captured_otherwise(whole: nn.Module, frames: traceback.StackSummary) -> str | None:
    """The setting by which a model's own code leaves out control flow that depends on values; None where there is none.

    The experts of Transformers are a loop over those that have tokens (eager), or products that need none.
    """
    chosen = {getattr(getattr(module, "config", None), "_experts_implementation", None) for module in whole.modules()}
    experts = any("expert" in frame.name or "expert" in (frame.line or "") for frame in frames if is_users(frame.filename))
    if "eager" not in chosen or not experts:
        return None
    return "choose experts without a loop: model.set_experts_implementation('grouped_mm'), or 'batched_mm'"
