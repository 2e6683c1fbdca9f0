"""Measurement of how long the operators of a captured model take on the device at hand.

Each operator group is cut out as a stage of its own, fed with made-up tensors of the right shapes, and timed forwards
and backwards apart, with gradients accumulating as they do from the second micro-batch on. The cost of calling a stage
is measured once and subtracted, because a stage of many operators pays it once. Groups of equal amounts and shapes
(repeated layers) are timed once. Where a group's backward can leave gradients of weights for later,
both passes are timed too, at the most samples.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gpp.capture.added import capture_part
from gpp.capture.codec import dtype_of, sizes_of
from gpp.capture.stage import StageModule, build_stage
from gpp.cost.load import Load
from gpp.cost.models.profiled import MOST_APART, GraphProfile, Setting, cpu_setting
from gpp.graph.captured import Captured, is_loss
from gpp.graph.op_graph import Op, OpGraph

WORK = """
import os, sys, torch
parent = int(sys.argv[1])  # not os.getppid(): the parent may have died already
torch.set_num_threads(1)
layer = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
x = torch.randn(64, 512)
layer(x).sum().backward()
print("busy", flush=True)
while os.getppid() == parent:
    layer(x).sum().backward()
    layer.zero_grad()
"""
"""Forwards and backwards of 2 MB of weights: products, copies and additions, as a stage of a model has them."""


@contextmanager
def companions(count: int) -> Iterator[tuple[int, ...]]:
    """`count` processes of one thread that compute from the beginning to the end of the block, which gets their ids."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", WORK, str(os.getpid())], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield tuple(process.pid for process in processes)


# A timing lasts this long at least, by looping over fast operators; below it the clock and the scheduler show.
_SPAN_S = 5e-4
MIN_REPEATS, _MAX_REPEATS = 2, 10
# Rounds over all operators, so that a busy moment of the machine does not fall on one operator alone.
_ROUNDS = 3
_WEIGHT_STD = 0.02
# A pass this long is far beyond fixed costs: larger ones take time in proportion, and would need much memory.
_SLOW_S = 0.25


def setting_of(device: str, num_threads: int, optimizer: str = "", num_companions: int = 0) -> Setting:
    """The setting that a measurement on `device` depends on."""
    if torch.device(device).type == "cpu":
        return cpu_setting(num_threads, optimizer, num_companions)
    return Setting(
        device_kind="cuda",
        device_name=torch.cuda.get_device_name(device),
        torch_version=torch.__version__,
        num_threads=num_threads,
        optimizer=optimizer,
    )


def profile(
    captured: Captured,
    graph: OpGraph,
    *,
    sample_counts: Sequence[int],
    device: str = "cpu",
    num_threads: int = 1,
    budget_s: float = 8.0,
    optimizer: Any = None,
    num_companions: int = 0,
) -> GraphProfile:
    """Time every operator of `graph` at every sample count.

    Args:
        sample_counts: ascending; `(captured.batch,)` for a model that runs at one batch size only.
        num_threads: CPU threads of one device, as the workers use.
        budget_s: seconds that this may take, roughly; slow operators get fewer repeats, never below two in each of
            three rounds.
        optimizer: an `AbstractOptimizer` whose step is timed; None measures none.
        num_companions: busy devices beside the measured one.

    Returns:
        Medians, without the cost of calling a stage, which is `pass_s`.
    """
    at = torch.device(device)
    with threads(num_threads), companions(num_companions) as beside:
        load = Load(beside)
        overhead = min((_overhead(at) for _ in range(_ROUNDS)), key=lambda pair: pair.forward_s + pair.backward_s)
        keys = [_signature(captured, op, build_stage(captured, list(op.nodes), device=torch.device("meta"))) for op in graph.ops]
        distinct = dict(zip(keys, graph.ops, strict=True))
        budget = budget_s / (2 * _ROUNDS * len(sample_counts) * max(1, len(distinct)))
        seen: dict[Any, list[_Row]] = {key: [] for key in distinct}
        part = capture_part()
        parts: dict[Any, list[_LateShare]] = {key: [] for key in distinct}
        for _ in range(_ROUNDS):
            for key, op in distinct.items():
                module = build_stage(captured, list(op.nodes), device=at)
                fill(module)
                seen[key].append(row := _row(module, sample_counts, at, budget, overhead))
                if op.weight_flops and sum(row[-1]) <= _SLOW_S and part and (rest := part.parted(module)):
                    parts[key].append(_in_two(module, sample_counts[-1], at, budget, overhead, row[-1][1], rest))
        rows = {key: tuple(zip(*map(_medians, zip(*found, strict=True)), strict=True)) for key, found in seen.items()}
        update = _update_s_per_byte(optimizer, at) if optimizer else None
        shares = {key: _LateShare(*(_medians(found) or (0.0, 0.0))) for key, found in parts.items()}
        others = load.share()
    return GraphProfile(
        graph_fingerprint=graph.fingerprint,
        sample_counts=tuple(sample_counts),
        update_s_per_byte=update,
        move_s_per_byte=_move_s_per_byte(at) if optimizer else None,
        setting=setting_of(device, num_threads, optimizer.kind if optimizer else "", num_companions),
        forward_s=tuple(rows[key][0] for key in keys),
        backward_s=tuple(rows[key][1] for key in keys),
        pass_s=(overhead.forward_s, overhead.backward_s),
        weight_share=tuple(shares[key].share if shares[key].apart <= MOST_APART else 0.0 for key in keys),
        apart=tuple(shares[key].apart for key in keys),
        others=others,
    )


