"""Generate a stage's code: nodes become a `torch.fx` graph, and that becomes a Python function."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from gpp.capture.codec import bound_arguments, decode, dtype_of, operator_of
from gpp.errors import CaptureError
from gpp.graph.captured import OPERATIONS, Node

_TWO_OPERANDS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    "max": torch.sym_max,
    "min": torch.sym_min,
}
_PATH = re.compile(r"\w+(\.\w+)*")


class Watcher(Protocol):
    """Is told of the calls of a pass. A place is the number of a node among those that the stage's training pass calls."""

    def draws(self, place: int) -> None:
        """The node at `place`, which draws random numbers, is called next."""

    def made(self, place: int, following: int, value: Any) -> None:
        """The node at `place` has made `value`, a tensor or a tuple of tensors; the one at `following` is called next."""


class Root(nn.Module):
    """Tree of the parameters and buffers that a stage uses, under their full names."""

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        """The module with a name's tensor, made if it is not there; users call theirs what they like, as a method of this class."""
        *prefix, name = path.split(".")
        if not all((*prefix, name)):
            raise CaptureError(f"{path!r} is not the name of a parameter or buffer")
        module: nn.Module = self
        for part in prefix:
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]  # only modules are added
        return module, name

    def add(self, node: Node, device: torch.device, dtypes: dict[torch.dtype, torch.dtype]) -> None:
        """Add an empty parameter, buffer or constant; one that a block has brought stays."""
        module, name = self._holder(node.target)
        if name in module._parameters or name in module._buffers:
            return
        dtype = dtype_of(node.dtype or "float32")
        tensor = torch.empty([int(extent) for extent in node.shape or ()], dtype=dtypes.get(dtype, dtype), device=device)
        if node.kind == "param":
            module._parameters[name] = nn.Parameter(tensor, requires_grad=node.requires_grad)
            return
        module._buffers[name] = tensor
        if not (node.kind == "buffer" and node.persistent):
            module._non_persistent_buffers_set.add(name)

    def add_block(
        self, node: Node, make: Callable[[], nn.Module] | None, device: torch.device, dtypes: dict[torch.dtype, torch.dtype]
    ) -> None:
        """Add a hand-written block, made by `make` or else by the factory that its node names."""
        if not _PATH.fullmatch(node.name):  # it ends up in generated code
            raise CaptureError(f"{node.name!r} is not the name of a block")
        module, name = self._holder(node.name)
        if make is None:
            args, kwargs = json.loads(node.kwargs["spec"])
            make = functools.partial(import_factory(node.target), *args, **kwargs)
        block = make().to(device)
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.data = tensor.data.to(dtypes.get(tensor.dtype, tensor.dtype))
        module.add_module(name, block)

    def get(self, path: str) -> Tensor:
        """A parameter or buffer by its full name."""
        (holder, name), *_ = self.holders([path])
        return holder[name]

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace own parameters and buffers by others of the same full names."""
        for (holder, name), tensor in zip(self.holders(tensors), tensors.values(), strict=True):
            holder[name] = tensor

    def holders(self, paths: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
        """Where the parameters and buffers of these full names are found, whichever tensors they are then."""
        found = []
        for path in paths:
            module, name = self._holder(path)
            found.append((module._parameters if name in module._parameters else module._buffers, name))
        return found

    def owned(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers, non-persistent ones too, tied ones once."""
        yield from self.named_parameters()
        yield from self.named_buffers()


