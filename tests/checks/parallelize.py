"""Networks of Hugging Face through `gpp.parallelize`, against plain loops: `python -m tests.checks.parallelize`.

Random weights, float64, 20 steps of Adam on 2 and 3 workers; the losses must be those of a plain loop over the same model. Then the
weights are saved by `save_pretrained`, read by `from_pretrained`, and trained for 5 steps more, beside a plain loop again. With
`--lengths` the lengths of T5's and CLIP's batches change from step to step, and the last batch is smaller. `--launch ranks` starts
every worker as a rank of torchrun, which runs this very file.

`--tokens` trains Llama, T5 and CLIP's text tower on texts of uneven lengths, whose labels after their ends are ignored: three
stages of two replicas each, eight micro-batches. Losses and weights must be those of a plain loop over whole mini-batches.
`--memory` says what the stage of the loss holds so, and with `loss_scope="minibatch"`, predicted and measured.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gpp
from gpp.app.batches import loss_of, named_targets
from gpp.capture.build import capture
from gpp.cost.problem import Problem
from gpp.graph.captured import Captured
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.loss_stage import LossScope, with_loss_apart
from gpp.plan.plan import Plan
from tests.checks import flops

SIZE, STEPS, TOLERANCE = 8, 20, 1e-12
IN_FLOAT32 = 1e-6
"""For models whose norms and routers compute in float32, whatever their weights are: sums of micro-batches round differently."""
LENGTHS = (12, 7, 16, 9)

Batch = dict[str, Tensor]
Sizes = dict[str, Any]
Case = tuple[nn.Module, Callable[[int], Batch], Callable[[Any], Tensor] | None]
"""A model, its batches by a length, and its loss; None for its own."""

TEXT: Sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION: Sizes = {name: size for name, size in TEXT.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}


def tokens(length: int) -> Tensor:
    return torch.randint(3, 100, (SIZE, length))


def numbers(*shape: int) -> Tensor:
    return torch.randn(SIZE, *shape, dtype=torch.float64)


def pairs(outputs: Any) -> Tensor:
    """One less the mean cosine of pairs."""
    text, image = (x / x.norm(dim=-1, keepdim=True) for x in (outputs.text_embeds, outputs.image_embeds))
    return (1 - (text * image).sum(-1)).mean()


def siglip() -> Case:
    from transformers import SiglipConfig, SiglipModel

    config = SiglipConfig(text_config=TEXT | {"max_position_embeddings": 16}, vision_config=VISION)
    return SiglipModel(config), lambda n: {"input_ids": tokens(16), "pixel_values": numbers(3, 32, 32)}, pairs


def blip() -> Case:
    from transformers import BlipConfig, BlipModel

    still: Sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "encoder_hidden_size": 32}
    config = BlipConfig(text_config=TEXT | still | {"max_position_embeddings": 16}, vision_config=VISION, projection_dim=32)
    return BlipModel(config), lambda n: {"input_ids": tokens(n), "pixel_values": numbers(3, 32, 32)}, pairs


def lxmert() -> Case:
    from transformers import LxmertConfig, LxmertModel

    layers: Sizes = {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 16, "max_position_embeddings": 16}
    sizes: Sizes = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = LxmertModel(LxmertConfig(**sizes, **layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    made = lambda n: {"input_ids": tokens(n), "visual_feats": numbers(6, 16), "visual_pos": numbers(6, 4).sigmoid()}  # noqa: E731
    return model, made, lambda outputs: outputs.pooled_output.square().mean()


def answered(n: int) -> Batch:
    return {"input_ids": tokens(n), "labels": tokens(n - 2)}


def continued(n: int) -> Batch:
    return {"input_ids": (ids := tokens(n)), "labels": ids}


CASES: dict[str, Callable[[], Case]] = {
    "t5": lambda: (flops.t5()[0], answered, None),
    "whisper": lambda: (flops.whisper()[0], lambda n: {"input_features": numbers(16, 64), "labels": tokens(n - 2)}, None),
    "siglip": siglip,
    "blip": blip,
    "lxmert": lxmert,
    "clip": lambda: (flops.clip()[0], lambda n: {"input_ids": tokens(n), "pixel_values": numbers(3, 32, 32)}, pairs),
    "mixtral": lambda: (flops.CASES["mixtral"]()[0], continued, None),
    "qwen2_moe": lambda: (flops.CASES["qwen2_moe"]()[0], continued, None),
}
CHANGING = ("t5", "clip")

IGNORED, TEXTS, MICROBATCHES, REPLICAS, STAGES, LENGTH = -100, 16, 8, 2, 3, 12
EXACT, TOKEN_STEPS = 1e-13, 3

Texts = tuple[nn.Module, Callable[[], tuple[Batch, Tensor | None]], Callable[..., Tensor] | None]
"""A model, its batches of texts (inputs, and labels where the loss is no part of the model), and its loss; None for its own."""


def texts(vocabulary: int, length: int = LENGTH) -> tuple[Batch, Tensor]:
    """Tokens with their mask, and labels [TEXTS, length] of which each text has another number; two micro-batches have none."""
    ids, labels = torch.randint(3, vocabulary, (TEXTS, length)), torch.randint(3, vocabulary, (TEXTS, length))
    ends = torch.randint(1, length + 1, (TEXTS, 1))
    after = torch.arange(length) >= ends
    counts = ends.clone()
    counts[TEXTS // 4 : TEXTS // 2] = 0
    return {"input_ids": ids, "attention_mask": (~after).long()}, labels.masked_fill(torch.arange(length) >= counts, IGNORED)


def next_tokens(outputs: Any, labels: Tensor) -> Tensor:
    """The loss of a language model in its own type; those of transformers compute theirs in float32."""
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama_texts(vocabulary: int = 100, length: int = LENGTH) -> Texts:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Sizes = TEXT | {"vocab_size": vocabulary, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes)), lambda: texts(vocabulary, length), next_tokens


def t5_texts() -> Texts:
    def batch() -> tuple[Batch, None]:
        inputs, labels = texts(100)
        return {**inputs, "labels": labels}, None

    return flops.t5()[0], batch, None


class Tagger(nn.Module):
    """CLIP's text tower, and a score of every tag for every token."""

    def __init__(self) -> None:
        from transformers import CLIPTextConfig, CLIPTextModel

        super().__init__()
        self.tower = CLIPTextModel(CLIPTextConfig(**TEXT, max_position_embeddings=16, bos_token_id=1, eos_token_id=2))
        self.head = nn.Linear(TEXT["hidden_size"], 100)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.tower(input_ids, attention_mask).last_hidden_state)


