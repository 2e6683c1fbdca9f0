"""`torch.export` on model, loss and metrics, with its errors in the user's terms."""

from __future__ import annotations

import builtins
import contextlib
import io
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._library.autograd as library_autograd
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._library.autograd import make_autograd_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer

from gpp.capture.flex import as_attention
from gpp.capture.given import given
from gpp.capture.kept import KeptModules
from gpp.capture.untraced import KnownValues, as_trained, data_detached, gathered, in_place, refused, unchecked
from gpp.capture.user_lines import REWRITE, explained, looks_at_values, reason, where
from gpp.errors import CaptureError, GppError, InvalidConfig
from gpp.graph.captured import ITEMS, LOSS
from gpp.models.losses import Loss, Measure, loss_terms, module_of


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An exported program with the names that are needed to read it.

    Args:
        inputs: names of the user inputs in the program's order; targets as `target:NAME`.
        results: names of the outputs in order.
        batch: None if symbolic.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    batch: int | None
    warnings: tuple[str, ...]


class Whole(nn.Module):
    """Model, loss and metrics as one module: it takes flat tensors and returns loss and metrics.

    The model is called within `around`.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        inputs: tuple[str, ...],
        targets: tuple[str, ...],
        loss: Loss,
        metrics: Mapping[str, Measure],
        items: Mapping[str, Callable[..., Any]],
        tell: Callable[[tuple[str, ...]], None],
    ) -> None:
        super().__init__()
        self.model = model
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        own = module_of(loss)
        if own is not None and own not in set(model.modules()):
            self.loss = own
        self.roots: dict[str, Any] = {"": model, "the loss": loss, **metrics, **items}
        # kept in a tuple so that nn.Module does not register modules among them a second time
        self._functions = (call, inputs, targets, loss, tuple(metrics.values()), items, tell)

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """(loss, metric, items, ...), all of them scalars; `tell` gets the names of the losses among them."""
        call, inputs, names, loss, metrics, items, tell = self._functions
        num_inputs = len(inputs)
        with self.around():
            outputs = call(self.model, flat[:num_inputs])
        targets: Any = dict(zip(names, flat[num_inputs:], strict=True))
        if len(names) == 1:
            targets = flat[num_inputs]
        terms = loss_terms(loss(outputs, targets))
        tell(tuple(terms))
        counted = flat[0] if num_inputs == 1 else dict(zip(inputs, flat[:num_inputs], strict=True))
        counts = [torch.as_tensor(count(counted, targets)).sum() for count in items.values()]
        return (*terms.values(), *(function(outputs, targets) for function in metrics), *counts)


def example_batch(examples: Mapping[str, Tensor]) -> int:
    """The batch size of the example tensors, each [batch, ...].

    Raises:
        InvalidConfig: the examples have no batch size, differing ones, or a batch of one sample.
    """
    for name, tensor in examples.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            what = "a tensor of one number" if isinstance(tensor, Tensor) else type(tensor).__name__
            rule, fix = "must be a tensor with the batch as its first dimension", "give numbers as Python's own: they are constants"
            raise InvalidConfig(f"inputs.{name}", what, rule, fix)
    if not examples:
        raise InvalidConfig("inputs", None, "have no tensor", "give the mini-batch's tensors, batch first")
    sizes = {name: tensor.shape[0] for name, tensor in examples.items()}
    if len(set(sizes.values())) != 1:
        rule = "the first dimension of every input and target must be the same batch size"
        raise InvalidConfig("inputs", sizes, rule, "pass batch-first tensors of one batch size")
    (size,) = set(sizes.values())
    if size < 2:
        rule = "torch.export takes sizes 0 and 1 for constants, so the example batch must be at least 2"
        raise InvalidConfig("inputs", sizes, rule, "pass two samples")
    return size


def resized(tensor: Tensor, batch: int) -> Tensor:
    """[batch, ...]: the example with another batch size, cut or with its samples repeated."""
    repeats = -(-batch // tensor.shape[0])
    return tensor.repeat(repeats, *[1] * (tensor.dim() - 1))[:batch] if repeats > 1 else tensor[:batch]


def trace(
    model: nn.Module,
    inputs: Any,
    targets: Mapping[str, Tensor],
    loss: Loss,
    metrics: Mapping[str, Measure],
    items: Mapping[str, Callable[..., Any]] | None = None,
    *,
    batch: int | None,
) -> Traced:
    """Export with a symbolic batch, or at a fixed batch size where the model allows no other.

    Every module keeps its mode, and the model is left as it was.

    Args:
        items: name of a loss term, or an empty one for all -> function (inputs, targets) -> number of its items.

    Raises:
        CaptureError: the model cannot be captured.
        InvalidConfig: see `example_batch`.
    """
    asked = given(model, inputs)
    examples, call = asked.tensors, asked.call
    names = (*examples, *(f"target:{name}" for name in targets))
    # torch.export takes one tensor that is given twice (labels that are the tokens) for one input.
    tensors = {name: tensor.clone() for name, tensor in zip(names, (*examples.values(), *targets.values()), strict=True)}
    size = example_batch(tensors)
    losses: list[str] = []
    tell = lambda names: losses.__setitem__(slice(None), names)  # noqa: E731
    counts = items or {}
    whole = Whole(model, call, tuple(examples), tuple(targets), loss, metrics, counts, tell)
    notes: list[str] = []
    try:
        with (
            _without_storage(whole, tensors) as flat,
            _annotations(notes),
            as_attention(where),
            mock.patch.object(transformer, "_detect_is_causal_mask", _is_causal),
            _left_alone(whole) as again,
            in_place(whole),
            data_detached(),
            unchecked(),
            gathered(),
            refused(),
            as_trained(whole),
        ):
            program, fixed = _exported(whole, flat, batch or size, again, notes)
    except GppError:
        raise
    except (Exception, SystemExit) as error:
        raise CaptureError(explained(error, whole)) from error
    return Traced(
        program=program,
        inputs=names,
        results=(*losses, *(f"metric:{name}" for name in metrics), *(ITEMS + (f"{LOSS}:{n}" if n else "") for n in counts)),
        batch=fixed,
        warnings=tuple(dict.fromkeys(notes)),
    )


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the user of `nn.Transformer` says that a mask is causal.

    Torch's own looks at its values; `gpp.capture.causal` does where it can.
    """
    return bool(is_causal)