def import_factory(path: str) -> Callable[..., nn.Module]:
    """The function at a dotted path.

    Raises:
        CaptureError: there is no such function.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CaptureError(
            f"the block factory {path} cannot be imported: {error}. Fix: give the dotted path of an importable function or class"
        ) from error


class Emitter:
    """Builds the code of one pass, node by node in execution order.

    Args:
        training: keep training behaviour; if false, the arguments that switch it are switched off.
        batch: the only batch size that the code is for; None for any.
        watched: whether the code tells a `Watcher`, its argument behind `batch`, of every call.
        through: node -> what calls its operator in its place; of others the operator is called itself.
    """

    def __init__(
        self,
        root: Root,
        *,
        device: torch.device,
        dtypes: dict[torch.dtype, torch.dtype],
        training: bool,
        batch: int | None,
        watched: bool = False,
        through: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._through = through or {}
        self.root, self.device, self.dtypes, self.training = root, device, dtypes, training
        self.graph = fx.Graph()
        self.batch = self.graph.placeholder("batch")
        self.watcher = self.graph.placeholder("watcher") if watched else None
        self.values: dict[str, fx.Node] = {}
        self.sizes: dict[str, Any] = {}
        self.no_grad = False
        self.outer_mode: fx.Node | None = None

    def placeholder(self, name: str) -> None:
        """Add an argument: a user input, a received tensor, a parameter, buffer or constant.

        Parameters are arguments, because to find one by its path in a tree of modules takes 1 us a level, in every pass.
        """
        # Users' names may be words of Python, or differ in signs alone.
        plain = re.sub(r"\W", "_", name)
        self.values[name] = self.graph.placeholder(f"v{len(self.values)}_{plain}")

    def skip(self, node: Node) -> None:
        """Leave an in-place update out: its value is the tensor that it would have written."""
        self.values[node.name] = self.values[node.args[0]["ref"]]

    def begin(self, node: Node) -> None:
        """Switch autograd off or on, as the node has it."""
        if self.training:
            self._set_mode(node.no_grad)

    def call(self, node: Node, through: Callable[..., Any] | None = None) -> None:
        """Add a call of an operator or a block.

        Args:
            through: calls the operator in its place.
        """
        if node.kind == "block":
            args = tuple(self._decode(argument) for argument in node.args)
            self.values[node.name] = self.graph.create_node("call_module", node.name, args)
            return
        self.begin(node)
        target = operator_of(node.target)
        args = [self._decode(argument) for argument in node.args]
        kwargs = {name: self._decode(argument) for name, argument in node.kwargs.items()}
        if not self.training:
            args, kwargs = _for_evaluation(target, args, kwargs)
        if through is None and (other := self._through.get(node.name)):
            # Generated code knows its globals by name.
            other.__name__ = other.__qualname__ = f"late_{target.__name__.replace('.', '_')}"
            through = other
        if not through and target is torch.ops.aten.view.default:
            # What came in a message is contiguous, and where it was captured it may have had strides that allow the view.
            target = torch.reshape
        elif not through and (function := python_function(target)):
            target, args, kwargs = function, *every_argument(target, args, kwargs)
        self.values[node.name] = self.graph.call_function(through or target, tuple(args), kwargs)

    def tell_draws(self, place: int) -> None:
        """Tell the watcher that random numbers are drawn next."""
        assert self.watcher is not None
        self.graph.call_method("draws", (self.watcher, place))

    def tell_made(self, place: int, following: int, name: str) -> None:
        """Hand the value of a node to the watcher."""
        assert self.watcher is not None
        self.graph.call_method("made", (self.watcher, place, following, self.values[name]))

    def finish(self, outputs: list[str]) -> Callable[..., tuple[Tensor, ...]]:
        """The function (root, batch, [watcher,] *placeholders) -> outputs by node name."""
        if self.training:
            self._set_mode(False)
        self.graph.output(tuple(self.values[name] for name in outputs))
        return type(fx.GraphModule(self.root, self.graph, "Stage")).forward

    def _decode(self, value: Any) -> Any:
        return decode(value, ref=self.values.__getitem__, number=self._size, device=self.device, dtypes=self.dtypes)

    def _size(self, expression: Any) -> Any:
        """A number computed from the batch argument; equal expressions are computed once."""
        if expression == "b":
            return self.batch
        if not isinstance(expression, list):
            return expression
        if expression[0] not in OPERATIONS:
            raise CaptureError(f"unknown operation in the size expression {expression!r}")
        key = repr(expression)
        if key not in self.sizes:
            kind, *operands = expression[0], *(self._size(operand) for operand in expression[1:])
            if kind == "float":
                self.sizes[key] = self.graph.call_function(torch.sym_float, (operands[0],))
            else:
                value = operands[0]
                for operand in operands[1:]:
                    value = self.graph.call_function(_TWO_OPERANDS[kind], (value, operand))
                self.sizes[key] = value
        return self.sizes[key]

    def _set_mode(self, no_grad: bool) -> None:
        """Switch autograd where a no_grad region begins or ends."""
        if no_grad == self.no_grad:
            return
        if self.outer_mode is None:
            self.outer_mode = self.graph.call_function(torch.is_grad_enabled)
        self.graph.call_function(torch._C._set_grad_enabled, (False if no_grad else self.outer_mode,))
        self.no_grad = no_grad


def python_function(target: Any) -> Callable[..., Any] | None:
    """PyTorch's own Python function of an operator, if it has one for this operator alone.

    Both end in the same kernel. But an operator that is called as such has its arguments boxed and matched with its schema: 2 to 5
    us a call, three times that with cold caches.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    packet, arguments = target.overloadpacket, target._schema.arguments
    # The schema of one that makes a tensor of nothing has a number as the default of a type, which no function takes.
    if set(packet.overloads()) - {"out"} != {"default"} or not arguments or str(arguments[0].type) != "Tensor":
        return None
    bindings: Any = torch._C
    name = packet.__name__
    if found := getattr(bindings._nn, name, None):
        return found
    # Generated code finds it as torch.NAME, where some names (cdist) are other functions, with other arguments.
    found = getattr(bindings._VariableFunctions, name, None)
    return found if found is getattr(torch, name, None) else None


def every_argument(target: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[Any, Any]]:
    """All arguments of a call: the defaults of a Python function are not always its operator's (the reduction of a loss)."""
    given = bound_arguments(target, args, kwargs)
    named = {argument.name for argument in target._schema.arguments if argument.kwarg_only}
    return [value for name, value in given.items() if name not in named], {name: given[name] for name in given if name in named}


def _for_evaluation(target: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call with training behaviour switched off.

    Normalisation without running statistics uses those of the batch in evaluation too, as torch's modules do.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return args, kwargs
    given = bound_arguments(target, args, kwargs)
    off: dict[str, Any] = {}
    if not ("running_mean" in given and given["running_mean"] is None):
        off = {name: False for name in ("train", "training", "use_input_stats") if name in given}
    if "dropout_p" in given:
        off["dropout_p"] = 0.0
    args, kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in off:
            if position < len(args):
                args[position] = off[argument.name]
            elif argument.name in kwargs or argument.default_value != off[argument.name]:
                kwargs[argument.name] = off[argument.name]
    return args, kwargs
