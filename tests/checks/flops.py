"""FLOPs of networks of Hugging Face against torch's own counter: `python -m tests.checks.flops [NAMES]`.

`--masks` compares causal attention with masks that say the same.

Small configurations with random weights, captured without a setting and run by torch's counter as they are. The counter has no
formula for the attention that a CPU runs (`_scaled_dot_product_flash_attention_for_cpu`), so it is lent the one that it has for
the same kernel on a card, and it counts causal attention as if it were whole: the table has our count with and without the half.
Gradients of the weights of grouped convolutions it counts as if there were no groups, and is lent its own formula of the forward.
Experts are counted in their loop, since the counter does not see the operator that Transformers makes of it.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from gpp.capture.build import capture
from gpp.errors import GppError
from gpp.graph.captured import Captured, evaluate

BATCH, LENGTH, WIDTH = 4, 32, 64
TOLERANCE = 0.02

Batch = dict[str, Tensor]
Sizes = dict[str, Any]
Case = tuple[nn.Module, Batch]

WORDS: Sizes = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: Sizes = WORDS | {"hidden_size": WIDTH, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER: Sizes = TEXT | {"num_key_value_heads": 2, "use_cache": False}
PICTURE: Sizes = {
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
}
LAYERS: Sizes = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in {"layers": 2, "attention_heads": 4, "ffn_dim": 160}.items()
}
ASK: Sizes = {"use_cache": False, "decoder_start_token_id": 1}


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 128, (BATCH, length))


def words(kind: str, **own: Any) -> Case:
    """A decoder or encoder of text with a head that names every token."""
    import transformers

    name, head = kind.split(".")
    config = getattr(transformers, f"{name}Config")(**own)
    found = ids()
    return getattr(transformers, head if head.startswith("Gemma") else f"{name}{head}")(config), {
        "input_ids": found,
        "labels": found,
    }


def pictures(kind: str, size: int = 32, **own: Any) -> Case:
    import transformers

    name, head = kind.split(".")
    config = getattr(transformers, f"{name}Config")(**own)
    return getattr(transformers, f"{name}{head}")(config), {"pixel_values": torch.randn(BATCH, 3, size, size)}


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Sizes = {"vocab_size": 128, "d_model": WIDTH, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, **ASK, dropout_rate=0.0)), {"input_ids": ids(), "labels": ids(LENGTH - 8)}


def bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    model = BartForConditionalGeneration(BartConfig(**WORDS, **LAYERS, **ASK, d_model=WIDTH))
    return model, {"input_ids": ids(), "labels": ids(LENGTH - 8)}


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: Sizes = {"d_model": WIDTH, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 40}
    ends = {key: WORDS[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    model = WhisperForConditionalGeneration(WhisperConfig(**LAYERS, **ASK, **ends, **sizes, dropout=0.0))
    return model, {"input_features": torch.randn(BATCH, 16, 64), "labels": ids(LENGTH - 8)}


def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=PICTURE | {"patch_size": 8}, projection_dim=32))
    return model, {"input_ids": ids(), "pixel_values": torch.randn(BATCH, 3, 32, 32)}


def llava() -> Case:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**PICTURE, patch_size=8),
        text_config=LlamaConfig(**DECODER),
        image_token_id=127,  # pyright: ignore[reportCallIssue]
        image_seq_length=16,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    text = ids().clamp(max=126)
    text[:, 2:18] = 127
    return LlavaForConditionalGeneration(config), {
        "input_ids": text,
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": text,
    }


def mamba() -> Case:
    return words("Mamba.ForCausalLM", vocab_size=128, hidden_size=WIDTH, state_size=8, num_hidden_layers=2, use_cache=False)


def wav2vec2() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    own = {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "mask_time_prob": 0.0}
    config = Wav2Vec2Config(**TEXT, **own, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.0)
    return Wav2Vec2Model(config), {"input_values": torch.randn(BATCH, 640)}


def flex() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    found = ids()
    own: Sizes = {"attn_implementation": "flex_attention"}
    return LlamaForCausalLM(LlamaConfig(**DECODER, **own)), {"input_ids": found, "labels": found}


EXPERTS: Sizes = DECODER | {"num_experts_per_tok": 2}
QWEN: Sizes = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: words("GPT2.LMHeadModel", vocab_size=128, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4, use_cache=False),
    "opt": lambda: words("OPT.ForCausalLM", **WORDS, hidden_size=WIDTH, ffn_dim=160, num_hidden_layers=2, num_attention_heads=4),
    "gpt_neox": lambda: words("GPTNeoX.ForCausalLM", **TEXT, use_cache=False),
    "llama": lambda: words("Llama.ForCausalLM", **DECODER),
    "qwen3": lambda: words("Qwen3.ForCausalLM", **DECODER, head_dim=16),
    "mistral": lambda: words("Mistral.ForCausalLM", **DECODER, sliding_window=8),
    "gemma3": lambda: words("Gemma3Text.Gemma3ForCausalLM", **DECODER, head_dim=16),
    "phi3": lambda: words("Phi3.ForCausalLM", **DECODER),
    "mixtral": lambda: words("Mixtral.ForCausalLM", **EXPERTS, num_local_experts=4),
    "qwen2_moe": lambda: words("Qwen2Moe.ForCausalLM", **EXPERTS, **QWEN),
    "bert": lambda: words("Bert.ForMaskedLM", **TEXT),
    "roberta": lambda: words("Roberta.ForMaskedLM", **TEXT),
    "distilbert": lambda: words("DistilBert.ForMaskedLM", vocab_size=128, dim=WIDTH, hidden_dim=160, n_layers=2, n_heads=4),
    "deberta": lambda: words("DebertaV2.ForMaskedLM", **TEXT),
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "vit": lambda: pictures("ViT.Model", **PICTURE, patch_size=8),
    "swin": lambda: pictures("Swin.Model", 64, image_size=64, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "convnext": lambda: pictures("ConvNext.Model", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
    "resnet": lambda: pictures("ResNet.Model", 64, embedding_size=16, hidden_sizes=[32, 48, 64, 96], depths=[1, 1, 1, 1]),
    "clip": clip,
    "llava": llava,
    "wav2vec2": wav2vec2,
    "mamba": mamba,
    "flex": flex,
}


def loss(outputs: Any, targets: Any = None) -> Tensor:
    """The loss of the model's own, or the mean square of what it returns first."""
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    found = getattr(outputs, "logits_per_text", None)
    return (outputs[0] if found is None else found).square().mean()