def _export(whole: Whole, flat: tuple[Tensor, ...], dim: Any) -> torch.export.ExportedProgram:
    shapes = None if dim is None else {"flat": tuple({0: dim} for _ in flat)}
    # on failure torch prints the whole graph before it raises; the exception says it all
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        # nn.LSTM and its kin keep their weights in a list as well; they are captured through their names
        warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export", category=UserWarning)
        with mock.patch.object(builtins, "len", _length):
            return torch.export.export(whole, flat, dynamic_shapes=shapes, strict=False)


def _length(thing: Any, /, _of: Callable[[Any], int] = len) -> Any:
    """`len`, which of a tensor is a size of the graph: Python's own makes a number of it, and a constant of the batch."""
    return thing.shape[0] if isinstance(thing, Tensor) and thing.dim() else _of(thing)


@contextlib.contextmanager
def _constants() -> Iterator[list[str]]:
    """The lines of the user's code at which torch makes a constant of a size, while this is open."""
    lines: list[str] = []
    own = ShapeEnv._set_replacement

    def replaced(env: ShapeEnv, size: Any, by: Any, *more: Any) -> None:
        if by.is_number:
            lines.append(where(traceback.extract_stack()))
        own(env, size, by, *more)

    with mock.patch.object(ShapeEnv, "_set_replacement", replaced):
        yield lines


def _exported(
    whole: Whole, flat: tuple[Tensor, ...], size: int, again: Callable[[], None], notes: list[str]
) -> tuple[torch.export.ExportedProgram, int | None]:
    """Export with a symbolic batch; where that fails at one batch size, which is returned and noted.

    A model whose code looks at values has those that follow from numbers alone (`KnownValues`). If all fails, the first
    failure is raised.
    """
    dim, sized = torch.export.Dim("batch", min=1), tuple(resized(tensor, size) for tensor in flat)
    with _constants() as lines:
        try:
            return _export_known(whole, flat, dim, again), None
        except GppError:
            raise
        except Exception as error:
            first = error
    again()
    try:
        program = _export_known(whole, sized, None, again)
    except CaptureError:
        raise
    except Exception as second:
        violated = isinstance(first, UserError) and first.error_type == UserErrorType.CONSTRAINT_VIOLATION
        raise (second if violated else first) from None
    notes.append(f"captured at the fixed batch size {size}: {reason(first, lines)}")
    return program, size