def clip_texts() -> Texts:
    return Tagger(), lambda: texts(100), lambda scores, labels: nn.functional.cross_entropy(scores.transpose(1, 2), labels)


OF_TEXTS: dict[str, Callable[[], Texts]] = {"llama": llama_texts, "t5": t5_texts, "clip": clip_texts}


def staged(captured: Captured, replicas: int, scope: LossScope = "microbatch") -> tuple[Problem, Plan]:
    """A chain of three stages, each with so many replicas, and micro-batches of an eighth of the mini-batch."""
    asked: dict[str, Any] = {"minibatch_size": TEXTS, "cost": gpp.Analytical(), "loss_scope": scope}
    even = gpp.Strategy(name="even", planner=gpp.Even(), schedule=gpp.OneFOneB())
    parts = [mask_of(s.ops) for s in even.plan(gpp.problem(captured, gpp.local(num_devices=STAGES), **asked)).stages]
    problem = gpp.problem(captured, gpp.local(num_devices=STAGES * replicas), **asked)
    whole = [mask & ~problem.minibatch_ops for mask in parts if mask & ~problem.minibatch_ops]
    parts = [mask | (problem.minibatch_ops if i + 1 == len(whole) else 0) for i, mask in enumerate(whole)]
    plan = make_plan(problem, "tokens", [(mask, replicas) for mask in parts], TEXTS // MICROBATCHES, ordered=True)
    return problem, with_loss_apart(plan, problem) if problem.minibatch_ops else plan


def captured_texts(model: nn.Module, inputs: Batch, labels: Tensor | None, loss: Callable[..., Tensor] | None) -> Captured:
    targets = named_targets(labels)
    return capture(model, inputs, targets, loss_of(loss, bool(targets)), name=type(model).__name__)


def check_tokens(name: str, folder: str) -> bool:
    """Train one network on uneven texts; says how far losses and weights are apart, and returns whether that is rounding alone."""
    torch.manual_seed(0)
    model, batch, loss = OF_TEXTS[name]()
    model = model.double().train()
    data = [batch() for _ in range(TOKEN_STEPS)]
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, loss, data, torch.optim.SGD(plain.parameters(), lr=0.1))
    _, plan = staged(captured_texts(model, *data[0], loss), REPLICAS)
    strategy, optimizer = gpp.Planning(plan=plan, cost=gpp.Analytical()), gpp.SGD(lr=0.1, momentum=0.0)
    settings: dict[str, Any] = {"strategy": strategy, "optimizer": optimizer, "run": gpp.Run(folder=folder)}
    with gpp.parallelize(model, *data[0], loss=loss, devices=plan.num_devices, **settings) as pipeline:
        losses = [pipeline.step(inputs, labels) for inputs, labels in data]
    apart = max(abs(found - value) / abs(value) for found, value in zip(losses, expected, strict=True))
    weights = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    shape = f"{len(plan.stages)} stages x {REPLICAS} replicas, {MICROBATCHES} micro-batches"
    ok = apart <= EXACT and weights <= EXACT and len(plan.stages) == STAGES
    print(f"{name:8} {shape}: losses apart {apart:.1e}, weights {weights:.1e} {'ok' if ok else 'WRONG'}", flush=True)
    return ok