_Row = list[tuple[float, float]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context in which torch has as many threads as a device."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class _PassTimes:
    forward_s: float
    backward_s: float


class _LateShare(NamedTuple):
    """A backward in two passes.

    Args:
        share: of its seconds, those of the second.
        apart: its seconds over those of the whole backward.
    """

    share: float
    apart: float


def _in_two(
    module: StageModule,
    samples: int,
    device: torch.device,
    budget_s: float,
    overhead: _PassTimes,
    whole_s: float,
    rest: Callable[[], Callable[[], None]],
) -> _LateShare:
    """The two passes of a group's backward, given the seconds of the whole one; `rest` as `AbstractCapturePart.parted` has it."""
    (forward, seeds), kept = one_pass(module, samples, device), list[Callable[[], None]]()

    def first(made: list[list[torch.Tensor]]) -> None:
        for roots in made:
            torch.autograd.backward(roots, seeds)
            kept.append(rest())

    def second(made: list[list[torch.Tensor]]) -> None:
        for finish in kept:
            finish()
        kept.clear()

    _, at_once, late = _time(lambda loops: [forward() for _ in range(loops)], [first, second], device, budget_s)
    at_once = max(at_once - overhead.backward_s, at_once / 10)
    return _LateShare(late / (at_once + late), (at_once + late) / whole_s)


def _row(module: StageModule, sample_counts: Sequence[int], device: torch.device, budget_s: float, overhead: _PassTimes) -> _Row:
    """(forward, backward) seconds of one group at each sample count, extrapolated above the first slow count."""
    out: _Row = []
    for i, samples in enumerate(sample_counts):
        if out and sum(out[-1]) > _SLOW_S:
            growth = samples / sample_counts[i - 1]
            out.append((out[-1][0] * growth, out[-1][1] * growth))
        else:
            pair = _time_passes(*one_pass(module, samples, device), device, budget_s)
            # An operator's own time: at least a tenth of the measured time, so that noise cannot make it vanish.
            forward_s = max(pair.forward_s - overhead.forward_s, pair.forward_s / 10)
            out.append((forward_s, max(pair.backward_s - overhead.backward_s, pair.backward_s / 10)))
    return out


def _medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """The median of each column; none without rows."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _signature(captured: Captured, op: Op, module: StageModule) -> tuple[Any, ...]:
    """A key that is equal for groups of equal calls, amounts, and shapes of all tensors that go in or out."""
    nodes = [captured.node_of[name] for name in op.nodes]
    boundary = [(n.shape, n.dtype, n.requires_grad) for n in module.entering().values()]
    return (
        tuple((n.target if n.kind in ("call", "block") else n.kind, repr(n.shape), n.dtype) for n in nodes),
        repr(boundary),
        len(module.sends),
        tuple(module.results),
        op.forward_flops,
        op.backward_flops,
        op.traffic_bytes,
        op.saved_bytes,
        tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()),
    )


def fill(module: StageModule) -> None:
    """Fill tensors with ordinary values: zeros, infinities or denormals can be much faster or slower."""
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(0.0, _WEIGHT_STD)
        for buffer in module.buffers():
            buffer.fill_(1 if buffer.is_floating_point() else 0)


def _values(module: StageModule, samples: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Name -> a made-up tensor of `samples` samples for a stage: normal numbers, index 0, or true."""
    out = {}
    for name, node in module.entering().items():
        shape, dtype = sizes_of(node, samples), dtype_of(node.dtype or "float32")
        if dtype.is_floating_point:
            out[name] = torch.randn(shape, dtype=dtype, device=device)
        else:
            out[name] = torch.full(shape, dtype is torch.bool, dtype=dtype, device=device)
    # A run counts once for a mini-batch, not in every forward.
    return {**out, **(module.counts.columns(out)(0, samples) if module.counts else {})}


def one_pass(
    module: StageModule, samples: int, device: torch.device
) -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """A forward of one group, and a gradient for each tensor that it returns, in the tensor's shape."""
    values = _values(module, samples, device)
    differentiable = {name for name in module.receives if module.spec(name).differentiable}

    def forward() -> list[torch.Tensor]:
        leaves = {name: t.detach().requires_grad_() if name in differentiable else t for name, t in values.items()}
        outputs = module(samples, leaves)
        return [t for name, t in outputs.items() if t.requires_grad and (name in module.sends or is_loss(name))]

    return forward, [torch.ones_like(t) for t in forward()]


def _overhead(device: torch.device) -> _PassTimes:
    """Seconds of a stage without any computing: a tensor enters and its gradient leaves."""
    received = torch.randn(1, device=device)
    return _time_passes(lambda: [received.detach().requires_grad_()], [torch.ones(1, device=device)], device, 0.05)


def _time_passes(
    forward: Callable[[], list[torch.Tensor]], seeds: list[torch.Tensor], device: torch.device, budget_s: float
) -> _PassTimes:
    """Medians over repeats of a forward and its backward."""

    def backward(made: list[list[torch.Tensor]]) -> None:
        for roots in made if seeds else ():
            torch.autograd.backward(roots, seeds)

    first, second = _time(lambda loops: [forward() for _ in range(loops)], [backward], device, budget_s)
    return _PassTimes(first, second if seeds else 0.0)


def _time(
    begin: Callable[[int], list[list[torch.Tensor]]],
    steps: Sequence[Callable[[list[list[torch.Tensor]]], None]],
    device: torch.device,
    budget_s: float,
) -> list[float]:
    """Medians over repeats, after two warm-up passes, which also fill the gradients that later passes add to.

    Args:
        begin: so many forwards.
        steps: what follows on all that they have made.
    """
    synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    clock = clock_of(device)

    def once(loops: int) -> list[float]:
        synchronize()
        marks = [clock()]
        made = begin(loops)
        synchronize()
        marks.append(clock())
        for step in steps:
            step(made)
            synchronize()
            marks.append(clock())
        return [(after - before) / loops for before, after in pairwise(marks)]

    once(1)
    took = sum(once(1))
    # The number is bounded, because the graphs of all loops are alive between the forwards and the backwards.
    loops = max(1, min(20, int(_SPAN_S / max(took, 1e-7))))
    seen: list[list[float]] = []
    end = time.perf_counter() + 2 * budget_s
    while len(seen) < _MAX_REPEATS and (len(seen) < MIN_REPEATS or time.perf_counter() < end):
        seen.append(once(loops))
    return _medians(seen)


def clock_of(device: torch.device) -> Callable[[], float]:
    """On one core, the time that this process computed: other programs on a busy machine do not count."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _cold(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work` on tensors that are not in a cache, as between two passes over a stage's activations.

    A buffer larger than any cache is touched before every repeat.
    """
    others, seen = torch.zeros(1 << 24, device=device), list[float]()
    for _ in range(9):
        others.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seen.append(time.perf_counter() - start)
    return statistics.median(seen[2:])


def _update_s_per_byte(optimizer: Any, device: torch.device) -> float:
    """Seconds of one optimizer step for each byte of parameter, on 32 tensors of 64 KB for each of its parts."""
    # Matrices, as nearly all weights are; torch's Muon takes nothing else.
    params = [torch.nn.Parameter(torch.randn(1 << 7, 1 << 7, device=device)) for _ in range(32)]
    for param in params:
        param.grad = torch.randn_like(param)
    seconds = sum(share * _cold(part.build(params).step, device) for share, part in optimizer.parts)
    return seconds / sum(p.numel() * p.element_size() for p in params)


def _move_s_per_byte(device: torch.device) -> float:
    """Seconds to read or write a byte of memory, from a copy of 32 tensors of 64 KB."""
    sources = [torch.randn(1 << 14, device=device) for _ in range(32)]
    copies = [torch.empty_like(source) for source in sources]

    def copy() -> None:
        for into, source in zip(copies, sources, strict=True):
            into.copy_(source)

    return _cold(copy, device) / sum(2 * s.numel() * s.element_size() for s in sources)
