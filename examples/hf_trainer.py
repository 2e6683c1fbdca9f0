"""The Trainer of Hugging Face around a pipeline: it keeps its loader, its arguments, its log and its callbacks.

    pip install transformers accelerate
    python examples/hf_trainer.py

The class below is all: a step of the Trainer is a step of the pipeline, which has the optimizer, so the Trainer's own has nothing
to do. Workers follow the rate of the Trainer's scheduler through `optimizer`.
"""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gpp


class PipelineTrainer(Trainer):
    """A Trainer whose steps are a pipeline's."""

    pipeline: gpp.Pipeline

    def train(self, *args: Any, **kwargs: Any) -> Any:
        example = next(iter(self.get_train_dataloader()))
        self.create_optimizer_and_scheduler(self.args.max_steps)
        run = gpp.Run(folder=self.args.output_dir, seed=self.args.seed)
        planning = gpp.Planning(strategy="graphpipe", cost=gpp.Analytical())
        with gpp.parallelize(self.model, dict(example), optimizer=self.optimizer, strategy=planning, run=run) as self.pipeline:
            return super().train(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.tensor(self.pipeline.step(dict(inputs)))


def main(folder: str = "outputs/hf_trainer", *, steps: int = 20) -> list[float]:
    """Train a small language model by a Trainer; the losses of the steps."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 12))]
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=5, use_cpu=True, report_to=[]
    )
    trainer = PipelineTrainer(model, arguments, train_dataset=texts)
    trainer.train()
    losses = trainer.pipeline.losses
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {steps}; the model has the trained weights")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