def show_memory(folder: str, vocabulary: int = 32_000, length: int = 64) -> None:
    """What the device of the loss holds with means over tokens of micro-batches, and of the whole mini-batch at once."""
    torch.manual_seed(0)
    model, batch, loss = llama_texts(vocabulary, length)
    data = [batch() for _ in range(TOKEN_STEPS)]
    captured = captured_texts(model.train(), *data[0], loss)
    print(f"logits of {TEXTS} texts of {length} tokens over {vocabulary} words: {TEXTS * length * vocabulary * 4 / 2**20:.0f} MiB")
    for scope in ("microbatch", "minibatch"):
        problem, plan = staged(captured, 1, scope)
        (last,) = {stage.devices for stage in plan.stages[-1:]}
        strategy = gpp.Strategy(name="even", planner=gpp.Even(), schedule=gpp.OneFOneB())
        predicted = strategy.predict(plan, problem).metrics.peak_memory_bytes
        strategy = gpp.Planning(plan=plan, cost=gpp.Analytical())
        settings: dict[str, Any] = {"strategy": strategy, "loss": gpp.Loss(function=loss, scope=scope)}
        run = gpp.Run(folder=f"{folder}-{scope}")
        with gpp.parallelize(copy.deepcopy(model), *data[0], devices=plan.num_devices, run=run, **settings) as pipeline:
            for inputs, labels in data:
                pipeline.step(inputs, labels)
        pipeline.report()
        peaks = json.loads((pipeline.run_dir / "result.json").read_text())["measured"]["peak_memory_bytes"]
        words = f"predicted {predicted[last[0]] / 2**20:.0f} MiB, measured {peaks[str(last[0])] / 2**20:.0f} MiB"
        print(f"loss_scope={scope}: the device of the loss holds at most {words}", flush=True)


def has_experts(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "num_experts_per_tok")


def plain_losses(model: nn.Module, loss: Any, data: Sequence[tuple[Batch, Tensor | None]], optimizer: Optimizer) -> list[float]:
    """Losses of a loop of one's own over whole mini-batches; the model holds the weights.

    Experts go in a loop: torch's product of groups has no float64.
    """
    if has_experts(model):
        model.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    out = []
    for inputs, labels in data:
        optimizer.zero_grad()
        outputs = model(**inputs)
        value = loss(outputs, *named_targets(labels).values()) if loss else outputs.loss
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out