def _whole(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _whole_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


def _grouped(gradient: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    return sum(rest[7][:2]) * flop_counter.conv_flop_count(x, weight, gradient, rest[4])


def counted(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Forward and backward FLOPs of torch's counter."""
    own = torch.ops.aten
    lent = {
        own._scaled_dot_product_flash_attention_for_cpu: _whole,
        own._scaled_dot_product_flash_attention_for_cpu_backward: _whole_backward,
        own.convolution_backward: _grouped,
    }
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    if getattr(model.config, "_attn_implementation", "") == "flex_attention":  # torch does not train it on a CPU
        model.set_attn_implementation("sdpa")  # pyright: ignore[reportCallIssue]
    with FlopCounterMode(display=False, custom_mapping=lent) as forward:
        value = loss(model(**batch))
    with FlopCounterMode(display=False, custom_mapping=lent) as backward:
        value.backward()
    return float(forward.get_total_flops()), float(backward.get_total_flops())


def left_out(captured: Captured) -> tuple[int, int, int]:
    """Attentions that are causal, and what they have in their forwards and backwards less than whole ones."""
    number, less = 0, 0
    for node in captured.nodes:
        if ".scaled_dot_product_attention." not in node.target or (
            node.kwargs.get("is_causal") is not True and True not in node.args[5:6]
        ):
            continue
        query, key, value = (tuple(evaluate(n, BATCH) for n in captured.node_of[ref["ref"]].shape or ()) for ref in node.args[:3])
        met = sum(min(row + 1, key[-2]) for row in range(query[-2]))
        number += 1
        less += query[0] * query[1] * (query[-2] * key[-2] - met) * 2 * (query[-1] + value[-1])
    return number, less, less * 5 // 2


def check(name: str) -> bool:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model = model.eval()  # with dropout a CPU has no fused attention
    began = time.process_time()
    try:
        captured = capture(model, batch, {}, loss, name=name)
    except GppError as error:
        print(f"{name:12} refused: {error}", flush=True)
        return False
    took = time.process_time() - began
    ours = [BATCH * sum(getattr(op, field) for op in captured.graph.ops) for field in ("forward_flops", "backward_flops")]
    theirs = counted(model, batch)
    causal, *less = left_out(captured)
    apart = [(mine + half) / other - 1 for mine, half, other in zip(ours, less, theirs, strict=True)]
    ok = all(abs(x) <= TOLERANCE for x in apart)
    shown = [
        f"{mine / 1e6:9.3f} {other / 1e6:9.3f} {mine / other - 1:+7.2%} {x:+7.2%}"
        for mine, other, x in zip(ours, theirs, apart, strict=True)
    ]
    size = captured.batch or "any"
    print(f"{name:11} {shown[0]} | {shown[1]} | {causal} causal, batch {size}, {took:.1f} s {'ok' if ok else 'APART'}", flush=True)
    for said in (*captured.warnings, *map(str, captured.uncounted)):
        print(f"    {said[:300]}", flush=True)
    return ok


def attended(length: int, width: int, dtype: torch.dtype, **told: Any) -> list[Tensor]:
    """The result of attention, and the gradients of query, key and value; the same at every call."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, width, dtype=dtype, requires_grad=True) for _ in range(3))
    out = nn.functional.scaled_dot_product_attention(q, k, v, **told)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.randn_like(out))]


def check_masks() -> bool:
    """Causal attention by `is_causal`, and by a mask of booleans or of minus infinity: how far results and gradients are apart."""
    worst: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for length in (1, 2, 7, 32, 129, 513, 1100):
            for width in (8, 64):
                allowed = torch.ones(length, length, dtype=torch.bool).tril()
                added = torch.zeros(length, length, dtype=dtype).masked_fill(~allowed, -torch.inf)
                told = attended(length, width, dtype, is_causal=True)
                for mask in (allowed, added):
                    found = attended(length, width, dtype, attn_mask=mask)
                    apart = max(float((a - b).abs().max()) for a, b in zip(told, found, strict=True))
                    worst[str(dtype)] = max(worst.get(str(dtype), 0.0), apart)
    print("is_causal beside masks of 7 lengths and 2 widths, forward and gradients, apart at most:", worst)
    return not any(worst.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--masks", action="store_true", help=check_masks.__doc__)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.masks:
        return 0 if check_masks() else 1
    print("MFLOP of a batch   ours     torch    apart   as whole | backward, likewise")
    found = [check(name) for name in asked.names]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
