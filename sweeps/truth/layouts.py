"""A published layout as a plan: which operators are in which stage, on which devices, and what is recomputed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from gpp.cluster import Device
from gpp.cost.problem import Problem
from gpp.cost.variants import recomputed_bytes
from gpp.graph.op_graph import Op, OpGraph, ReplicaSums, mask_of
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.schedules.base import Pass, StageSchedule
from gpp.schedules.gpipe import GPipe
from gpp.settings import settings
from sweeps.truth.rows import Row

RESNET_101 = (3, 4, 23, 3)
UNET_HEIGHTS, UNET_CONVS = 5, 5
FORWARD_BYTES, BACKWARD_BYTES, KEPT_BYTES = 13, 19, 5
"""Of each score of an attention that goes through them."""
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 38, 14
"""Of each logit of a loss in float32, kernel by kernel."""
HEAD = ("norm", "head")
ENDS = 2
"""What a GPT has beside its layers: the embedding before them, and the head behind."""


@settings("strategy.schedule")
class Torchgpipe(StageSchedule):
    """GPipe whose backwards begin with the last micro-batch, as autograd runs them in torchgpipe."""

    holds = GPipe.holds

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        forwards = GPipe().order(plan, stage, num_microbatches)[:num_microbatches]
        return forwards + GPipe().order(plan, stage, num_microbatches)[: num_microbatches - 1 : -1]


def flat_layers(row: Row, graph: OpGraph) -> list[int]:
    """Operators of each of torchgpipe's flat layers, in order; the loss is left over.

    A stash is a layer without an operator; a residual layer adds, and its shortcut's convolution and norm are in it.
    """
    if row.model.startswith("ResNet"):
        block = [0, *[1] * 8, 1, 1]  # stash; three convolutions with norms, two ReLUs between; residual; ReLU
        first = [0, *[1] * 8, 3, 1]
        return [1] * 4 + [n for count in RESNET_101 for n in first + block * (count - 1)] + [1, 0, 1]
    if row.model.startswith("U-Net"):
        convs = [1] * 4 * UNET_CONVS
        return [*[*convs, 0, 1] * UNET_HEIGHTS, *convs, *[1, 1, *convs] * UNET_HEIGHTS, 1]
    names = [op.name for op in graph.ops[:-1]]
    cells = [int(name.split(".")[1]) if name.startswith("cells.") else -1 for name in names]
    last = max(cells)
    behind = max(i for i, cell in enumerate(cells) if cell == last)
    counts = [0] * (last + 3)
    for i, cell in enumerate(cells):
        counts[last + 2 if i > behind else cell + 1] += 1
    return counts


def gpt_layers(graph: OpGraph) -> list[int]:
    """Operators of a GPT's embedding, of each of its layers, and of its last norm and head; the loss is left over."""
    names = [op.name.split(".") for op in graph.ops[:-1]]
    last = 1 + max(int(parts[1]) for parts in names if parts[0] == "layers")
    place, counts = 0, [0] * (last + 2)
    for parts in names:
        place = int(parts[1]) + 1 if parts[0] == "layers" else last + 1 if parts[0] in HEAD else place
        counts[place] += 1
    return counts


