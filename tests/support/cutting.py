"""Cut a captured model into random stages, run them in one process, compare with the model itself."""

import random

import torch

from gpp.capture.stage import build_stage, initial_state
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph, bits
from gpp.serialization import from_json, to_json
from tests.support.problems import random_partition


def random_parts(graph: OpGraph, num_parts: int, seed: int) -> list[list[int]]:
    """Convex parts in a topological order, at random."""
    return [list(bits(mask)) for mask in random_partition(graph, min(num_parts, graph.num_ops), random.Random(seed))]


def build_stages(captured: Captured, model, parts, **options):
    """Stages from the capture's JSON form, with the model's weights."""
    captured = from_json(Captured, to_json(captured))
    state = initial_state(model, captured)
    stages = []
    for part in parts:
        stage = build_stage(captured, [n for op in part for n in captured.graph.ops[op].nodes], device="cpu", **options)
        stage.load(state)
        stages.append(stage)
    return stages


def run_pipeline(stages, values, batch):
    """Forward and backward through the stages; returns loss and gradients by parameter name."""
    sent, received, loss = {}, [], None
    for stage in stages:
        local = {}
        for name in stage.receives:
            spec, tensor = stage.spec(name), sent[name]
            assert tuple(d for i, d in enumerate(tensor.shape) if i != spec.batch_dim) == spec.shape
            assert tensor.shape[spec.batch_dim] == batch and tensor.dtype == spec.dtype
            # as a message brings it: the samples first, and contiguous so
            local[name] = tensor.detach().movedim(spec.batch_dim, 0).contiguous().movedim(0, spec.batch_dim)
            if spec.differentiable:
                local[name].requires_grad_()
        out = stage(batch, {**{name: values[name] for name in stage.inputs}, **local})
        assert set(out) == {*stage.sends, *(["loss"] if "loss" in stage.results else [])}
        sent.update({name: out[name] for name in stage.sends})
        loss = out.get("loss", loss)
        received.append(local)
    grads: dict[str, torch.Tensor] = {}
    for stage, local in reversed(list(zip(stages, received, strict=True))):
        outputs = [sent[name] for name in stage.sends if name in grads]
        gradients = [grads.pop(name) for name in stage.sends if name in grads]
        if "loss" in stage.results:
            outputs, gradients = [*outputs, loss], [*gradients, None]
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name, tensor in local.items():
            if tensor.grad is not None:
                grads[name] = grads[name] + tensor.grad if name in grads else tensor.grad
    return loss.detach(), total_gradients(stages)


def total_gradients(stages):
    """Gradients by name, summed over the stages that share a parameter."""
    out: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                out[name] = out[name] + parameter.grad if name in out else parameter.grad
    return out


def reference(model, inputs, targets, loss):
    """Loss and gradients of the model itself."""
    model.zero_grad()
    outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    value = loss(outputs, targets)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def named(captured: Captured, inputs, targets):
    """Values keyed as stages want them."""
    flat = [*(inputs.values() if isinstance(inputs, dict) else inputs)]
    flat += targets.values() if isinstance(targets, dict) else [targets]
    return dict(zip(captured.inputs, flat, strict=True))


def assert_cuts_exactly(captured: Captured, model, make, loss, *, batches=(1, 2, 5), seeds=(0, 1, 2), tolerance=1e-12):
    """Random cuts give the model's loss, gradients and buffers.

    Args:
        make: batch size -> (inputs, targets).
    """
    for batch in batches:
        for seed in seeds:
            inputs, targets = make(batch)
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            stages = build_stages(captured, model, random_parts(captured.graph, 2 + seed, 10 * batch + seed))
            torch.manual_seed(seed)
            got_loss, got = run_pipeline(stages, named(captured, inputs, targets), batch)
            torch.manual_seed(seed)
            want_loss, want = reference(model, inputs, targets, loss)
            assert torch.equal(got_loss, want_loss) or abs(got_loss - want_loss) <= tolerance
            assert set(got) == set(want)
            for name in want:
                assert (got[name] - want[name]).abs().max() <= tolerance, name
            owned = {name: b for stage in stages for name, b in stage.named_buffers()}
            for name, b in model.named_buffers():
                if name in owned:
                    assert torch.equal(owned[name], b), name
                b.copy_(buffers[name])
