"""LLaVA, Qwen2.5-VL and Whisper of Transformers, captured once each and planned at 1 to 32 devices.

    python -m tests.checks.captured_once             planned; a line for each model and number of devices
    python -m tests.checks.captured_once --train     trained on two workers, too, beside a plain loop in float64

Small random configurations, as in `tests.checks.flops`. LLaVA and Qwen2.5-VL run at the size of a micro-batch alone, 4 samples, and
have copies of a pipeline for replicas. Qwen2.5-VL walks over the grids of its pictures: a wrapper makes them of numbers of Python,
and takes the places of the tokens, which are computed outside, as an input. Batches of another grid are captured anew.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gpp
from gpp.capture.build import capture
from tests.checks.flops import BATCH, llava, whisper
from tests.checks.parallelize import plain_losses
from tests.support.options import options

DEVICES = (1, 2, 4, 8, 16, 32)
MINIBATCH, LENGTH, TOLERANCE = 128, 20, 1e-12
PICTURE, START, END = 5, 6, 7
GRIDS = ((1, 4, 8), (1, 8, 4))
"""Frames, rows and columns of patches of a picture; the second has as many windows, and another order of the patches."""

Batch = tuple[dict[str, Any], Tensor]


class Wrapped(nn.Module):
    """The logits of a model of Transformers, by inputs that are batch first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        """[samples, tokens, words]."""
        return self.model(**inputs).logits


class WithPictures(Wrapped):
    """Qwen2.5-VL with one picture a sample, all of one grid."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, pixel_values: Tensor, position_ids: Tensor, grid: tuple[int, int, int]
    ) -> Tensor:
        """[samples, tokens, words].

        Args:
            pixel_values: [samples, patches, numbers of a patch].
            position_ids: [samples, 3, tokens], as the model's own `get_rope_index` computes them.
            grid: of a picture.
        """
        grids = torch.tensor([list(grid)] * len(input_ids))
        patches, places = pixel_values.flatten(0, 1), position_ids.transpose(0, 1)
        return self.model(input_ids=input_ids, pixel_values=patches, image_grid_thw=grids, position_ids=places).logits


def next_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean over samples and tokens, in the type of the logits."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def qwen() -> tuple[nn.Module, Callable[[tuple[int, int, int], int], Batch]]:
    """The model, and its batches by grid and number of samples."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    words = sizes | heads | {"vocab_size": 100, "rope_parameters": rope, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    windows = {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]}
    kinds: dict[str, Any] = {"image_token_id": PICTURE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = Qwen2_5_VLConfig(text_config=words, vision_config=sizes | windows, **kinds, video_token_id=8)
    model = Qwen2_5_VLForConditionalGeneration(config)

    def batch(grid: tuple[int, int, int], samples: int) -> Batch:
        shown, patches = grid[0] * grid[1] * grid[2] // 4, grid[0] * grid[1] * grid[2]
        tokens = torch.randint(10, 100, (samples, LENGTH))
        tokens[:, 2], tokens[:, 3 : 3 + shown], tokens[:, 3 + shown] = START, PICTURE, END
        told = {"mm_token_type_ids": (tokens == PICTURE).long(), "image_grid_thw": torch.tensor([list(grid)] * samples)}
        places, _ = model.model.get_rope_index(tokens, attention_mask=torch.ones_like(tokens), **told)
        pixels = torch.randn(samples, patches, 3 * 2 * 14 * 14, dtype=next(model.parameters()).dtype)
        inputs = {"input_ids": tokens, "pixel_values": pixels, "position_ids": places.transpose(0, 1).contiguous(), "grid": grid}
        return inputs, tokens

    return WithPictures(model), batch


def of_flops(case: Callable[[], Any]) -> tuple[nn.Module, Batch]:
    """A model of `tests.checks.flops` with a batch, without the loss of its own."""
    model, inputs = case()
    labels = inputs.pop("labels")
    if "input_features" in inputs:
        inputs["decoder_input_ids"] = labels
    return Wrapped(model), (inputs, labels)


def models() -> dict[str, tuple[nn.Module, Batch]]:
    """Each model with a batch of BATCH samples."""
    torch.manual_seed(0)
    pictures, batch = qwen()
    return {"llava": of_flops(llava), "qwen2_5_vl": (pictures, batch(GRIDS[0], BATCH)), "whisper": of_flops(whisper)}


def planned(name: str, model: nn.Module, batch: Batch) -> bool:
    """Capture a model and plan it; a line for each number of devices. Whether no step is longer than with fewer devices."""
    began = time.process_time()
    inputs, tokens = batch
    captured = capture(model.eval(), inputs, {"target": tokens}, next_tokens, name=name, batch=BATCH)
    at = "any size" if captured.batch is None else f"{captured.batch} samples"
    ok = captured.checked is not None and captured.checked.unknown is None
    print(f"{name}: {len(captured.nodes)} nodes, runs at {at}, {time.process_time() - began:.0f} CPU s", flush=True)
    strategy, before = gpp.Strategy(name="graphpipe", planner=gpp.GraphPipe(), schedule=gpp.OneFOneB()), float("inf")
    for count in DEVICES:
        began = time.process_time()
        problem = gpp.problem(captured, gpp.local(num_devices=count), minibatch_size=MINIBATCH, cost=gpp.Analytical())
        plan = strategy.plan(problem)
        seconds, copies = strategy.predict(plan, problem).metrics.iteration_s, max(len(stage.replicas) for stage in plan.stages)
        ok, before = ok and seconds <= before, seconds
        shape = f"{len(plan.stages)} stages, at most {copies} replicas, {plan.num_devices} used"
        print(f"  {count:2} devices: {seconds * 1e3:6.2f} ms a step, {shape}, {time.process_time() - began:.0f} CPU s", flush=True)
    return ok


def trained(folder: str) -> bool:
    """Train Qwen2.5-VL on two workers with pictures of both grids; whether losses and weights are those of a plain loop."""
    torch.manual_seed(0)
    model, batch = qwen()
    model = model.double()
    data, plain = [batch(GRIDS[i % 2], 8) for i in range(4)], copy.deepcopy(model)
    losses = plain_losses(plain, next_tokens, data, torch.optim.SGD(plain.parameters(), lr=0.1))
    planning = gpp.Planning(strategy="even", microbatch_size=2, cost=gpp.Analytical())
    settings: dict[str, Any] = {"optimizer": gpp.SGD(lr=0.1, momentum=0.0), "run": gpp.Run(folder=folder), "strategy": planning}
    with gpp.parallelize(model, *data[0], loss=next_tokens, devices=2, **settings) as pipeline:
        apart = max(abs(pipeline.step(*batch) - loss) for batch, loss in zip(data, losses, strict=True))
    weights = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    print(f"qwen2_5_vl, two grids, two workers: losses apart {apart:.1e}, weights {weights:.1e}", flush=True)
    return apart <= TOLERANCE and weights <= TOLERANCE


def main() -> int:
    given = options(__doc__, train=False)
    torch.set_num_threads(1)
    ok = [planned(name, *case) for name, case in models().items()]
    if given.train:
        with tempfile.TemporaryDirectory() as folder:
            ok.append(trained(f"{folder}/run"))
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
