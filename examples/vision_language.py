"""A vision-language model of Hugging Face on two devices: its image encoder is frozen, what joins them and the text model train.

    pip install transformers
    python examples/vision_language.py

The model is made from a configuration, with random weights: nothing is downloaded. The pictures are digits, whose upper and lower
halves must agree with the text that names them.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpp

SIZE = 16


class Captioner(nn.Module):
    """A frozen image encoder, a projection, and a text model that reads both, as LLaVA is made."""

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel

        super().__init__()
        vision = CLIPVisionConfig(
            hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8
        )
        text = LlamaConfig(
            vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, use_cache=False
        )
        self.vision, self.text = CLIPVisionModel(vision), LlamaModel(text)
        self.vision.requires_grad_(False).eval()
        self.project, self.head = nn.Linear(48, 48), nn.Linear(48, 64, bias=False)

    def train(self, mode: bool = True) -> "Captioner":
        super().train(mode)
        self.vision.eval()  # frozen, so without dropout
        return self

    def forward(self, pixels: Tensor, words: Tensor) -> Tensor:
        patches = self.project(self.vision(pixel_values=pixels).last_hidden_state)
        seen = torch.cat([patches, self.text.embed_tokens(words)], dim=1)
        return self.head(self.text(inputs_embeds=seen).last_hidden_state[:, -words.shape[1] :])


def next_word(scores: Tensor, words: Tensor) -> Tensor:
    """The mean over words of the cross entropy."""
    return cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def main(folder: str = "outputs/vision_language", *, steps: int = 30) -> list[float]:
    """Train for some steps; their losses."""
    torch.manual_seed(0)
    words = torch.randint(64, (SIZE, 12))
    batches = [((torch.randn(SIZE, 3, 32, 32), words), words) for _ in range(4)]
    model = Captioner().train()
    before = model.vision.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with gpp.parallelize(
        model,
        *batches[0],
        loss=next_word,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3),
        strategy=gpp.Planning(strategy="graphpipe", cost=gpp.Analytical()),
        run=gpp.Run(folder=folder),
    ) as pipeline:
        print(pipeline)
        losses = pipeline.train(batches, steps)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.vision.state_dict().items()), "the encoder is frozen"
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {steps}; the encoder is as it was")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
