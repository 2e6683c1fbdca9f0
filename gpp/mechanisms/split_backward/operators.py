"""Which operators of a stage leave the gradients of their weights to the second half of a backward, and why others do not.

    x ── linear(w) ── matmul(v.t()) ── lstm(u) ── loss        v.t() follows from weights alone
         split        split            whole

What is computed from weights alone stays in the graph of the forward, and the second half goes through it once all the gradients
that come to it are known. A parameter of which one use stays whole gets its gradient in the first half, so all uses of it do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpp.capture.codec import bound_arguments, decode, dtype_of, operator_of, writes
from gpp.capture.stage import StageModule
from gpp.graph.captured import Node, evaluate, node_references, references
from gpp.mechanisms.split_backward.late import FORMULAS, Late

_LATE: Final = WeakKeyDictionary[StageModule, Late]()

_PRODUCTS = re.compile(
    r"aten\.(matmul|mm|bmm|mv|addmm|addmv|baddbmm|addbmm|einsum|bilinear|inner|tensordot|conv\w*|_grouped_mm)\.|gpp\.grouped_mm\."
)
"""Operators that compute apart what they would compute together: a product for the data, and one for the weights.

Others go once through data and gradients for both halves, in one kernel or nearly so. On a processor both halves of a layer norm
take 1.6 to 2.4 of the time of the whole, a group norm's 2.3, a product with a vector of scales 1.4, a sum with positions 4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The halves of one stage's backward.

    Args:
        split: node -> of each tensor among its arguments, in order, whether it is a weight or follows from weights alone.
        whole: nodes that read trained weights, or follow from them alone, and make their gradients in the first half -> why.
        alone: nodes that follow from trained weights alone.
    """

    split: Mapping[str, tuple[bool, ...]]
    whole: Mapping[str, str]
    alone: frozenset[str]


def halves(
    node_of: Mapping[str, Node],
    calls: Sequence[str],
    outputs: Iterable[str],
    *,
    whole: frozenset[str] = frozenset(),
    formulas: bool = False,
    elsewhere: bool = False,
) -> Halves:
    """The split of a stage's backward.

    Args:
        node_of: nodes by name.
        calls: nodes that its training pass calls, in order.
        outputs: those among them whose values leave the stage.
        whole: nodes that are to stay whole.
        formulas: whether all but the operators of `late.FORMULAS` stay whole: an operator with a graph of its own keeps
            its inputs and its weights as the forward found them.
        elsewhere: whether another device makes the second half, out of what it is sent: operators of which
            it could not know enough stay whole.
    """
    return _HalvesSearch(node_of, calls, whole, formulas or elsewhere, elsewhere).run(set(outputs))


def split(module: StageModule, *, whole: frozenset[str] = frozenset(), formulas: bool = False, elsewhere: bool = False) -> Halves:
    """Let the backward of training passes leave the gradients of the weights in `late_of`; arguments as `halves` has them."""
    cut = module.cut
    found = halves(cut.node_of, cut.calls, cut.outputs, whole=whole, formulas=formulas, elsewhere=elsewhere)
    late = Late(cut.device)
    targets = {name: cut.node_of[name].target for name in found.split}
    module.call_through({name: late.of(name, targets[name], own, operator_of(targets[name])) for name, own in found.split.items()})
    _LATE[module] = late
    return found


def late_of(module: StageModule) -> Late:
    """What the last backward of a module that is split has left."""
    return _LATE[module]


class _HalvesSearch:
    def __init__(
        self, node_of: Mapping[str, Node], calls: Sequence[str], whole: frozenset[str], formulas: bool, elsewhere: bool
    ) -> None:
        self.node_of, self.calls = node_of, calls
        self.own, self.asked, self.formulas, self.elsewhere = set(calls), whole, formulas, elsewhere
        self.roots: dict[str, frozenset[str]] = {}
        """Weights, and nodes that follow from weights alone -> the trained parameters behind them."""
        self.data: set[str] = set()
        self.readers: list[str] = []

    def run(self, outputs: set[str]) -> Halves:
        """See `halves`."""
        for name in self.calls:
            self._follow(name)
        why = {name: reason for name in self.readers if (reason := self._reason(self.node_of[name]))}
        why |= dict.fromkeys(outputs & set(self.roots), "its value leaves the stage")
        for name in self.calls:
            if name in self.roots and writes(operator_of(self.node_of[name].target)):
                why[name] = "it writes in place"
        users, uses = self._users_and_uses()
        changed = True
        while changed:
            before = len(why)
            for param, found in users.items():
                if not any(name in why for name in found) and not _added_in_order(uses.get(param, [])):
                    why[found[0]] = f"its gradient of {self.node_of[param].target} is one of several that autograd adds up in turn"
                if first := next((name for name in found if name in why), None):
                    reason = f"it reads {self.node_of[param].target}, as {first} does, which stays whole"
                    for name in found:
                        why.setdefault(name, reason)
            changed = len(why) > before
        split = {
            name: tuple(need in self.roots for need in node_references(self.node_of[name]))
            for name in self.readers
            if name not in why
        }
        return Halves(split=split, whole=why, alone=frozenset(self.roots) & self.own)

    def _follow(self, name: str) -> None:
        """Whether a call depends on samples, on weights alone, or reads both."""
        node = self.node_of[name]
        needs = list(node_references(node))
        for need in needs:
            leaf = self.node_of[need]
            if need not in self.own and leaf.kind == "param" and leaf.requires_grad:
                self.roots.setdefault(need, frozenset([need]))
            elif need not in self.own and leaf.kind not in ("param", "buffer", "constant"):
                self.data.add(need)
        behind = frozenset[str]().union(*(self.roots.get(need, frozenset()) for need in needs))
        if any(need in self.data for need in needs) or node.kind == "block":
            self.data.add(name)
            if behind and not node.no_grad and node.requires_grad:
                self.readers.append(name)
        elif behind and not node.no_grad and node.requires_grad:
            self.roots[name] = behind

    def _reason(self, node: Node) -> str | None:
        """Why an operator cannot be split, seen by itself; None if it can."""
        if node.kind == "block":
            return "it is a hand-written block, which nobody looks into"
        if node.name in self.asked:
            return "its halves take more than 1.1 of the time of the whole, as measured"
        target = operator_of(node.target)
        if node.mutates or writes(target):
            return "it writes in place"
        if node.target not in FORMULAS and not _PRODUCTS.match(node.target):
            return "it makes no product, so both halves would go through the same data"
        schema = getattr(target, "_schema", None)
        if schema is None or any(made.alias_info is not None for made in schema.returns):
            return "it makes a view"
        if node.target in FORMULAS:
            given = bound_arguments(target, node.args, node.kwargs)
            weights = [name for key in ("weight", "bias") for name in references(given.get(key))]
            rest = [name for key, value in given.items() if key not in ("weight", "bias") for name in references(value)]
            if not any(name in self.data for name in weights) and not any(name in self.roots for name in rest):
                computed = self.elsewhere and any(name in self.own for name in weights)
                return (
                    "it reads what is computed from weights, which the device that makes the second half does not have"
                    if computed
                    else None
                )
            return "it computes with weights in place of data"
        if not self.formulas and _reads_twice(node, self.node_of, self.data):
            return "it reads its data several times, whose gradients autograd adds up one by one"
        return "it is computed with the weights that the forward found, which are gone by then" if self.formulas else None

    def _users_and_uses(self) -> tuple[dict[str, list[str]], dict[str, list[tuple[int, bool]]]]:
        """Trained parameter -> the calls that read it, or what follows from it, in order; and of the calls that follow from
        weights, node -> (place, whether it is a reader) of those that read the node itself."""
        users: dict[str, list[str]] = defaultdict(list)
        uses: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        readers = set(self.readers)
        for place, name in enumerate(self.calls):
            if name in self.roots or name in readers:
                needs = dict.fromkeys(node_references(self.node_of[name]))
                for param in sorted(frozenset[str]().union(*(self.roots.get(need, frozenset()) for need in needs))):
                    users[param].append(name)
                for need in needs:
                    uses[need].append((place, name not in self.roots))
        return users, uses


# Any number of samples that is nobody's size by chance.
_SAMPLES = 3


def _reads_twice(node: Node, node_of: Mapping[str, Node], data: Iterable[str]) -> bool:
    """Whether autograd differentiates an operator as several, of which more than one read the same data."""
    target = operator_of(node.target)
    assert isinstance(target, torch._ops.OpOverload), "what takes a tensor out of several is no reader"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return False
    given: dict[str, Tensor] = {}

    def value(name: str) -> Tensor:
        if name not in given:
            of = node_of[name]
            # Passes may cast what nodes have in several types.
            dtype = torch.float32 if dtype_of(of.dtype or "float32").is_floating_point else dtype_of(of.dtype or "")
            shape = [int(evaluate(size, _SAMPLES)) for size in of.shape or ()]
            given[name] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=of.requires_grad)
        return given[name]

    args, kwargs = (
        decode(part, ref=value, number=lambda tree: evaluate(tree, _SAMPLES), device=torch.device("meta"))
        for part in (node.args, list(node.kwargs.values()))
    )
    made = target(*args, **dict(zip(node.kwargs, kwargs, strict=True)))
    watched = {name for name in given if name in data and given[name].requires_grad}
    todo = [t.grad_fn for t in (made if isinstance(made, (tuple, list)) else (made,)) if t.grad_fn is not None]
    seen, reads = set(todo), list[object]()
    while todo:
        for step, _ in todo.pop().next_functions:
            if step is None:
                continue
            reads += [step.variable] if hasattr(step, "variable") else []
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return any(sum(found is given[name] for found in reads) > 1 for name in watched)


def _added_in_order(uses: Sequence[tuple[int, bool]]) -> bool:
    """Whether the queue adds up a parameter's gradients as autograd does, which goes from the last use to the first.

    The queue has those of its readers first, and then those of what follows from it alone. Two are equal in either order.
    """
    late = [place for place, reads in uses if reads]
    alone = [place for place, reads in uses if not reads]
    return len(uses) < 3 or not late or not alone or min(late) > max(alone)
