"""The script that runs the pages' Python blocks, one after the other in one process, each with names of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.documented import PLANNER, PythonBlock
from tests.support.pages import DOCS

SCRIPT = '''
import json, sys, time, traceback
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import gpp
{planner}

class Towers(nn.Module):
    """Two towers that are added."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(2))

    def forward(self, a, b):
        return self.left(a) + self.right(b)


def yours():
    """Names that the text calls yours, made anew for each block."""
    torch.manual_seed(0)
    a, b, y = torch.randn(256, 8), torch.randn(256, 8), torch.randn(256, 4)
    loader = [((a[i : i + 64], b[i : i + 64]), y[i : i + 64]) for i in range(0, 128, 64)]
    names = {{"model": Towers(), "a": a, "b": b, "y": y, "loader": loader, "inputs": (a[:64], b[:64]), "labels": y[:64]}}
    return names | {{"torch": torch, "nn": nn, "cross_entropy": cross_entropy, "__name__": "__main__"}}


def of_t5(names):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained("my/t5")
    ids, labels = torch.randint(64, (16, 8)), torch.randint(64, (16, 6))
    names.update(T5ForConditionalGeneration=T5ForConditionalGeneration, ids=ids, labels=labels)
    names["loader"] = [{{"input_ids": ids[i : i + 8], "labels": labels[i : i + 8]}} for i in (0, 8)]


if __name__ == "__main__":
    ended = {{}}
    for block in json.loads({blocks!r}):
        names, begin = {{**globals(), **yours()}}, time.process_time()
        try:
            code = compile(block["text"], block["where"], "exec")
            if "T5" not in block["text"] or {loads}:
                if "T5" in block["text"]:
                    of_t5(names)
                exec(code, names)
                if "with" not in block["text"] and "pipeline" in names:
                    names["pipeline"].close()
            ended[block["where"]] = ""
        except BaseException as error:
            traceback.print_exc()
            ended[block["where"]] = f"{{type(error).__name__}}: {{error}}"
        print(block["where"], "took", round(time.process_time() - begin, 1), "s of this process")
    with open("blocks.json", "w") as file:
        json.dump(ended, file)
'''


def write_script(folder: Path, blocks: Sequence[PythonBlock], *, loads: bool) -> Path:
    """Write the script; it leaves blocks.json, where each block has an error, empty for none.

    Args:
        loads: whether the block that loads a model of Hugging Face runs, and is not only compiled.
    """
    page = (DOCS / "models.md").read_text()
    match = re.search(r"`(optimizer=lambda [^`]+)`", page)
    assert match, "the page shows an optimizer that is a function"
    # It stands in a line of prose, as an argument of the call in the block above it.
    call = f"""import gpp

with gpp.parallelize(model, (a[:64], b[:64]), y[:64], loss=torch.nn.functional.mse_loss, devices=2, {match[1]}) as pipeline:
    print(pipeline.step((a[:64], b[:64]), y[:64]))
"""
    number = page[: match.start()].count("\n") + 1
    listed = [asdict(block) for block in (*blocks, PythonBlock(f"models.md:{number}", call))]
    script = folder / "documented_blocks.py"
    script.write_text(SCRIPT.format(planner=PLANNER, blocks=json.dumps(listed), loads=loads))
    return script