def _export_known(whole: Whole, flat: tuple[Tensor, ...], dim: Any, again: Callable[[], None]) -> torch.export.ExportedProgram:
    """Export as it is; where a number is read from a tensor, with values that follow from numbers alone, if that is enough."""
    program, failure = None, None
    try:
        program = _export(whole, flat, dim)
        if not _reads(program):
            return program
    except Exception as error:
        if not looks_at_values(error):
            raise
        failure = error
    again()
    with contextlib.suppress(Exception), mock.patch.object(whole, "around", KnownValues):
        known = _export(whole, flat, dim)
        if program is None or not _reads(known):  # a number that is read may decide nothing
            return known
    if program is not None:
        return program
    assert failure is not None
    raise failure


def _reads(program: torch.export.ExportedProgram) -> bool:
    """Whether a program reads a number from a tensor."""
    return any(node.target is torch.ops.aten.item.default for node in program.graph.nodes)


@contextlib.contextmanager
def _without_storage(whole: Whole, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Make a model on the meta device look like one on the CPU, so that constants made in its code fit it.

    Parameters and buffers are exchanged for fake ones of the same identity (ties stay ties) and put
    back afterwards. A model with real parameters is left alone. Yields the inputs to trace with.
    """
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (holder, key, value)
        for module in whole.modules()
        for holder in (module._parameters, module._buffers, vars(module))
        for key, value in holder.items()
        if isinstance(value, Tensor)
    ]
    if not any(value.is_meta for _, _, value in slots):
        device = next((value.device for _, _, value in slots), torch.device("cpu"))
        yield tuple(tensor.to(device) for tensor in tensors.values())
        return
    recurrent = [module for module in whole.modules() if isinstance(module, nn.RNNBase)]
    flat_weights = [module._flat_weights for module in recurrent]
    fakes: dict[int, Tensor] = {}
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        for holder, key, value in slots:
            if id(value) not in fakes:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                fakes[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
            holder[key] = fakes[id(value)]
        for module in recurrent:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        flat = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors.values())
    try:
        yield flat
    finally:
        for holder, key, value in slots:
            holder[key] = value
        for module, weights in zip(recurrent, flat_weights, strict=True):
            module._flat_weights = weights


@contextlib.contextmanager
def _left_alone(whole: Whole) -> Iterator[Callable[[], None]]:
    """Put back what tracing changes in the model; yields what does so before another attempt.

    Hooks on the backward of modules are left out: they are functions of autograd, which cannot be traced.
    """
    kept = KeptModules(whole.roots, values=False)

    def begin() -> None:
        kept.put_back()
        for module in whole.modules():
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()

    try:
        begin()
        yield begin
    finally:
        kept.put_back()


@contextlib.contextmanager
def _annotations(notes: list[str]) -> Iterator[None]:
    """Find annotations that tracing would lose silently: checkpoints (noted) and custom backwards (refused).

    The Function that torch makes for an operator with a registered backward is none of them: what is captured is the operator,
    which brings its backward along.
    """
    written: Any = torch.autograd.Function.__dict__["apply"]

    def plain(cls: type, *args: Any, **kwargs: Any) -> Any:
        return written.__get__(None, cls)(*args, **kwargs)  # up to 2.14 a function of Python, then one of C

    def note() -> None:
        notes.append(
            f"torch.utils.checkpoint at {where(traceback.extract_stack())} is ignored; the activations inside are kept. "
            "strategy/memory=recompute computes again what does not fit"
        )

    def not_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        # The note stands around the call of the function: up to 2.11 torch's own saves the inputs with a Function.
        note()
        yield

    generator = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpointing, f"{generator}_impl"):  # from torch 2.15
        generator += "_impl"

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == library_autograd.__name__:
            return plain(cls, *args, **kwargs)
        if cls is checkpointing.CheckpointFunction:
            note()
            function, _, *operands = args
            return function(*operands)
        if cls.__module__ == make_autograd_impl.__module__:
            return plain(cls, *args, **kwargs)
        raise CaptureError(
            f"{cls.__name__} is a torch.autograd.Function at {where(traceback.extract_stack())}; capturing would "
            f"drop its own backward. Fix: {REWRITE}"
        )

    with (
        mock.patch.object(checkpointing, generator, not_reentrant),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
    ):
        yield
