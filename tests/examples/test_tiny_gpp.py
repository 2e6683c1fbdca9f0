"""The graph pipeline in one file: what its docstring says, and the product's losses on the same plan."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from tests.support.call import call
from tests.support.pages import ROOT

FILE = ROOT / "examples" / "tiny_gpp.py"
SAMPLES, MICROBATCHES, STEPS = 32, 4, 3


@pytest.fixture(scope="module")
def tiny() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)  # the processes that it spawns import it, too
        yield importlib.import_module("tiny_gpp")


def test_it_stands_alone() -> None:
    text = FILE.read_text()
    assert not re.search(r"^\s*(import|from) gpp", text, re.MULTILINE)
    assert 300 <= len(text.splitlines()) <= 500


def test_the_towers_side_by_side_are_the_best_cut(tiny: ModuleType) -> None:
    """Of equal layers: two micro-batches more than the count for a graph of depth 2, three more for the best chain."""
    blocks = tiny.make_model()
    seconds = {block.name: (1.0, 2.0) if isinstance(block.module, tiny.Layer) else (0.0, 0.0) for block in blocks}
    cuts = [(tiny.predict(cut, seconds, 8), cut) for cut in tiny.every_cut(blocks, 4)]
    best_s, best = min(cuts, key=lambda found: found[0])
    assert best_s == 2 * 3.0 * (8 + 1)
    assert min(took for took, cut in cuts if tiny.is_chain(cut)) == 2 * 3.0 * (8 + 3)
    assert sorted(best.distance(s) for s in range(4)) == [1, 2, 2, 2]


def as_typed(*words: str) -> None:
    """Run the file; its processes are forks, where torch lets a fork compute gradients."""
    sys.argv = [str(FILE), *words]
    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="spawn" if torch.version.cuda else "fork"
    )
    runpy.run_path(str(FILE), run_name="__main__")


def test_the_documented_command_trains_as_one_process_does() -> None:
    command = re.search(r"^ +python examples/tiny_gpp.py (.*)$", FILE.read_text(), re.MULTILINE)
    assert command
    apart = re.search(r"largest difference from one process: (\S+)", call(__name__, "as_typed", *command[1].split()))
    assert apart and float(apart[1]) < 1e-12


@pytest.mark.long
def test_the_product_has_the_same_losses_on_the_same_plan(tiny: ModuleType, tmp_path: Path) -> None:
    import gpp
    from gpp.graph.op_graph import mask_of
    from gpp.plan.build import make_plan

    class Model(nn.Module):
        """The blocks as one module; labels are the loss's."""

        def __init__(self) -> None:
            super().__init__()
            self.names = [block.name for block in tiny.make_model()]
            self.reads = {block.name: block.reads for block in tiny.make_model()}
            self.blocks = nn.ModuleDict({block.name.replace(".", "_"): block.module for block in tiny.make_model()})

        def forward(self, vision: Tensor, text: Tensor, audio: Tensor) -> Tensor:
            values = {"vision": vision, "text": text, "audio": audio}
            for name in self.names[:-1]:
                values[name] = self.blocks[name.replace(".", "_")](*(values[read] for read in self.reads[name]))
            head = self.blocks["head"]
            assert isinstance(head, tiny.Head)
            return head.classify(values[self.reads["head"][0]])

    def fields(step: int) -> tuple[dict[str, Tensor], Tensor]:
        batch = tiny.make_batch(step, SAMPLES)
        return {name: batch[name] for name in tiny.TOWERS}, batch["labels"]

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        blocks = tiny.make_model()
        of = {block.name: next((i for i, name in enumerate(tiny.TOWERS) if block.name.startswith(name)), 3) for block in blocks}
        graph = tiny.stage_graph(blocks, of)
        losses, _ = tiny.train(graph, SAMPLES, MICROBATCHES, STEPS)
        model, (inputs, labels) = Model(), fields(0)
        loss = nn.functional.cross_entropy
        cluster = gpp.local(num_devices=4)
        problem = gpp.problem(gpp.capture_model(model, inputs, labels, loss=loss), cluster, minibatch_size=SAMPLES)
        masks = [0] * graph.size
        for op, made in enumerate(problem.graph.ops):
            found = [name for name in of if f"blocks.{name.replace('.', '_')}" in made.name]
            masks[of[found[0]] if found else 3] |= mask_of([op])
        plan = make_plan(problem, "tiny", [(mask, 1) for mask in masks], SAMPLES // MICROBATCHES)
        given = {"optimizer": gpp.SGD(lr=0.1, momentum=0.9), "run": gpp.Run(folder=tmp_path)}
        with gpp.parallelize(model, inputs, labels, loss=loss, devices=cluster, strategy=plan, **given) as pipeline:
            assert pipeline.plan.depth == 2
            ours = [pipeline.step(*fields(step)) for step in range(STEPS)]
        alone = tiny.train_alone(SAMPLES, STEPS)
    finally:
        torch.set_default_dtype(default)
    assert losses == pytest.approx(ours, rel=0, abs=1e-12)
    assert losses == pytest.approx(alone, rel=0, abs=1e-12)