def alone(model: nn.Module, loss: Callable[[Any], Tensor] | None, data: Sequence[Batch]) -> list[float]:
    """Losses of Adam over a copy of the model, in a plain loop."""
    model = copy.deepcopy(model)
    return plain_losses(model, loss, [(batch, None) for batch in data], torch.optim.Adam(model.parameters(), lr=1e-3))


def check(name: str, workers: int, *, changes: bool, folder: str) -> bool:
    """Train one network; says how far the losses are apart at most, and returns whether that is rounding alone."""
    torch.manual_seed(0)
    model, batch, loss = CASES[name]()
    model = model.double().train()
    data = [batch(LENGTHS[i % len(LENGTHS)] if changes else LENGTHS[0]) for i in range(STEPS)]
    if changes:
        data[-1] = {key: tensor[: SIZE - 3] for key, tensor in data[-1].items()}
    expected = alone(model, loss, data)
    strategy = gpp.Strategy(name="graphpipe", planner=gpp.GraphPipe(replication=False), schedule=gpp.OneFOneB())
    planning = gpp.Planning(strategy=strategy, cost=gpp.Analytical(), microbatch_size=SIZE // 4)
    settings: dict[str, Any] = {"loss": loss, "devices": workers, "strategy": planning}
    with gpp.parallelize(model, data[0], run=gpp.Run(folder=folder), **settings) as pipeline:
        losses = [pipeline.step(each) for each in data]
        stages = len(pipeline.plan.stages)
        where = pipeline.run_dir / "saved"  # on all ranks that of rank 0
        pipeline.save_pretrained(where)
    saved: Any = type(model).from_pretrained(where, dtype="auto").train()
    kept = all(torch.equal(weight, saved.state_dict()[key]) for key, weight in model.state_dict().items())
    again = data[: STEPS // 4]
    expected += alone(saved, loss, again)
    with gpp.parallelize(saved, data[0], run=gpp.Run(folder=f"{folder}-again"), **settings) as pipeline:
        losses += [pipeline.step(each) for each in again]
    worst = max(abs(found - value) / abs(value) for found, value in zip(losses, expected, strict=True))
    ok = worst <= (IN_FLOAT32 if has_experts(model) else TOLERANCE) and stages >= workers and kept
    if os.environ.get("RANK", "0") == "0":
        what = f"{len(set(LENGTHS))} lengths" if changes else "one length"
        verdict = "ok" if ok else "WRONG"
        print(f"{name:8} {workers} workers, {stages} stages, {what}, {STEPS} steps: apart {worst:.1e} {verdict}", flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*CASES, "llama"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--launch", choices=("local", "ranks"), default="local")
    asked = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("skipped: the networks are those of transformers, which is not installed (pip install transformers)")
        return 0
    if asked.tokens or asked.memory:
        with tempfile.TemporaryDirectory() as folder:
            if asked.memory:
                show_memory(f"{folder}/memory")
            names = [name for name in OF_TEXTS if name in asked.names] if asked.tokens else []
            found = [check_tokens(name, f"{folder}/{name}") for name in names]
            return 0 if all(found) else 1
    if asked.launch == "ranks" and "RANK" not in os.environ:
        words = [*asked.names, *(["--lengths"] if asked.lengths else []), "--launch", "ranks", "--workers"]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return max(subprocess.call([*start, str(n), "-m", "tests.checks.parallelize", *words, str(n)]) for n in asked.workers)
    names = [name for name in asked.names if name in (CHANGING if asked.lengths else CASES)]
    with tempfile.TemporaryDirectory() as folder:
        # All ranks are told rank 0's folder.
        found = [check(name, n, changes=asked.lengths, folder=f"{folder}/{name}{n}") for n in asked.workers for name in names]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