def stage_masks(row: Row, graph: OpGraph) -> list[int]:
    """The operators of each stage; the loss is in the last one, and of a GPT the embedding in the first and the head in the last.

    Raises:
        ValueError: the row's layers are not those of the model.
    """
    is_gpt = row.settings[0] == "model=gpt"
    counts = gpt_layers(graph) if is_gpt else flat_layers(row, graph)
    layers = len(counts) - ENDS * is_gpt
    balance = list(row.balance or (layers // row.pipeline,) * row.pipeline)
    if sum(balance) != layers or sum(counts) != graph.num_ops - 1:
        raise ValueError(f"{row.model}: {layers} layers of {sum(counts)} operators, of {graph.num_ops - 1} in {sum(balance)}")
    if is_gpt:
        balance[0] += 1
        balance[-1] += 1
    ends = np.cumsum([0, *counts])[np.cumsum([0, *balance])]
    ends[-1] += 1
    return [mask_of(range(a, b)) for a, b in pairwise(ends)]


def recomputed(row: Row, graph: OpGraph) -> frozenset[int]:
    """Operators that are computed again: all, or those of a GPT's layers; not the loss."""
    if row.recompute == "none":
        return frozenset()
    return frozenset(i for i, op in enumerate(graph.ops[:-1]) if row.recompute != "layers" or op.name.startswith("layers."))


def with_split_head(row: Row, graph: OpGraph) -> OpGraph:
    """The graph of a GPT whose head and loss are split over the vocabulary, as Megatron's are; ours run whole on every device.

    Forwards the devices sum three numbers in float32 for each token (the largest logit, the exponentials and the target's logit),
    backwards the gradient of the head's input.

    Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
    """
    head, loss = (next(i for i, op in enumerate(graph.ops) if op.name == name) for name in ("head", "loss"))
    entering = next(tensor for tensor in graph.tensors if head in tensor.consumers)
    sums = {
        head: {"backward_sums": ReplicaSums(count=1, num_bytes=entering.bytes_per_sample)},
        loss: {"forward_sums": ReplicaSums(count=3, num_bytes=3 * 4 * int(row.words["model.sequence"]))},
    }
    ops = list(graph.ops)
    for i, own in sums.items():
        share = 1 / row.tensor
        split = {"share": share, "params": share, "saved_bytes": ops[i].saved_bytes * share, **own}
        ways = (replace(v, **split) if v.degree == row.tensor else v for v in ops[i].variants)
        ops[i] = replace(ops[i], variants=tuple(ways))
    return replace(graph, ops=tuple(ops))


def with_recomputed_shards(graph: OpGraph, problem: Problem, samples: int, degree: int) -> OpGraph:
    """The graph with a variant that recomputes at a tensor-parallel degree: its forward, and the forward's sums, once more.

    A variant's times are multiples of forward plus backward, so they hold for one micro-batch size on one kind of device.
    """
    times = problem.op_times(samples, 0, degree)
    ops = []
    for i, op in enumerate(graph.ops):
        way = next(v for v in op.variants if v.degree == degree)
        forward, backward = float(times.forward_s[i]), float(times.backward_s[i])
        total = (forward + backward) or 1.0
        again = replace(
            way,
            recompute=True,
            share=None,
            forward=forward / total,
            backward=(backward + forward) / total,
            saved_bytes=min(way.saved_bytes, recomputed_bytes(graph, i)),
            backward_sums=way.backward_sums.plus(way.forward_sums.num_bytes, way.forward_sums.count),
        )
        ops.append(replace(op, variants=(*op.variants, again)))
    return replace(graph, ops=tuple(ops))


def flops_of_a_byte(graph: OpGraph, device: Device) -> float:
    """FLOPs that take as long on this device as a byte. An operator takes the longer of its FLOPs and its bytes, and one that
    stands for several kernels takes what each of them does: bytes of such kernels count as FLOPs."""
    return device.flop_per_s(graph.dtype) / device.memory_bandwidth_bytes_per_s


def with_whole_products(row: Row, graph: OpGraph) -> OpGraph:
    """The graph of a GPT whose causal attention multiplies all queries with all keys: two products forwards and four backwards."""
    length = int(row.words["model.sequence"])

    def whole(op: Op) -> Op:
        forward = op.forward_flops * 2 * length / (length + 1)
        return replace(op, forward_flops=forward, backward_flops=2 * forward)

    return replace(graph, ops=tuple(whole(op) if op.name.endswith("scaled_dot_product_attention") else op for op in graph.ops))


def with_scores(row: Row, graph: OpGraph, device: Device) -> OpGraph:
    """The graph of a GPT whose attention goes through its scores: both products, softmax and dropout have kernels of their own.

    Of the 16 bits for each head and two tokens a forward writes the product (2 bytes), reads and writes it in the softmax (4) and
    in the dropout, which writes a mask too (5), and reads it for the second product (2). A backward reads and writes it in the
    second product's (4), the dropout's (5) and the softmax's (6), and reads it twice in the first product's (4). Kept are the
    softmax (2 bytes), the dropout's mask (1) and what that leaves (2). Bytes are beside the products' FLOPs (`flops_of_a_byte`).

    Source of what is kept: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198:
    the 5 a s^2 b of a layer.
    """
    scores = int(row.words["model.num_heads"]) * int(row.words["model.sequence"]) ** 2
    each = scores * flops_of_a_byte(graph, device)

    def scored(op: Op) -> Op:
        more = {
            "forward_flops": op.forward_flops + FORWARD_BYTES * each,
            "backward_flops": op.backward_flops + BACKWARD_BYTES * each,
            "saved_bytes": op.saved_bytes + KEPT_BYTES * scores,
        }
        return replace(op, **more) if op.name.endswith("scaled_dot_product_attention") else op

    return replace(graph, ops=tuple(map(scored, graph.ops)))


def with_float_loss(row: Row, graph: OpGraph, device: Device) -> OpGraph:
    """The graph of a GPT whose loss is Megatron's: its logits are made float32, and each step has a kernel of its own.

    Of each logit a forward reads 2 bytes and writes 4, reads it for the maximum (4), reads and writes it to subtract that (8), for
    the exponential (8) and to divide by their sum (8), which it reads them for (4). A backward reads and writes it to multiply by
    the loss's gradient (8), and reads 4 bytes and writes 2.

    Source: NVIDIA/Megatron-LM at f5345df, megatron/mpu/cross_entropy.py and megatron/model/gpt_model.py.
    """
    each = int(row.words["model.sequence"]) * int(row.words["model.vocabulary"]) * flops_of_a_byte(graph, device)
    loss = replace(graph.ops[-1], forward_flops=LOSS_FORWARD_BYTES * each, backward_flops=LOSS_BACKWARD_BYTES * each)
    return replace(graph, ops=(*graph.ops[:-1], loss))


def laid_out(row: Row, problem: Problem) -> Plan:
    """The row's plan; replicas and the devices that share one are neighbours, stages follow each other, round and round where a
    device has several.
    """
    masks = stage_masks(row, problem.graph)
    width = row.data * row.tensor
    microbatch = row.microbatch * row.data
    devices = [tuple(range(d * width, (d + 1) * width)) for d in range(row.pipeline)]
    placement = [devices[s % row.pipeline] for s in range(len(masks))]
    plan = make_plan(problem, "published", [(mask, width) for mask in masks], microbatch, ordered=True, placement=placement)
    again = recomputed(row, problem.graph)
    stages = [stage.having(TensorParallel(degree=row.tensor)) if row.tensor > 1 else stage for stage in plan.stages]
    stages = [marked(stage, recompute=tuple(op for op in stage.ops if op in again)) for stage in stages]
    plan = replace(plan, stages=tuple(stages))
    plan.check_stages(problem.graph, problem.cluster.num_devices)
    return plan


def kept_plan(plan: Plan) -> Plan:
    """The same plan, nothing recomputed."""
    return replace(plan, stages=tuple(stage.keeping for stage in plan.stages))
